"""The numerical check: what ranks computed together equals what one process computes from the same tokens.

Each parameter's gradient is compared with a float32 gradient of a single process, by the L2 norm of the difference.
Gradients in float32 have a fixed relative tolerance. Gradients in a low precision may be as far away as a small
multiple of the distance of a single process in that precision. Both limits have an absolute part, relative to the norm
of the whole gradient: after many steps on random tokens the gradients of queries and keys are mostly rounding errors.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.simulated_compute import SimulatedLinear
from parbench.workloads.model.transformer import loss_of, materialise, outline, plain_name
from parbench.workloads.step.layout import Layout, local, whole

RELATIVE_TOLERANCE = 1e-4
"""Limit of a float32 gradient's distance, relative to its own norm.

Sums in another order differ by up to 1e-5 at 256 sequences per rank. A reduction in bfloat16 differs by 5e-4 or more.
"""
NOISE_FLOOR = 1e-8
"""The same limit relative to the norm of the whole gradient: rounding errors of a gradient that is almost zero.

Measured over 150 steps of two models on random tokens: a right gradient needs at most 6e-10, and the smallest gradient
of any parameter is 4e-8, so that a missing one is still beyond the limit.
"""
LOW_PRECISION_FACTOR = 3
"""Limit of a low-precision gradient's distance, relative to the distance of a single process in the same precision.

Two right gradients have independent errors of about the same size, but those of queries and keys scatter: over 150
steps of two models in bfloat16 their errors differed by up to a factor of 2.7, beyond the two limits below.
"""
LOW_PRECISION_EPSILONS = 2
"""The same limit relative to the gradient's own norm, in machine epsilons: an error of few elements is chance."""
LOW_PRECISION_NOISE_FLOOR = 5e-6
"""The same limit relative to the norm of the whole gradient. A right gradient was measured to need at most 2.2e-6."""
ALL_GRADIENTS_FACTOR = 1.5
"""Limit of the distance of all low-precision gradients together, relative to the distance of a single process.

Errors of single tensors average out, so this limit finds a wrong common factor, such as one rank of 64 that is left out
of the mean.
"""
_DECIDED = 1e-3
_UPDATE_TOLERANCE = 0.05
# A right run was measured at 0.01 of the movement of two steps, a run without one of the steps at 0.5.
_MOVEMENT_TOLERANCE = 0.3

Tensors = Mapping[str, Tensor]
Microbatches = Sequence[Tensor]


