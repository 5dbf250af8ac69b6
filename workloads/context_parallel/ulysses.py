"""Ulysses: ranks exchange parts of the sequence for heads, attend to the whole with theirs, and exchange back.

arXiv 2309.14509. Around a ring of other ranks it is USP (arXiv 2405.07719): the inner core is any other.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.context_parallel.recorder import Direction, Recorder

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Ulysses:
    """The core of an attention of q, k, v (b, a, s/u, d), around one of (b, a/u, s, d)."""

    def __init__(self, group: dist.ProcessGroup, inner: Core, recorder: Recorder) -> None:
        self.group, self._inner, self.recorder = group, inner, recorder
        self.ranks = dist.get_process_group_ranks(group)
        recorder.moves |= {"heads": self.exchanged, "output": self.exchanged}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries, all heads."""
        ranks = self.group.size()
        counts = [x.shape[1] // ranks for x in (q, k, v)]
        by_rank = torch.cat([_cut(x, 1, ranks) for x in (q, k, v)], dim=2).movedim(1, 0)
        heads = self._exchange(by_rank, "heads").movedim(0, 2).flatten(2, 3)
        whole_q, whole_k, whole_v = torch.split(heads, counts, dim=1)
        out = _cut(self._inner(whole_q, whole_k, whole_v), 2, ranks).movedim(2, 0)
        return self._exchange(out, "output").movedim(0, 1).flatten(1, 2)

    def exchanged(self, by_rank: Tensor) -> Tensor:
        """Return what every rank has for this one, (u, ...), of what this one has for every rank, (u, ...)."""
        received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, by_rank.contiguous(), group=self.group)
        return received

    def _exchange(self, by_rank: Tensor, what: str) -> Tensor:
        received: Tensor = _Exchange.apply(by_rank, self, what)  # type: ignore[no-untyped-call]
        return received


class _Exchange(torch.autograd.Function):
    """An all_to_all of equal parts; backward is the same one."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, ulysses: Ulysses, what: str) -> Tensor:
        ctx.ulysses, ctx.what = ulysses, what
        return _noted(by_rank, ulysses, what, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _noted(gradients[0], ctx.ulysses, ctx.what, "backward"), None, None


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return a tensor with one dim cut in two: parts, and what is in each."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


def _noted(by_rank: Tensor, ulysses: Ulysses, what: str, direction: Direction) -> Tensor:
    with ulysses.recorder.waiting(direction, 0, what, by_rank, ulysses.ranks):
        return ulysses.exchanged(by_rank)
