"""The memory in use on this host's GPUs, which a driver may take long to free after a process. Without torch."""

import os
import time
from collections.abc import Collection, Mapping

from parbench.bench.machine.gpu import read_report

_SLACK_BYTES = 256 << 20
"""The memory in use changes by itself."""


def measure_gpu_memory(device: str) -> dict[str, int]:
    """Return the memory (bytes) in use by the UUID of a GPU; nothing on the CPU or where it is unknown."""
    gpus = read_report(os.environ, "sample").gpus if device == "cuda" else ()
    return {gpu.uuid: gpu.memory_used_bytes for gpu in gpus if gpu.uuid and gpu.memory_used_bytes is not None}


def wait_for_gpu_memory(before: Mapping[str, int], uuids: Collection[str], deadline: float) -> list[str]:
    """Wait until GPUs have no more memory in use than before, and describe those that still have."""
    while True:
        now = measure_gpu_memory("cuda") if uuids else {}
        extra = {uuid: now[uuid] - before[uuid] for uuid in now if uuid in uuids and uuid in before}
        extra = {uuid: size for uuid, size in extra.items() if size > _SLACK_BYTES}
        if not extra or time.monotonic() > deadline:
            return [f"{size / 2**30:.1f} GiB on {uuid}" for uuid, size in extra.items()]
        time.sleep(0.5)
