"""``parbench doctor``: what on this machine disturbs a measurement, and how to fix it."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from parbench.bench.machine.disturbance import (
    UNKNOWN,
    Disturbance,
    format_gibibytes,
    format_switch,
    make_finding,
)
from parbench.bench.machine.environment import read_governors
from parbench.bench.machine.gpu import GPU_FIX, Gpu
from parbench.bench.machine.gpu_host import has_iommu_translation, has_peer_memory
from parbench.bench.machine.gpu_topics import examine_gpu
from parbench.bench.machine.host_load import BUSY_SHARE
from parbench.bench.machine.machine import (
    Machine,
    get_affinity,
    inspect_machine,
    try_call,
)
from parbench.bench.text import format_table, pluralize

_MIN_SHM_BYTES = 10**9
_CORES_FIX = (
    "lift the container's CPU quota, which pauses ranks during a measurement, "
    "and pin it to whole cores instead"
)
_LOAD_FIX = "stop other work, or measure longer (--budget)"
_GOVERNOR_FIX = "sudo cpupower frequency-set -g performance, so that clocks do not follow the load"
_SHM_FIX = "NCCL uses /dev/shm: start the container with --shm-size 1g or more, or --ipc host"
_IOMMU_FIX = "boot with iommu=pt: translation slows transfers between GPUs, NICs and the host"
_PEER_FIX = "sudo modprobe nvidia_peermem: NICs copy through the host without it"


def examine_this_host(environ: Mapping[str, str]) -> tuple[Disturbance, ...]:
    """Return a finding for each topic of this host, such as ``load average`` or ``gpu clocks``.

    A finding holds the state of the host in a topic, also if the state does not disturb.
    ``environ`` holds the environment variables.
    """
    machine = inspect_machine(environ)
    findings = [*examine_cores(machine.cores), *examine_gpus(machine)]
    if machine.gpus:
        findings += examine_gpu_host(machine.gpus)
    return tuple(findings)


def examine_cores(num_cores: int) -> list[Disturbance]:
    """Return the findings about the cores of this host and their load, one for each topic.

    The topics are ``cores``, ``load average`` and ``cpu governor``. ``num_cores`` is the number of
    cores that this process may use, in which CPU quotas count.
    """
    num_allowed = len(get_affinity())
    num_host_cores = psutil.cpu_count() or 1
    load_average = os.getloadavg()[0]  # of the last minute, in processes
    governor = read_governors()
    cores = f"{num_cores} available of {num_allowed}"
    load = f"{load_average:.2f} on {pluralize(num_host_cores, 'core')} of the host"
    is_busy = load_average > BUSY_SHARE * num_host_cores
    return [
        make_finding("cores", cores, num_cores < num_allowed, _CORES_FIX),
        make_finding("load average", load, is_busy, _LOAD_FIX),
        make_finding("cpu governor", governor, governor != "performance", _GOVERNOR_FIX),
    ]


def examine_gpus(machine: Machine) -> list[Disturbance]:
    """Return the findings about the GPUs of a machine, empty if it has none.

    If GPUs do not answer to NVML, the first finding names them, and it disturbs. Then follows a
    finding for each topic of ``examine_gpu``, such as clocks, about all GPUs that answer. It
    disturbs if the state of any GPU disturbs. If the states differ, its facts list that of each
    GPU: ``GPU 0: on; GPU 1: off``.
    """
    findings = []
    if machine.silent_gpus:
        facts = machine.describe_silent_gpus()
        findings.append(make_finding("gpus", facts, True, GPU_FIX))
    by_gpu = [examine_gpu(gpu, machine.gpus) for gpu in machine.gpus]
    for topic_findings in zip(*by_gpu, strict=True):
        worst = max(topic_findings, key=lambda finding: finding.disturbs)
        facts = worst.facts
        if any(finding.facts != facts for finding in topic_findings):
            pairs = zip(machine.gpus, topic_findings, strict=True)
            facts = "; ".join(f"GPU {gpu.index}: {finding.facts}" for gpu, finding in pairs)
        findings.append(replace(worst, topic=f"gpu {worst.topic}", facts=facts))
    return findings


def examine_gpu_host(gpus: Sequence[Gpu], root: Path = Path("/")) -> list[Disturbance]:
    """Return the findings about settings of this host that slow its GPUs and NICs.

    There is a finding about the size of ``/dev/shm``, one about the IOMMU of the ``gpus`` and, if
    the host has RDMA NICs, one about peer memory, also if the settings do not disturb. ``root`` is
    the folder that contains ``dev``, ``proc`` and ``sys``, ``/`` except in tests.
    """
    shm_bytes = try_call(lambda: shutil.disk_usage(root / "dev/shm").total)
    is_shm_small = (shm_bytes or 0) < _MIN_SHM_BYTES
    iommu = has_iommu_translation(gpus, root)
    findings = [
        make_finding("/dev/shm", format_gibibytes(shm_bytes), is_shm_small, _SHM_FIX),
        make_finding("iommu", format_switch(iommu), bool(iommu), _IOMMU_FIX),
    ]
    if any((root / "sys/class/infiniband").glob("*")):
        peer_memory = has_peer_memory(root)
        facts = format_switch(peer_memory)
        findings.append(make_finding("peer memory", facts, not peer_memory, _PEER_FIX))
    return findings


def render(findings: Sequence[Disturbance]) -> str:
    """Return the findings as a text table with a row for each topic.

    A row has the topic, the verdict (``ok``, ``disturbs``, or ``-`` for unknown) and the facts. A
    fix follows in a row of its own.
    """
    rows = []
    for finding in findings:
        verdict, facts = "disturbs" if finding.disturbs else "ok", finding.facts
        if facts == UNKNOWN:
            verdict, facts = UNKNOWN, "not readable, as in many virtual machines and containers"
        rows.append((finding.topic, f"{verdict:<8}", facts))
        if finding.fix:
            rows.append(("", "", finding.fix))
    return format_table(rows)
