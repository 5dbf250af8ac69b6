"""Collectives with a backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]
"""A function that sends a tensor to other ranks and returns the received or reduced tensor."""


def communicate(x: Tensor, forward: Collective, backward: Collective) -> Tensor:
    """Return ``forward(x)``, a collective with a backward pass.

    In backward, ``backward(gradient)`` is called with the gradient of the result, and must return
    the gradient of ``x``.
    """
    result: Tensor = _CollectiveWithBackward.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _CollectiveWithBackward(torch.autograd.Function):
    """Runs one collective in forward, and another one on the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        """Return ``forward(x)``, and keep ``backward`` for the backward pass."""
        ctx.backward_collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x``, and None for the two collectives."""
        return ctx.backward_collective(gradients[0]), None, None
