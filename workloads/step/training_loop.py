"""A user's training loop as a benchmark: a model, a batch, a loss and an optimizer, as they are."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from parbench.bench.world.benchmark import Benchmark, Description
from parbench.workloads.model.transformer import plain_name
from parbench.workloads.step.verify import (
    collect_gradients,
    collect_weights,
    load_weights,
    norm_of_all,
)

_NO_REFERENCE_NOTE = "no reference was given: gradients are only checked to be finite"
_MAX_NAMED_GRADIENTS = 3
_MAX_ERRORS = {torch.float32: 1e-4, torch.float64: 1e-9}
_MAX_ERROR_OF_HALF_PRECISION = 3e-2
Loss = Callable[[Any, Any], Tensor]


class TrainingLoop(Benchmark):
    """One step of a user's training loop: zero the gradients, run one batch, update the weights.

    See ``parbench.step_of``.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        reference: nn.Module | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._loss = loss
        self._optimizer = optimizer
        self._reference = reference
        self._step_number = 0
        self._wrong_gradients: list[str] = []
        self._parameters = []
        for group in optimizer.param_groups:
            self._parameters += group["params"]
        self.dtype: torch.dtype = self._parameters[0].dtype if self._parameters else torch.float32
        self._draw_batch()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._run_forward_backward()
        with record_function("parbench:optimizer"):
            self._optimizer.step()

    def reset(self) -> None:
        self._step_number += 1
        self._draw_batch()

    def check(self) -> int:
        """Return the number of wrong gradients.

        A gradient is wrong if it differs from the reference's mean over ranks. Without a
        reference it is wrong if it is not finite.
        """
        self._optimizer.zero_grad()
        self._run_forward_backward()
        if self._reference is None:
            self._wrong_gradients = []
            for name, gradient in collect_gradients(self._model).items():
                if not torch.isfinite(gradient).all():
                    self._wrong_gradients.append(f"{name}: a gradient is not finite")
        else:
            self._wrong_gradients = self._compare_with_reference(self._reference)
        self._optimizer.zero_grad()
        return len(self._wrong_gradients)

    def differences(self) -> Sequence[str]:
        """Return a phrase for each wrong gradient of the last check."""
        return self._wrong_gradients[:_MAX_NAMED_GRADIENTS]

    def describe(self) -> Description:
        num_parameters = sum(parameter.numel() for parameter in self._parameters)
        return Description(
            headline="step_time",
            details={"optimizer": type(self._optimizer).__name__, "parameters": num_parameters},
            notes=() if self._reference is not None else (_NO_REFERENCE_NOTE,),
        )

    def _draw_batch(self) -> None:
        has_batches = callable(self._batch)
        self._current_batch = self._batch(self._step_number) if has_batches else self._batch

    def _run_forward_backward(self) -> None:
        with record_function("parbench:forward"):
            loss = self._loss(self._model, self._current_batch)
        with record_function("parbench:backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    def _compare_with_reference(self, reference: nn.Module) -> list[str]:
        """Return a phrase for each gradient that differs from the reference's mean over ranks."""
        gradients = collect_gradients(self._model)
        weights = collect_weights(self._model)
        reference_parameters = {
            plain_name(name): parameter for name, parameter in reference.named_parameters()
        }
        missing = reference_parameters.keys() - weights.keys()
        if missing:
            return [f"{name}: the model has no such parameter" for name in sorted(missing)]
        load_weights(reference, weights)
        reference.zero_grad()
        loss = self._loss(reference, self._current_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        wrong = []
        for name, parameter in reference_parameters.items():
            if parameter.grad is None:
                continue
            expected = parameter.grad.detach().clone()
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
            if name not in gradients:
                wrong.append(f"{name}: has no gradient")
                continue
            norm = max(norm_of_all([expected]), sys.float_info.min)
            error = norm_of_all([gradients[name].float() - expected.float()]) / norm
            tolerance = _MAX_ERRORS.get(expected.dtype, _MAX_ERROR_OF_HALF_PRECISION)
            if not error <= tolerance:  # NaN is wrong too
                wrong.append(f"{name}: gradient differs by {error:.2g} of the reference's norm")
        return wrong
