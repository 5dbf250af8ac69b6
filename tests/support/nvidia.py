"""A fake driver: an NVML library that reports given GPUs."""

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pynvml  # type: ignore[import-untyped]

from parbench.bench.machine.gpu import LIBRARY

SOURCE = Path(__file__).with_name("nvml.c")
Facts = Mapping[str, str]
"""Values of a GPU by the keys of ``nvml.c``."""

# An idle GPU of a DGX H100.
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_total": str(81559 << 20),
    "memory_used": "0",
    "persistence": "1",
    "mig": "0",
    "ecc": "1",
    "power_limit": "700000",
    "power_default": "700000",
    "clock_max.1": "1980",
    "clock.1": "345",
    "clock_reasons": "0x1",
    "pcie_generation_max": "5",
    "pcie_width_max": "16",
    "pcie_width": "16",
    "errors_uncorrected": "0",
    "rows": "0 0 0",
}
LOST = {"handle": "error 15"}
"""The facts of a GPU that has fallen off the bus."""
NO_PERMISSION = {"handle": "error 4"}
"""The facts of a GPU that belongs to another job."""
NO_DRIVER = "error 9"
HANG = "hang"


def format_uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


def gpus(kind: Facts, count: int, **changes: Facts) -> list[dict[str, str]]:
    """Return GPUs of a kind; ``gpu3`` and the like are changes of a single GPU."""
    listed = []
    for index in range(count):
        changed = changes.get(f"gpu{index}", {})
        listed.append({**kind, "uuid": format_uuid(index), **changed})
    return listed


def describe_links(states: Sequence[bool]) -> dict[str, str]:
    """Return facts about NVLinks that are active or not."""
    facts = {f"field.{pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT}": str(len(states))}
    for link, is_active in enumerate(states):
        facts[f"link_active.{link}"] = str(int(is_active))
    return facts


def install(
    folder: Path,
    listed: Sequence[Facts],
    *,
    init: str = "",
) -> dict[str, str]:
    """Write the library for these GPUs, and return an environment in which it is found.

    ``init`` is what the library does at first: ``error 9`` or ``hang``.
    """
    lines = ["driver 580.95.05", f"count {len(listed)}"]
    if init:
        lines.append(f"init {init}")
    for index, facts in enumerate(listed):
        lines += [f"{index}.{key} {value}" for key, value in facts.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvml.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    library = folder / LIBRARY
    if not library.exists():
        library.symlink_to(compile_library())
    return {"PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}


@functools.cache
def compile_library() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library
