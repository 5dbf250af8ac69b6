"""The time budget of a run, divided among its repetitions and their blocks. Without torch.

A case is a benchmark with values for its parameters. A repetition starts all ranks, which then
measure the cases. If cases need different environment variables, each group of cases with equal
variables has its own start of ranks, which counts as a repetition here.

A case that is cheap to keep ready is measured in several blocks, with blocks of other cases between
them, in random order. A disturbance of the machine then affects a part of every case instead of all
samples of one case.

The default budget of a run is chosen in ``bench/plan/options.py``.
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
"""The factor between the needed time and a suggested time budget, because speed varies."""
BLOCKS = 10
"""The number of blocks into which the samples of a small operation are split.

Other cases are measured between them. The second-smallest and the second-largest median of ten
blocks enclose the true median with a probability of 97.9 %.
"""
_MAX_INTERLEAVED_BYTES = 512 << 20
"""The largest sum of message sizes in bytes of all cases that are measured in several blocks.

They stay in memory between their blocks, and an operation allocates several times its message size.
"""
_DEFAULT_BYTES = 1 << 20
"""The size in bytes that is assumed for a case without the parameter ``size_bytes``."""
_INTERLEAVED_KINDS = ("collective", "p2p", "memory", "compute")
"""The kinds of cases that are measured in several blocks. A kind is the first part of a name.

A training step is not among them, because its model is large and slow to prepare. A custom step is
not, because its size is unknown.
"""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The expected time to start all ranks and to measure each case, in seconds.

    Each time is the minimum over the repetitions that the run has so far.
    """

    startup_seconds: float | None = None
    """The seconds to start all ranks, without measuring any case.

    None before the end of the first repetition that measured a case.
    """
    case_seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds to measure a case with the least number of samples, by the id of the case.

    Cases that were never measured are missing.
    """

    def with_repetition(self, seconds: float, records: Iterable[Record]) -> "CostModel":
        """Return the model with the times of one more repetition, as the minimum of old and new.

        ``seconds`` is the duration of the repetition, and ``records`` are the results of its cases.
        If no case was measured successfully, the model is returned unchanged.
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
        """Return the expected seconds of a case in one repetition.

        For a case that was never measured it is the mean over all measured cases, 0 without any.
        """
        if case.id in self.case_seconds:
            return self.case_seconds[case.id]
        return fmean(self.case_seconds.values() or [0.0])

    def estimate_repetition(self, cases: Iterable[Case]) -> float:
        """Return the expected seconds to start all ranks and measure these cases.

        The time for the cases is taken as at least half of that for the start, because a shorter
        measurement is not worth a start.
        """
        startup = self.startup_seconds or 0.0
        return startup + max(sum(map(self.estimate_case, cases)), startup / 2)

    def count_fitting(self, seconds: float, repetitions: Sequence[Sequence[Case]]) -> int:
        """Return the number of repetitions, from the first one on, that fit into ``seconds``.

        ``repetitions`` holds the cases of each repetition, in the order in which they are made.
        """
        for count, cases in enumerate(repetitions):
            seconds -= self.estimate_repetition(cases)
            if seconds < 0:
                return count
        return len(repetitions)


def compute_least_seconds(record: Record) -> float:
    """Return the seconds that a measured case would have taken with the least number of samples.

    That is the time of the case less the time of its samples beyond ``min_iterations``.
    """
    values = record.samples.values
    if not values:
        return record.seconds
    steps = int(record.details.get("steps_per_sample", 1))
    extra_share = max(1 - Measure().min_iterations / len(values), 0.0)
    return max(record.seconds - extra_share * steps * sum(values), 0.0)


