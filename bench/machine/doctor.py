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
from bench.text import UserError, listed

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
    return Load(
        one_minute=load_average(),
        steal_percent=getattr(psutil.cpu_times_percent(interval=seconds), "steal", None),
        swap_used_bytes=psutil.swap_memory().used,
        shm_bytes=_shm_bytes(),
    )


def examine(machine: Machine, environment: Mapping[str, Any], *, load: Load) -> tuple[Finding, ...]:
    host, process, variables = (environment.get(name) or {} for name in ("host", "process", "variables"))
    spec = _default_spec(machine)
    return (
        _torch(machine),
        _device(machine, spec),
        _ranks(machine, spec),
        _cores(machine, process),
        _load_average(machine, load),
        _governor(host),
        _clock_source(host),
        _steal(load),
        _virtual(host),
        _interface(host, process, variables),
        _memory(machine),
        _shared_memory(machine, load),
        _swap(load),
        _threads(machine, spec, variables),
    )


def examine_here(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    return examine(inspect_machine(environ), capture(environ), load=sample_load())


def render(findings: Sequence[Finding]) -> str:
    width = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.topic:<{width}}  {_verdict(finding):<8}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<{width}}  {'':<8}  {finding.remedy}")
    return "".join(f"{line}\n" for line in lines)


def as_json(findings: Sequence[Finding]) -> bytes:
    return msgspec.json.encode(findings) + b"\n"


def _verdict(finding: Finding) -> str:
    if finding.found == UNKNOWN:
        return UNKNOWN
    return "disturbs" if finding.disturbs else "ok"


def _judged(topic: str, found: str | None, disturbs: bool, remedy: str) -> Finding:
    """Return a finding whose remedy is for when it disturbs; nothing unknown disturbs."""
    if found is None:
        return Finding(topic=topic, found=UNKNOWN, disturbs=False)
    return Finding(topic=topic, found=found, disturbs=disturbs, remedy=remedy if disturbs else "")


def _default_spec(machine: Machine) -> WorldChoice | None:
    try:
        return choose_world(machine, nproc=None, backend=None, device=None, allow_single=False)
    except UserError:  # no torch, which has a finding of its own
        return None


def _torch(machine: Machine) -> Finding:
    version = machine.torch_version
    if version is None:
        found = "not installed" if machine.torch_has_cuda is None else None
        return _judged("torch", found, True, "pip install 'torch>=2.11'")
    match = re.match(r"(\d+)\.(\d+)", version)
    old = match is not None and (int(match[1]), int(match[2])) < OLDEST_TORCH
    return _judged("torch", version, old, "pip install --upgrade 'torch>=2.11': older ones are not supported")


def _device(machine: Machine, chosen: WorldChoice | None) -> Finding:
    if chosen is None:
        return _judged("device", None, False, "")
    gpus = f"; {len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "; no GPU"
    notes = [note for note in chosen.notes if not note.startswith(FUNCTIONAL_ONLY)]
    found = f"{chosen.spec.device} with {chosen.spec.backend}{gpus}"
    return Finding(topic="device", found=found, disturbs=False, remedy="; ".join(notes))


def _ranks(machine: Machine, chosen: WorldChoice | None) -> Finding:
    if chosen is None:
        return _judged("ranks", None, False, "")
    whole = min(machine.cores, machine.physical_cores or machine.cores)
    ranks = chosen.spec.nproc
    remedy = f"--nproc {whole}" if whole > 1 else "a machine with a core for each rank"
    siblings = f" ({whole} physical)" if whole < machine.cores else ""
    found = f"{ranks} on {_count(machine.cores, 'core')}{siblings}"
    return _judged("ranks", found, ranks > whole, f"use {remedy}: ranks that share a core wait for each other")


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


def _load_average(machine: Machine, load: Load) -> Finding:
    running = load.one_minute
    return _judged(
        "load average",
        None if running is None else f"{running:.2f} on {_count(machine.cores, 'core')}",
        running is not None and running > MAX_LOAD_PER_CORE * machine.cores,
        "stop other work, or use more launches (--launches)",
    )


