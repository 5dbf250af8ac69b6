"""The parity gate: what ranks computed together equals what one process computes alone."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

RELATIVE_TOLERANCE = 1e-4
"""Of a tensor's largest reference value.

float32 sums in another order were seen to differ by up to 1e-5 of it at 256 sequences a rank; traffic in bfloat16
would differ by 5e-4 and more.
"""


def count_apart(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> int:
    """Return how many elements are farther from the reference than the tolerance; a missing tensor is all wrong."""
    wrong = 0
    for ours, reference in zip(found, expected, strict=True):
        assert reference is not None
        if ours is None:
            wrong += reference.numel()
            continue
        limit = RELATIVE_TOLERANCE * reference.abs().max()
        apart = (ours - reference).abs()
        wrong += int(
            (~((apart <= limit) & apart.isfinite())).sum()
        )  # a NaN is in no limit, infinity in an infinite one
    return wrong


def count_unlike_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """Return how many elements on this rank differ in any bit from rank 0's."""
    wrong = 0
    for tensor in tensors:
        reference = tensor.detach().clone()
        dist.broadcast(reference, group=group, group_src=0)
        unlike = tensor.detach().flatten().view(torch.uint8) != reference.flatten().view(torch.uint8)
        wrong += int(unlike.view(-1, tensor.element_size()).any(dim=1).sum())
    return wrong
