"""DDP's buckets: which gradients are summed together, and how far the backward pass is when the last of them is there.

torch fills buckets with gradients in the order in which the backward pass makes them, and closes one once it holds
``bucket_mb`` or more (torch.nn.parallel.DistributedDataParallel, ``bucket_cap_mb``). Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workloads.costs.parameter_table import ParameterPart


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are summed by one call; ``ready`` is the share of the backward pass after which it can start."""

    size_bytes: int
    ready: float


def buckets_of(parts: Sequence[ParameterPart], *, cap_bytes: float, element_bytes: int) -> list[Bucket]:
    """Return the buckets in the order in which they are summed; the backward pass goes by the elements of layers."""
    found: list[Bucket] = []
    held, behind, whole = 0, 0, sum(part.numel for part in parts if _in_layer(part))
    for i, part in enumerate(reversed(parts), 1):
        held += part.numel * element_bytes
        behind += part.numel if _in_layer(part) else 0
        if held >= cap_bytes or i == len(parts):
            found.append(Bucket(size_bytes=held, ready=behind / whole))
            held = 0
    return found


def _in_layer(part: ParameterPart) -> bool:
    return part.name.startswith("layers.")


def exposed_seconds(buckets: Sequence[Bucket], seconds: Callable[[int], float], window_seconds: float) -> float:
    """Return what is left to wait for after a backward pass of ``window_seconds``: bucket after bucket."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * window_seconds) + seconds(bucket.size_bytes)
    return end - window_seconds