def _governor(host: Mapping[str, Any]) -> Finding:
    remedy = "sudo cpupower frequency-set -g performance, so that clocks do not follow the load"
    return _judged("cpu governor", host.get("governor"), host.get("governor") != "performance", remedy)


def _clock_source(host: Mapping[str, Any]) -> Finding:
    return _judged(
        "clock source",
        host.get("clock_source"),
        host.get("clock_source") not in CLOCK_SOURCES,
        f"reading it costs a system call in each time stamp: boot with {listed(CLOCK_SOURCES)} where it is stable",
    )


def _steal(load: Load) -> Finding:
    percent = load.steal_percent
    return _judged(
        "steal time",
        None if percent is None else f"{percent:.1f} %",
        percent is not None and percent > MAX_STEAL_PERCENT,
        "the hypervisor gives these cores to others: use dedicated cores, or more launches (--launches)",
    )


def _virtual(host: Mapping[str, Any]) -> Finding:
    virtual = host.get("virtualised")
    return _judged(
        "virtual machine",
        None if virtual is None else "yes" if virtual else "no",
        bool(virtual),
        "neighbours can disturb: use more launches (--launches), and compare within a run",
    )


def _interface(host: Mapping[str, Any], process: Mapping[str, Any], variables: Mapping[str, Any]) -> Finding:
    named = variables.get("GLOO_SOCKET_IFNAME")
    if named:
        return _judged("interface", f"{named} (GLOO_SOCKET_IFNAME)", False, "")
    if "address" not in host:
        return _judged("interface", None, False, "")
    address, name = host["address"], host.get("name") or "the host name"
    local = address is None or ipaddress.ip_address(address).is_loopback
    return _judged(
        "interface",
        f"{process.get('interface') or UNKNOWN} ({name} resolves to {address or 'nothing'})",
        local,
        "one node can measure so; between nodes, set GLOO_SOCKET_IFNAME to the network's interface (see ip -br addr)",
    )


def _memory(machine: Machine) -> Finding:
    free = machine.memory_bytes
    small = free is not None and free < MIN_MEMORY_BYTES
    return _judged("memory", _gibibytes(free, "available"), small, "free some: large sizes will be skipped")


def _shared_memory(machine: Machine, load: Load) -> Finding:
    size = load.shm_bytes
    small = size is not None and size < MIN_SHM_BYTES and bool(machine.gpus)
    remedy = "nccl moves data through it: start the container with --shm-size 1g or more, or --ipc host"
    return _judged("/dev/shm", _gibibytes(size, "in all"), small, remedy)


def _swap(load: Load) -> Finding:
    used = load.swap_used_bytes
    remedy = "free memory, then sudo swapoff -a && sudo swapon -a: ranks wait for pages that were swapped out"
    return _judged("swap", _gibibytes(used, "in use"), bool(used), remedy)


def _threads(machine: Machine, chosen: WorldChoice | None, variables: Mapping[str, Any]) -> Finding:
    text = variables.get("OMP_NUM_THREADS")
    if text is None or chosen is None:
        return _judged(
            "threads", "OMP_NUM_THREADS is not set" if text is None else f"OMP_NUM_THREADS={text}", False, ""
        )
    per_rank = re.match(r"\d+", text)  # "4,2" is four threads, each of which may start two
    threads = int(per_rank[0]) * chosen.spec.nproc if per_rank else 0
    return _judged(
        "threads",
        f"OMP_NUM_THREADS={text}",
        threads > machine.cores,
        f"{threads} threads on {_count(machine.cores, 'core')}: "
        f"set OMP_NUM_THREADS={max(1, machine.cores // chosen.spec.nproc)}",
    )


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _gibibytes(num_bytes: int | None, what: str) -> str | None:
    return None if num_bytes is None else f"{num_bytes / (1 << 30):.2f} GiB {what}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
