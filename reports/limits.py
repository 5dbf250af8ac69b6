"""The check of a run's metrics against the limits of ``--limits``.

A limit of an unknown value is never met.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.limits import MetricLimit, read_limits
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.results.tables import metric_column
from parbench.bench.text import name_first
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.fits import COPY, Ceiling
from parbench.reports.analysis.steps import compute_exposed_share
from parbench.reports.run_data import RunData

MAX_NAMED_RESULTS = 5
"""The number of limits that are not met and printed. The others are counted."""
LimitVerdict = Literal["NOT MET", "NOT RUN", "UNKNOWN", "MET"]
"""The outcome of a limit for one case. UNKNOWN means that the value of the metric is unknown."""
EXIT_CODES: Mapping[LimitVerdict, ExitCode] = {
    "NOT MET": ExitCode.BAD,
    "NOT RUN": ExitCode.DID_NOT_RUN,
    "UNKNOWN": ExitCode.UNDECIDED,
    "MET": ExitCode.OK,
}
"""The exit code of each verdict, in the order from the worst verdict to the best."""


@dataclass(frozen=True, kw_only=True)
class LimitResult:
    """The verdict on one limit for a metric of one case."""

    limit: MetricLimit
    """The limit that was checked."""
    metric: str
    """The full name of the metric, with its mesh axis or component: ``exposed_comm.dp``."""
    case: str
    """The label of the case."""
    verdict: LimitVerdict
    """MET, NOT MET, NOT RUN if the case was not measured, or UNKNOWN if the metric has no value."""
    finding: str
    """A clause from ``but`` on with the value of the metric, or the reason for its absence."""

    @property
    def message(self) -> str:
        """A sentence with the verdict, the limit and the value of the metric."""
        rule = f"{self.metric} of {self.case} must be {self.limit.text}"
        return f"Limit {self.verdict}: {rule}, {self.finding}."


def check_run(data: RunData, file: Path, code: int) -> int:
    """Check the metrics of a run against the limits in a file, and return the exit code.

    The results of the limits are printed to standard error. ``code`` is the exit code of the run
    itself. The worse one of this exit code and the exit code of the limits is returned.
    """
    results = check_limits(data, read_limits(file, data.plan.cases))
    for sentence in describe_limits(results):
        click.echo(sentence, err=True)
    return get_limits_exit_code(results, code)


def check_limits(data: RunData, limits: Sequence[MetricLimit]) -> tuple[LimitResult, ...]:
    """Return the result of each limit for each case and metric to which it applies, worst first."""
    case_results = {result.case.id: result for result in data.results}
    results: list[LimitResult] = []
    for limit in limits:
        for case in data.plan.cases:
            if limit.applies_to(case):
                result = case_results.get(case.id)
                results += _check_case(limit, case.label, result, data.ceiling)
    order = list(EXIT_CODES)
    return tuple(sorted(results, key=lambda result: order.index(result.verdict)))


def get_limits_exit_code(results: Sequence[LimitResult], code: int = 0) -> ExitCode:
    """Return the worst of the exit code ``code`` of the run and the exit codes of its limits."""
    return combine_exit_codes([code, *(EXIT_CODES[result.verdict] for result in results)])


def describe_limits(results: Sequence[LimitResult]) -> list[str]:
    """Return a sentence for each limit that is not met, the worst first, but at most five.

    The number of the others follows. If all limits are met, the only sentence states this. The
    result is empty without limits.
    """
    unmet = [result.message for result in results if result.verdict != "MET"]
    if results and not unmet:
        return [f"Limits: all are met (values checked: {len(results)})."]
    return name_first(unmet, MAX_NAMED_RESULTS)


def _check_case(
    limit: MetricLimit, label: str, result: CaseResult | None, ceiling: Ceiling | None
) -> Iterator[LimitResult]:
    """Yield the result of a limit for each metric of one case that the limit names.

    ``label`` is the label of the case. ``result`` is None for a case without a record. ``ceiling``
    is the bandwidth with which the run compares bus bandwidth, None if it has none.
    """
    if result is None or not result.metrics:
        reason = "; ".join(result.reasons) if result else "it has no record"
        yield LimitResult(
            limit=limit,
            metric=limit.metric,
            case=label,
            verdict="NOT RUN",
            finding=f"but it did not run: {reason}",
        )
        return
    metrics = _collect_metrics(result, ceiling)
    names = [limit.metric]
    if limit.metric not in metrics:
        names = [name for name in metrics if name.startswith(f"{limit.metric}.")] or names
    for name in names:
        metric = metrics.get(name)
        verdict: LimitVerdict = "UNKNOWN"
        finding = "but the run has no value of this metric (values: parbench show --all RUN)"
        if metric is not None and metric.value is not None:
            verdict = "MET" if limit.is_met(metric.value) else "NOT MET"
            cells = {"value": metric.value, "value_low": metric.low, "value_high": metric.high}
            column = metric_column(name, key="value", has_interval=True)
            finding = f"but it is {column.format_cell(cells)}"
        yield LimitResult(limit=limit, metric=name, case=label, verdict=verdict, finding=finding)


def _collect_metrics(result: CaseResult, ceiling: Ceiling | None) -> dict[str, MetricValue]:
    """Return the metrics of a case keyed by name, with two more that limits may name.

    ``exposed_fraction`` is exposed communication over the time of the profiled step.
    ``busbw_of_copy`` is bus bandwidth over ``ceiling``, which must be the bandwidth of a memory
    copy. Both are fractions, and left out if unknown.
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
