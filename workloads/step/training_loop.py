"""A training loop of one's own as a benchmark: a model, a batch, a loss and an optimizer, as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.benchmark import Benchmark, Description
from parbench.workloads.step.layout import whole

_FINITE_ONLY = "no reference was given: gradients are checked to be finite, and nothing more"
_MOST_NAMED = 3
Loss = Callable[[Any, Any], Tensor]
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_COARSE = 3e-2  # of half precision


class TrainingLoop(Benchmark):
    """One step of a loop: gradients from nothing, one batch, one update; see ``parbench.step_of``."""

    def __init__(
        self,
        model: Any,
        batch: Any,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        reference: nn.Module | None = None,
    ) -> None:
        self._model, self._batch, self._loss, self._optimizer = model, batch, loss, optimizer
        self._reference, self._number = reference, 0
        self._wrong: list[str] = []
        if isinstance(model, nn.Module) != (loss is not None):
            raise ValueError(
                "step_of: a module needs a loss, and a schedule has its own: give it None"
            )
        if loss is None and reference is not None:
            raise ValueError(
                "step_of: a schedule takes no reference: its stages' gradients are checked to be finite"
            )
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.dtype: torch.dtype = self._parameters[0].dtype if self._parameters else torch.float32
        self._next()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._forward_backward()
        self._optimizer.step()

    def reset(self) -> None:
        self._number += 1
        self._next()

    def check(self) -> int:
        """Return how many gradients differ from the reference's mean over ranks, or are not finite; see ``step_of``."""
        self._optimizer.zero_grad()
        self._forward_backward()
        if self._reference is None:
            wrong = (name for name, grad in self._gradients() if not torch.isfinite(grad).all())
            self._wrong = [f"{name}: a gradient is not finite" for name in wrong]
        else:
            self._wrong = list(self._unlike_reference(self._reference))
        self._optimizer.zero_grad()
        return len(self._wrong)

    def differences(self) -> Sequence[str]:
        return self._wrong[:_MOST_NAMED]

    def describe(self) -> Description:
        notes = () if self._reference is not None else (_FINITE_ONLY,)
        count = sum(one.numel() for one in self._parameters)
        return Description(
            headline="step_time",
            details={"optimizer": type(self._optimizer).__name__, "parameters": count},
            notes=notes,
        )

    def _next(self) -> None:
        self._present = self._batch(self._number) if callable(self._batch) else self._batch

    def _forward_backward(self) -> None:
        if self._loss is not None:
            self._loss(self._model, self._present).backward()  # type: ignore[no-untyped-call]
        elif isinstance(self._present, Mapping):
            self._model.step(**self._present)
        else:
            self._model.step(*self._present)

    def _gradients(self) -> list[tuple[str, Tensor]]:
        """Return the gradients by the names of a single process's model, whole on every rank."""
        named = (
            self._model.named_parameters()
            if isinstance(self._model, nn.Module)
            else _of_stages(self._model)
        )
        found = [
            (name.removeprefix("module."), one.grad) for name, one in named if one.grad is not None
        ]
        return [(name, whole(grad)) for name, grad in found]

    def _unlike_reference(self, reference: nn.Module) -> Sequence[str]:
        gradients = dict(self._gradients())
        weights = {
            name.removeprefix("module."): whole(one.detach())
            for name, one in self._model.named_parameters()
        }
        reference.load_state_dict({**dict(reference.named_buffers()), **weights}, strict=False)
        reference.zero_grad()
        cast(Loss, self._loss)(reference, self._present).backward()  # type: ignore[no-untyped-call]
        found = []
        for name, one in reference.named_parameters():
            if one.grad is None:
                continue
            expected = one.grad.detach().clone()
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
            if name not in gradients:
                found.append(f"{name}: has no gradient")
            elif (apart := _distance(gradients[name], expected)) > _TOLERANCE.get(
                expected.dtype, _COARSE
            ):
                found.append(f"{name}: gradient is {apart:.2g} of its length from the reference's")
        return found


def _of_stages(schedule: Any) -> list[tuple[str, nn.Parameter]]:
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return [
        (f"{stage.stage_index}.{name}", one)
        for stage in stages
        for name, one in stage.submod.named_parameters()
    ]


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|; infinite where either is not finite."""
    length = float(torch.linalg.vector_norm(expected.float()))
    apart = float(torch.linalg.vector_norm(found.float() - expected.float()))
    return apart / max(length, 1e-30) if apart == apart else float("inf")
