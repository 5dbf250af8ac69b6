"""The columns that several tables of steps share, and the row of a step."""

from collections.abc import Iterable
from typing import Any

from parbench.bench.results.formatting import format_word_counts
from parbench.bench.results.metrics import METRICS
from parbench.bench.results.tables import Column, SortedText, metric_column
from parbench.reports.case_results import CaseResult

STEP_COLUMN = Column(
    key="step", title="step", help="training step with the parameters in which steps differ"
)
STEP_TIME_COLUMN = metric_column("step_time", key="seconds", has_interval=True)
QUALITY_COLUMNS = (
    metric_column("time_p99", key="p99"),
    metric_column("time_q10", key="q10"),
    Column(
        key="noise",
        title="noise",
        help="variation between repetitions, within a single one: stable, fair, noisy, very noisy",
        grade_key="noise",
        is_result=True,
    ),
    Column(key="iterations", title="n", kind="count", help="iterations of all repetitions"),
    Column(
        key="num_effective",
        title="n_eff",
        kind="count",
        help="number of independent iterations that would be as precise",
    ),
    Column(
        key="repetitions",
        title="repetitions",
        kind="count",
        help="repetitions that measured the case, of those planned",
    ),
    Column(key="stop", title="stop", help="rule that ended the measurement, by repetition"),
    Column(key="check", title="check", help="comparison of the results with the reference"),
)


def make_step_row(label: str, step: CaseResult) -> dict[str, Any]:
    """Return the row of a step: its metrics with their intervals, and the quality of its time."""
    time = step.metrics.get(step.headline)
    is_within_repetition = time is not None and time.is_within_repetition
    row: dict[str, Any] = {}
    for name, metric in {"seconds": time, **step.metrics}.items():
        if metric is not None:
            row[name] = metric.value
            if metric.is_within_repetition == is_within_repetition:
                row[f"{name}_low"] = metric.low
                row[f"{name}_high"] = metric.high
    return row | {
        "step": label,
        "is_within_repetition": is_within_repetition,
        "p99": step.value(f"{step.headline}_p99"),
        "q10": step.value(f"{step.headline}_q10"),
        "noise": step.noise,
        "iterations": step.iterations or None,
        "num_effective": step.num_effective,
        "repetitions": SortedText(f"{step.repetitions}/{step.planned}", step.repetitions),
        "stop": format_word_counts(step.stops),
        "check": step.check_text,
    }


def make_metric_columns(table: str, steps: Iterable[CaseResult]) -> list[Column]:
    """Return the columns of the metrics that are declared for a table, and known of a step."""
    names = dict.fromkeys(
        name for step in steps for name, metric in step.metrics.items() if metric.value is not None
    )
    return [
        metric_column(name)
        for metric in METRICS
        if table in metric.tables
        for name in names
        if metric.specialize(name)
    ]
