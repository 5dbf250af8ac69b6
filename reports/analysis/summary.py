"""What a run found: its records merged across repetitions into one row a case, and whether all is well. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import SkippedCase
from parbench.bench.results.metrics import MetricValue, collect_by_name, merge_metrics
from parbench.bench.results.records import Check, Record, Status, WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import (
    MIN_INTERVAL_ITERATIONS,
    MIN_INTERVAL_REPETITIONS,
    Estimate,
    Grade,
    grade_noise,
)
from parbench.reports.analysis.statistics import compute_log_deviation

WORST_FIRST: tuple[Status, ...] = ("wrong", "hang", "failed", "skipped", "ok")
_CODES: Mapping[Status, ExitCode] = {
    "wrong": ExitCode.BAD,
    "hang": ExitCode.DID_NOT_RUN,
    "failed": ExitCode.DID_NOT_RUN,
    "skipped": ExitCode.OK,
    "ok": ExitCode.OK,
}
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case over all repetitions; ``metrics`` is empty where a result was wrong, for that has no time.

    ``repetitions`` of those ``planned`` measured it; ``stops`` and ``steady`` are counted by repetition.
    """

    case: Case
    world: WorldInfo
    status: Status
    repetitions: int
    planned: int
    iterations: int
    reasons: tuple[str, ...]
    stops: tuple[tuple[str, int], ...]
    check: Check
    metrics: Mapping[str, MetricValue]
    steady: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    records: tuple[Record, ...]

    @property
    def kind(self) -> str:
        return self.case.name.partition(".")[0]

    @property
    def is_communication(self) -> bool:
        return self.kind in ("collective", "p2p", "memory")

    @property
    def headline(self) -> str:
        usual, other = ("time", "step_time") if self.is_communication else ("step_time", "time")
        return other if other in self.metrics and usual not in self.metrics else usual

    @property
    def size_bytes(self) -> int | None:
        size = self.case.params.get("size_bytes")
        return size if isinstance(size, int) else None

    def value(self, name: str) -> float | None:
        metric = self.metrics.get(name)
        return metric.value if metric else None

    def by_repetition(self, name: str) -> dict[int, float]:
        """Return what the repetitions that measured it know of a metric, in their order, where it is above zero."""
        found = {record.repetition: record.metrics.get(name) for record in self.measured}
        known = {
            repetition: metric.value
            for repetition, metric in found.items()
            if metric and metric.value is not None
        }
        return {
            repetition: known[repetition] for repetition in sorted(known) if known[repetition] > 0
        }

    @property
    def seconds(self) -> float | None:
        """How long the case took, None where that is unknown or zero."""
        return self.value(self.headline) or None

    @property
    def measured(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.status == "ok")

    @property
    def effective(self) -> float | None:
        """How many independent iterations would tell the medians as well; None where a repetition does not know."""
        known = [record.noise.effective if record.noise else None for record in self.measured]
        return sum(one for one in known if one is not None) if known and None not in known else None

    @property
    def scatter(self) -> float | None:
        """How far repetitions scatter; None for fewer than three whose times are above zero."""
        times = [*self.by_repetition(self.headline).values()]
        return compute_log_deviation(times) if len(times) >= MIN_INTERVAL_REPETITIONS else None

    @property
    def grade(self) -> Grade | None:
        """The word for the scatter between repetitions, for that within of one alone, if long enough; two tell
        neither."""
        if self.scatter is not None:
            return grade_noise(self.scatter)
        alone = (
            self.measured
            if self.repetitions == 1 and self.iterations >= MIN_INTERVAL_ITERATIONS
            else ()
        )
        return next((one.noise.grade for one in alone if one.noise), None)


