"""Communication of an expert axis that autograd knows: uneven all-to-alls under way, gathers, and sums of parts.

A flight is issued, and waited for when its tokens are needed; its backward pass is a flight of gradients in the other
direction. What is received is zeroed first: where communication is silenced, it is read as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.world.torch_compat import all_gather_single, reduce_scatter_single


class Flight:
    """Rows (n, ...) on their way: ``sends[j]`` of them to rank j, ``receives[j]`` from it, in rank order."""

    def __init__(self, x: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> None:
        self.receives, self.sends, self.group = list(receives), list(sends), group
        self.work: dist.Work | None = None
        self.returned: tuple[Tensor, dist.Work | None] | None = None
        self._received: Tensor | None = _Issue.apply(x, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the rows received, (sum of ``receives``, ...); once."""
        # what is received knows its flight by autograd: kept here too, neither would ever be given back
        received, self._received = self._received, None
        assert received is not None, "a flight arrives once"
        arrived: Tensor = _Wait.apply(received, self)  # type: ignore[no-untyped-call]
        self.work = None
        return arrived


def issue(
    x: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work | None]:
    """Start an uneven all-to-all of rows, without gradients; return what it fills and its work."""
    received = x.new_zeros(sum(receives), *x.shape[1:])
    work = dist.all_to_all_single(received, x.contiguous(), list(receives), list(sends), group=group, async_op=True)
    return received, work


def swap_now(x: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows of an uneven all-to-all, without gradients; where communication is silenced, this rank's own."""
    received = x.clone() if receives == sends else x.new_zeros(sum(receives), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(receives), list(sends), group=group)
    return received


def swap_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank means to send here, (ranks, m), of what this one means to send to each.

    Where communication is silenced, it is as if all meant to send what this one does.
    """
    received = counts.clone()
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class _Issue(torch.autograd.Function):
    """Starts a flight forward; backward waits for the gradients that ``_Wait`` has sent off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        received, flight.work = issue(x, flight.receives, flight.sends, flight.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert ctx.flight.returned is not None, "waiting, which comes before in backward, has sent them"
        gradient, work = ctx.flight.returned
        ctx.flight.returned = None
        _finish(work)
        return gradient, None


class _Wait(torch.autograd.Function):
    """Waits for a flight forward; backward sends the gradients off. The gradient that it hands on is a placeholder."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        _finish(flight.work)
        ctx.mark_dirty(received)  # neither a copy nor a view
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.returned = issue(gradients[0], flight.sends, flight.receives, flight.group)
        return gradients[0], None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows (ranks n, ...), in rank order; backward sums their gradients and keeps this rank's."""
    gathered: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part (n, ...) of the sum over ranks of x (ranks n, ...); backward gathers its gradients."""
    part: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return part


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows without gradients."""
    whole = x.new_zeros(group.size() * len(x), *x.shape[1:])
    all_gather_single(whole, x.contiguous(), group)
    return whole


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum without gradients."""
    part = x.new_zeros(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(part, x.contiguous(), group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.group), None
