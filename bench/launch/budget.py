"""The time budget of a run, shared among its repetitions and their blocks. Without torch.

The default budget of a run is chosen in ``bench/plan/options.py``.

A case that is cheap to keep ready has several blocks, with those of all other cases between, in
random order. What slows a machine for a while then affects a part of every case, not all of one.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from statistics import fmean

from parbench.bench.launch.messages import Block
from parbench.bench.plan.cases import Case, group_by_variables
from parbench.bench.plan.plan import Measure, Plan
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run

RESERVE = 1.1
"""The factor of an advised time budget, because the machine may be slower the next time."""
BLOCKS = 10
"""The blocks of a case. The second-smallest and second-largest of ten block medians enclose the
true median with a probability of 97.9 %."""
_MAX_INTERLEAVED_BYTES = 512 << 20
"""The largest sum of the sizes of the cases that stay prepared between their blocks.

An operation holds several times its size.
"""
_DEFAULT_BYTES = 1 << 20
_INTERLEAVED_KINDS = ("collective", "p2p", "memory", "compute")
"""The kinds of cases that have several blocks.

The model of a training step is large and slow to prepare, and the size of a custom step is unknown.
"""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Start-up and per-case cost in seconds, each the minimum over the repetitions so far."""

    startup_seconds: float | None = None
    """The cost of a start of all ranks without its cases, None before the first."""
    case_seconds: Mapping[str, float] = field(default_factory=dict)
    """The cost of each measured case by the id of the case."""

    def with_repetition(self, seconds: float, records: Iterable[Record]) -> "CostModel":
        """Return the model after one more repetition, which took ``seconds`` for these records.

        It is the same model if the repetition has no measured case.
        """
        records = list(records)
        if not any(record.status == "ok" for record in records):
            return self
        startup_seconds = seconds
        case_seconds = dict(self.case_seconds)
        for record in records:
            startup_seconds -= record.seconds
            if record.status == "ok":
                least = compute_least_seconds(record)
                least = min(least, case_seconds.get(record.case.id, math.inf))
                case_seconds[record.case.id] = least
        if self.startup_seconds is not None:
            startup_seconds = min(startup_seconds, self.startup_seconds)
        return CostModel(
            startup_seconds=max(startup_seconds, 0.0),
            case_seconds=case_seconds,
        )

    def estimate_case(self, case: Case) -> float:
        """Return the expected seconds of a case, the mean of all cases if it was never measured."""
        if case.id in self.case_seconds:
            return self.case_seconds[case.id]
        return fmean(self.case_seconds.values() or [0.0])

    def estimate_repetition(self, cases: Iterable[Case]) -> float:
        """Return the expected seconds of a repetition of these cases, with its start.

        The cases count at least half of the start, because a shorter measurement is not worth it.
        """
        startup = self.startup_seconds or 0.0
        return startup + max(sum(map(self.estimate_case, cases)), startup / 2)

    def count_fitting(self, seconds: float, repetitions: Sequence[Sequence[Case]]) -> int:
        """Return the number of repetitions, from the first on, that fit into ``seconds``."""
        for count, cases in enumerate(repetitions):
            seconds -= self.estimate_repetition(cases)
            if seconds < 0:
                return count
        return len(repetitions)


def compute_least_seconds(record: Record) -> float:
    """Return the seconds that the case of a record would have taken with the fewest iterations."""
    values = record.samples.values
    if not values:
        return record.seconds
    steps = int(record.details.get("steps_per_sample", 1))
    extra_share = max(1 - Measure().min_iterations / len(values), 0.0)
    return max(record.seconds - extra_share * steps * sum(values), 0.0)


def compute_costs(run: Run) -> CostModel:
    """Return the cost model from the repetitions that a run already has."""
    model = CostModel()
    for number in sorted({record.repetition for record in run.records}):
        seconds = sum(info.seconds for info in run.info.repetitions if info.repetition == number)
        records = [record for record in run.records if record.repetition == number]
        model = model.with_repetition(seconds, records)
    if model.startup_seconds is None:
        return model
    num_starts = len(group_by_variables(run.info.plan.cases))
    return replace(model, startup_seconds=model.startup_seconds / num_starts)


