"""The records of a run merged over repetitions: one result for each case, and the exit code."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.plan.cases import Case
from parbench.bench.results.metrics import MetricValue, collect_by_name, merge_metrics
from parbench.bench.results.records import Check, Record, Status, WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import (
    MIN_INTERVAL_ITERATIONS,
    MIN_INTERVAL_REPETITIONS,
    Grade,
    grade_noise,
)
from parbench.reports.stats import compute_log_deviation

WORST_FIRST: tuple[Status, ...] = ("wrong", "hang", "failed", "skipped", "ok")
"""The statuses of a case from the worst to the best, the order by which "worst" is meant here."""
EXIT_CODES: Mapping[Status, ExitCode] = {
    "wrong": ExitCode.BAD,
    "hang": ExitCode.DID_NOT_RUN,
    "failed": ExitCode.DID_NOT_RUN,
    "skipped": ExitCode.OK,
    "ok": ExitCode.OK,
}
"""The exit code of a run in which a case has this status."""
COMMUNICATION_KINDS = ("collective", "p2p", "memory")
"""The first parts of the names of communication benchmarks, as in ``collective.all_reduce``."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The merged result of one benchmark case over all repetitions of a run."""

    case: Case
    """The benchmark and the values of its parameters."""
    world: WorldInfo
    """The numbers of ranks and nodes, the backend and the device of the case.

    They are those of the first repetition that measured the case, otherwise of the first record.
    """
    status: Status
    """The worst status of a repetition, in the order wrong, hang, failed, skipped, ok."""
    reasons: tuple[str, ...]
    """Sentences about why the status is not ok, from the repetitions that have this status.

    Without duplicates. Empty if the status is ok.
    """
    repetitions: int
    """The number of repetitions that measured the case: their status is ok."""
    planned: int
    """The number of repetitions in the plan, at least the number of repetitions with a record."""
    iterations: int
    """The number of timed iterations, summed over the measured repetitions."""
    stops: tuple[tuple[str, int], ...]
    """(stopping criterion, number of repetitions that it ended), the most common criterion first.

    A criterion is a word such as ``precision`` or ``budget``.
    """
    check: Check
    """The numerical check of the case's output against a reference, over all repetitions.

    It passes if it passed in each repetition that has a check.
    """
    metrics: Mapping[str, MetricValue]
    """The mean of each metric over repetitions, keyed by the metric's name, such as ``busbw``.

    Empty if no repetition measured the case, or if an output was wrong.
    """
    notes: tuple[str, ...]
    """Remarks of the benchmark about its measurement, from all repetitions, without duplicates."""
    records: tuple[Record, ...]
    """The last record of each repetition that has one."""

    @property
    def kind(self) -> str:
        """The first part of the case's name: ``collective``, ``p2p``, ``memory`` or ``workload``.

        Custom benchmarks may have other words.
        """
        return self.case.name.partition(".")[0]

    @property
    def is_communication(self) -> bool:
        """True for collective, p2p and memory benchmarks, False for steps and custom benchmarks."""
        return self.kind in COMMUNICATION_KINDS

    @property
    def headline(self) -> str:
        """The name of the metric that is an iteration's duration: ``time`` or ``step_time``."""
        names = ("time", "step_time") if self.is_communication else ("step_time", "time")
        return next((name for name in names if name in self.metrics), names[0])

    @property
    def seconds(self) -> float | None:
        """The duration of one iteration in seconds: of one operation, or of one training step.

        It is the geometric mean over repetitions of the medians over iterations. None if it is
        unknown or zero.
        """
        return self.value(self.headline) or None

    @property
    def size_bytes(self) -> int:
        """The message size in bytes as nccl-tests counts it, 0 if the case has no size."""
        size = self.case.params.get("size_bytes")
        return size if isinstance(size, int) else 0

    @cached_property
    def details(self) -> dict[str, Any]:
        """The facts that the benchmark recorded next to metrics, such as mesh axes, keyed by name.

        A fact that differs between repetitions is the list of its values in the repetitions.
        """
        by_name = collect_by_name([record.details for record in self.records])
        return {name: _merge_equal(values) for name, values in by_name.items()}

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the case's process group, by default all ranks of the run."""
        size = self.details.get("group_size") if "group" in self.case.params else None
        return size if isinstance(size, int) else self.world.size

    @cached_property
    def measured(self) -> tuple[Record, ...]:
        """The records of the repetitions that measured the case: their status is ok."""
        return tuple(record for record in self.records if record.status == "ok")

    @cached_property
    def variation(self) -> float | None:
        """The relative standard deviation of an iteration's duration over repetitions, a fraction.

        It is the standard deviation of the logarithms of the repetitions' median durations. None if
        fewer than three repetitions measured the case.
        """
        seconds = list(self.by_repetition(self.headline).values())
        if len(seconds) < MIN_INTERVAL_REPETITIONS:
            return None
        return compute_log_deviation(seconds)

    @property
    def noise(self) -> Grade | None:
        """The grade of the variation: ``stable``, ``fair``, ``noisy`` or ``very noisy``.

        With at least three repetitions, it grades the variation between repetitions. With a single
        repetition of at least 20 iterations, it grades the variation between iterations. Otherwise
        it is None.
        """
        if self.variation is not None:
            return grade_noise(self.variation)
        if self.repetitions != 1 or self.iterations < MIN_INTERVAL_ITERATIONS:
            return None
        noise = self.measured[0].noise
        return noise.grade if noise else None

    @property
    def check_text(self) -> str:
        """The outcome of the check against the reference as text.

        ``ok``, ``unchecked``, ``wrong``, or ``3 wrong`` with the number of wrong elements.
        """
        if self.check.passed is None:
            return "unchecked"
        if self.check.passed:
            return "ok"
        return "wrong" if self.check.wrong is None else f"{self.check.wrong} wrong"

    def make_key(self, *without: str) -> object:
        """Return a key that is equal for two results that differ at most in the parameters ``without``.

        The key is (``world``, number of ranks in the process group, set of (parameter, value)
        pairs). The pairs include the name of the benchmark, unless ``without`` contains ``case``.
        """
        values = {"case": (self.case.name, self.case.target), **self.case.params}
        settings = {name: value for name, value in values.items() if name not in without}
        return self.world, self.num_ranks, frozenset(settings.items())

    def value(self, name: str) -> float | None:
        """Return the mean over repetitions of the metric ``name``, None if it is unknown."""
        metric = self.metrics.get(name)
        return metric.value if metric else None

    def by_repetition(self, name: str) -> dict[int, float]:
        """Return the metric ``name`` in each measured repetition, keyed by the index from 0.

        Repetitions in which the value is unknown, zero or negative are left out.
        """
        values = {}
        for record in sorted(self.measured, key=lambda record: record.repetition):
            metric = record.metrics.get(name)
            if metric and metric.value is not None and metric.value > 0:
                values[record.repetition] = metric.value
        return values


