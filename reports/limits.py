"""The check of a run's metrics against the limits of ``--limits``.

A limit of an unknown value is never met.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import click

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.formatting import (
    format_measurement,
    format_percent,
)
from parbench.bench.results.limits import MetricLimit, read_limits, resolve_metric
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.results.runs import require_complete
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.fits import COPY, Ceiling
from parbench.reports.analysis.steps import compute_exposed_share
from parbench.reports.run_data import RunData

LimitVerdict = Literal["NOT MET", "NOT RUN", "UNKNOWN", "MET"]
"""The outcome of a limit. UNKNOWN means that the value of the metric is unknown."""
EXIT_CODES: Mapping[LimitVerdict, ExitCode] = {
    "NOT MET": ExitCode.BAD,
    "NOT RUN": ExitCode.DID_NOT_RUN,
    "UNKNOWN": ExitCode.UNDECIDED,
    "MET": ExitCode.OK,
}
"""The exit code of each verdict, in the order from the worst verdict to the best."""


@dataclass(frozen=True, kw_only=True)
class LimitResult:
    """The verdict on one limit for a metric, over all cases to which the limit applies."""

    limit: MetricLimit
    """The limit that was checked."""
    verdict: LimitVerdict
    """The worst verdict of a case, in the order NOT MET, NOT RUN, UNKNOWN, MET."""
    message: str
    """A sentence about one case with this verdict: the case farthest from the limit."""


class _LimitCheck(NamedTuple):
    """The verdict on a limit for one metric of one case."""

    verdict: LimitVerdict
    """NOT RUN if the case was not measured, UNKNOWN if the metric has no value."""
    label: str
    """The label of the case."""
    finding: str
    """A clause with the value, or with the reason why it is unknown."""
    distance: float = 0.0
    """The absolute difference between the value and the limit, 0 if the value is unknown."""


def check_run(data: RunData, file: Path, code: int) -> int:
    """Check the limits of a file, print the result to standard error, and return the exit code.

    ``code`` is the exit code of the run itself. The worse of both codes is returned.
    """
    require_complete(data.run)
    results = check_limits(data, read_limits(file, data.plan.cases, data.plan.skipped))
    for sentence in describe_limits(results):
        click.echo(sentence, err=True)
    return get_limits_exit_code(results, code)


def check_limits(data: RunData, limits: Sequence[MetricLimit]) -> tuple[LimitResult, ...]:
    """Return the result of each limit over all cases of the run to which it applies."""
    case_results = {result.case.id: result for result in data.results}
    cases = {case.id: case for case in data.plan.cases}
    cases |= {case_id: result.case for case_id, result in case_results.items()}
    results = []
    for limit in limits:
        checks: list[_LimitCheck] = []
        for case_id, case in cases.items():
            if limit.applies_to(case):
                checks += _check_case(limit, case.label, case_results.get(case_id), data.ceiling)
        results.append(_combine_cases(limit, checks))
    return tuple(results)


def get_limits_exit_code(results: Sequence[LimitResult], code: int = 0) -> ExitCode:
    """Return the worst of the exit code ``code`` of the run and the exit codes of its limits."""
    return combine_exit_codes([code, *(EXIT_CODES[result.verdict] for result in results)])


def describe_limits(results: Sequence[LimitResult]) -> tuple[str, ...]:
    """Return a sentence for each limit that is not met, or a single one if all are met.

    The result is empty without limits.
    """
    unmet = tuple(result.message for result in results if result.verdict != "MET")
    if unmet or not results:
        return unmet
    if len(results) == 1:
        return ("Limits: the limit is met.",)
    return (f"Limits: all {len(results)} are met.",)


def _check_case(
    limit: MetricLimit, label: str, result: CaseResult | None, ceiling: Ceiling | None
) -> Iterator[_LimitCheck]:
    """Yield the check of a limit for each metric of one case that the limit names.

    ``label`` is the label of the case. ``result`` is None for a case without a record. ``ceiling``
    is the bandwidth limit of the run.
    """
    if result is None:
        yield _LimitCheck("NOT RUN", label, "it has no record")
        return
    if not result.repetitions or not result.metrics:
        reason = "; ".join(result.reasons) or result.status
        yield _LimitCheck("NOT RUN", label, f"it did not run: {reason}")
        return
    metrics = _collect_metrics(result, ceiling)
    names = [limit.metric]
    if limit.metric not in metrics:
        names = [name for name in metrics if name.startswith(f"{limit.metric}.")]
    if not names:
        yield _LimitCheck("UNKNOWN", label, "the metric is not available")
    for name in names:
        yield _check_value(limit, label, name, metrics[name])


def _check_value(limit: MetricLimit, label: str, name: str, metric: MetricValue) -> _LimitCheck:
    """Return the check of a limit for the value of one metric of a case.

    ``name`` is the full name of the metric, which may have an axis or a component.
    """
    component = name.removeprefix(limit.metric).removeprefix(".")
    suffix = f" on {component}" if component else ""
    if metric.value is None:
        method = f" ({metric.method})" if metric.method else ""
        return _LimitCheck("UNKNOWN", label, f"it is unknown{suffix}{method}")
    verdict: LimitVerdict = "MET" if limit.is_met(metric.value) else "NOT MET"
    finding = f"it is {_format_metric(name, metric)}{suffix}"
    return _LimitCheck(verdict, label, finding, abs(metric.value - limit.number))


def _combine_cases(limit: MetricLimit, checks: Sequence[_LimitCheck]) -> LimitResult:
    """Return the result of a limit over all cases from the checks of single cases.

    The verdict is the worst of a case, in the order NOT MET, NOT RUN, UNKNOWN, MET. Of equally bad
    cases, the message names the case farthest from the limit.
    """
    order = list(EXIT_CODES)
    worst = min(checks, key=lambda check: (order.index(check.verdict), -check.distance))
    equal_labels = {check.label for check in checks if check.verdict == worst.verdict}
    num_cases = len({check.label for check in checks})
    starts = {"MET": "Limit met", "NOT MET": "Limit not met"}
    start = starts.get(worst.verdict, "Limit not evaluated")
    message = f"{start}: {limit.metric} of {worst.label} must be {limit.text}, {worst.finding}."
    if len(equal_labels) > 1:
        message += f" The same applies to {len(equal_labels)} of {pluralize(num_cases, 'case')}."
    return LimitResult(limit=limit, verdict=worst.verdict, message=message)


def _format_metric(name: str, metric: MetricValue) -> str:
    """Return the value of a metric as text with its interval, as a percentage if it has no unit."""
    declared = resolve_metric(name)
    if metric.unit or declared is None:
        return format_measurement(metric)
    if declared.number_format:
        return format_measurement(metric, declared.number_format.format)
    return format_measurement(metric, format_percent)


def _collect_metrics(result: CaseResult, ceiling: Ceiling | None) -> dict[str, MetricValue]:
    """Return the metrics of a case keyed by name, with two more that limits may name.

    ``exposed_fraction`` is exposed communication over the time of the profiled step.
    ``busbw_of_copy`` is bus bandwidth over ``ceiling``, if the ceiling is the bandwidth of a memory
    copy.
    """
    metrics = dict(result.metrics)
    exposed = compute_exposed_share(result)
    if exposed is not None:
        metrics["exposed_fraction"] = make_value("exposed_fraction", exposed)
    bus_bandwidth = result.value("busbw")
    if bus_bandwidth is not None and ceiling is not None and ceiling.name == COPY:
        share = bus_bandwidth / ceiling.bytes_per_second
        metrics["busbw_of_copy"] = make_value("busbw_of_copy", share)
    return metrics
