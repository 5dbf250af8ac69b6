"""``parbench doctor``: what on this machine disturbs a measurement, and how to fix it.

The examination uses captured facts only, so that any machine can be examined on any other.
"""

import ipaddress
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from parbench.bench.machine.environment import (
    VOLATILE,
    capture_environment,
    format_cpus,
    parse_cpus,
)
from parbench.bench.machine.gpu import Gpu, has_library
from parbench.bench.machine.gpu_host import (
    describe_nearest_nics,
    find_acs_bridges,
    find_nics,
    has_iommu_translation,
    has_numa_balancing,
    has_peer_memory,
    read_xids,
)
from parbench.bench.machine.gpu_topics import (
    DRIVER_FIX,
    UNKNOWN,
    GpuTopic,
    format_gibibytes,
    format_switch,
    list_gpu_topics,
)
from parbench.bench.machine.host_load import BUSY_SHARE, STEAL_PERCENT
from parbench.bench.machine.machine import Machine, inspect_machine, is_older, try_call
from parbench.bench.machine.world_spec import (
    WorldSpec,
    choose_world,
    describe_driver_mismatch,
    suggest_driver_fix,
)
from parbench.bench.text import UserError, format_list, format_table, pluralize

CLOCK_SOURCES = ("tsc", "arch_sys_counter")
_MIN_TORCH = (2, 11)
_MIN_MEMORY_BYTES = 1 << 30
_MIN_SHM_BYTES = 10**9
_MIN_OPEN_FILES = 1 << 14
_SAMPLE_SECONDS = 0.3
_VIRTUAL_FACTS = {None: None, True: "yes", False: "no"}
FIXES = {
    "cores": "lift the container's CPU quota, which halts ranks in mid-flight, and pin it to whole cores instead",
    "load average": "stop other work, or use more repetitions (--repetitions)",
    "cpu governor": "sudo cpupower frequency-set -g performance, so that clocks do not follow the load",
    "clock source": "reading it costs a system call in each time stamp: "
    f"boot with {format_list(CLOCK_SOURCES)} where it is stable",
    "steal time": "the hypervisor gives these cores to others: use dedicated cores, or more repetitions "
    "(--repetitions)",
    "virtual machine": "others share the hardware: use more repetitions (--repetitions), and compare within a run",
    "interface": "fine on one node; between nodes set GLOO_SOCKET_IFNAME to the network's interface (ip -br addr)",
    "open files": f"ulimit -n {_MIN_OPEN_FILES}: many ranks need a socket for each other rank",
    "numa balancing": "sudo sysctl kernel.numa_balancing=0: it moves pages away from GPUs",
    "iommu": "boot with iommu=pt: translation slows transfers between GPUs, NICs and the host",
    "acs": "sudo setpci -s BRIDGE ECAP_ACS+6.w=0: transfers between GPUs and NICs pass the CPU",
    "peer memory": "sudo modprobe nvidia_peermem: NICs copy through the host without it",
    "memlock": "ulimit -l unlimited (containers: --ulimit memlock=-1): NICs lock memory",
    "gpu errors": "look them up at docs.nvidia.com/deploy/xid-errors, then sudo nvidia-smi -r -i GPU",
    "memory": "free some: large sizes will be skipped",
    "/dev/shm": "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host",
    "swap": "free memory, then sudo swapoff -a && sudo swapon -a: ranks wait for pages that were swapped out",
}


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A finding: the state of a machine in one topic, such as ``cpu governor`` or ``gpu clocks``.

    ``parbench doctor`` makes one finding for each topic, also if the state does not disturb.
    """

    topic: str
    """The name of the topic, such as ``load average``."""
    facts: str
    """The state of the machine in this topic as text, ``-`` if it is unknown."""
    disturbs: bool = False
    """True if the state disturbs measurements."""
    fix: str = ""
    """Advice to the user to change the state, empty if nothing needs a change."""


def sample_load() -> dict[str, Any]:
    """Measure for 0.3 s the CPU time that the hypervisor takes, and read swap and /dev/shm.

    The result has three keys. ``steal_percent`` is the stolen share of the CPU time of all cores in
    per cent. ``swap_used_bytes`` is the swap in use. ``shm_bytes`` is the total size of /dev/shm.
    None means unknown.
    """
    shm_bytes = try_call(lambda: shutil.disk_usage("/dev/shm").total)
    steal = getattr(psutil.cpu_times_percent(interval=_SAMPLE_SECONDS), "steal", None)
    return {
        "steal_percent": steal,
        "swap_used_bytes": psutil.swap_memory().used,
        "shm_bytes": shm_bytes,
    }


def examine_this_host(
    environ: Mapping[str, str], machine: Machine | None = None, *, gpus: bool = True
) -> tuple[Disturbance, ...]:
    """Examine this host and return one finding for each topic, also if nothing disturbs in it.

    ``environ`` holds the environment variables. ``machine`` describes this host if the caller has
    inspected it already. If it is None, the host is inspected here. If ``gpus`` is False, GPUs are
    ignored, because the caller measures the CPU.
    """
    machine = machine or inspect_machine(environ)
    environment = capture_environment(environ)
    environment[VOLATILE] |= {**sample_load(), "has_nvml": gpus and has_library(environ)}
    if not gpus:
        machine = replace(machine, gpus=(), silent_gpus=(), driver_cuda_version=None)
    findings = examine(machine, environment)
    if not machine.gpus:
        return findings
    return (*findings, *examine_gpu_host(machine.gpus))


def examine(machine: Machine, environment: Mapping[str, Any]) -> tuple[Disturbance, ...]:
    """Return one finding for each topic of a machine, also if nothing disturbs in it.

    The topics are torch, the default device and ranks, the cores, the host (load, CPU settings,
    network interface, memory), OMP_NUM_THREADS, and the GPUs. Settings of the host that concern
    GPUs and NICs, such as ACS, are left to ``examine_gpu_host``.

    ``environment`` is the result of ``capture_environment`` on the machine, of which the keys
    ``host``, ``variables``, ``process`` and ``load`` are used. The dict under ``load`` must also
    have the three keys of ``sample_load``, and ``has_nvml``, which is True if NVML is installed.
    Only the arguments are examined, so they may describe a machine other than this host.
    """
    try:
        world = choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:
        # Without torch, or with GPUs that cannot be used, which have findings of their own.
        world = None
    return (
        _examine_torch(machine),
        *_examine_ranks(machine, world, environment["process"]["affinity"]),
        *_examine_host(machine, environment),
        _examine_threads(machine.cores, world, environment["variables"].get("OMP_NUM_THREADS")),
        *_examine_gpus(machine, has_nvml=environment[VOLATILE]["has_nvml"]),
    )


def examine_gpu_host(gpus: Sequence[Gpu], root: Path = Path("/")) -> tuple[Disturbance, ...]:
    """Return the findings about settings of this host that slow or break its GPUs and NICs.

    There is one finding for each topic, also if nothing disturbs in it. The topics are the limit of
    open files, NUMA balancing, IOMMU, ACS and the GPU errors (Xid) in the kernel's log. If the host
    has RDMA NICs, the limit of locked memory, peer memory and the NICs nearest to each GPU follow.
    ``root`` is the folder with the ``dev``, ``proc`` and ``sys`` to read.
    """
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    xids = read_xids(root)
    bridges = find_acs_bridges(root)
    findings = [
        _make_finding("open files", _format_limit(open_files), 0 <= open_files < _MIN_OPEN_FILES),
        _examine_switch("numa balancing", has_numa_balancing(root)),
        _examine_switch("iommu", has_iommu_translation(gpus, root)),
        _make_finding("acs", _format_names(bridges), bool(bridges)),
        _make_finding("gpu errors", _format_names(xids, "Xid "), bool(xids)),
    ]
    nics = find_nics(root)
    if nics:
        locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        nearest_nics = [describe_nearest_nics(gpu, nics, root) for gpu in gpus]
        findings += [
            _make_finding("memlock", _format_limit(locked_bytes, " B"), locked_bytes >= 0),
            _examine_switch("peer memory", has_peer_memory(root), should_be_on=True),
            Disturbance(topic="nearest nics", facts="; ".join(nearest_nics)),
        ]
    return tuple(findings)


def _format_limit(limit: int, unit: str = "") -> str:
    """Return a resource limit (ulimit) as text followed by ``unit``.

    The text is ``unlimited`` for a negative ``limit``, which stands for no limit.
    """
    return "unlimited" if limit < 0 else f"{limit}{unit}"


def _examine_switch(topic: str, is_on: bool | None, *, should_be_on: bool = False) -> Disturbance:
    """Return a finding about a setting that is on or off, such as NUMA balancing.

    It disturbs measurements if ``is_on`` differs from ``should_be_on``. An ``is_on`` of None means
    that the setting is unknown, which does not count as a disturbance.
    """
    return _make_finding(topic, format_switch(is_on), is_on is not should_be_on)


def _format_names(names: Sequence[str] | None, prefix: str = "") -> str | None:
    """Return the names joined by commas after ``prefix``, as the facts of a finding.

    The text is ``none`` without a prefix if ``names`` is empty. None if ``names`` is None, which
    means unknown.
    """
    if names is None:
        return None
    return f"{prefix}{', '.join(names)}" if names else "none"


def render(findings: Sequence[Disturbance]) -> str:
    """Return the findings as a text table with a row for each topic.

    A row has the topic, the verdict (``ok``, ``disturbs``, or ``-`` for unknown) and the facts. A
    fix follows in a row of its own.
    """
    rows = []
    for finding in findings:
        verdict = "disturbs" if finding.disturbs else "ok"
        if finding.facts == UNKNOWN:
            verdict = UNKNOWN
        rows.append((finding.topic, f"{verdict:<8}", finding.facts))
        if finding.fix:
            rows.append(("", "", finding.fix))
    return format_table(rows)


def _make_finding(topic: str, facts: str | None, disturbs: bool, fix: str = "") -> Disturbance:
    """Return a finding about a topic, with a fix only if the state disturbs.

    ``facts`` is the state of the machine as text. None or an empty text means unknown. An unknown
    state never disturbs, even if ``disturbs`` is True. An empty ``fix`` stands for the advice
    that ``FIXES`` has for the topic.
    """
    if not facts:
        return Disturbance(topic=topic, facts=UNKNOWN)
    fix = fix or FIXES[topic] if disturbs else ""
    return Disturbance(topic=topic, facts=facts, disturbs=disturbs, fix=fix)


def _examine_torch(machine: Machine) -> Disturbance:
    """Return a finding about torch. It disturbs if torch is missing or older than 2.11."""
    version = machine.torch_version
    if version is None:
        facts = "not installed" if machine.torch_has_cuda is None else None
        return _make_finding("torch", facts, True, "pip install 'torch>=2.11'")
    fix = "pip install --upgrade 'torch>=2.11': older ones are not supported"
    return _make_finding("torch", version, is_older(version, _MIN_TORCH), fix)


def _examine_ranks(machine: Machine, world: WorldSpec | None, affinity: str) -> list[Disturbance]:
    """Return three findings: the default device, the default number of ranks, and the cores.

    ``world`` holds the defaults for this machine. If it is None, device and ranks are unknown.
    ``affinity`` lists the CPUs that this process may use, such as ``0-3,8``. More ranks than
    physical cores disturb.
    """
    cores = _examine_cores(machine, affinity)
    if world is None:
        unknown = [Disturbance(topic=topic, facts=UNKNOWN) for topic in ("device", "ranks")]
        return [*unknown, cores]
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    facts = f"{world.device} with {world.backend}; {gpus}"
    device = Disturbance(topic="device", facts=facts, fix="; ".join(world.notes))
    num_physical = min(machine.cores, machine.physical_cores or machine.cores)
    physical = f" ({num_physical} physical)" if num_physical < machine.cores else ""
    facts = f"{world.nproc} on {pluralize(machine.cores, 'core')}{physical}"
    better = (
        f"--nproc {num_physical}" if num_physical > 1 else "a machine with a core for each rank"
    )
    fix = f"use {better}: ranks that share a core wait for each other"
    return [device, _make_finding("ranks", facts, world.nproc > num_physical, fix), cores]


def _examine_cores(machine: Machine, affinity: str) -> Disturbance:
    """Return a finding about the available cores. It disturbs if a CPU quota limits them.

    ``affinity`` lists the CPUs that this process may use, such as ``0-3,8``.
    """
    num_allowed = len(parse_cpus(affinity))
    has_quota = machine.cores < num_allowed
    facts = f"{machine.cores} available"
    if has_quota:
        facts += f", by a CPU quota on {num_allowed}"
    if machine.physical_cores is not None:
        facts += f", {machine.physical_cores} physical in the machine"
    return _make_finding("cores", facts, has_quota)


def _examine_host(machine: Machine, environment: Mapping[str, Any]) -> list[Disturbance]:
    """Return the findings about the load, CPU settings, network interface and memory of a host.

    ``environment`` is the result of ``capture_environment``. The dict under its key ``load`` must
    also have the three keys of ``sample_load``.
    """
    host = environment["host"]
    load = environment[VOLATILE]
    host_cores = machine.host_cores or 0  # The load average counts all of them.
    average = load["one_minute"] if host_cores else None
    governor = host["governor"]
    clock_source = host["clock_source"]
    steal = load["steal_percent"]
    is_virtual = host["virtualised"]
    memory = machine.memory_bytes
    shm = load["shm_bytes"]
    swap = load["swap_used_bytes"]
    average_facts = _format(average, f"{{:.2f}} on {pluralize(host_cores, 'core')} of the host")
    is_shm_low = bool(machine.gpus) and (shm or 0) < _MIN_SHM_BYTES
    return [
        _make_finding("load average", average_facts, (average or 0) > BUSY_SHARE * host_cores),
        _make_finding("cpu governor", governor, governor != "performance"),
        _make_finding("clock source", clock_source, clock_source not in CLOCK_SOURCES),
        _make_finding("steal time", _format(steal, "{:.1f} %"), (steal or 0) > STEAL_PERCENT),
        _make_finding("virtual machine", _VIRTUAL_FACTS[is_virtual], bool(is_virtual)),
        _examine_interface(environment),
        _make_finding(
            "memory", format_gibibytes(memory, "available"), (memory or 0) < _MIN_MEMORY_BYTES
        ),
        _make_finding("/dev/shm", format_gibibytes(shm, "in all"), is_shm_low),
        _make_finding("swap", format_gibibytes(swap, "in use"), bool(swap)),
    ]


def _format(value: float | None, template: str) -> str | None:
    """Return the facts of a finding: the format string ``template`` with ``value`` filled in.

    None if ``value`` is None, which means unknown.
    """
    return None if value is None else template.format(value)


def _examine_interface(environment: Mapping[str, Any]) -> Disturbance:
    """Return a finding about the network interface that gloo uses on a host.

    It disturbs if GLOO_SOCKET_IFNAME is not set and the host name resolves to a loopback address or
    not at all. ``environment`` is the result of ``capture_environment``.
    """
    host = environment["host"]
    chosen_interface = environment["variables"].get("GLOO_SOCKET_IFNAME")
    if chosen_interface:
        return _make_finding("interface", f"{chosen_interface} (GLOO_SOCKET_IFNAME)", False)
    address = host["address"]
    interface = environment["process"]["interface"] or UNKNOWN
    facts = f"{interface} ({host['name']} resolves to {address or 'nothing'})"
    is_local = address is None or ipaddress.ip_address(address).is_loopback
    return _make_finding("interface", facts, is_local)


def _examine_threads(cores: int, world: WorldSpec | None, variable: str | None) -> Disturbance:
    """Return a finding about OMP_NUM_THREADS, which disturbs if all ranks start too many threads.

    Too many are more than ``cores`` in total. ``world`` holds the default number of ranks, None if
    unknown. ``variable`` is the value of OMP_NUM_THREADS, None if the variable is not set.
    """
    num_ranks = world.nproc if world is not None else 0
    match = re.match(r"\d+", variable or "")  # "4,2" is four threads, each of which may start two.
    num_threads = int(match[0]) * num_ranks if match else 0
    fitting = max(1, cores // max(num_ranks, 1))
    fix = f"{num_threads} threads on {pluralize(cores, 'core')}: set OMP_NUM_THREADS={fitting}"
    facts = "OMP_NUM_THREADS is not set" if variable is None else f"OMP_NUM_THREADS={variable}"
    return _make_finding("threads", facts, num_threads > cores, fix)


def _examine_gpus(machine: Machine, *, has_nvml: bool) -> list[Disturbance]:
    """Return the findings about the GPUs of a machine, empty if no GPU is expected.

    They are GPUs that do not answer, a driver that is too old for torch, and one finding for each
    topic of ``list_gpu_topics``. If ``has_nvml`` is True (NVML is installed) and no GPU is visible,
    the missing GPUs are a finding.
    """
    findings = []
    if machine.silent_gpus:
        facts = machine.describe_silent_gpus()
        findings.append(_make_finding("gpus", facts, True, machine.gpu_failure.fix))
    elif has_nvml and not machine.gpus:
        facts = "NVML is installed, and no GPU is visible"
        findings.append(_make_finding("gpu driver", facts, True, DRIVER_FIX))
    if machine.driver_cuda_version and machine.torch_cuda_version:
        findings.append(_examine_cuda_version(machine))
    if machine.gpus:
        topics = list_gpu_topics(machine.gpus)
        findings += [_examine_topic(topic, machine.gpus) for topic in topics]
    return findings


def _examine_cuda_version(machine: Machine) -> Disturbance:
    """Return a finding that disturbs if the driver is too old for the CUDA of torch.

    The CUDA versions of the driver and of torch must be known.
    """
    old_driver = describe_driver_mismatch(machine)
    if old_driver:
        return _make_finding("gpu cuda", old_driver, True, suggest_driver_fix(machine))
    driver = f"driver supports CUDA up to {machine.driver_cuda_version}"
    facts = f"{driver}, torch is built for CUDA {machine.torch_cuda_version}"
    return Disturbance(topic="gpu cuda", facts=facts)


def _examine_topic(topic: GpuTopic, gpus: Sequence[Gpu]) -> Disturbance:
    """Return one finding about a topic for all GPUs, which disturbs if any GPU's state disturbs.

    If the GPUs differ, the facts are listed with the indices of the GPUs: ``GPU 0-2: on; GPU 3:
    off``.
    """
    indices: dict[str, list[int]] = {}
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        indices.setdefault(topic.describe(gpu) or UNKNOWN, []).append(index)
    parts = [f"GPU {format_cpus(numbers)}: {facts}" for facts, numbers in indices.items()]
    facts = "; ".join(parts) if len(indices) > 1 else next(iter(indices))
    is_disturbing = any(topic.is_disturbing(gpu) for gpu in gpus)
    return _make_finding(f"gpu {topic.name}", facts, is_disturbing, topic.fix)
