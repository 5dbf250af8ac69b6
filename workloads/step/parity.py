"""The parity gate: what ranks computed together equals what one process computes alone, on the same tokens.

Each parameter's gradient is judged by itself, against its own scale. float32 is compared element by element. A narrower
type is compared by distance: from gradients in float32, ours may be no farther than those of one process in the same
type, but for a margin; so may all of them together. A gradient that is rounding alone, as float64 or the narrow type
tells, has nothing to be compared with but its rounding.

How far one process's rounding moves a gradient is chance where long sums cancel, as those of queries and keys do the
longer a model is trained on random tokens. What is beyond its limit is judged by several roundings, of weights that are
moved by a last bit each time.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer
from parbench.workloads.model.shapes import Shape
from parbench.workloads.model.timed_compute import TimedLinear
from parbench.workloads.model.transformer import generator, loss_of, materialise, outline, plain_name
from parbench.workloads.step.layout import Layout, whole

RELATIVE_TOLERANCE = 1e-4
"""Of a tensor's largest reference value.

float32 sums in another order were seen to differ by up to 1e-5 of it at 256 sequences a rank; traffic in bfloat16
would differ by 5e-4 and more.
"""
DISTANCE_MARGIN = 1.5
FLOOR = 2
"""Machine epsilons that a tensor may be farther than the margin says, for the distance of few elements is chance."""
ROUNDING_MARGIN = 4
"""Times its rounding that a tensor may be apart that is little else."""
DRAWS = 8
FARTHEST_MARGIN = 2
"""``DISTANCE_MARGIN`` of the farthest of several roundings.