def compute_costs(run: Run) -> CostModel:
    """Return the expected time to start all ranks and to measure each case of a run.

    It follows from the repetitions that the run has so far.
    """
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
    """Divides the time of a run among its repetitions.

    A repetition is here one start of all ranks with the cases that it measures. All repetitions get
    equal parts of the remaining time. Their number is reduced if their expected times, which are
    known after the first repetition, do not fit.
    """

    def __init__(
        self, seconds: float, costs: CostModel, repetitions: Sequence[Sequence[Case]]
    ) -> None:
        """Begin the time of the run now.

        Args:
            seconds: the time budget of the run.
            costs: the expected times to start all ranks and to measure each case.
            repetitions: the cases of each repetition, in the order in which they are made.
        """
        self.costs = costs
        """The expected times of starts and cases, updated after each repetition."""
        self.num_completed = 0
        """The number of repetitions that are over."""
        self.num_fitting = len(repetitions)
        """The number of repetitions, including the current one, for which there is still time."""
        self._repetitions = repetitions
        self._end = time.monotonic() + seconds
        # The last cases may take a little longer rather than be left out after all others.
        self._last_end = self._end + min(0.1 * seconds, 5.0)

    def compute_remaining_seconds(self) -> float:
        """Return the seconds from now on in which cases may still begin, at least 0.

        The limit is later than the end of the budget, by a tenth of it or 5 s, whichever is less.
        So the last cases may take a little longer instead of being left out.
        """
        return max(self._last_end - time.monotonic(), 0.0)

    def compute_deadline(self, began: float) -> float:
        """Return the time at which the current repetition should end.

        ``began`` is the time at which it began. Both times are in seconds of ``time.monotonic()``.
        All repetitions that fit into the remaining time get an equal part of it.
        """
        costs = self.costs
        if costs.startup_seconds is None:
            costs = CostModel(startup_seconds=time.monotonic() - began)
        seconds = self._end - began
        num_fitting = costs.count_fitting(seconds, self._repetitions[self.num_completed :])
        return began + seconds / max(num_fitting, 1)

    def complete_repetition(self, seconds: float, records: Iterable[Record]) -> None:
        """Update the expected times after a repetition, and count the repetitions that still fit.

        ``seconds`` is the time that the repetition took, and ``records`` are the results of its
        cases.
        """
        self.costs = self.costs.with_repetition(seconds, records)
        self.num_completed += 1
        seconds = self.compute_remaining_seconds()
        to_come = self._repetitions[self.num_completed :]
        self.num_fitting = self.costs.count_fitting(seconds, to_come) if seconds else 0

    def compute_progress(self, share: float) -> float:
        """Return the fraction of the run that is completed, from 0 to 1.

        ``share`` is the completed fraction of the current repetition.
        """
        return (self.num_completed + share) / (self.num_completed + self.num_fitting)


def format_budget(seconds: float) -> str:
    """Return a value of ``--budget``, such as ``90s`` or ``7m``, for a run that takes ``seconds``.

    A reserve of 10 % is added. The sum is rounded up to 10 s, or to 1 min if it is at least 3 min.
    """
    needed = round(RESERVE * seconds, 3)
    return f"{10 * math.ceil(needed / 10)}s" if needed < 180 else f"{math.ceil(needed / 60)}m"


def suggest_budget(plan: Plan, costs: CostModel, num_fitting: int = 1) -> str:
    """Return a value of ``--budget``, such as ``7m``, with which all repetitions have time.

    It is the larger of two times, plus 10 %: the expected time of all repetitions, and the run's
    budget times the number of all repetitions over ``num_fitting``.

    Args:
        plan: the plan of a run whose budget did not suffice.
        costs: the expected times to start all ranks and to measure each case.
        num_fitting: the number of repetitions for which the budget sufficed.
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
    """Return the blocks of one start of all ranks in an order that depends only on ``seed``.

    A block is a run of samples of one case, without samples of other cases between them. An
    operation with a small message has ten blocks, which are spread over the repetition in random
    order. Any other case has a single block, at a random position among the blocks of operations.

    Args:
        cases: the cases to measure.
        weights: the weight of each case, in the order of ``cases``. The time that remains after all
            costs is shared in proportion to the weights. The blocks of a case divide its weight
            evenly.
        costs: the seconds that each case takes with the least number of samples. The blocks of a
            case divide them evenly.
        seed: the seed of the random order.
        num_extra: the number of extra blocks for each case with ten blocks. They come last, have
            weight and cost 0, and use only the time that is left over.
        shuffles_single: True if the cases with a single block are in random order, so that a short
            budget leaves out different cases in each repetition. Otherwise they are in the order of
            ``cases``.
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
    """Return the indices of the cases that are measured in several blocks, by ascending size.

    They are the operations with the smallest messages, up to a sum of message sizes of 512 MiB. The
    limit exists because these cases stay in memory between their blocks.
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
