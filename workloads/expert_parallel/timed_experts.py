"""Experts that wait in proportion to the tokens they get, so that what an uneven load costs shows on any machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workloads.model.timed_compute import TimedCompute


@dataclass(frozen=True, kw_only=True)
class ExpertWait:
    """How long experts take that only wait: ``seconds_per_row`` forward, as long for each of the two gradients."""

    seconds_per_row: float
    waiter: TimedCompute


def wait_instead(x: Tensor, weights: Sequence[Tensor], wait: ExpertWait) -> Tensor:
    """Wait for rows (n, h) as long as they are said to take; they become zeros, and so do all gradients."""
    waited: Tensor = _Waited.apply(x, wait, *weights)  # type: ignore[no-untyped-call]
    return waited


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: ExpertWait, *weights: Tensor) -> Tensor:
        ctx.wait, ctx.sizes = wait, [weight.shape for weight in weights]
        with wait.waiter.waiting(len(x) * wait.seconds_per_row):
            return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wait, gradient = ctx.wait, gradients[0]
        with wait.waiter.waiting(2 * len(gradient) * wait.seconds_per_row):
            return torch.zeros_like(gradient), None, *(gradient.new_zeros(size) for size in ctx.sizes)