Of 398 states of a trained model a right gradient in float32 was seen beyond ``ROUNDING_MARGIN`` of one rounding in 35,
of the largest of 8 in none; of 250 in bfloat16 beyond its limit by one rounding in 23, by 8 and this margin in none.
"""
_DECIDED = 1e-3
_UPDATE_TOLERANCE = 0.05
# a right run was seen at 0.01 of what two steps move, one step missing at 0.5
_MOVEMENT_TOLERANCE = 0.3

Tensors = Mapping[str, Tensor]
Roundings = Mapping[str, Sequence[Tensor]]  # by parameter how far each draw of one process's is from the truth
Alone = Callable[[torch.dtype, int], Tensors]  # one process's gradients in a type, of weights as the draw moves them
Microbatches = Sequence[Tensor]


class Parity:
    """Compares a layout with a single process; every rank builds its own reference and takes part in every check."""

    def __init__(self, world: World, layout: Layout, shape: Shape, dtype: torch.dtype) -> None:
        self._world, self._layout, self._shape, self._dtype = world, layout, shape, dtype
        self._steps_compared = False
        self.differences: list[str] = []  # what the last count was of
        self.compared: list[Compared] = []
        self.notes: tuple[str, ...] = ()
        # the type of which distances are compared; None where elements are
        narrow = layout.reduced_dtype or dtype
        self._narrow = None if narrow == torch.float32 else narrow
        # bit for bit; a device may add in another order each time
        self._exact = bool(layout.exact_order) and self._narrow is None and world.device.type == "cpu"

    def count_wrong(
        self, batch: Microbatches, gradients_of: Callable[[], Tensor | None], step: Callable[[], None]
    ) -> int:
        """Return how many elements are wrong: of weights, unlike their replicas'; of gradients, losses and two steps.

        The first time the layout has taken one step on ``batch``, and here takes the second. ``batch`` are all data
        ranks' microbatches, one after the other.
        """
        self.differences = []
        wrong = 0
        if not self._steps_compared:
            self._steps_compared = True
            step()
            wrong += self._count(self._count_wrong_updates(batch), "weights after two steps are not one process's")
        mine = self._weights()
        wrong += self._count_unlike(mine.values())
        weights: Tensors = mine
        if self._layout.holds_stage_only:  # those of all stages; what no rank holds is missing
            told = self._world.gather({name: w.cpu() for name, w in mine.items()})
            weights = {name: tensor for of in told for name, tensor in of.items()}
        loss_of_all, gradients = self._reference(weights, batch, torch.float32)
        alone = lru_cache(maxsize=1)(partial(self._rounded, weights, batch))
        loss = gradients_of()
        self._layout.gather_gradients()
        found = {plain_name(name): whole(p).detach() for name, p in _gradients(self._layout.model).items()}
        expected = {name: gradients[name] for name in mine}
        for name, gradient in gradients.items():
            if name not in weights:
                wrong += self._count(gradient.numel(), f"{name} is held by no rank")
        loss_compared = self._compare_loss(loss, loss_of_all, lambda: alone(self._narrow or torch.float32, 0)[0])
        if self._exact:
            compared = list(compare_elements(found, expected, tolerance=0.0))
        else:
            compared = compare(found, expected, lambda *of: {name: alone(*of)[1][name] for name in mine}, self._narrow)
        return wrong + self._judged(loss_compared, compared)

    def _compare_loss(self, loss: Tensor | None, expected: float, alone: Callable[[], float]) -> "Compared":
        """Compare the mean of all ranks' losses; ``alone`` is one process's in the model's own type."""
        # ranks that do not know a loss tell none, and those that share their tokens tell the same
        losses: list[float | None] = [None] * self._world.size
        dist.all_gather_object(losses, None if loss is None else float(loss), group=self._world.control)
        known = [value for value in losses if value is not None]
        limit = RELATIVE_TOLERANCE * abs(expected)
        if self._dtype != torch.float32:
            limit = torch.finfo(self._dtype).eps * abs(expected) + DISTANCE_MARGIN * abs(alone() - expected)
        mean = sum(known) / len(known)
        apart = abs(mean - expected)
        how = f"is {mean:.6g}, the reference's {expected:.6g} (limit {limit:.2g} apart)"
        return Compared("loss", apart / limit if limit else 0.0, int(not apart <= limit), how)

    def _judged(self, loss: "Compared", gradients: Iterable["Compared"]) -> int:
        """Keep what was compared, and return how many elements of it are wrong."""
        self.compared = [*gradients, loss]
        wrong = self._count(loss.wrong, str(loss))
        return wrong + sum(self._count(one.wrong, f"gradient of {one}") for one in self.compared[:-1])

    def _count_unlike(self, weights: Iterable[Tensor]) -> int:
        replicas = self._layout.replica_group or (None if self._layout.holds_stage_only else self._world.group)
        if replicas is None:
            return 0
        return self._count(count_unlike_rank_0(weights, replicas), "weights are not those of rank 0")

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
        if self._narrow is None:
            return sum(int((~(values.abs() <= _UPDATE_TOLERANCE * LEARNING_RATE)).sum()) for values in apart)
        far, way = (sum(float(values.square().sum()) for values in of) ** 0.5 for of in (apart, moved))
        return 0 if far <= _MOVEMENT_TOLERANCE * way else sum(map(len, apart))

    def _reference(
        self, weights: Tensors, batch: Microbatches, dtype: torch.dtype, draw: int = 0
    ) -> tuple[float, Tensors]:
        alone = self._alone(dtype, weights)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
                    parameter.copy_(moved(parameter, name, draw))
        return self._backward(alone, batch), _gradients(alone)

    def _rounded(self, weights: Tensors, batch: Microbatches, dtype: torch.dtype, draw: int) -> tuple[float, Tensors]:
        """Return one process's mean loss and gradients in a type; summed in it if ranks sum theirs in it alone."""
        narrow, ranks = self._layout.reduced_dtype, self._layout.data_size
        if dtype != narrow:
            return self._reference(weights, batch, dtype, draw)
        each, total, losses = len(batch) // ranks, dict[str, Tensor](), 0.0
        for rank in range(ranks):
            part_of = batch[rank * each : (rank + 1) * each]
            loss, part = self._reference(weights, part_of, self._dtype, draw)
            losses += loss / ranks
            for name, gradient in part.items():
                mine = (gradient / ranks).to(narrow)
                total[name] = mine if name not in total else total[name] + mine
        return losses, total

    def _alone(self, dtype: torch.dtype, given: Container[str] = ()) -> nn.Module:
        alone = self._outline(dtype)
        materialise(alone, self._world.seed, self._world.device, given=given)
        return alone

    def _outline(self, dtype: torch.dtype) -> nn.Module:
        make = self._layout.reference_model
        return outline(self._shape, dtype) if make is None else make(dtype)

    def _backward(self, alone: nn.Module, batch: Microbatches) -> float:
        """Take the gradients of the mean loss, as the layout accumulates them if they are to be equal; return it.

        In a narrow type they are of one microbatch after the other, for a sum over more tokens is rounded more.
        """
        order = self._layout.exact_order
        if self._layout.reference_loss is loss_of and next(alone.parameters()).dtype == self._narrow:
            order = order or range(len(batch))
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


@dataclass(frozen=True)
class Compared:
    """A tensor beside its reference: how many times its limit it is apart (0 where it has none), and what is wrong.

    ``wrong`` counts elements.
    """

    name: str
    times_limit: float
    wrong: int
    how: str

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


