"""Several runs beside each other: in what they differ, and the rows that answer the same question. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.results.metrics import MetricValue
from bench.results.runs import Run
from bench.results.stats import Estimate, ratio_within_launch
from reports.facts import PAIRS, environment_facts, flatten
from reports.nodes.rank_hosts import Nodes, nodes_of
from reports.nodes.sweep_folder import Point
from reports.summary import Row, Summary

DID_NOT_RUN = 4
_OF_PLAN = ("preset", "nproc", "backend", "device", "launches")
# what differs between any two runs and says nothing of either, and what does but may explain their times
_OF_EVERY_RUN, _CIRCUMSTANCES = ("boot_id", "job", "SLURM_JOB_ID"), ("one_minute", "nodelist", "SLURM_JOB_NODELIST")


@dataclass(frozen=True, kw_only=True)
class One:
    """A run with its summary, the number by which tables call it, and the point of a sweep that it measured."""

    number: int
    run: Run
    summary: Summary
    point: Point | None = None

    @cached_property
    def nodes(self) -> Nodes | None:
        """Where its ranks ran, None where all are on one host or the run does not tell."""
        return nodes_of(self.run)

    @property
    def num_nodes(self) -> int:
        """How many nodes its ranks were on, or were to be on where they never started."""
        spread = self.run.info.plan.spread
        return max([row.world.nodes for row in self.summary.rows] + [spread.nodes if spread else 1])

    @property
    def name(self) -> str:
        """What columns call it."""
        return f"run {self.number}"

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows with a valid measurement."""
        return tuple(row for row in self.summary.rows if row.metrics)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same in all runs, with each run's text."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A case in the runs that measured it, by the runs' numbers."""

    rows: Mapping[int, Row]

    @property
    def first(self) -> Row:
        """The row of the first run that has it."""
        return self.rows[min(self.rows)]

    def ratio(self, number: int) -> MetricValue | None:
        """Return a run's time over the first's with its interval, None if either is unknown."""
        one, other = (_estimate(self.rows.get(of)) for of in (number, min(self.rows)))
        if one is None or other is None:
            return None
        found = ratio_within_launch(one, other)
        return MetricValue(value=found.value, unit="", better="lower", low=found.low, high=found.high)


@dataclass(frozen=True, kw_only=True)
class Several:
    """Runs in the order in which they were given, and in what they differ.

    ``lacking`` are sentences on what should be here and is not, such as a point of a sweep without a run.
    """

    runs: tuple[One, ...]
    differences: tuple[Difference, ...]
    lacking: tuple[str, ...] = ()

    @property
    def counting(self) -> tuple[One, ...]:
        """The runs without those of a point that ran again later: its last run decides."""
        last = {one.point.id: one.number for one in self.runs if one.point}
        return tuple(one for one in self.runs if not one.point or last[one.point.id] == one.number)

    @property
    def fine(self) -> bool:
        """Whether every run that counts is, and nothing is lacking."""
        return all(one.summary.verdict.fine for one in self.counting) and not self.lacking

    @property
    def code(self) -> int:
        """The exit code: 1 if a result is wrong, else 4 if something did not run, else 0."""
        codes = {one.summary.verdict.code for one in self.counting}
        return 1 if 1 in codes else DID_NOT_RUN if codes != {0} or self.lacking else 0

    @property
    def verdict_words(self) -> str:
        """Which runs are fine, and which are not."""
        bad = [one.number for one in self.counting if not one.summary.verdict.fine]
        lacking = f"; {len(self.lacking)} more that should be here {_are(self.lacking)} not" if self.lacking else ""
        if bad:
            return f"not fine: {', '.join(f'run {number}' for number in bad)} of {len(self.runs)}{lacking}"
        counted = f"all {len(self.runs)} runs" if len(self.runs) != 1 else "the one run"
        return f"{'not complete, else ' * bool(lacking)}fine: {counted}{lacking}"

    @property
    def words(self) -> str:
        """In what the runs differ, as a sentence."""
        asked = [one for one in self.differences if not _is_circumstance(one.name)]
        if not asked:
            return "They differ in nothing but circumstances: what their times differ by is those, or chance."
        if len(asked) == 1:
            return f"They differ in one thing, {asked[0].name}: {', '.join(asked[0].texts)}."
        return f"They differ in {len(asked)} things, so no one of them explains what their times differ by."


def several(
    runs: Sequence[tuple[Run, Summary]], points: Sequence[Point | None] = (), lacking: Sequence[str] = ()
) -> Several:
    """Return the runs, numbered from 1, with their differences; ``points`` are those that they measured, if any."""
    known = (*points, *([None] * (len(runs) - len(points))))
    ones = tuple(
        One(number=i, run=run, summary=summary, point=point)
        for i, ((run, summary), point) in enumerate(zip(runs, known, strict=True), start=1)
    )
    facts = [dict(_facts(one.run)) for one in ones]
    names = dict.fromkeys(name for one in facts for name in one)
    told = [(name, tuple(one.get(name, "-") for one in facts)) for name in names]
    told += [(f"{case} {name}", texts) for (case, name), texts in _varying(ones).items()]
    different = (Difference(name=name, texts=texts) for name, texts in told if len(set(texts)) > 1)
    return Several(runs=ones, differences=tuple(different), lacking=tuple(lacking))


def beside(several: Several) -> tuple[Beside, ...]:
    """Return each case that two runs or more measured, matched without the parameters in which the runs differ."""
    varying = _varying(several.runs)
    found: dict[object, dict[int, Row]] = {}
    for one in several.runs:
        for row in one.shown:
            found.setdefault(_identity(row, varying), {})[one.number] = row
    return tuple(Beside(rows=rows) for rows in found.values() if len(rows) > 1)


def _facts(run: Run) -> list[tuple[str, str]]:
    info = run.info
    plan: dict[str, Any] = {name: getattr(info.plan, name) for name in _OF_PLAN}
    environment = ((f"environment.{name}", text) for name, text in environment_facts(info.environment or {}))
    facts = [*flatten({"plan": plan, "host": info.host, "parbench": info.parbench}), *environment]
    return [fact for fact in facts if fact[0].rpartition(".")[2] not in _OF_EVERY_RUN]


def _are(told: Sequence[str]) -> str:
    return "is" if len(told) == 1 else "are"


def _is_circumstance(name: str) -> bool:
    """Say whether a difference was not asked for, or follows from the number of ranks."""
    last = name.rpartition(".")[2]
    return last in _CIRCUMSTANCES or last.startswith(PAIRS)


def _varying(runs: Sequence[One]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return by case name and parameter each run's value, where every run has one value throughout and they differ."""
    values: dict[tuple[str, str], list[set[str]]] = {}
    for one in runs:
        for row in one.summary.rows:
            for name, value in row.case.params.items():
                sets = values.setdefault((row.case.name, name), [set() for _ in runs])
                sets[one.number - 1].add(str(value))
    found = {key: sets for key, sets in values.items() if all(len(one) == 1 for one in sets)}
    told = {key: tuple(next(iter(one)) for one in sets) for key, sets in found.items()}
    return {key: texts for key, texts in told.items() if len(set(texts)) > 1}


def _identity(row: Row, varying: Mapping[tuple[str, str], object]) -> object:
    kept = {name: value for name, value in row.case.params.items() if (row.case.name, name) not in varying}
    return row.case.name, tuple(sorted(kept.items(), key=lambda one: one[0]))


def _estimate(row: Row | None) -> Estimate | None:
    metric = row.metrics.get(row.headline) if row is not None else None
    if metric is None or not metric.value:
        return None
    return Estimate(value=metric.value, low=metric.low, high=metric.high, method=metric.method)
