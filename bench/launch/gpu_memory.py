"""The memory in use on this host's GPUs, which a GPU driver may free long after a process ends."""

import os
import time
from collections.abc import Collection, Mapping

from parbench.bench.machine.gpu import read_report

_SLACK_BYTES = 256 << 20
"""The memory in use changes by itself."""


def measure_gpu_memory(device: str) -> dict[str, int]:
    """Return the memory (bytes) in use by the UUID of each GPU, where it is known."""
    used_bytes = {}
    for gpu in read_report(os.environ, "sample").gpus if device == "cuda" else ():
        if gpu.uuid and gpu.memory_used_bytes is not None:
            used_bytes[gpu.uuid] = gpu.memory_used_bytes
    return used_bytes


def wait_for_gpu_memory(
    before: Mapping[str, int], uuids: Collection[str], deadline: float
) -> list[str]:
    """Wait until GPUs have no more memory in use than ``before``, at most until ``deadline``.

    Returns a phrase for each GPU that still has more in use.
    """
    while True:
        used_bytes = measure_gpu_memory("cuda") if uuids else {}
        remains = []
        for uuid in used_bytes.keys() & set(uuids) & before.keys():
            extra_bytes = used_bytes[uuid] - before[uuid]
            if extra_bytes > _SLACK_BYTES:
                remains.append(f"{extra_bytes / 2**30:.1f} GiB on {uuid}")
        if not remains or time.monotonic() > deadline:
            return remains
        time.sleep(0.5)