def compare(
    found: Tensors,
    expected: Tensors,
    alone: Alone,
    narrow: torch.dtype | None,
    anyone: Callable[[bool], bool] = bool,
) -> list[Compared]:
    """Compare each tensor with one process's in float32, ``expected``: by elements, or by distances of a narrow type.

    What is beyond its limit is compared again by the farthest of up to ``DRAWS`` roundings, by elements then with
    float64. ``alone`` gives what ``expected`` names; ``anyone`` whether something is true on any rank, where ranks take
    part in ``alone`` together.
    """
    truth = expected
    if narrow is None:
        compared = list(compare_elements(found, expected))
        if not anyone(any(one.wrong for one in compared)):
            return compared
        truth = alone(torch.float64, 0)
    roundings: dict[str, list[Tensor]] = {name: [] for name in expected}
    for draw in range(DRAWS):
        drawn = alone(narrow or torch.float32, draw)
        for name, so_far in roundings.items():
            apart = drawn[name] - truth[name]
            so_far.append(apart.abs().amax() if narrow is None else apart.norm())
        if narrow is None:
            compared = list(compare_elements(found, truth, roundings))
        else:
            compared = list(compare_distances(found, truth, roundings, narrow))
        if not anyone(any(one.wrong for one in compared)):
            break
    return compared


def moved(weight: Tensor, name: str, draw: int) -> Tensor:
    """Return a tensor whose numbers are moved up or down by about a last bit, by lot; as it is in draw 0."""
    if not draw:
        return weight
    up = torch.rand(weight.shape, generator=generator(draw, name, weight.device), device=weight.device) < 0.5
    half = torch.finfo(weight.dtype).eps / 2
    return (weight + weight * torch.where(up, half, -half)).to(weight.dtype)


def compare_elements(
    found: Tensors, expected: Tensors, roundings: Roundings | None = None, tolerance: float = RELATIVE_TOLERANCE
) -> Iterator[Compared]:
    """Compare each tensor by its elements, to the bit where nothing is tolerated; a missing one is zero."""
    for name, reference in expected.items():
        apart, largest = (_or_zero(found, name, reference) - reference).abs(), reference.abs().amax()
        limit = largest * tolerance
        if roundings is not None:
            limit = torch.maximum(limit, ROUNDING_MARGIN * torch.stack(list(roundings[name])).amax())
        # a NaN is in no limit, infinity in an infinite one
        wrong = int((~((apart <= limit) & apart.isfinite())).sum())
        yield _compared(name, found, reference, wrong, *(float(value) for value in (apart.amax(), limit, largest)))


def compare_distances(
    found: Tensors, expected: Tensors, roundings: Roundings, narrow: torch.dtype
) -> Iterator[Compared]:
    """Compare each tensor by its distance, and all together by the first draw if no single one is wrong."""
    all_apart = all_rounding = 0.0
    all_right = True
    for name, reference in expected.items():
        apart = float((_or_zero(found, name, reference).float() - reference).norm())
        rounding = float(torch.stack(list(roundings[name])).amax())
        size = float(reference.norm())
        margin = DISTANCE_MARGIN if len(roundings[name]) == 1 else FARTHEST_MARGIN
        limit = margin * rounding + FLOOR * torch.finfo(narrow).eps * size
        if rounding > size / 2:
            limit = ROUNDING_MARGIN * rounding
        wrong = 0 if apart <= limit < math.inf else reference.numel()
        all_right &= not wrong
        yield _compared(name, found, reference, wrong, apart, limit, size)
        all_apart, all_rounding = math.hypot(all_apart, apart), math.hypot(all_rounding, float(roundings[name][0]))
    limit = DISTANCE_MARGIN * all_rounding
    wrong = sum(reference.numel() for reference in expected.values()) if all_right and all_apart > limit else 0
    how = f"together is {all_apart:.2g} from the reference (limit {limit:.2g})"
    yield Compared("all parameters", all_apart / limit if limit else 0.0, wrong, how)


def _or_zero(found: Tensors, name: str, reference: Tensor) -> Tensor:
    return found.get(name, torch.zeros_like(reference))


def _compared(
    name: str, found: Tensors, reference: Tensor, wrong: int, apart: float, limit: float, size: float
) -> Compared:
    """Say how far a tensor is apart, or that it is missing or a multiple of the reference if that explains it."""
    how, tensor = "", found.get(name)
    if wrong and not size:
        how = "is not zero, as the reference is"
    elif wrong and (tensor is None or not tensor.any()):
        how = "is missing" if tensor is None else "is zero"
    elif wrong:
        assert tensor is not None
        factor = float((tensor.float() * reference).sum() / reference.square().sum())
        rest = float((tensor.float() - factor * reference).norm() / reference.norm())
        how = f"is {apart / size:.2g} of the reference's size from it (limit {limit / size:.2g})"
        if abs(factor - 1) > 2 * rest:
            how = f"is {factor:.3g} of the reference"
    return Compared(name, apart / limit if limit else 0.0, wrong, how)


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


def count_unlike_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """Return how many elements on this rank differ in any bit from rank 0's."""
    wrong = 0
    for tensor in tensors:
        reference = tensor.detach().clone()
        dist.broadcast(reference, group=group, group_src=0)
        unlike = tensor.detach().flatten().view(torch.uint8) != reference.flatten().view(torch.uint8)
        wrong += int(unlike.view(-1, tensor.element_size()).any(dim=1).sum())
    return wrong
