"""``parbench doctor``: what on this machine disturbs a measurement, and how to fix it.

The examination uses captured facts only, so that any machine can be examined on any other.
"""

import ipaddress
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from parbench.bench.machine.environment import VOLATILE, capture, format_cpus, parse_cpus
from parbench.bench.machine.gpu import Gpu, has_library
from parbench.bench.machine.gpu_topics import FIXES as GPU_FIXES
from parbench.bench.machine.gpu_topics import UNKNOWN, GpuTopic, format_gibibytes, list_gpu_topics
from parbench.bench.machine.host_load import BUSY_SHARE, STEAL_PERCENT
from parbench.bench.machine.machine import Machine, inspect_machine, try_call
from parbench.bench.machine.silent_gpus import describe_silent_gpus, suggest_fix
from parbench.bench.machine.world_spec import (
    WorldSpec,
    choose_world,
    find_old_driver,
    suggest_driver,
)
from parbench.bench.text import UserError, format_list, format_table, pluralize

CLOCK_SOURCES = ("tsc", "arch_sys_counter")
_MIN_TORCH = (2, 11)
_MIN_MEMORY_BYTES = 1 << 30
_MIN_SHM_BYTES = 10**9
_SAMPLE_SECONDS = 0.3
FIXES = {
    "cores": "lift the container's CPU quota, which halts ranks in mid-flight, and pin it to whole cores instead",
    "load average": "stop other work, or use more launches (--launches)",
    "cpu governor": "sudo cpupower frequency-set -g performance, so that clocks do not follow the load",
    "clock source": "reading it costs a system call in each time stamp: "
    f"boot with {format_list(CLOCK_SOURCES)} where it is stable",
    "steal time": "the hypervisor gives these cores to others: use dedicated cores, or more launches (--launches)",
    "virtual machine": "others share the hardware: use more launches (--launches), and compare within a run",
    "interface": "fine on one node; between nodes set GLOO_SOCKET_IFNAME to the network's interface (ip -br addr)",
    "memory": "free some: large sizes will be skipped",
    "/dev/shm": "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host",
    "swap": "free memory, then sudo swapoff -a && sudo swapon -a: ranks wait for pages that were swapped out",
    **GPU_FIXES,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The facts about one topic, whether they disturb, and the fix or a note."""

    topic: str
    found: str  # - if unknown
    disturbs: bool
    remedy: str = ""


def sample_load() -> dict[str, Any]:
    """Return the present load of the machine, in addition to the captured load average.

    None is unknown.
    """
    shm_bytes = try_call(lambda: shutil.disk_usage("/dev/shm").total)
    steal = getattr(psutil.cpu_times_percent(interval=_SAMPLE_SECONDS), "steal", None)
    return {
        "steal_percent": steal,
        "swap_used_bytes": psutil.swap_memory().used,
        "shm_bytes": shm_bytes,
    }


def examine_here(
    environ: Mapping[str, str], machine: Machine | None = None, *, gpus: bool = True
) -> tuple[Finding, ...]:
    """Examine this machine, without its ``gpus`` for a run on the CPU.

    ``machine`` is known from an earlier step.
    """
    machine = machine or inspect_machine(environ)
    environment = capture(environ)
    environment[VOLATILE] |= {**sample_load(), "has_nvml": gpus and has_library(environ)}
    if not gpus:
        machine = replace(machine, gpus=(), silent_gpus=(), gpu_failure=None, driver_cuda_version=None)
    return examine(machine, environment)


def examine(machine: Machine, environment: Mapping[str, Any]) -> tuple[Finding, ...]:
    host = environment.get("host") or {}
    process = environment.get("process") or {}
    variables = environment.get("variables") or {}
    load = environment.get(VOLATILE) or {}
    try:
        world = choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:
        # Without torch, or with GPUs that cannot be used, which have findings of their own.
        world = None
    return (
        _examine_torch(machine),
        *_examine_ranks(machine, world, process.get("affinity")),
        _examine_load(load.get("one_minute"), machine.host_cores),
        *_examine_processor(host),
        _examine_steal(load.get("steal_percent")),
        _examine_virtualization(host.get("virtualised")),
        _examine_interface(host, process.get("interface"), variables.get("GLOO_SOCKET_IFNAME")),
        *_examine_memory(machine, load),
        _examine_threads(machine.cores, world, variables.get("OMP_NUM_THREADS")),
        *_examine_silent_gpus(machine),
        *_examine_cuda_versions(machine),
        *_examine_gpus(machine, has_nvml=load.get("has_nvml", False)),
    )


def render(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        rows.append((finding.topic, f"{_describe_verdict(finding):<8}", finding.found))
        if finding.remedy:
            rows.append(("", "", finding.remedy))
    return format_table(rows)


def _describe_verdict(finding: Finding) -> str:
    if finding.found == UNKNOWN:
        return UNKNOWN
    return "disturbs" if finding.disturbs else "ok"


def _make_finding(topic: str, found: str | None, disturbs: bool = False, fix: str = "") -> Finding:
    """Return a finding, with a fix if it disturbs. Unknown facts do not disturb."""
    if not found:
        return Finding(topic=topic, found=UNKNOWN, disturbs=False)
    if not disturbs:
        return Finding(topic=topic, found=found, disturbs=False)
    return Finding(topic=topic, found=found, disturbs=True, remedy=fix or FIXES[topic])


def _examine_torch(machine: Machine) -> Finding:
    version = machine.torch_version
    if version is None:
        found = "not installed" if machine.torch_has_cuda is None else None
        return _make_finding("torch", found, True, "pip install 'torch>=2.11'")
    match = re.match(r"(\d+)\.(\d+)", version)
    is_old = match is not None and (int(match[1]), int(match[2])) < _MIN_TORCH
    fix = "pip install --upgrade 'torch>=2.11': older ones are not supported"
    return _make_finding("torch", version, is_old, fix)


def _examine_ranks(machine: Machine, world: WorldSpec | None, affinity: str | None) -> list[Finding]:
    cores = _examine_cores(machine, affinity)
    if world is None:
        return [_make_finding("device", None), _make_finding("ranks", None), cores]
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    device = Finding(
        topic="device",
        found=f"{world.device} with {world.backend}; {gpus}",
        disturbs=False,
        remedy="; ".join(world.notes),
    )
    num_physical = min(machine.cores, machine.physical_cores or machine.cores)
    physical = f" ({num_physical} physical)" if num_physical < machine.cores else ""
    found = f"{world.nproc} on {pluralize(machine.cores, 'core')}{physical}"
    better = f"--nproc {num_physical}" if num_physical > 1 else "a machine with a core for each rank"
    fix = f"use {better}: ranks that share a core wait for each other"
    return [device, _make_finding("ranks", found, world.nproc > num_physical, fix), cores]


def _examine_cores(machine: Machine, affinity: str | None) -> Finding:
    cores = machine.cores
    num_allowed = cores if affinity is None else len(parse_cpus(affinity))
    has_quota = cores < num_allowed
    found = f"{cores} available"
    if has_quota:
        found += f", by a CPU quota on {num_allowed}"
    if machine.physical_cores is not None:
        found += f", {machine.physical_cores} physical in the machine"
    return _make_finding("cores", found, has_quota)


def _examine_load(load_average: float | None, host_cores: int | None) -> Finding:
    """Compare the load average with the cores of the whole host, because it counts all of them."""
    if load_average is None or host_cores is None:
        return _make_finding("load average", None)
    found = f"{load_average:.2f} on {pluralize(host_cores, 'core')} of the host"
    return _make_finding("load average", found, load_average > BUSY_SHARE * host_cores)


def _examine_processor(host: Mapping[str, Any]) -> list[Finding]:
    governor = host.get("governor")
    clock_source = host.get("clock_source")
    return [
        _make_finding("cpu governor", governor, governor != "performance"),
        _make_finding("clock source", clock_source, clock_source not in CLOCK_SOURCES),
    ]


def _examine_steal(steal_percent: float | None) -> Finding:
    if steal_percent is None:
        return _make_finding("steal time", None)
    return _make_finding("steal time", f"{steal_percent:.1f} %", steal_percent > STEAL_PERCENT)


def _examine_virtualization(is_virtual: bool | None) -> Finding:
    if is_virtual is None:
        return _make_finding("virtual machine", None)
    return _make_finding("virtual machine", "yes" if is_virtual else "no", is_virtual)


def _examine_memory(machine: Machine, load: Mapping[str, Any]) -> list[Finding]:
    free_bytes = machine.memory_bytes
    shm_bytes = load.get("shm_bytes")
    swap_bytes = load.get("swap_used_bytes")
    is_memory_low = free_bytes is not None and free_bytes < _MIN_MEMORY_BYTES
    is_shm_low = shm_bytes is not None and shm_bytes < _MIN_SHM_BYTES
    return [
        _make_finding("memory", _format_size(free_bytes, "available"), is_memory_low),
        _make_finding("/dev/shm", _format_size(shm_bytes, "in all"), is_shm_low and bool(machine.gpus)),
        _make_finding("swap", _format_size(swap_bytes, "in use"), bool(swap_bytes)),
    ]


def _format_size(num_bytes: int | None, suffix: str) -> str | None:
    return None if num_bytes is None else format_gibibytes(num_bytes, suffix)


def _examine_interface(host: Mapping[str, Any], interface: str | None, chosen_interface: str | None) -> Finding:
    if chosen_interface:
        return _make_finding("interface", f"{chosen_interface} (GLOO_SOCKET_IFNAME)")
    if "address" not in host:
        return _make_finding("interface", None)
    address = host["address"]
    name = host.get("name") or "the host name"
    found = f"{interface or UNKNOWN} ({name} resolves to {address or 'nothing'})"
    is_local = address is None or ipaddress.ip_address(address).is_loopback
    return _make_finding("interface", found, is_local)


def _examine_threads(cores: int, world: WorldSpec | None, variable: str | None) -> Finding:
    num_ranks = world.nproc if world is not None else 0
    match = re.match(r"\d+", variable or "")  # "4,2" is four threads, each of which may start two.
    num_threads = int(match[0]) * num_ranks if match else 0
    fitting = max(1, cores // max(num_ranks, 1))
    fix = f"{num_threads} threads on {pluralize(cores, 'core')}: set OMP_NUM_THREADS={fitting}"
    found = "OMP_NUM_THREADS is not set" if variable is None else f"OMP_NUM_THREADS={variable}"
    return _make_finding("threads", found, num_threads > cores, fix)


def _examine_silent_gpus(machine: Machine) -> list[Finding]:
    if not machine.silent_gpus:
        return []
    found = describe_silent_gpus(machine.silent_gpus, machine.gpu_failure)
    return [_make_finding("gpus", found, True, suggest_fix(machine.gpu_failure))]


def _examine_cuda_versions(machine: Machine) -> list[Finding]:
    """Examine whether the driver is new enough for torch.

    Returns no finding if a version is unknown.
    """
    supported = machine.driver_cuda_version
    built = machine.torch_cuda_version
    if supported is None or built is None:
        return []
    old_driver = find_old_driver(machine)
    if old_driver:
        return [_make_finding("gpu cuda", old_driver, True, suggest_driver(machine))]
    is_older = _parse_version(supported) < _parse_version(built)[:2]
    note = "within a major version torch works, but code that is compiled for this GPU at run time may not"
    found = f"driver supports CUDA up to {supported}, torch is built for CUDA {built}"
    return [Finding(topic="gpu cuda", found=found, disturbs=False, remedy=note if is_older else "")]


def _parse_version(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _examine_gpus(machine: Machine, *, has_nvml: bool) -> list[Finding]:
    """Return a finding for each topic of the GPUs; without a GPU only if one is expected."""
    if machine.gpus:
        return [_examine_topic(topic, machine.gpus) for topic in list_gpu_topics(machine.gpus)]
    if has_nvml and not machine.silent_gpus:
        return [_make_finding("gpu driver", "NVML is installed, and no GPU is visible", True)]
    return []


def _examine_topic(topic: GpuTopic, gpus: Sequence[Gpu]) -> Finding:
    """Return a finding about all GPUs; those with the same facts are named together."""
    indices: dict[str, list[int]] = {}
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        indices.setdefault(topic.describe(gpu) or UNKNOWN, []).append(index)
    if len(indices) == 1:
        [found] = indices
    else:
        parts = [f"GPU {format_cpus(numbers)}: {facts}" for facts, numbers in indices.items()]
        found = "; ".join(parts)
    return _make_finding(topic.name, found, any(topic.is_disturbing(gpu) for gpu in gpus))