@dataclass(frozen=True, kw_only=True)
class Alike(Generic[K]):
    """Rows that are alike but for one thing, by that, such as the number of a run."""

    rows: Mapping[K, Row]

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A planned case without a record in ``repetitions`` of the ``planned`` repetitions."""

    case: Case
    repetitions: int
    planned: int


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Rows by status, skipped cases, ``planned`` cases times repetitions and those ``missing``; ``code`` is the
    exit's."""

    counts: Mapping[Status, int]
    skipped: int
    missing: int
    planned: int
    code: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run, ready to be shown."""

    rows: tuple[Row, ...]
    skipped: tuple[SkippedCase, ...]
    missing: tuple[Missing, ...]
    tally: Tally


def summarize(run: Run) -> Summary:
    """Return the rows in the plan's order (cases that are not of the plan last), and what has no row."""
    plan = run.info.plan
    by_case: dict[str, list[Record]] = {case.id: [] for case in plan.cases}
    left_out = {skipped.case.id for skipped in plan.skipped}
    for record in run.records:
        if record.case.id not in left_out:  # the plan says already why
            by_case.setdefault(record.case.id, []).append(record)
    rows = tuple(_row(records, plan.repetitions) for records in by_case.values() if records)
    lacking = [
        (case, plan.repetitions - len({record.repetition for record in by_case[case.id]}))
        for case in plan.cases
    ]
    missing = tuple(
        Missing(case=case, repetitions=n, planned=plan.repetitions) for case, n in lacking if n > 0
    )
    counts, without_record = (
        Counter(row.status for row in rows),
        sum(one.repetitions for one in missing),
    )
    cut, least = (
        {record.case.id for record in run.records if record.is_out_of_budget},
        min(2, plan.repetitions),
    )
    answered = any(row.repetitions for row in rows) and all(
        row.repetitions >= least for row in rows if row.case.id in cut
    )
    tally = Tally(
        counts={status: counts[status] for status in reversed(WORST_FIRST) if counts[status]},
        skipped=len(plan.skipped),
        missing=without_record,
        planned=len(plan.cases) * plan.repetitions,
        code=exit_code(counts, missing=without_record, answered=answered),
    )
    return Summary(rows=rows, skipped=plan.skipped, missing=missing, tally=tally)


def exit_code(statuses: Iterable[Status], *, missing: int = 0, answered: bool = True) -> int:
    """Return the exit code of a run with cases of these statuses.

    A run is not ``answered`` if nothing was measured, or if the budget left a case without a second repetition of
    several.
    What cannot run here is not bad.
    """
    codes = [_CODES[status] for status in statuses]
    if missing or not answered:
        codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def _row(found: Sequence[Record], planned: int) -> Row:
    if any(
        record.status == "ok" for record in found
    ):  # what a later repetition had no time for was measured before
        found = [record for record in found if not record.is_out_of_budget]
    records = tuple({record.repetition: record for record in found}.values())
    worst_first = sorted(records, key=lambda record: WORST_FIRST.index(record.status))
    status, measured = (
        worst_first[0].status,
        [record for record in records if record.status == "ok"],
    )
    first, noises = (measured or records)[0], [record.noise for record in measured if record.noise]
    passed = [record.check.passed for record in records if record.check.passed is not None]
    wrong = [record.check.wrong for record in records if record.check.wrong is not None]
    # why the later repetitions skipped a bad case is no news
    telling = [
        one
        for one in worst_first
        if one.reason and (one.status != "skipped" or status == "skipped")
    ]
    notes = [note for record in records for note in record.notes]
    if len(found) > len(records):
        notes.append(
            "some repetitions were measured more than once: the last record of each counts"
        )
    if any(record.world != records[0].world for record in records):
        notes.append("repetitions ran on different worlds")
    return Row(
        case=first.case,
        world=first.world,
        status=status,
        repetitions=len(measured),
        planned=max(planned, len(records)),
        iterations=sum(len(record.samples.values) for record in measured),
        reasons=tuple(dict.fromkeys(record.reason for record in telling)),
        stops=tuple(Counter(record.stop for record in measured if record.stop).most_common()),
        check=Check(passed=all(passed) if passed else None, wrong=sum(wrong) if wrong else None),
        metrics={} if status == "wrong" else merge_metrics([record.metrics for record in measured]),
        steady=tuple(Counter(noise.steady for noise in noises).most_common()),
        notes=tuple(dict.fromkeys(notes)),
        records=records,
    )


def num_ranks(row: Row) -> int:
    """Return the ranks of the row's group; a group that is the whole world does not say its size."""
    size = common_details(row).get("group_size") if "group" in row.case.params else None
    return size if isinstance(size, int) else row.world.size


def estimate_of(metric: MetricValue | None) -> Estimate | None:
    """Return what has a logarithm: None if the value is unknown or not above zero, no interval if that is not."""
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    ends = [end for end in (metric.low, metric.high) if end and end > 0]
    low, high = ends if len(ends) == 2 else (None, None)
    return Estimate(value=metric.value, low=low, high=high, method=metric.method)


def readable(rows: Iterable[Row], read: Callable[[Row], T | str | None]) -> tuple[T, ...]:
    return tuple(
        found for row in rows if (found := read(row)) is not None and not isinstance(found, str)
    )


def unreadable(rows: Iterable[Row], read: Callable[[Row], object]) -> tuple[str, ...]:
    return tuple(found for row in rows if isinstance(found := read(row), str))


def common_details(row: Row) -> dict[str, Any]:
    """Return the details of the row's records: a value where repetitions agree, the list of theirs where they do
    not."""
    told = collect_by_name([record.details for record in row.records])
    return {name: of[0] if all(value == of[0] for value in of) else of for name, of in told.items()}
