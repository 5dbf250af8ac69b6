"""What on this machine disturbs a measurement, and what to do about it: ``parbench doctor``.

Everything is judged from captured values, so that any machine can be examined on any other.
"""

import ipaddress
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from parbench.bench.machine.environment import VOLATILE, capture, format_cpus, parse_cpus
from parbench.bench.machine.gpu import IDLE, Gpu, has_library
from parbench.bench.machine.host_load import BUSY_SHARE, STEAL_PERCENT
from parbench.bench.machine.machine import Machine, inspect_machine, or_none
from parbench.bench.machine.silent_gpus import describe_silent_gpus, suggest_fix
from parbench.bench.machine.world_spec import (
    WorldSpec,
    choose_world,
    find_old_driver,
    suggest_driver,
)
from parbench.bench.text import UserError, counted, format_table, listed

UNKNOWN = "-"
CLOCK_SOURCES = ("tsc", "arch_sys_counter")
_BUSY_BYTES = 2 << 30  # more than a driver takes for itself
_SWITCH = {True: "on", False: "off", None: None}
REMEDIES = {
    "cores": "lift the container's CPU quota, which halts ranks in mid-flight, and pin it to whole cores instead",
    "load average": "stop other work, or use more launches (--launches)",
    "cpu governor": "sudo cpupower frequency-set -g performance, so that clocks do not follow the load",
    "clock source": "reading it costs a system call in each time stamp: "
    f"boot with {listed(CLOCK_SOURCES)} where it is stable",
    "steal time": "the hypervisor gives these cores to others: use dedicated cores, or more launches (--launches)",
    "virtual machine": "others share the hardware: use more launches (--launches), and compare within a run",
    "interface": "fine on one node; between nodes set GLOO_SOCKET_IFNAME to the network's interface (ip -br addr)",
    "memory": "free some: large sizes will be skipped",
    "/dev/shm": "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host",
    "gpu driver": "see nvidia-smi and CUDA_VISIBLE_DEVICES: a driver older than its libraries, a GPU off the bus",
    "gpu processes": "end them, or leave these GPUs out (CUDA_VISIBLE_DEVICES): they share time, memory and links",
    "gpu clocks": "power: sudo nvidia-smi -pl WATTS; heat: cooling; set clocks: sudo nvidia-smi -rgc, -rac",
    "gpu power": "sudo nvidia-smi -pl WATTS sets it, as far as the rack's power allows",
    "gpu mig": "a slice is measured, and nccl joins none: sudo nvidia-smi -mig 0, and reset the GPU",
    "gpu memory": "reset it (sudo nvidia-smi -r -i GPU) or reboot; have it replaced if they come again",
    "gpu pcie": "reseat it, and see lspci -vv (LnkCap, LnkSta): data to and from the host takes longer",
    "gpu nvlink": "see nvidia-smi nvlink -e, dmesg (Xid) and the fabric manager's log; then reset or replace it",
    "gpu persistence": "sudo nvidia-smi -pm 1: else the driver is unloaded between launches, which then start late",
    "swap": "free memory, then sudo swapoff -a && sudo swapon -a: ranks wait for pages that were swapped out",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what was found (``-`` if unknown), whether it disturbs, and what to do or to know."""

    topic: str
    found: str
    disturbs: bool
    remedy: str = ""


def sample_load(seconds: float = 0.3) -> dict[str, Any]:
    """Return what else happens on the machine now, beside the load average that is captured; None is unknown."""
    shm_bytes = or_none(lambda: shutil.disk_usage("/dev/shm").total)
    steal = getattr(psutil.cpu_times_percent(interval=seconds), "steal", None)
    return {"steal_percent": steal, "swap_used_bytes": psutil.swap_memory().used, "shm_bytes": shm_bytes}


def examine_here(environ: Mapping[str, str], *, gpus: bool = True) -> tuple[Finding, ...]:
    """Examine this machine, for a run on the CPU without its ``gpus``."""
    environment, machine = capture(environ), inspect_machine(environ)
    environment[VOLATILE] |= {**sample_load(), "has_nvml": gpus and has_library(environ)}
    if not gpus:
        machine = replace(machine, gpus=(), silent_gpus=(), gpu_failure=None, driver_cuda_version=None)
    return examine(machine, environment)


def examine(machine: Machine, environment: Mapping[str, Any]) -> tuple[Finding, ...]:
    names = ("host", "process", "variables", VOLATILE)
    host, process, variables, load = (environment.get(name) or {} for name in names)
    try:
        chosen = choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:  # no torch, silent GPUs or an old driver, which have findings of their own
        chosen = None
    governor, clock, virtual = (host.get(name) for name in ("governor", "clock_source", "virtualised"))
    running, steal = load.get("one_minute"), load.get("steal_percent")
    free, shm, swap = machine.memory_bytes, load.get("shm_bytes"), load.get("swap_used_bytes")
    return (
        _torch(machine),
        *_device_ranks_and_cores(machine, chosen, process.get("affinity")),
        _examine_load(running, machine.host_cores),
        _judged("cpu governor", governor, governor != "performance"),
        _judged("clock source", clock, clock not in CLOCK_SOURCES),
        _judged("steal time", None if steal is None else f"{steal:.1f} %", (steal or 0.0) > STEAL_PERCENT),
        _judged("virtual machine", None if virtual is None else "yes" if virtual else "no", bool(virtual)),
        _interface(host, process.get("interface"), variables.get("GLOO_SOCKET_IFNAME")),
        _judged("memory", _gibibytes(free, "available"), (free or 0) < 1 << 30),
        _judged("/dev/shm", _gibibytes(shm, "in all"), (shm or 0) < 10**9 and bool(machine.gpus)),
        _judged("swap", _gibibytes(swap, "in use"), bool(swap)),
        _threads(machine.cores, chosen.nproc if chosen else 0, variables.get("OMP_NUM_THREADS")),
        *_silent_gpus(machine),
        *_cuda_versions(machine),
        *_gpus(machine.gpus, has_library=load.get("has_nvml", False) and not machine.silent_gpus),
    )


def render(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        verdict = UNKNOWN if finding.found == UNKNOWN else "disturbs" if finding.disturbs else "ok"
        rows.append((finding.topic, f"{verdict:<8}", finding.found))
        if finding.remedy:
            rows.append(("", "", finding.remedy))
    return format_table(rows)


def _judged(topic: str, found: str | None, disturbs: bool = False, remedy: str = "") -> Finding:
    """Return a finding whose remedy is for when it disturbs; nothing unknown disturbs."""
    disturbs = disturbs and bool(found)
    remedy = (remedy or REMEDIES[topic]) if disturbs else ""
    return Finding(topic=topic, found=found or UNKNOWN, disturbs=disturbs, remedy=remedy)


def _torch(machine: Machine) -> Finding:
    version = machine.torch_version
    if version is None:
        found = "not installed" if machine.torch_has_cuda is None else None
        return _judged("torch", found, True, "pip install 'torch>=2.11'")
    match = re.match(r"(\d+)\.(\d+)", version)
    old = match is not None and (int(match[1]), int(match[2])) < (2, 11)
    return _judged("torch", version, old, "pip install --upgrade 'torch>=2.11': older ones are not supported")


def _device_ranks_and_cores(machine: Machine, spec: WorldSpec | None, affinity: str | None) -> list[Finding]:
    cores, physical = machine.cores, machine.physical_cores
    allowed = cores if affinity is None else len(parse_cpus(affinity))
    quota = f", by a CPU quota on {allowed}" if cores < allowed else ""
    in_all = "" if physical is None else f", {physical} physical in the machine"
    available = _judged("cores", f"{cores} available{quota}{in_all}", cores < allowed)
    if spec is None:
        return [_judged("device", None), _judged("ranks", None), available]
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    notes = "; ".join(spec.notes)
    device = Finding(topic="device", found=f"{spec.device} with {spec.backend}; {gpus}", disturbs=False, remedy=notes)
    whole = min(cores, physical or cores)
    found = f"{spec.nproc} on {counted(cores, 'core')}{f' ({whole} physical)' if whole < cores else ''}"
    better = f"--nproc {whole}" if whole > 1 else "a machine with a core for each rank"
    remedy = f"use {better}: ranks that share a core wait for each other"
    return [device, _judged("ranks", found, spec.nproc > whole, remedy), available]


def _examine_load(load_average: float | None, host_cores: int | None) -> Finding:
    """Compare the load average with the cores of the whole host, because it counts processes on all of them."""
    if load_average is None or host_cores is None:
        return _judged("load average", None)
    found = f"{load_average:.2f} on {counted(host_cores, 'core')} of the host"
    return _judged("load average", found, load_average > BUSY_SHARE * host_cores)


def _interface(host: Mapping[str, Any], interface: str | None, named: str | None) -> Finding:
    if named or "address" not in host:
        return _judged("interface", f"{named} (GLOO_SOCKET_IFNAME)" if named else None)
    address, name = host["address"], host.get("name") or "the host name"
    found = f"{interface or UNKNOWN} ({name} resolves to {address or 'nothing'})"
    return _judged("interface", found, address is None or ipaddress.ip_address(address).is_loopback)


def _threads(cores: int, ranks: int, text: str | None) -> Finding:
    per_rank = re.match(r"\d+", text or "")  # "4,2" is four threads, each of which may start two
    threads = int(per_rank[0]) * ranks if per_rank else 0
    fitting = max(1, cores // max(ranks, 1))
    remedy = f"{threads} threads on {counted(cores, 'core')}: set OMP_NUM_THREADS={fitting}"
    found = "OMP_NUM_THREADS is not set" if text is None else f"OMP_NUM_THREADS={text}"
    return _judged("threads", found, threads > cores, remedy)


def _silent_gpus(machine: Machine) -> list[Finding]:
    if not machine.silent_gpus:
        return []
    found = describe_silent_gpus(machine.silent_gpus, machine.gpu_failure)
    return [_judged("gpus", found, True, suggest_fix(machine.gpu_failure))]


def _cuda_versions(machine: Machine) -> list[Finding]:
    """Return whether the driver is new enough for torch, nothing where the version of either is unknown."""
    supported, built = machine.driver_cuda_version, machine.torch_cuda_version
    if supported is None or built is None:
        return []
    if old_driver := find_old_driver(machine):
        return [_judged("gpu cuda", old_driver, True, suggest_driver(machine))]
    is_older = [int(part) for part in supported.split(".")] < [int(part) for part in built.split(".")[:2]]
    note = "within a major version torch works, but code that is compiled for this GPU at run time may not"
    found = f"driver supports CUDA up to {supported}, torch is built for CUDA {built}"
    return [Finding(topic="gpu cuda", found=found, disturbs=False, remedy=note if is_older else "")]


@dataclass(frozen=True)
class GpuTopic:
    """Something to look at on each GPU: its words, None if unknown, and whether it disturbs."""

    name: str
    tell: Callable[[Gpu], str | None]
    disturbs: Callable[[Gpu], object]


def gpu_topics(gpus: Sequence[Gpu]) -> tuple[GpuTopic, ...]:
    """Return what is to be looked at on GPUs that should be alike."""
    most = max((_active(gpu) or 0 for gpu in gpus), default=0)
    return (
        GpuTopic("gpu driver", lambda gpu: gpu.driver, lambda gpu: False),
        GpuTopic("gpu processes", _processes, lambda gpu: gpu.processes or (gpu.memory_used_bytes or 0) > _BUSY_BYTES),
        GpuTopic("gpu clocks", _clocks, lambda gpu: slowing(gpu) or _is_slow(gpu)),
        GpuTopic(
            "gpu power",
            lambda gpu: _of(gpu.power_limit_watts, gpu.power_default_watts, " W"),
            lambda gpu: _less(gpu.power_limit_watts, gpu.power_default_watts),
        ),
        GpuTopic("gpu mig", lambda gpu: _SWITCH[gpu.mig], lambda gpu: gpu.mig),
        GpuTopic("gpu memory", _errors, lambda gpu: gpu.errors_uncorrected or gpu.remap_pending or gpu.remap_failed),
        GpuTopic("gpu pcie", _pcie, lambda gpu: _less(gpu.pcie_width, gpu.pcie_width_max)),
        GpuTopic(
            "gpu nvlink",
            lambda gpu: _of(_active(gpu), len(gpu.nvlinks or ()) or None, " active"),
            lambda gpu: _less(_active(gpu), most),
        ),
        GpuTopic("gpu persistence", lambda gpu: _SWITCH[gpu.persistence], lambda gpu: gpu.persistence is False),
    )


def _gpus(gpus: Sequence[Gpu], *, has_library: bool) -> list[Finding]:
    """Return a finding for each topic, GPUs of which the same is told together; nothing where no GPU is expected."""
    if not gpus:
        return [_judged("gpu driver", "NVML is installed, and no GPU is visible", disturbs=True)] if has_library else []

    def judged(topic: GpuTopic) -> Finding:
        told: dict[str, list[int]] = {}
        for place, gpu in enumerate(gpus):
            told.setdefault(topic.tell(gpu) or UNKNOWN, []).append(place if gpu.index is None else gpu.index)
        parts = (f"GPU {format_cpus(places)}: {words}" for words, places in told.items())
        disturbs = any(topic.disturbs(gpu) for gpu in gpus)
        return _judged(topic.name, "; ".join(told if len(told) == 1 else parts), disturbs)

    return [judged(topic) for topic in gpu_topics(gpus)]


def _active(gpu: Gpu) -> int | None:
    return None if gpu.nvlinks is None else sum(rate != 0 for rate in gpu.nvlinks)


def _processes(gpu: Gpu) -> str | None:
    used = gpu.memory_used_bytes or 0
    if not gpu.processes and used > _BUSY_BYTES:  # a container does not show those of others
        return f"none shown, but {_gibibytes(used, 'in use')}"
    return None if gpu.processes is None else ", ".join(gpu.processes) or "none"


def slowing(gpu: Gpu) -> list[str]:
    """Return what slows the clocks; an idle GPU's are low on purpose, unless the hardware slows them."""
    reasons = gpu.slowed_by or ()
    return [name for name in reasons if name != IDLE and (IDLE not in reasons or name.startswith("hardware"))]


def _is_slow(gpu: Gpu) -> bool:
    return (gpu.utilization_percent or 0) >= 50 and _less(gpu.sm_clock, gpu.sm_clock_max, 0.9)


def _clocks(gpu: Gpu) -> str:
    reasons, sm = slowing(gpu), _of(gpu.sm_clock, gpu.sm_clock_max, " MHz")
    memory = _of(gpu.memory_clock, gpu.memory_clock_max, " MHz")
    heat = "" if gpu.temperature_celsius is None else f" at {gpu.temperature_celsius} degrees C"
    why = f"slowed by {' and '.join(reasons)}{heat}" if reasons else IDLE if IDLE in (gpu.slowed_by or ()) else None
    return ", ".join(filter(None, (sm and f"SM {sm}", memory and f"memory {memory}", why)))


def _errors(gpu: Gpu) -> str:
    named = (("uncorrected", gpu.errors_uncorrected), ("corrected", gpu.errors_corrected))
    parts = [] if gpu.ecc is None else [f"ECC {_SWITCH[gpu.ecc]}"]
    parts += [f"{number} {what} errors" for what, number in named if number is not None]
    parts += [] if gpu.rows_remapped is None else [f"{gpu.rows_remapped} rows remapped"]
    parts += ["a remap pending"] * bool(gpu.remap_pending) + ["a remap failed"] * bool(gpu.remap_failed)
    return ", ".join(parts)


def _pcie(gpu: Gpu) -> str:
    generation = _of(gpu.pcie_generation, gpu.pcie_generation_max)
    return ", ".join(
        filter(None, (_of(gpu.pcie_width, gpu.pcie_width_max, " lanes"), generation and f"generation {generation}"))
    )


def _less(now: float | None, most: float | None, share: float = 1.0) -> bool:
    return now is not None and most is not None and now < share * most


def _of(now: float | None, most: float | None, unit: str = "") -> str | None:
    return None if now is None else f"{now:g}{'' if most is None else f' of {most:g}'}{unit}"


def _gibibytes(num_bytes: int | None, what: str) -> str | None:
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB {what}"