class TimeBudget:
    """Divides the time of a run among its repetitions, whose cost is known after the first one.

    ``repetitions`` holds the cases of each repetition.
    """

    def __init__(
        self, seconds: float, costs: CostModel, repetitions: Sequence[Sequence[Case]]
    ) -> None:
        self.costs = costs
        self.num_completed = 0
        self.num_fitting = len(repetitions)
        """The number of repetitions to come for which there is time, with the present one."""
        self._repetitions = repetitions
        self._end = time.monotonic() + seconds
        # The last cases may take a little longer rather than be left out after all others.
        self._last_end = self._end + min(0.1 * seconds, 5.0)

    def compute_remaining_seconds(self) -> float:
        """Return the seconds during which cases may still begin."""
        return max(self._last_end - time.monotonic(), 0.0)

    def compute_deadline(self, began: float) -> float:
        """Return the end of the current repetition, which began at ``began``.

        Both are in seconds of time.monotonic(). The repetitions that fit into the remaining time
        share it evenly.
        """
        costs = self.costs
        if costs.startup_seconds is None:
            costs = CostModel(startup_seconds=time.monotonic() - began)
        seconds = self._end - began
        num_fitting = costs.count_fitting(seconds, self._repetitions[self.num_completed :])
        return began + seconds / max(num_fitting, 1)

    def complete_repetition(self, seconds: float, records: Iterable[Record]) -> None:
        """Complete the current repetition and count the later ones for which there is time.

        The repetition took ``seconds`` for these records.
        """
        self.costs = self.costs.with_repetition(seconds, records)
        self.num_completed += 1
        seconds = self.compute_remaining_seconds()
        to_come = self._repetitions[self.num_completed :]
        self.num_fitting = self.costs.count_fitting(seconds, to_come) if seconds else 0

    def compute_progress(self, share: float) -> float:
        """Return the completed share of the run, from ``share`` of the current repetition."""
        return (self.num_completed + share) / (self.num_completed + self.num_fitting)


def format_budget(seconds: float) -> str:
    """Format ``seconds`` plus a reserve as a value of ``--budget``: ``90s``, ``7m``."""
    needed = round(RESERVE * seconds, 3)
    return f"{10 * math.ceil(needed / 10)}s" if needed < 180 else f"{math.ceil(needed / 60)}m"


def suggest_budget(plan: Plan, costs: CostModel, num_fitting: int = 1) -> str:
    """Return a value of ``--budget`` for which every repetition of the plan has time.

    The plan's own budget sufficed for ``num_fitting`` repetitions. Repetitions use all of their
    time, so the cost of the fewest iterations alone would not suffice.
    """
    starts = group_by_variables(plan.cases)
    least_seconds = plan.repetitions * sum(map(costs.estimate_repetition, starts))
    scaled_seconds = plan.budget_seconds * plan.repetitions / max(num_fitting, 1)
    return format_budget(max(least_seconds, scaled_seconds))


def make_blocks(
    cases: Sequence[Case],
    weights: Sequence[float],
    costs: Sequence[float],
    seed: str,
    num_extra: int = 0,
    *,
    shuffles_single: bool = False,
) -> list[Block]:
    """Return the blocks of a repetition in an order that depends only on ``seed``.

    A case has 1 or ``BLOCKS`` blocks. Cases with one come in the order of ``cases``, or in random
    order, so that a budget that is too small does not leave out the same cases in each repetition.

    Args:
        cases: the cases to measure.
        weights: the weight of each case, which its blocks share evenly.
        costs: the seconds that each case costs at least, which its blocks share evenly.
        seed: the seed of the order.
        num_extra: the number of passes over the cases with several blocks that follow, whose blocks
            have neither weight nor cost.
        shuffles_single: True for the random order of cases with one block.

    """
    random = Random(seed)
    interleaved = _choose_interleaved_cases(cases)
    passes = [random.sample(interleaved, len(interleaved)) for _ in range(BLOCKS)]
    blocks = []
    for index in chain.from_iterable(passes):
        weight = weights[index] / BLOCKS
        blocks.append(Block(case=index, weight=weight, cost_seconds=costs[index] / BLOCKS))
    single = [index for index in range(len(cases)) if index not in interleaved]
    if shuffles_single:
        random.shuffle(single)
    positions = sorted(random.randint(0, len(blocks)) for _ in single)
    # From the end, so that earlier positions stay as they are.
    for position, index in zip(reversed(positions), reversed(single), strict=True):
        block = Block(case=index, weight=weights[index], cost_seconds=costs[index])
        blocks.insert(position, block)
    for _ in range(num_extra):
        blocks += [Block(case=index) for index in random.sample(interleaved, len(interleaved))]
    return blocks


def _choose_interleaved_cases(cases: Sequence[Case]) -> list[int]:
    """Return the indices of the cases that have several blocks, the smallest case first.

    They stay prepared between their blocks, so their memory is limited.
    """
    sizes = []
    for case in cases:
        size = case.all_params.get("size_bytes")
        sizes.append(size if isinstance(size, int) else _DEFAULT_BYTES)
    interleaved = []
    free_bytes = _MAX_INTERLEAVED_BYTES
    for index in sorted(range(len(cases)), key=sizes.__getitem__):
        free_bytes -= sizes[index]
        if free_bytes >= 0 and cases[index].kind in _INTERLEAVED_KINDS:
            interleaved.append(index)
    return interleaved