def _merge_equal(values: list[Any]) -> Any:
    """Return the common value of a list if all its elements are equal, otherwise the list.

    ``values`` has the values of one fact about a case in its repetitions. It is not empty.
    """
    return values[0] if all(value == values[0] for value in values) else values


def group_results(results: Iterable[CaseResult], *without: str) -> list[list[CaseResult]]:
    """Return lists of results that differ at most in the parameters named in ``without``.

    The lists are in the order of their first results. All results of a list have the same ranks
    and, if ``without`` does not contain ``case``, the same benchmark name.
    """
    groups: dict[object, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.make_key(*without), []).append(result)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class MissingCase:
    """A planned case that has no record in some of its repetitions."""

    case: Case
    """The benchmark and the values of its parameters."""
    repetitions: int
    """The number of planned repetitions in which the case has no record."""


def merge_records(run: Run) -> tuple[CaseResult, ...]:
    """Return the result of each case that has a record, in the order of the plan.

    Cases that are not in the plan come last. Cases that the plan skips have no result.
    """
    plan = run.info.plan
    by_case: dict[str, list[Record]] = {case.id: [] for case in plan.cases}
    skipped_ids = {skipped.case.id for skipped in plan.skipped}
    for record in run.records:
        if record.case.id not in skipped_ids:
            by_case.setdefault(record.case.id, []).append(record)
    return tuple(
        merge_repetitions(records, plan.repetitions) for records in by_case.values() if records
    )


