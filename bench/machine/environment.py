"""What a rank's surroundings are, in plain data, and how near two ranks are: captured without torch, compared."""

import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations, groupby
from pathlib import Path
from typing import Any

import msgspec
import psutil

from parbench.bench.machine.gpu import Links
from parbench.bench.machine.machine import affinity, available_cores, contents, or_none, package_version, whole_number

VOLATILE = "load"  # the group of values that no two runs share, which comparisons pass over
DISTURBANCES = "disturbances"  # in that group: what the doctor found at a run's start
EMULATED_VARIABLE = "PARBENCH_EMULATED"

_ALLOWED = re.compile(
    r"(TORCH_)?NCCL_.*|(GLOO|UCX|FI)_.*|PYTORCH_.*ALLOC_CONF|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS)"
    r"|NVIDIA_TF32_OVERRIDE|(OMP|MKL)_NUM_THREADS|SLURM_(CLUSTER_NAME|JOB_(ID|NODELIST|NUM_NODES|PARTITION)|NNODES|NTASKS(_PER_NODE)?"
    r"|TASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND|DISTRIBUTION|GPUS_ON_NODE|RESTART_COUNT|TOPOLOGY_ADDR(_PATTERN)?)"
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
_SECRET_URL = re.compile(r"://\S*(@|[?&;][^=\s]*(token|key|secret|pass)[^=\s]*=)", re.IGNORECASE)
_BOOT_ID = "proc/sys/kernel/random/boot_id"
_MISSING = object()


def capture(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Return the surroundings of this process, unknown as None; ``root`` holds the ``proc`` and ``sys`` to read."""
    address, cpus, variables = host_address(), affinity(), recorded_variables(environ)
    first_cpu = (contents(root / "proc/cpuinfo") or "").split("\n\n")[0]
    cpu = dict(re.findall(r"^(.*?)[ \t]*:[ \t]*(.*?)[ \t]*$", first_cpu, re.MULTILINE))
    flags = cpu.get("flags")  # Arm lists "Features" instead, which do not tell
    system = root / "sys/devices/system"
    governors = {contents(system / f"cpu/cpu{number}/cpufreq/scaling_governor") for number in cpus}
    versions = {name: package_version(name) for name in ("torch", "numpy", "parbench")}
    load = or_none(os.getloadavg)
    return {
        "host": {
            "name": socket.gethostname(),
            "address": address,
            "os": (or_none(platform.freedesktop_os_release) or {}).get("PRETTY_NAME") or platform.system(),
            "kernel": platform.release(),
            "boot_id": contents(root / _BOOT_ID),
            "cpu_model": cpu.get("model name"),
            "memory_bytes": psutil.virtual_memory().total,
            "clock_source": contents(system / "clocksource/clocksource0/current_clocksource"),
            "governor": ",".join(sorted(name for name in governors if name)) or None,
            "virtualised": None if flags is None else "hypervisor" in flags.split(),
        },
        "versions": {"python": platform.python_version(), **versions},
        "variables": variables,
        "process": {
            "cores": available_cores(root),
            "affinity": format_cpus(cpus),
            "interface": variables.get("GLOO_SOCKET_IFNAME") or interface_of(address),
        },
        # how many processes ran or waited for a core
        VOLATILE: {"one_minute": None if load is None else round(load[0], 2)},
    }


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value.encode("utf-8", "backslashreplace").decode()  # JSON cannot hold bytes that are no text
        for name, value in sorted(environ.items())
        if _ALLOWED.fullmatch(name) and not _SECRET_NAME.search(name) and not _SECRET_URL.search(value)
    }


def host_address() -> str | None:
    """Return the address the host name resolves to, as gloo looks it up; None if it resolves to nothing."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label of 64 characters is a host name to Linux, and no name to DNS
        return None
    return str(found[0][4][0])


def interface_of(address: str | None) -> str | None:
    # all of 127/8 is the loopback interface's, though only 127.0.0.1 is listed
    sought = "127.0.0.1" if address and address.startswith("127.") else address
    named = ((name, entry.address) for name, entries in psutil.net_if_addrs().items() for entry in entries)
    return next((name for name, borne in named if borne.partition("%")[0] == sought), None)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers as Linux writes them: ``0-3,8``."""
    # along a run, a number and its place grow alike
    runs = [list(run) for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def parse_cpus(text: str) -> frozenset[int]:
    ends = [part.split("-") for part in text.split(",") if part]
    return frozenset(cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1))


def hoist(environments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what all ranks share, leaf by leaf, and what each rank has besides."""
    common: dict[str, Any] = {}
    rests: list[dict[str, Any]] = [{} for _ in environments]
    for key in dict.fromkeys(chain.from_iterable(environments)):
        values = [environment.get(key, _MISSING) for environment in environments]
        if all(isinstance(value, Mapping) for value in values):
            common[key], remaining = hoist(values)
            values = [rest or _MISSING for rest in remaining]
        elif all(value == values[0] for value in values):
            common[key] = values[0]
            continue
        for rest, value in zip(rests, values, strict=True):
            if value is not _MISSING:
                rest[key] = value
    return common, rests


def difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return each leaf that differs, as dotted path -> [base, other], None where it is absent; volatile ones aside."""
    ours, theirs = dict(leaves(base)), dict(leaves(other))
    pairs = {path: [ours.get(path), theirs.get(path)] for path in sorted({*ours, *theirs})}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1] and path.partition(".")[0] != VOLATILE}


def leaves(group: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the path of each value in nested groups, its names joined by dots, and the value."""
    for key, value in group.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def emulation(environ: Mapping[str, str]) -> str:
    """Return which nodes or links are not real, an empty string if all are."""
    return environ.get(EMULATED_VARIABLE, "")


def describe_emulation(emulation: str) -> str:
    return f"emulated: {emulation}"


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: CPUs it may use, their NUMA nodes, its GPU's UUID if any, its switch path under SLURM."""

    host: str
    boot_id: str | None = None  # of the kernel, because hosts may have equal names
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    gpu: str | None = None
    switches: str | None = None


def rank_place(host: str, environ: Mapping[str, str], gpu: str | None, root: Path = Path("/")) -> RankPlace:
    cpus, switches = affinity(), environ.get("SLURM_TOPOLOGY_ADDR")
    nodes = sorted(node for node, own in _numa_nodes(root).items() if cpus & own)
    boot_id = contents(root / _BOOT_ID)
    return RankPlace(
        host=host, boot_id=boot_id, cpus=tuple(sorted(cpus)), numa_nodes=tuple(nodes), gpu=gpu, switches=switches
    )


def _numa_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node by its number."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(one.name.removeprefix("node")): parse_cpus(contents(one / "cpulist") or "") for one in folders}


def core_groups(count: int, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs that this process may use in so many groups of as equal a size as can be, at most one each.

    CPUs of a NUMA node, and of a physical core, are side by side.
    """
    near = {cpu: node for node, own in _numa_nodes(root).items() for cpu in own}

    def place(cpu: int) -> tuple[int, ...]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        told = [contents(topology / name) for name in ("physical_package_id", "core_id")]
        return near.get(cpu, 0), *(whole_number(word) or 0 for word in told), cpu

    cpus = sorted(affinity(), key=place)
    count = min(count, len(cpus))
    return tuple(tuple(sorted(cpus[len(cpus) * i // count : len(cpus) * (i + 1) // count])) for i in range(count))


def relations(places: Sequence[RankPlace], links: Links) -> dict[str, str | None]:
    """Return the relation of each pair of ranks, as ``0-1``; nothing for more than 64 ranks, whose table none reads."""
    if len(places) > 64:
        return {}
    return {f"{a}-{b}": relation(one, other, links) for (a, one), (b, other) in combinations(enumerate(places), 2)}


def relation(a: RankPlace, b: RankPlace, links: Links) -> str | None:
    """Return how near two ranks are, in words; None where nothing tells."""
    # As in NCCL: containers of one host may have several names, and hosts may have equal names.
    if (a.host, a.boot_id) != (b.host, b.boot_id):
        # switch paths such as spine.leaf1.n1: the last part is the node itself
        one, other = ((place.switches or "").rpartition(".")[0] for place in (a, b))
        return "same switch" if one == other != "" else "other node"
    if a.gpu is not None and b.gpu is not None:
        return "same GPU" if a.gpu == b.gpu else links.get(frozenset((a.gpu, b.gpu)))
    if len(a.cpus) == 1 and a.cpus == b.cpus:
        return "same core"
    if len(a.numa_nodes) != 1 or len(b.numa_nodes) != 1:
        return None  # free to move between NUMA nodes, or no NUMA node is shown
    return "same NUMA node" if a.numa_nodes == b.numa_nodes else "other NUMA node"
