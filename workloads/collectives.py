"""Collectives with a backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]


def communicate(x: Tensor, forward: Collective, backward: Collective) -> Tensor:
    """Return ``forward(x)``, and run the collective ``backward`` on the gradient in backward."""
    result: Tensor = _CollectiveWithBackward.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _CollectiveWithBackward(torch.autograd.Function):
    """Runs one collective in forward, and another on the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.backward_collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_collective(gradients[0]), None, None
