"""A user's training loop as a benchmark: a model, a batch, a loss and an optimizer, as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from parbench.bench.world.benchmark import Benchmark, Description
from parbench.workloads.step.verify import (
    RELATIVE_TOLERANCE,
    WrongTensor,
    collect_gradients,
    collect_weights,
    compare,
    find_not_finite,
    load_weights,
    norm_of_all,
)

_NO_REFERENCE_NOTE = "no reference was given: gradients are only checked to be finite"
_MAX_NAMED_GRADIENTS = 3
_HALF_PRECISION_TOLERANCE = 3e-2
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
            wrong = list(find_not_finite(self._model))
        else:
            wrong = self._compare_with_reference(self._reference)
        self._wrong_gradients = [str(gradient) for gradient in wrong]
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

    def _compare_with_reference(self, reference: nn.Module) -> list[WrongTensor]:
        """Return the gradients that differ from the reference's mean over ranks."""
        gradients = collect_gradients(self._model)
        weights = collect_weights(self._model)
        missing = [
            WrongTensor(name, weight.numel(), "is not a parameter of the model")
            for name, weight in collect_weights(reference).items()
            if name not in weights
        ]
        if missing:
            return missing
        load_weights(reference, weights)
        reference.zero_grad()
        loss = self._loss(reference, self._current_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        expected = collect_gradients(reference)
        for gradient in expected.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        is_half = self.dtype.itemsize < 4
        tolerance = _HALF_PRECISION_TOLERANCE if is_half else RELATIVE_TOLERANCE
        norm = norm_of_all(expected.values())
        return list(compare(gradients, expected, None, norm, tolerance))