class Parity:
    """Compares a layout with a single process; every rank builds its own reference and takes part in every check."""

    def __init__(self, world: World, layout: Layout, shape: Shape, dtype: torch.dtype) -> None:
        self._world, self._layout, self._shape, self._dtype = world, layout, shape, dtype
        self._steps_compared = False
        self.differences: list[str] = []
        """The wrong tensors of the last check, a phrase each."""
        compared_dtype = layout.reduced_dtype or dtype
        self._low_precision = None if compared_dtype == torch.float32 else compared_dtype
        # Bitwise on the CPU only: a GPU may add in another order each time.
        self._exact = (
            bool(layout.exact_order) and self._low_precision is None and world.device.type == "cpu"
        )

    def count_wrong(
        self,
        batch: Microbatches,
        gradients_of: Callable[[], Tensor | None],
        step: Callable[[], None],
    ) -> int:
        """Count wrong elements of weights, compared with their replicas, and of gradients, the loss and two updates.

        ``batch`` has the microbatches of all data ranks, one after the other. Before the first check the layout has
        taken one step on it, and this check takes the second one.
        """
        self.differences = []
        wrong = 0
        if not self._steps_compared:
            self._steps_compared = True
            step()
            wrong += self._count(
                self._count_wrong_updates(batch), "weights after two steps are not one process's"
            )
        own_weights = self._weights()
        wrong += self._count_unlike(own_weights.values())
        weights = self._gather_stages(own_weights) if self._layout.holds_stage_only else own_weights
        reference_loss, reference = self._reference(weights, batch, torch.float32)
        for name, gradient in reference.items():
            if name not in weights:
                wrong += self._count(gradient.numel(), f"{name} is held by no rank")
        low_precision_loss, low_precision = reference_loss, None
        if self._low_precision is not None:
            low_precision_loss, low_precision = self._low_precision_reference(
                weights, batch, self._low_precision
            )
        loss = gradients_of()
        self._layout.gather_gradients()
        found = {
            plain_name(name): whole(p).detach()
            for name, p in _gradients(self._layout.model).items()
        }
        expected = {name: reference[name] for name in own_weights}
        if self._exact:
            compared = compare_bits(found, expected)
        else:
            compared = compare(found, expected, low_precision, norm_of_all(reference.values()))
        wrong += self._count_wrong_loss(loss, reference_loss, low_precision_loss)
        return wrong + sum(
            self._count(tensor.wrong, f"gradient of {tensor}") for tensor in compared
        )

    def check_without_reference(self, gradients_of: Callable[[], Tensor | None]) -> int:
        """Count elements of weights unlike their replicas', and of the loss and gradients that are not finite."""
        self.differences = []
        wrong = self._count_unlike(whole(p).detach() for p in self._layout.model.parameters())
        loss = gradients_of()
        if loss is not None:
            wrong += self._count(int(not loss.isfinite()), "loss is not finite")
        for name, gradient in _gradients(self._layout.model).items():
            not_finite = int((~local(gradient).isfinite()).sum())
            wrong += self._count(not_finite, f"gradient of {plain_name(name)} is not finite")
        return wrong

    def _gather_stages(self, own_weights: Tensors) -> Tensors:
        """Return the weights of all pipeline stages."""
        per_rank = self._world.gather({name: weight.cpu() for name, weight in own_weights.items()})
        return {name: weight for weights in per_rank for name, weight in weights.items()}

    def _count_wrong_loss(self, loss: Tensor | None, expected: float, low_precision: float) -> int:
        """Compare the mean of all ranks' losses with the reference; ranks without a loss take no part in the mean."""
        losses: list[float | None] = [None] * self._world.size
        dist.all_gather_object(
            losses, None if loss is None else float(loss), group=self._world.control
        )
        known = [value for value in losses if value is not None]
        limit = RELATIVE_TOLERANCE * abs(expected)
        if self._dtype != torch.float32:
            error = LOW_PRECISION_FACTOR * abs(low_precision - expected)
            limit = torch.finfo(self._dtype).eps * abs(expected) + error
        mean = sum(known) / len(known)
        text = f"loss is {mean:.6g}, the reference's {expected:.6g} (limit {limit:.2g} apart)"
        return self._count(int(not abs(mean - expected) <= limit), text)

    def _count_unlike(self, weights: Iterable[Tensor]) -> int:
        replicas = self._layout.replica_group or (
            None if self._layout.holds_stage_only else self._world.group
        )
        if replicas is None:
            return 0
        return self._count(
            count_unlike_rank_0(weights, replicas), "weights are not those of rank 0"
        )

    def _count(self, wrong: int, words: str) -> int:
        """Return a count, and keep what it is of if there is something wrong."""
        if wrong:
            self.differences.append(words)
        return wrong

    def count_wrong_fills(self, accumulation: int) -> int:
        """Return how many weight gradients of timed compute are not the mean over data ranks of their fills."""
        wrong = 0
        self._layout.gather_gradients()
        for module in self._layout.model.modules():
            if isinstance(module, SimulatedLinear):
                gradient = None if module.weight.grad is None else whole(module.weight.grad)
                wrong += count_unfilled(
                    gradient, accumulation * module.mean_gradient_value, self._world.size
                )
        return wrong

    def _count_wrong_updates(self, batch: Microbatches) -> int:
        """Compare weights after two steps with a single process's, where the gradients leave no doubt of their sign."""
        start, alone = (
            self._single_process_model(self._dtype),
            self._single_process_model(self._dtype),
        )
        optimizer = make_optimizer(alone.parameters(), self._dtype)
        decided: dict[str, Tensor] = {}
        for _ in range(2):
            optimizer.zero_grad()
            self._backward(alone, batch)
            optimizer.step()
            for name, gradient in _gradients(alone).items():
                large = gradient.abs() > _DECIDED * gradient.abs().max()
                decided[name] = large & decided.get(name, large)
        before, expected = (dict(model.named_parameters()) for model in (start, alone))
        apart, moved = [], []
        for name, found in self._weights().items():
            if name in decided:
                ours, theirs, first = (
                    tensor.detach().float() for tensor in (found, expected[name], before[name])
                )
                apart.append((ours - theirs)[decided[name]])
                moved.append((first - theirs)[decided[name]])
        if self._low_precision is None:
            return sum(
                int((~(values.abs() <= _UPDATE_TOLERANCE * LEARNING_RATE)).sum())
                for values in apart
            )
        far, way = (
            sum(float(values.square().sum()) for values in of) ** 0.5 for of in (apart, moved)
        )
        return 0 if far <= _MOVEMENT_TOLERANCE * way else sum(map(len, apart))

    def _reference(
        self, weights: Tensors, batch: Microbatches, dtype: torch.dtype
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss and the gradients of a single process in a type."""
        model = self._single_process_model(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        return self._backward(model, batch), _gradients(model)

    def _low_precision_reference(
        self, weights: Tensors, batch: Microbatches, dtype: torch.dtype
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss and the gradients in a low precision.

        Where only the reduction is in that type, so is only the sum of the data ranks' gradients here.
        """
        if self._layout.reduced_dtype is None:
            return self._reference(weights, batch, dtype)
        ranks = self._layout.data_size
        each = len(batch) // ranks
        total: dict[str, Tensor] = {}
        mean_loss = 0.0
        for rank in range(ranks):
            loss, gradients = self._reference(
                weights, batch[rank * each : (rank + 1) * each], self._dtype
            )
            mean_loss += loss / ranks
            for name, gradient in gradients.items():
                part = (gradient / ranks).to(dtype)
                total[name] = total[name] + part if name in total else part
        return mean_loss, total

    def _single_process_model(self, dtype: torch.dtype) -> nn.Module:
        make = self._layout.reference_model
        model = outline(self._shape, dtype) if make is None else make(dtype)
        materialise(model, self._world.seed, self._world.device)
        return model

    def _backward(self, alone: nn.Module, batch: Microbatches) -> float:
        """Take the gradients of the mean loss, as the layout accumulates them if they are to be equal; return it.

        In a narrow type they are of one microbatch after the other, for a sum over more tokens is rounded more.
        """
        order = self._layout.exact_order
        if (
            self._layout.reference_loss is loss_of
            and next(alone.parameters()).dtype == self._low_precision
        ):
            order = order or range(len(batch))
        parts = [batch[i] for i in order] if order else [torch.cat(tuple(batch))]
        total = 0.0
        for part in parts:
            loss = self._layout.reference_loss(alone, part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _weights(self) -> dict[str, Tensor]:
        return {
            plain_name(name): whole(p).detach() for name, p in self._layout.model.named_parameters()
        }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Compared:
    """A tensor compared with its reference."""

    name: str
    wrong: int
    """Number of wrong elements."""
    how: str
    """What is wrong, as a phrase after the name."""

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


def norm_of_all(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all tensors together."""
    return math.hypot(*(float(tensor.float().norm()) for tensor in tensors))


def compare(
    found: Tensors, expected: Tensors, low_precision: Tensors | None, norm: float
) -> Iterator[Compared]:
    """Compare each tensor with ``expected``, the float32 reference, by L2 norm.

    ``low_precision`` has the same tensors of a single process in the type that is checked, None for float32. ``norm``
    is that of the whole reference. A tensor that is absent is wrong unless its reference is zero. So is a tensor of
    zeros, if a single process computes another value in the same precision. If every low-precision tensor is right,
    all of them are compared together.
    """
    distances: list[float] = []
    errors: list[float] = []
    all_right = True
    for name, reference in expected.items():
        size = float(reference.norm())
        limit = RELATIVE_TOLERANCE * size + NOISE_FLOOR * norm
        if low_precision is not None:
            error = float((low_precision[name].float() - reference).norm())
            errors.append(error)
            epsilon = torch.finfo(low_precision[name].dtype).eps
            limit = LOW_PRECISION_FACTOR * error + LOW_PRECISION_EPSILONS * epsilon * size
            limit += LOW_PRECISION_NOISE_FLOOR * norm
        tensor = found.get(name)
        is_right = size == 0
        if tensor is not None:
            distance = float((tensor.float() - reference).norm())
            distances.append(distance)
            is_right = distance <= limit < math.inf  # false for NaN
            if low_precision is not None and low_precision[name].any() and not tensor.any():
                is_right = False
        all_right = all_right and is_right
        yield Compared(
            name,
            0 if is_right else reference.numel(),
            "" if is_right else _describe(tensor, reference),
        )
    if (
        low_precision is not None
        and all_right
        and math.hypot(*distances) > ALL_GRADIENTS_FACTOR * math.hypot(*errors)
    ):
        num_elements = sum(reference.numel() for reference in expected.values())
        ratio = math.hypot(*distances) / max(math.hypot(*errors), sys.float_info.min)
        description = (
            f"are {ratio:.2g} times as far from the reference as those of a single process"
        )
        yield Compared("all parameters together", num_elements, description)


def compare_bits(found: Tensors, expected: Tensors) -> Iterator[Compared]:
    """Compare each tensor element by element, without a tolerance. An absent tensor is zero."""
    for name, reference in expected.items():
        tensor = found.get(name)
        wrong = int(
            ((torch.zeros_like(reference) if tensor is None else tensor) != reference).sum()
        )
        yield Compared(name, wrong, _describe(tensor, reference) if wrong else "")


def _describe(tensor: Tensor | None, reference: Tensor) -> str:
    """Describe a wrong tensor: missing, a multiple of the reference if that explains it, or its relative distance."""
    if not reference.any():
        return "is not zero, as the reference is"
    if tensor is None:
        return "is missing"
    if not tensor.any():
        return "is zero"
    size = reference.norm()
    factor = float((tensor.float() * reference).sum() / size.square())
    rest = float((tensor.float() - factor * reference).norm() / size)
    if abs(factor - 1) > 2 * rest:
        return f"is {factor:.3g} of the reference"
    distance = float((tensor.float() - reference).norm() / size)
    return f"differs from the reference by {distance:.2g} of its norm"


def count_unfilled(gradient: Tensor | None, expected: float, num_ranks: int) -> int:
    """Return how many elements of a timed gradient are not what ``num_ranks`` filled in; a missing one counts as 1.

    Ranks may divide before they sum, and sum in any order. A rank adds 2 / (3 num_ranks) of the whole at least: in
    bfloat16 a single one is seen on up to 26 ranks; on more, so many roundings may be as large.
    """
    if gradient is None:
        return 1
    # half a last bit each, of half the sum in the mean, would be twice that; a ring's were seen at a half of it
    roundings = num_ranks * torch.finfo(gradient.dtype).eps / 8
    tolerance = (
        RELATIVE_TOLERANCE
        if gradient.dtype == torch.float32
        else max(1 / (2 * num_ranks), roundings)
    )
    # a NaN is in no limit
    return int((~((gradient.float() - expected).abs() <= tolerance * abs(expected))).sum())


def count_unlike_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """Return how many elements on this rank differ in any bit from rank 0's."""
    wrong = 0
    for tensor in tensors:
        reference = tensor.detach().clone()
        dist.broadcast(reference, group=group, group_src=0)
        unlike = tensor.detach().flatten().view(torch.uint8) != reference.flatten().view(
            torch.uint8
        )
        wrong += int(unlike.view(-1, tensor.element_size()).any(dim=1).sum())
    return wrong
