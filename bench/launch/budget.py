"""What a repetition costs, known from those that were made, and how many of them a budget holds. Without torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Measure, Plan
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run

RESERVE = 1.1
"""The factor of an advised budget: the machine may be slower the next time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseCost:
    """The time of a case in one repetition."""

    id: str
    name: str
    seconds: float
    least_seconds: float | None
    """The time with the fewest iterations, None if the case was not measured."""

    @classmethod
    def of(cls, record: Record) -> "CaseCost":
        """Compute the cost of a recorded case. More iterations than the fewest are taken if there is time."""
        values = record.samples.values
        steps = record.details.get("steps_per_sample", 1)
        seconds_of_iterations = sum(values) * (steps if isinstance(steps, int) else 1)
        extra_share = max(1 - Measure().min_iterations / len(values), 0.0) if values else 0.0
        least = max(record.seconds - extra_share * seconds_of_iterations, 0.0)
        return cls(
            id=record.case.id,
            name=record.case.name,
            seconds=record.seconds,
            least_seconds=least if record.status == "ok" else None,
        )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Start-up and per-case cost in seconds, each the minimum over the repetitions so far."""

    startup_seconds: float | None = None
    """The cost of a repetition without its cases, None before the first."""
    case_seconds: Mapping[str, float] = field(default_factory=dict)
    """By the id of the case."""
    name_seconds: Mapping[str, float] = field(default_factory=dict)
    """The mean over the cases of a name."""

    def updated(self, seconds: float, costs: Sequence[CaseCost]) -> "CostModel":
        """Return the model after another repetition, which took so long."""
        startup = max(seconds - sum(cost.seconds for cost in costs), 0.0)
        if self.startup_seconds is not None:
            startup = min(startup, self.startup_seconds)
        case_seconds = dict(self.case_seconds)
        by_name: dict[str, list[float]] = {}
        for cost in costs:
            if cost.least_seconds is not None:
                least = min(cost.least_seconds, case_seconds.get(cost.id, math.inf))
                case_seconds[cost.id] = least
                by_name.setdefault(cost.name, []).append(least)
        means = {name: fmean(values) for name, values in by_name.items()}
        return CostModel(
            startup_seconds=startup, case_seconds=case_seconds, name_seconds={**self.name_seconds, **means}
        )

    def estimate_case(self, case: Case) -> float:
        """Estimate the cost of a case; one that was never measured costs as others of its name, or of all names."""
        seconds = self.case_seconds.get(case.id, self.name_seconds.get(case.name))
        return fmean(self.case_seconds.values() or [0.0]) if seconds is None else seconds

    def estimate_repetition(self, cases: Iterable[Case]) -> float:
        """Estimate the cost of a repetition. To measure for less than half of its start is not worth the start."""
        startup = self.startup_seconds or 0.0
        return startup + max(sum(map(self.estimate_case, cases)), startup / 2)

    def count_fitting(self, seconds: float, repetitions: Sequence[Sequence[Case]]) -> int:
        """Return how many of these repetitions, from the first on, there is time for."""
        for count, cases in enumerate(repetitions):
            seconds -= self.estimate_repetition(cases)
            if seconds < 0:
                return count
        return len(repetitions)


def compute_costs(run: Run) -> CostModel:
    """Return the cost model of a run's repetitions."""
    model = CostModel()
    for number in sorted({record.launch for record in run.records if record.status == "ok"}):
        seconds = sum(info.seconds for info in run.info.launches if info.launch == number)
        model = model.updated(seconds, [CaseCost.of(record) for record in run.records if record.launch == number])
    return model


def group_by_repetition(pending: Iterable[tuple[int, Case]]) -> dict[int, list[Case]]:
    """Return the cases of each repetition, the first repetition first."""
    number_of = itemgetter(0)
    groups = groupby(sorted(pending, key=number_of), number_of)
    return {number: [case for _, case in entries] for number, entries in groups}


def format_budget(seconds: float) -> str:
    """Format ``seconds`` plus a reserve as a value of ``--budget``: ``90s``, ``7m``."""
    needed = round(RESERVE * seconds, 3)
    return f"{10 * math.ceil(needed / 10)}s" if needed < 180 else f"{math.ceil(needed / 60)}m"


def suggest_budget(plan: Plan, costs: CostModel, num_fitting: int = 1) -> str:
    """Return the ``--budget`` that holds every repetition of a plan whose own budget holds ``num_fitting``.

    Repetitions use the time that they are given, so that the cost of the fewest iterations alone would not suffice.
    """
    fewest_iterations = plan.launches * costs.estimate_repetition(plan.cases)
    return format_budget(max(fewest_iterations, plan.budget_seconds * plan.launches / max(num_fitting, 1)))
