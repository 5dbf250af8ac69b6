"""AdamW, and AdamW of float32 masters where the model is in a narrower type."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LEARNING_RATE = 1e-3


def make_optimizer(
    parameters: Iterable[Tensor], dtype: torch.dtype, *, timed: bool = False
) -> torch.optim.Optimizer:
    groups = make_parameter_groups(parameters)
    return optimizer_class(dtype, timed=timed)(groups, lr=LEARNING_RATE)  # type: ignore[call-arg]


def make_parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups of plain tensors and of DTensors, each only if it has parameters.

    On CUDA torch updates a group as lists of tensors (``foreach``), and a list must not mix both kinds.
    """
    plain: list[Tensor] = []
    distributed: list[Tensor] = []
    for parameter in parameters:
        (distributed if isinstance(parameter, DTensor) else plain).append(parameter)
    return [{"params": group} for group in (plain, distributed) if group]


def optimizer_class(dtype: torch.dtype, *, timed: bool = False) -> type[torch.optim.Optimizer]:
    """Return torch's AdamW for float32, ``MasterAdamW`` for narrower types, ``Unmoved`` where compute is timed."""
    if timed:
        return Unmoved
    return torch.optim.AdamW if dtype == torch.float32 else MasterAdamW


class Unmoved(torch.optim.Optimizer):
    """Leaves the parameters as they are: the update is arithmetic too, and timed compute has none."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on a float32 copy of each parameter: 12 bytes of state a parameter, as mixed-precision training keeps.

    Source of the accounting: ZeRO (arXiv 1910.02054), section 3.1.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._inner: torch.optim.AdamW | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters from the gradients, and the parameters from the masters."""
        inner = self._inner or self._begin()
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        inner.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)
            master.grad = None

    def held(self) -> list[Tensor]:
        moments = (
            []
            if self._inner is None
            else [v for s in self._inner.state.values() for v in s.values()]
        )
        return [
            *(master for _, master in self._pairs),
            *(value for value in moments if isinstance(value, Tensor)),
        ]

    def _begin(self) -> torch.optim.AdamW:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._pairs = [(parameter, parameter.detach().float().clone()) for parameter in parameters]
        masters = [master.requires_grad_() for _, master in self._pairs]
        self._inner = torch.optim.AdamW(make_parameter_groups(masters), lr=self.defaults["lr"])
        return self._inner
