"""What on this machine disturbs a measurement, and what to do about it: ``parbench doctor``.

Everything is judged from captured values, so that any machine can be examined on any other.
"""

import ipaddress
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from bench.machine.environment import capture, load_average, parse_cpus
from bench.machine.machine import Machine, inspect_machine
from bench.machine.world_spec import FUNCTIONAL_ONLY, WorldChoice, choose_world
from bench.text import UserError, counted, listed

UNKNOWN = "-"
OLDEST_TORCH = (2, 11)
CLOCK_SOURCES = ("tsc", "arch_sys_counter")
MAX_LOAD_PER_CORE = 0.25
MAX_STEAL_PERCENT = 2.0
MIN_SHM_BYTES = 10**9
MIN_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: what was found (``-`` if unknown), whether it disturbs, and what to do or to know."""

    topic: str
    found: str
    disturbs: bool
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What else happens on the machine now; None is unknown."""

    one_minute: float | None = None
    steal_percent: float | None = None
    swap_used_bytes: int | None = None
    shm_bytes: int | None = None


def sample_load(seconds: float = 0.3) -> Load:
    try:
        shm_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        shm_bytes = None
    return Load(
        one_minute=load_average(),
        steal_percent=getattr(psutil.cpu_times_percent(interval=seconds), "steal", None),
        swap_used_bytes=psutil.swap_memory().used,
        shm_bytes=shm_bytes,
    )