def merge_repetitions(records: Sequence[Record], planned: int) -> CaseResult:
    """Return the result of one case, merged from the last record of each repetition.

    ``records`` are all records of the case in the order of their file, and ``planned`` is the
    number of repetitions in the plan. If a repetition was measured, records that only state that
    the time budget ended are left out.
    """
    if any(record.status == "ok" for record in records):
        records = [record for record in records if not record.is_out_of_budget]
    latest = tuple({record.repetition: record for record in records}.values())
    status = min((record.status for record in latest), key=WORST_FIRST.index)
    worst = [record for record in latest if record.status == status]
    measured = [record for record in latest if record.status == "ok"]
    first = measured[0] if measured else latest[0]
    stops = Counter(record.stop for record in measured if record.stop)
    metrics = {} if status == "wrong" else merge_metrics([record.metrics for record in measured])
    return CaseResult(
        case=first.case,
        world=first.world,
        status=status,
        reasons=tuple(dict.fromkeys(record.reason for record in worst if record.reason)),
        repetitions=len(measured),
        planned=max(planned, len(latest)),
        iterations=sum(len(record.samples.values) for record in measured),
        stops=tuple(stops.most_common()),
        check=_merge_checks(latest),
        metrics=metrics,
        notes=tuple(dict.fromkeys(note for record in latest for note in record.notes)),
        records=latest,
    )


def _merge_checks(records: Sequence[Record]) -> Check:
    """Return one numerical check for a case from the checks of its repetitions.

    ``records`` are the last record of each repetition. The check passes if each repetition that has
    a check passed it. ``wrong`` is the sum of the wrong elements over repetitions. A field is None
    if it is unknown in all repetitions.
    """
    outcomes = [record.check.passed for record in records if record.check.passed is not None]
    counts = [record.check.wrong for record in records if record.check.wrong is not None]
    return Check(passed=all(outcomes) if outcomes else None, wrong=sum(counts) if counts else None)


def find_missing(run: Run) -> tuple[MissingCase, ...]:
    """Return the planned cases that have no record in at least one repetition, in plan order."""
    plan = run.info.plan
    repetitions: dict[str, set[int]] = {case.id: set() for case in plan.cases}
    for record in run.records:
        if record.case.id in repetitions:
            repetitions[record.case.id].add(record.repetition)
    return tuple(
        MissingCase(case=case, repetitions=plan.repetitions - len(repetitions[case.id]))
        for case in plan.cases
        if len(repetitions[case.id]) < plan.repetitions
    )


def compute_exit_code(statuses: Iterable[Status], *, is_complete: bool = True) -> int:
    """Return the exit code of a run whose cases have the given statuses.

    It is 1 if a case is wrong. Otherwise it is 4 if a case failed or hung, or if a planned
    measurement is missing (``is_complete`` is False). Otherwise it is 0.
    """
    codes = [EXIT_CODES[status] for status in statuses]
    if not is_complete:
        codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)


def is_conclusive(run: Run, results: Sequence[CaseResult]) -> bool:
    """Return True if a run measured a case, and each case that the time budget cut short suffices.

    A case is cut short if the time budget ended before all its repetitions. It suffices with two
    measured repetitions, or with one if the plan has only one. ``results`` are the results of the
    run's cases.
    """
    cut_ids = {record.case.id for record in run.records if record.is_out_of_budget}
    min_repetitions = min(2, run.info.plan.repetitions)
    cut_results = [result for result in results if result.case.id in cut_ids]
    return any(result.repetitions for result in results) and all(
        result.repetitions >= min_repetitions for result in cut_results
    )
