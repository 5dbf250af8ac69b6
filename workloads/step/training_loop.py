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
    compute_norm,
    find_not_finite,
    load_weights,
)

_NO_REFERENCE_NOTE = "no reference was given: gradients are only checked to be finite"
"""The note on results of a training loop without a reference model."""
_HALF_PRECISION_TOLERANCE = 3e-2
"""The relative limit of a gradient's L2 distance from its reference in 16-bit types."""
Loss = Callable[[Any, Any], Tensor]
"""A function of the model and a batch that returns the loss as a scalar tensor with a graph."""


class TrainingLoop(Benchmark):
    """The benchmark of one step of a user's training loop.

    It zeroes the gradients, runs forward and backward of one batch, and updates the weights. Users
    make it with ``parbench.step_of``.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        reference: nn.Module | None = None,
    ) -> None:
        """Set up the benchmark from the objects of the user's training loop.

        ``batch`` is one batch for all steps, or a function from the number of the step to its
        batch. ``loss(model, batch)`` returns the loss. ``reference`` is a single-process copy of
        the model for the check of gradients, None for a check that they are finite.
        """
        self._model = model
        self._batch = batch
        self._loss = loss
        self._optimizer = optimizer
        self._reference = reference
        self._step_number = -1
        self._wrong_gradients: list[str] = []
        parameter = next(model.parameters(), None)
        self.dtype: torch.dtype = torch.float32 if parameter is None else parameter.dtype
        self.reset()

    def step(self) -> None:
        """Zero the gradients, run forward and backward of the batch, and update the weights."""
        self._optimizer.zero_grad()
        self._run_forward_backward()
        with record_function("parbench:optimizer"):
            self._optimizer.step()

    def reset(self) -> None:
        """Set the batch on which the next step trains, before that step is timed.

        It is the user's only batch, or the result of the user's function for the next step number.
        """
        self._step_number += 1
        self._current_batch = self._batch
        if callable(self._batch):
            self._current_batch = self._batch(self._step_number)

    def check(self) -> int:
        """Compute gradients of the current batch, and return the number of wrong gradient tensors.

        The gradient of a parameter counts once, however many of its elements are wrong. It is wrong
        if its L2 distance from the mean over ranks of the reference's gradients exceeds the
        tolerance, or if it is missing although the reference's gradient is not zero. Without a
        reference, it is wrong if one of its elements on this rank is infinite or NaN.
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
        return self._wrong_gradients

    def describe(self) -> Description:
        """Return the name of the main metric, and a note on the check without a reference model.

        Gradients are then only checked to be finite.
        """
        notes = () if self._reference is not None else (_NO_REFERENCE_NOTE,)
        return Description(headline="step_time", notes=notes)

    def _run_forward_backward(self) -> None:
        """Run forward and backward of the user's model on the current batch.

        Both are named ranges, so that profiles show their time.
        """
        with record_function("parbench:forward"):
            loss = self._loss(self._model, self._current_batch)
        with record_function("parbench:backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    def _compare_with_reference(self, reference: nn.Module) -> list[WrongTensor]:
        """Return the gradients of the model that are too far from those of the reference.

        The reference gets the model's weights and the current batch. Its gradients are averaged
        over ranks by all_reduces, so that all ranks call it. If only the reference has the gradient
        of a parameter, the model's gradient counts as missing and wrong.
        """
        gradients = collect_gradients(self._model)
        load_weights(reference, collect_weights(self._model))
        reference.zero_grad()
        loss = self._loss(reference, self._current_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        expected = collect_gradients(reference)
        for gradient in expected.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        is_half = self.dtype.itemsize < 4
        tolerance = _HALF_PRECISION_TOLERANCE if is_half else RELATIVE_TOLERANCE
        norm = compute_norm(expected.values())
        return list(compare(gradients, expected, None, norm, tolerance))