def examine_here(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    return examine(inspect_machine(environ), capture(environ), load=sample_load())


def examine(machine: Machine, environment: Mapping[str, Any], *, load: Load) -> tuple[Finding, ...]:
    host, process, variables = (environment.get(name) or {} for name in ("host", "process", "variables"))
    try:
        chosen = choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:  # no torch, which has a finding of its own
        chosen = None
    cores, running, steal, virtual = machine.cores, load.one_minute, load.steal_percent, host.get("virtualised")
    free, shm, swap = machine.memory_bytes, load.shm_bytes, load.swap_used_bytes
    return (
        _torch(machine),
        *_device_and_ranks(machine, chosen),
        _cores(machine, process),
        _judged(
            "load average",
            None if running is None else f"{running:.2f} on {counted(cores, 'core')}",
            (running or 0.0) > MAX_LOAD_PER_CORE * cores,
            "stop other work, or use more launches (--launches)",
        ),
        _judged(
            "cpu governor",
            host.get("governor"),
            host.get("governor") != "performance",
            "sudo cpupower frequency-set -g performance, so that clocks do not follow the load",
        ),
        _judged(
            "clock source",
            host.get("clock_source"),
            host.get("clock_source") not in CLOCK_SOURCES,
            f"reading it costs a system call in each time stamp: boot with {listed(CLOCK_SOURCES)} where it is stable",
        ),
        _judged(
            "steal time",
            None if steal is None else f"{steal:.1f} %",
            (steal or 0.0) > MAX_STEAL_PERCENT,
            "the hypervisor gives these cores to others: use dedicated cores, or more launches (--launches)",
        ),
        _judged(
            "virtual machine",
            None if virtual is None else "yes" if virtual else "no",
            bool(virtual),
            "neighbours can disturb: use more launches (--launches), and compare within a run",
        ),
        _interface(host, process, variables),
        _judged(
            "memory",
            _gibibytes(free, "available"),
            free is not None and free < MIN_MEMORY_BYTES,
            "free some: large sizes will be skipped",
        ),
        _judged(
            "/dev/shm",
            _gibibytes(shm, "in all"),
            shm is not None and shm < MIN_SHM_BYTES and bool(machine.gpus),
            "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host",
        ),
        _judged(
            "swap",
            _gibibytes(swap, "in use"),
            bool(swap),
            "free memory, then sudo swapoff -a && sudo swapon -a: ranks wait for pages that were swapped out",
        ),
        _threads(machine, chosen, variables),
    )


def render(findings: Sequence[Finding]) -> str:
    width = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        verdict = UNKNOWN if finding.found == UNKNOWN else "disturbs" if finding.disturbs else "ok"
        lines.append(f"{finding.topic:<{width}}  {verdict:<8}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<{width}}  {'':<8}  {finding.remedy}")
    return "".join(f"{line}\n" for line in lines)


def as_json(findings: Sequence[Finding]) -> bytes:
    return msgspec.json.encode(findings) + b"\n"


def _judged(topic: str, found: str | None, disturbs: bool = False, remedy: str = "") -> Finding:
    """Return a finding whose remedy is for when it disturbs; nothing unknown disturbs."""
    disturbs = disturbs and found is not None
    return Finding(topic=topic, found=found or UNKNOWN, disturbs=disturbs, remedy=remedy if disturbs else "")


def _torch(machine: Machine) -> Finding:
    version = machine.torch_version
    if version is None:
        found = "not installed" if machine.torch_has_cuda is None else None
        return _judged("torch", found, True, "pip install 'torch>=2.11'")
    match = re.match(r"(\d+)\.(\d+)", version)
    old = match is not None and (int(match[1]), int(match[2])) < OLDEST_TORCH
    return _judged("torch", version, old, "pip install --upgrade 'torch>=2.11': older ones are not supported")


def _device_and_ranks(machine: Machine, chosen: WorldChoice | None) -> tuple[Finding, Finding]:
    if chosen is None:
        return _judged("device", None), _judged("ranks", None)
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    device = Finding(
        topic="device",
        found=f"{chosen.spec.device} with {chosen.spec.backend}; {gpus}",
        disturbs=False,
        remedy="; ".join(note for note in chosen.notes if not note.startswith(FUNCTIONAL_ONLY)),
    )
    whole = min(machine.cores, machine.physical_cores or machine.cores)
    siblings = f" ({whole} physical)" if whole < machine.cores else ""
    ranks = _judged(
        "ranks",
        f"{chosen.spec.nproc} on {counted(machine.cores, 'core')}{siblings}",
        chosen.spec.nproc > whole,
        f"use {f'--nproc {whole}' if whole > 1 else 'a machine with a core for each rank'}: "
        "ranks that share a core wait for each other",
    )
    return device, ranks


def _cores(machine: Machine, process: Mapping[str, Any]) -> Finding:
    affinity = process.get("affinity")
    allowed = machine.cores if affinity is None else len(parse_cpus(affinity))
    physical = "" if machine.physical_cores is None else f", {machine.physical_cores} physical in the machine"
    quota = f", by a CPU quota on {allowed}" if machine.cores < allowed else ""
    return _judged(
        "cores",
        f"{machine.cores} available{quota}{physical}",
        machine.cores < allowed,
        "lift the container's CPU quota, which halts ranks in mid-flight, and pin it to whole cores instead",
    )


def _interface(host: Mapping[str, Any], process: Mapping[str, Any], variables: Mapping[str, Any]) -> Finding:
    named = variables.get("GLOO_SOCKET_IFNAME")
    if named or "address" not in host:
        return _judged("interface", f"{named} (GLOO_SOCKET_IFNAME)" if named else None)
    address, name = host["address"], host.get("name") or "the host name"
    return _judged(
        "interface",
        f"{process.get('interface') or UNKNOWN} ({name} resolves to {address or 'nothing'})",
        address is None or ipaddress.ip_address(address).is_loopback,
        "one node can measure so; between nodes, set GLOO_SOCKET_IFNAME to the network's interface (see ip -br addr)",
    )


def _threads(machine: Machine, chosen: WorldChoice | None, variables: Mapping[str, Any]) -> Finding:
    text = variables.get("OMP_NUM_THREADS")
    if text is None:
        return _judged("threads", "OMP_NUM_THREADS is not set")
    per_rank = re.match(r"\d+", text)  # "4,2" is four threads, each of which may start two
    ranks = chosen.spec.nproc if chosen else 0
    threads = int(per_rank[0]) * ranks if per_rank else 0
    return _judged(
        "threads",
        f"OMP_NUM_THREADS={text}",
        threads > machine.cores,
        f"{threads} threads on {counted(machine.cores, 'core')}: "
        f"set OMP_NUM_THREADS={max(1, machine.cores // max(ranks, 1))}",
    )


def _gibibytes(num_bytes: int | None, what: str) -> str | None:
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB {what}"
