"""What a launch costs, known from those that were made, and how many of them a budget holds. Without torch."""

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

RESERVE = 1.1  # of a budget that is advised: the next time the machine may be slower


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds that a case took, and what it would have with the fewest iterations; None where it was not measured."""

    id: str
    name: str
    seconds: float
    least: float | None

    @classmethod
    def on(cls, record: Record) -> "Spent":
        # more iterations are taken where there is time
        values, steps = record.samples.values, record.details.get("steps_per_sample", 1)
        more = max(1 - Measure().min_iterations / len(values), 0.0) if values else 0.0
        least = max(record.seconds - more * sum(values) * (steps if isinstance(steps, int) else 1), 0.0)
        measured = least if record.status == "ok" else None
        return cls(id=record.case.id, name=record.case.name, seconds=record.seconds, least=measured)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds: a launch's without its cases, None before the first, and each case's; of several launches the least."""

    start: float | None = None
    cases: Mapping[str, float] = field(default_factory=dict)  # by id
    names: Mapping[str, float] = field(default_factory=dict)  # the mean of a name's cases

    def after(self, seconds: float, spent: Sequence[Spent]) -> "Prices":
        """Return the prices once a launch that took so long has spent this on its cases."""
        rest = max(seconds - sum(one.seconds for one in spent), 0.0)
        cases, named = dict(self.cases), dict[str, list[float]]()
        for one in spent:
            if one.least is not None:
                cost = cases[one.id] = min(one.least, cases.get(one.id, math.inf))
                named.setdefault(one.name, []).append(cost)
        names = {**self.names, **{name: fmean(costs) for name, costs in named.items()}}
        return Prices(start=rest if self.start is None else min(rest, self.start), cases=cases, names=names)

    def case(self, case: Case) -> float:
        """Return what a case costs; one never measured as those of its name, or as the mean of all."""
        known = self.cases.get(case.id, self.names.get(case.name))
        return fmean(self.cases.values() or [0.0]) if known is None else known

    def launch(self, cases: Iterable[Case]) -> float:
        """Return what a launch costs; below a third of measuring none is worth its start."""
        start = self.start or 0.0
        return start + max(sum(map(self.case, cases)), start / 2)

    def held(self, seconds: float, launches: Sequence[Sequence[Case]]) -> int:
        """Return how many of these launches, from the first on, there is time for."""
        for count, cases in enumerate(launches):
            seconds -= self.launch(cases)
            if seconds < 0:
                return count
        return len(launches)


def prices_of(run: Run) -> Prices:
    """Return what a run's launches have cost."""
    prices = Prices()
    for launch in sorted({record.launch for record in run.records if record.status == "ok"}):
        seconds = sum(one.seconds for one in run.info.launches if one.launch == launch)
        prices = prices.after(seconds, [Spent.on(record) for record in run.records if record.launch == launch])
    return prices


def by_launch(pending: Iterable[tuple[int, Case]]) -> dict[int, list[Case]]:
    """Return the cases of each launch, the first launch first."""
    launch_of = itemgetter(0)
    return {launch: [case for _, case in of] for launch, of in groupby(sorted(pending, key=launch_of), launch_of)}


def budget_for(seconds: float) -> str:
    """Return as ``--budget`` takes it what holds so many seconds, with a reserve: ``90s``, ``7m``."""
    needed = round(RESERVE * seconds, 3)
    return f"{10 * math.ceil(needed / 10)}s" if needed < 180 else f"{math.ceil(needed / 60)}m"


def budget_of_all(plan: Plan, prices: Prices) -> str:
    """Return the ``--budget`` that holds every launch of every case of a plan."""
    return budget_for(plan.launches * prices.launch(plan.cases))
