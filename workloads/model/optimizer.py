"""AdamW, and AdamW with float32 master weights for models of a lower precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

LEARNING_RATE = 1e-3
"""The learning rate of every optimizer in training steps."""


def make_optimizer(parameters: Iterable[Tensor], dtype: torch.dtype) -> torch.optim.Optimizer:
    """Return the optimizer of a training step for ``parameters`` of type ``dtype``.

    It is AdamW, with float32 master weights for other types than float32.
    """
    groups = make_parameter_groups(parameters)
    return choose_optimizer(dtype)(groups, lr=LEARNING_RATE)  # type: ignore[call-arg]


def make_parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: one of plain tensors, one per mesh of DTensors.

    On CUDA torch updates the tensors of a group together (``foreach``), so that they must not mix
    DTensors with plain tensors, or DTensors of different meshes.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def choose_optimizer(dtype: torch.dtype) -> type[torch.optim.Optimizer]:
    """Return the optimizer class for weights: AdamW for float32, ``MasterAdamW`` for other types."""
    return torch.optim.AdamW if dtype == torch.float32 else MasterAdamW


def freeze(optimizer: torch.optim.Optimizer) -> None:
    """Let the steps of an optimizer leave all parameters unchanged, for simulated compute.

    An optimizer of ZeRO-1 still communicates. Only the optimizer inside of it does nothing.
    """
    updating = getattr(optimizer, "optim", optimizer)
    updating.step = lambda **_: None  # type: ignore[method-assign]


class MasterAdamW(torch.optim.Optimizer):
    """AdamW that updates a float32 copy of each parameter (mixed-precision training).

    The state takes 12 bytes per parameter (ZeRO, arXiv 1910.02054, section 3.1). A step also holds
    float32 copies of all gradients at once, because AdamW updates all parameters together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        """Register ``params``. The float32 copies are made in the first step."""
        super().__init__(params, {"lr": lr})
        self._inner: torch.optim.AdamW | None = None
        """The AdamW of the float32 copies, None before the first step."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Each parameter with its float32 copy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the float32 copies from the gradients, and copy them into the parameters.

        ``closure`` is ignored.
        """
        inner = self._inner or self._make_masters()
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        inner.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)
            master.grad = None
            if parameter not in self.state:
                self.state[parameter] = {"master": master, **inner.state[master]}

    def _make_masters(self) -> torch.optim.AdamW:
        """Copy each parameter to float32, and return an AdamW of these copies."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._pairs = [(parameter, parameter.detach().float().clone()) for parameter in parameters]
        masters = [master.requires_grad_() for _, master in self._pairs]
        self._inner = torch.optim.AdamW(make_parameter_groups(masters), lr=self.defaults["lr"])
        return self._inner
