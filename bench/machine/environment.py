"""What a rank's surroundings are, in plain data: captured without torch, hoisted over ranks, compared between runs."""

import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil

from bench.machine.machine import affinity, available_cores, contents, package_version

VOLATILE = "load"
"""The group of values that no two runs share, which comparisons pass over."""
VARIABLE = "PARBENCH_EMULATED"
EMULATED = "emulated"
"""How a note begins that says that nodes or links are not real."""

_ALLOWED = (
    *("NCCL_*", "TORCH_NCCL_*", "GLOO_*", "UCX_*", "FI_*", "PYTORCH_*ALLOC_CONF"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION"),
    *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
    *("SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"),
    *("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"),
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
_SECRET_URL = re.compile(r"://\S*(@|[?&;][^=\s]*(token|key|secret|pass)[^=\s]*=)", re.IGNORECASE)
_MISSING = object()


def capture(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, Any]:
    """Return the surroundings of this process, unknown as None; ``root`` holds the ``proc`` and ``sys`` to read."""
    address = host_address()
    variables = recorded_variables(environ)
    return {
        "host": _host(root, address),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("torch", "numpy", "parbench")},
        },
        "variables": variables,
        "process": {
            "cores": available_cores(root),
            "affinity": format_cpus(affinity()),
            "interface": variables.get("GLOO_SOCKET_IFNAME") or interface_of(address),
        },
        VOLATILE: {"one_minute": load_average()},
    }


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value.encode("utf-8", "backslashreplace").decode()  # JSON cannot hold bytes that are no text
        for name, value in sorted(environ.items())
        if any(fnmatchcase(name, pattern) for pattern in _ALLOWED)
        and not _SECRET_NAME.search(name)
        and not _SECRET_URL.search(value)
    }


def load_average() -> float | None:
    """Return the number of processes that ran or waited for a core, averaged over a minute; None if unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def host_address() -> str | None:
    """Return the address the host name resolves to, as gloo looks it up; None if it resolves to nothing."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a label of 64 characters is a host name to Linux, and no name to DNS
        return None
    return str(found[0][4][0])


def interface_of(address: str | None) -> str | None:
    if address is None:
        return None
    # all of 127/8 is the loopback interface's, though only 127.0.0.1 is listed
    sought = "127.0.0.1" if address.startswith("127.") else address
    for name, addresses in psutil.net_if_addrs().items():
        if any(sought == entry.address.partition("%")[0] for entry in addresses):
            return name
    return None


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers as Linux writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def parse_cpus(text: str) -> frozenset[int]:
    ends = [part.split("-") for part in text.split(",") if part]
    return frozenset(cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1))


def hoist(environments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what all ranks share, leaf by leaf, and what each rank has besides."""
    common: dict[str, Any] = {}
    rests: list[dict[str, Any]] = [{} for _ in environments]
    for key in dict.fromkeys(key for environment in environments for key in environment):
        values = [environment.get(key, _MISSING) for environment in environments]
        groups = [value for value in values if isinstance(value, Mapping)]
        if len(groups) == len(values):
            common[key], remaining = hoist(groups)
            own = [rest or _MISSING for rest in remaining]
        elif all(value == values[0] for value in values):
            common[key], own = values[0], [_MISSING] * len(values)
        else:
            own = values
        for rest, value in zip(rests, own, strict=True):
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


def emulation(environ: Mapping[str, str]) -> str | None:
    return environ.get(VARIABLE) or None


def emulation_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    told = emulation(environ)
    return () if told is None else (f"{EMULATED}: {told}",)


def _host(root: Path, address: str | None) -> dict[str, Any]:
    first_cpu = (contents(root / "proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.partition(":") for line in first_cpu.splitlines())
    cpu = {name.strip(): value.strip() for name, _, value in pairs}
    flags = cpu.get("flags")  # Arm lists "Features" instead, which do not tell
    folder = root / "sys/devices/system/cpu"
    governors = {contents(folder / f"cpu{number}/cpufreq/scaling_governor") for number in affinity()}
    try:
        os_name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        os_name = platform.system()
    return {
        "name": socket.gethostname(),
        "address": address,
        "os": os_name,
        "kernel": platform.release(),
        "boot_id": contents(root / "proc/sys/kernel/random/boot_id"),
        "cpu_model": cpu.get("model name"),
        "memory_bytes": psutil.virtual_memory().total,
        "clock_source": contents(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "governor": ",".join(sorted(name for name in governors if name)) or None,
        "virtualised": None if flags is None else "hypervisor" in flags.split(),
    }
