"""The parity gate: what ranks computed together equals what one process computes alone, on the same tokens.

float32 is compared element by element. A narrower type is compared by distance: from gradients in float32, ours may be
no farther than those of one process in the same type, but for a margin.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.world.world import World
from workloads.model.optimizer import LEARNING_RATE, make_optimizer
from workloads.model.shapes import Shape
from workloads.model.timed_compute import TimedLinear
from workloads.model.transformer import build, plain_name
from workloads.step.layout import Layout, whole

RELATIVE_TOLERANCE = 1e-4
"""Of a tensor's largest reference value.

float32 sums in another order were seen to differ by up to 1e-5 of it at 256 sequences a rank; traffic in bfloat16
would differ by 5e-4 and more.
"""
FLOOR = 1e-2
"""Of the largest gradient of the whole model: a tensor whose gradients are below it is compared as if it had such."""
DISTANCE_MARGIN = 1.5
_DECIDED = 1e-3
_UPDATE_TOLERANCE = 0.05
# a right run was seen at 0.01 of what two steps move, one step missing at 0.5
_MOVEMENT_TOLERANCE = 0.3

Tensors = Mapping[str, Tensor]
Microbatches = Sequence[Tensor]


class Parity:
    """Compares a layout with a single process; every rank builds its own reference and takes part in every check."""

    def __init__(self, world: World, layout: Layout, shape: Shape, dtype: torch.dtype) -> None:
        self._world, self._layout, self._shape, self._dtype = world, layout, shape, dtype
        self._steps_compared = False
        # elements are compared, not distances as where numbers are narrow
        self._by_element = dtype == torch.float32 and layout.reduced_dtype in (None, torch.float32)
        # bit for bit; a device may add in another order each time
        self._exact = bool(layout.exact_order) and world.device.type == "cpu"

    def count_wrong(
        self, batch: Microbatches, gradients_of: Callable[[], Tensor | None], step: Callable[[], None]
    ) -> int:
        """Return how many elements are wrong: of weights, unlike their replicas'; of gradients, losses and two steps.

        The first time the layout has taken one step on ``batch``, and here takes the second. ``batch`` are all data
        ranks' microbatches, one after the other.
        """
        wrong = 0
        if not self._steps_compared:
            self._steps_compared = True
            step()
            wrong += self._count_wrong_updates(batch)
        mine = self._weights()
        replicas = self._layout.replica_group or (None if self._layout.holds_stage_only else self._world.group)
        wrong += 0 if replicas is None else count_unlike_rank_0(mine.values(), replicas)
        weights: Tensors = mine
        if self._layout.holds_stage_only:  # those of all stages; what no rank holds is missing
            told = self._world.gather({name: w.cpu() for name, w in mine.items()})
            weights = {name: tensor for of in told for name, tensor in of.items()}
        loss_of_all, gradients = self._reference(weights, batch, torch.float32)
        loss = gradients_of()
        self._layout.gather_gradients()
        found = {plain_name(name): whole(p).detach() for name, p in _gradients(self._layout.model).items()}
        expected = {name: gradients[name] for name in mine}
        wrong += sum(gradient.numel() for name, gradient in gradients.items() if name not in weights)
        # ranks that do not know a loss tell none, and those that share their tokens tell the same
        losses: list[float | None] = [None] * self._world.size
        dist.all_gather_object(losses, None if loss is None else float(loss), group=self._world.control)
        known = [value for value in losses if value is not None]
        if self._dtype == torch.float32:
            apart = abs(sum(known) / len(known) - loss_of_all)
            wrong += int(not apart <= RELATIVE_TOLERANCE * abs(loss_of_all))
        if self._by_element:
            return wrong + (count_unlike if self._exact else count_apart)(found, expected)
        alone = self._rounded(weights, batch)
        limit = DISTANCE_MARGIN * distance({name: alone[name] for name in mine}, expected)
        near = distance(found, expected) <= limit
        return wrong + (0 if near else sum(gradient.numel() for gradient in found.values()))

    def count_wrong_fills(self, accumulation: int) -> int:
        """Return how many weight gradients of timed compute are not the mean over data ranks of their fills."""
        wrong = 0
        self._layout.gather_gradients()
        for module in self._layout.model.modules():
            if isinstance(module, TimedLinear):
                gradient = None if module.weight.grad is None else whole(module.weight.grad)
                wrong += count_unfilled(gradient, accumulation * module.mean_fill, self._world.size)
        return wrong

    def _count_wrong_updates(self, batch: Microbatches) -> int:
        """Compare weights after two steps with a single process's, where the gradients leave no doubt of their sign."""
        start, alone = self._alone(self._dtype), self._alone(self._dtype)
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
                ours, theirs, first = (tensor.detach().float() for tensor in (found, expected[name], before[name]))
                apart.append((ours - theirs)[decided[name]])
                moved.append((first - theirs)[decided[name]])
        if self._by_element:
            return sum(int((~(values.abs() <= _UPDATE_TOLERANCE * LEARNING_RATE)).sum()) for values in apart)
        far, way = (sum(float(values.square().sum()) for values in of) ** 0.5 for of in (apart, moved))
        return 0 if far <= _MOVEMENT_TOLERANCE * way else sum(map(len, apart))

    def _reference(self, weights: Tensors, batch: Microbatches, dtype: torch.dtype) -> tuple[float, Tensors]:
        """Return one process's mean loss over the batch, and its gradients by name."""
        alone = self._alone(dtype)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        return self._backward(alone, batch), _gradients(alone)

    def _rounded(self, weights: Tensors, batch: Microbatches) -> Tensors:
        """Return one process's gradients in the type that is narrow: the model's, or that in which ranks sum theirs."""
        narrow, ranks = self._layout.reduced_dtype, self._layout.data_size
        if narrow is None:
            return self._reference(weights, batch, self._dtype)[1]
        each, total = len(batch) // ranks, dict[str, Tensor]()
        for rank in range(ranks):
            _, part = self._reference(weights, batch[rank * each : (rank + 1) * each], self._dtype)
            for name, gradient in part.items():
                mine = (gradient / ranks).to(narrow)
                total[name] = mine if name not in total else total[name] + mine
        return total

    def _alone(self, dtype: torch.dtype) -> nn.Module:
        if self._layout.reference_model is not None:
            return self._layout.reference_model(dtype)
        return build(self._shape, self._world.seed, self._world.device, dtype)

    def _backward(self, alone: nn.Module, batch: Microbatches) -> float:
        """Take the gradients of the mean loss, as the layout accumulates them if they are to be equal; return it."""
        order = self._layout.exact_order
        parts = [batch[i] for i in order] if order else [torch.cat(tuple(batch))]
        total = 0.0
        for part in parts:
            loss = self._layout.reference_loss(alone, part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _weights(self) -> dict[str, Tensor]:
        return {plain_name(name): whole(p).detach() for name, p in self._layout.model.named_parameters()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def count_apart(found: Tensors, expected: Tensors) -> int:
    """Return how many elements are farther from the reference than the tolerance; a missing tensor is all wrong."""
    floor = FLOOR * max((float(reference.abs().max()) for reference in expected.values()), default=0.0)
    wrong = 0
    for name, reference in expected.items():
        if name not in found:
            wrong += reference.numel()
            continue
        limit = RELATIVE_TOLERANCE * reference.abs().max().clamp(min=floor)
        apart = (found[name] - reference).abs()
        # a NaN is in no limit, infinity in an infinite one
        wrong += int((~((apart <= limit) & apart.isfinite())).sum())
    return wrong


def count_unlike(found: Tensors, expected: Tensors) -> int:
    """Return how many elements differ from the reference at all; a missing tensor is all wrong."""
    return sum(
        reference.numel() if name not in found else int((found[name] != reference).sum())
        for name, reference in expected.items()
    )


def count_unfilled(gradient: Tensor | None, expected: float, num_ranks: int) -> int:
    """Return how many elements of a timed gradient are not what ``num_ranks`` filled in; a missing one counts as 1.

    Ranks may divide before they sum, and sum in any order. A rank adds 2 / (3 num_ranks) of the whole at least: in
    bfloat16 a single one is seen on up to 26 ranks; on more, so many roundings may be as large.
    """
    if gradient is None:
        return 1
    # half a last bit each, of half the sum in the mean, would be twice that; a ring's were seen at a half of it
    roundings = num_ranks * torch.finfo(gradient.dtype).eps / 8
    tolerance = RELATIVE_TOLERANCE if gradient.dtype == torch.float32 else max(1 / (2 * num_ranks), roundings)
    # a NaN is in no limit
    return int((~((gradient.float() - expected).abs() <= tolerance * abs(expected))).sum())


def distance(found: Tensors, expected: Tensors) -> float:
    """Return the distance of all gradients together, relative to the length of the reference; infinite if one lacks."""
    if found.keys() != expected.keys():
        return float("inf")
    apart = sum(float((found[name].float() - reference).square().sum()) for name, reference in expected.items())
    size = sum(float(reference.square().sum()) for reference in expected.values())
    return float((apart / size) ** 0.5)


def count_unlike_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """Return how many elements on this rank differ in any bit from rank 0's."""
    wrong = 0
    for tensor in tensors:
        reference = tensor.detach().clone()
        dist.broadcast(reference, group=group, group_src=0)
        unlike = tensor.detach().flatten().view(torch.uint8) != reference.flatten().view(torch.uint8)
        wrong += int(unlike.view(-1, tensor.element_size()).any(dim=1).sum())
    return wrong
