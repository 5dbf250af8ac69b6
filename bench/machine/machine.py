"""What this process may use: cores, memory and GPUs, found without importing torch."""

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

_T = TypeVar("_T")
_QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; ``memory_bytes`` is None where the driver does not tell."""

    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process started here finds; ``cores`` and ``memory_bytes`` are what it may use of them."""

    cores: int
    physical_cores: int | None = None
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    torch_version: str | None = None
    torch_has_cuda: bool | None = None


def inspect_machine(environ: Mapping[str, str]) -> Machine:
    return Machine(
        cores=available_cores(),
        physical_cores=psutil.cpu_count(logical=False),
        memory_bytes=available_memory_bytes(),
        gpus=visible_gpus(environ),
        torch_version=package_version("torch"),
        torch_has_cuda=_torch_has_cuda(),
    )


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def or_none(ask: Callable[[], _T]) -> _T | None:
    """Return what the system answers, None where it cannot tell."""
    try:
        return ask()
    except OSError:
        return None


def contents(path: Path) -> str | None:
    return or_none(lambda: path.read_text(encoding="utf-8", errors="replace").strip())


def whole_number(text: str | None) -> int | None:
    """Return the whole number a word stands for, None for ``max``, ``-1``, ``[N/A]`` and the like."""
    word = (text or "").strip()
    return int(word) if word.isascii() and word.isdigit() else None


def affinity() -> frozenset[int]:
    """Return the logical CPUs this process may be scheduled on; all of them where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores(root: Path = Path("/")) -> int:
    """Return the size of the affinity, limited by the CPU quotas of the cgroups under ``root``; at least 1."""
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, int(min([len(affinity()), *quotas])))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes free without swapping, limited by the memory cgroups under ``root``."""
    spare = [room for folder in _cgroup_folders(root, "memory") if (room := _memory_room(folder)) is not None]
    return max(0, min([int(psutil.virtual_memory().available), *spare]))


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup and those above it, any of which can limit it, in v1 and v2."""
    base = root / "sys/fs/cgroup"
    for line in (contents(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, unknown here: its limits then lie at the mount, the last folder.
        parts = [part for part in path.split("/") if part]
        for mount in (base / controllers, base / controller) if controllers else (base, base / "unified"):
            yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _cpu_quota(folder: Path) -> float | None:
    """Return the cores' worth of time a cgroup allows, None if it sets no limit."""
    words = (contents(folder / "cpu.max") or "").split() or [
        contents(folder / "cpu.cfs_quota_us") or "",
        contents(folder / "cpu.cfs_period_us") or "",
    ]
    quota, period = (whole_number(word) for word in words)
    return quota / period if quota and period else None


def _memory_room(folder: Path) -> int | None:
    """Return the bytes a cgroup still allows, None if it sets no limit; an unlimited v1 cgroup gives a huge number."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = whole_number(contents(folder / limit_name)), whole_number(contents(folder / usage_name))
        if limit is not None and usage is not None:
            statistics = (contents(folder / "memory.stat") or "").splitlines()
            cache = dict(line.split(maxsplit=1) for line in statistics).get(cache_name)
            return limit - usage + (whole_number(cache) or 0)
    return None


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs ``nvidia-smi`` lists and ``CUDA_VISIBLE_DEVICES`` leaves; none if it is absent or fails."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ()
    try:
        done = subprocess.run(
            [command, *_QUERY],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            encoding="utf-8",
            errors="replace",
            timeout=_QUERY_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = []
    for line in done.stdout.splitlines():
        name, comma, mebibytes = line.rpartition(",")
        if comma:
            memory = whole_number(mebibytes)
            gpus.append(Gpu(name=name.strip(), memory_bytes=None if memory is None else memory << 20))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(gpus if visible is None or not gpus else _restricted(gpus, visible))


def _restricted(gpus: list[Gpu], visible: str) -> Iterator[Gpu]:
    for entry in (word.strip() for word in visible.split(",")):
        index = whole_number(entry)
        if index is not None and index < len(gpus):
            yield gpus[index]
        elif entry.startswith(("GPU-", "MIG-")):
            # which GPU an identifier stands for is known only where all are alike, the size of a slice never
            yield gpus[0] if len(set(gpus)) == 1 and entry.startswith("GPU-") else Gpu(name=entry)
        else:
            return  # CUDA hides an entry it does not know, and all that follow it


def _torch_has_cuda() -> bool | None:
    """Say whether the installed torch was built for CUDA, from its ``version.py``; None if that cannot be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        statements = ast.parse(contents(Path(spec.origin).with_name("version.py")) or "").body
    except SyntaxError:
        return None
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            value = getattr(statement, "value", None)
            return bool(value.value) if isinstance(value, ast.Constant) else None
    return None
