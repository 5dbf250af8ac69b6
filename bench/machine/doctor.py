"""``parbench doctor``: what on this machine disturbs a measurement, and how to fix it."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from parbench.bench.machine.disturbance import (
    UNKNOWN,
    Disturbance,
    format_gibibytes,
    format_switch,
    make_finding,
)
from parbench.bench.machine.environment import format_cpus, read_governors
from parbench.bench.machine.gpu import GPU_FIX, Gpu, has_library
from parbench.bench.machine.gpu_host import has_iommu_translation, has_peer_memory
from parbench.bench.machine.gpu_topics import examine_gpu
from parbench.bench.machine.host_load import BUSY_SHARE, STEAL_PERCENT
from parbench.bench.machine.machine import (
    Machine,
    get_affinity,
    inspect_machine,
    try_call,
)
from parbench.bench.machine.world_spec import choose_world
from parbench.bench.text import UserError, format_table, pluralize

_MIN_SHM_BYTES = 10**9
_SAMPLE_SECONDS = 0.3
_FIXES = {
    "torch": "pip install 'torch>=2.11'",
    "ranks": "use fewer ranks (--nproc): ranks that share a core wait for each other",
    "cores": "lift the container's CPU quota, which halts ranks in mid-flight, and pin it to whole cores instead",
    "load average": "stop other work, or measure longer (--budget)",
    "cpu governor": "sudo cpupower frequency-set -g performance, so that clocks do not follow the load",
    "steal time": "the hypervisor gives these cores to others: use dedicated cores, or measure longer (--budget)",
    "/dev/shm": "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host",
    "gpu driver": "see nvidia-smi and CUDA_VISIBLE_DEVICES: a driver older than its libraries, a GPU off the bus",
    "iommu": "boot with iommu=pt: translation slows transfers between GPUs, NICs and the host",
    "peer memory": "sudo modprobe nvidia_peermem: NICs copy through the host without it",
}


def _examine(topic: str, facts: str | None, disturbs: bool) -> Disturbance:
    """Return a finding about a topic, with the advice of ``_FIXES`` if the state disturbs.

    ``facts`` is the state of the machine in the topic as text. None means unknown and never
    disturbs.
    """
    return make_finding(topic, facts, disturbs, _FIXES[topic])


def examine_this_host(environ: Mapping[str, str]) -> tuple[Disturbance, ...]:
    """Return a finding for each topic of this host, such as ``load average`` or ``gpu clocks``.

    A finding holds the state of the host in a topic, also if the state does not disturb.
    ``environ`` holds the environment variables.
    """
    machine = inspect_machine(environ)
    findings = [*examine_cores(machine, read_core_state()), *examine_gpus(machine)]
    if not machine.gpus and not machine.silent_gpus and has_library(environ):
        facts = "NVML is installed, and no GPU is visible"
        findings.append(_examine("gpu driver", facts, True))
    if machine.gpus:
        findings += examine_gpu_host(machine.gpus)
    return tuple(findings)


@dataclass(frozen=True, kw_only=True)
class CoreState:
    """The load of this host, and its settings that can slow its cores. None means unknown."""

    num_allowed: int
    """The number of CPUs in the affinity of this process."""
    load_average: float
    """The mean number of processes that ran or waited for a core in the last minute."""
    governor: str | None
    """The cpufreq governors of the CPUs in the affinity, joined by commas."""
    steal_percent: float | None
    """The share of the CPU time of all cores that the hypervisor took in 0.3 s, in per cent."""
    shm_bytes: int | None
    """The total size of /dev/shm in bytes."""


def read_core_state() -> CoreState:
    """Return the load and the settings of this host's cores, and the size of /dev/shm.

    The call takes 0.3 s, in which the CPU time is measured that the hypervisor takes.
    """
    return CoreState(
        num_allowed=len(get_affinity()),
        load_average=os.getloadavg()[0],
        governor=read_governors(),
        steal_percent=getattr(psutil.cpu_times_percent(_SAMPLE_SECONDS), "steal", None),
        shm_bytes=try_call(lambda: shutil.disk_usage("/dev/shm").total),
    )


def examine_cores(machine: Machine, state: CoreState) -> list[Disturbance]:
    """Return the findings about torch, ranks and cores, one for each of seven topics.

    The topics are ``torch``, ``ranks``, ``cores``, ``load average``, ``cpu governor``, ``steal
    time`` and ``/dev/shm``, in this order.
    """
    torch = machine.torch_version
    if torch is None and machine.torch_has_cuda is None:
        torch = "not installed"
    host_cores = machine.host_cores or 0  # The load average counts all of them.
    load = f"{state.load_average:.2f} on {pluralize(host_cores, 'core')} of the host"
    steal = state.steal_percent
    is_shm_low = bool(machine.gpus) and (state.shm_bytes or 0) < _MIN_SHM_BYTES
    return [
        _examine("torch", torch, torch == "not installed"),
        _examine_ranks(machine),
        _examine(
            "cores",
            f"{machine.cores} available of {state.num_allowed}",
            machine.cores < state.num_allowed,
        ),
        _examine(
            "load average",
            load if host_cores else None,
            state.load_average > BUSY_SHARE * host_cores,
        ),
        _examine("cpu governor", state.governor, state.governor != "performance"),
        _examine(
            "steal time",
            None if steal is None else f"{steal:.1f} %",
            (steal or 0) > STEAL_PERCENT,
        ),
        _examine("/dev/shm", format_gibibytes(state.shm_bytes), is_shm_low),
    ]


def _examine_ranks(machine: Machine) -> Disturbance:
    """Return a finding about the number of ranks that ``parbench run`` starts by default.

    It disturbs if there are more ranks than physical cores. It is unknown if no ranks can be
    started, because torch is missing or GPUs cannot be used.
    """
    try:
        world = choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:
        # Without torch, or with GPUs that cannot be used, which have findings of their own.
        return Disturbance(topic="ranks", facts=UNKNOWN)
    num_physical = min(machine.cores, machine.physical_cores or machine.cores)
    facts = f"{world.nproc} on {world.device} with {world.backend}; {num_physical} physical cores"
    return _examine("ranks", facts, world.nproc > num_physical)


def examine_gpus(machine: Machine) -> list[Disturbance]:
    """Return the findings about the GPUs of a machine, empty if it has none.

    If GPUs do not answer to NVML, the first finding names them, and it disturbs. Then follows a
    finding for each topic of ``examine_gpu``, such as clocks, about all GPUs that answer. It
    disturbs if the state of any GPU disturbs. If the states differ, its facts list them with the
    indices of the GPUs: ``GPU 0-2: on; GPU 3: off``.
    """
    findings = []
    if machine.silent_gpus:
        facts = machine.describe_silent_gpus()
        findings.append(make_finding("gpus", facts, True, GPU_FIX))
    by_gpu = [examine_gpu(gpu, machine.gpus) for gpu in machine.gpus]
    for topic_findings in zip(*by_gpu, strict=True):
        indices: dict[str, list[int]] = {}
        for position, finding in enumerate(topic_findings):
            index = machine.gpus[position].index
            indices.setdefault(finding.facts, []).append(position if index is None else index)
        parts = [f"GPU {format_cpus(numbers)}: {facts}" for facts, numbers in indices.items()]
        facts = "; ".join(parts) if len(indices) > 1 else next(iter(indices))
        worst = max(topic_findings, key=lambda finding: finding.disturbs)
        findings.append(replace(worst, topic=f"gpu {worst.topic}", facts=facts))
    return findings


def examine_gpu_host(gpus: Sequence[Gpu], root: Path = Path("/")) -> list[Disturbance]:
    """Return the findings about settings of this host that slow its GPUs and NICs.

    There is a finding about the IOMMU of the ``gpus`` and, if the host has RDMA NICs, one about
    peer memory, also if the settings do not disturb. ``root`` is the folder that contains ``proc``
    and ``sys``, ``/`` except in tests.
    """
    iommu = has_iommu_translation(gpus, root)
    findings = [_examine("iommu", format_switch(iommu), bool(iommu))]
    if any((root / "sys/class/infiniband").glob("*")):
        peer_memory = has_peer_memory(root)
        findings.append(_examine("peer memory", format_switch(peer_memory), not peer_memory))
    return findings


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
