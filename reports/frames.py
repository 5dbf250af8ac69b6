"""Tidy pandas frames of the results of a run.

pandas is imported by the functions that build a frame, so that commands without one start fast.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parbench.bench.results.formatting import format_word_counts
from parbench.bench.results.metrics import MetricValue
from parbench.reports.analysis.case_results import CaseResult

if TYPE_CHECKING:
    import pandas as pd

_CASE_DTYPES = {
    "case_id": "object",
    "name": "object",
    "label": "object",
    "kind": "object",
    "is_communication": "bool",
    "status": "object",
    "reason": "object",
    "repetitions": "Int64",
    "planned": "Int64",
    "iterations": "Int64",
    "variation": "float64",
    "noise": "object",
    "stop": "object",
    "check": "object",
    "kernel": "object",
    "world_size": "Int64",
    "num_ranks": "Int64",
    "nodes": "Int64",
    "backend": "object",
    "device": "object",
    "headline": "object",
    "seconds": "float64",
    "seconds_low": "float64",
    "seconds_high": "float64",
    "is_within_repetition": "bool",
    "result": "object",
}


def build_cases_frame(results: Sequence[CaseResult], labels: Mapping[str, str]) -> "pd.DataFrame":
    """Return a pandas frame with a row for each result. ``RunData.cases`` documents its columns.

    ``labels`` are the labels of cases, keyed by case id.
    """
    rows = [_make_case_row(result, labels[result.case.id]) for result in results]
    return _build_frame(rows, _CASE_DTYPES)


def join_frames(frames: Mapping[str, "pd.DataFrame"], column: str) -> "pd.DataFrame":
    """Return the rows of all frames below each other, with the name of their frame in a column.

    ``frames`` are keyed by name. ``column`` is the title of the added first column.
    """
    import pandas as pd

    return pd.concat(frames, names=[column]).reset_index(column)


def list_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a frame as dicts from column name to value."""
    names = [str(name) for name in frame.columns]
    columns = [frame.iloc[:, index].tolist() for index in range(len(names))]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _make_case_row(result: CaseResult, label: str) -> dict[str, Any]:
    """Return one row of the frame of cases, keyed by column: values, parameters, then metrics."""
    headline = result.metrics.get(result.headline)
    is_within_repetition = bool(headline and headline.is_within_repetition)
    low, high = _get_interval(headline, is_within_repetition=is_within_repetition)
    row = {
        "case_id": result.case.id,
        "name": result.case.name,
        "label": label,
        "kind": result.kind,
        "is_communication": result.is_communication,
        "status": result.status,
        "reason": "; ".join(result.reasons) or None,
        "repetitions": result.repetitions,
        "planned": result.planned,
        "iterations": result.iterations or None,
        "variation": result.variation,
        "noise": result.noise,
        "stop": format_word_counts(result.stops) if result.stops else None,
        "check": result.check_text,
        "kernel": result.kernel,
        "world_size": result.world.size,
        "num_ranks": result.num_ranks,
        "nodes": result.world.nodes,
        "backend": result.world.backend,
        "device": result.world.device,
        "headline": result.headline,
        "seconds": result.seconds,
        "seconds_low": low,
        "seconds_high": high,
        "is_within_repetition": is_within_repetition,
        "result": result,
    }
    row |= {f"param_{name}": value for name, value in result.case.params.items()}
    for name, metric in result.metrics.items():
        low, high = _get_interval(metric, is_within_repetition=is_within_repetition)
        values = {name: metric.value, f"{name}_low": low, f"{name}_high": high}
        row = values | row
    return row


def _get_interval(
    metric: MetricValue | None, *, is_within_repetition: bool
) -> tuple[float | None, float | None]:
    """Return the bounds of a metric's 95 % interval, ``(None, None)`` if it is unknown.

    An interval within one repetition counts as unknown unless ``is_within_repetition`` is True.
    """
    if metric is None or (metric.is_within_repetition and not is_within_repetition):
        return None, None
    return metric.low, metric.high


def _build_frame(rows: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str]) -> "pd.DataFrame":
    """Return rows as a frame with the columns of ``dtypes`` first, then parameters and metrics.

    ``dtypes`` are pandas types keyed by column.
    """
    import pandas as pd

    names = dict.fromkeys([*dtypes, *(name for row in rows for name in row)])
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        dtype = dtypes.get(name) or _choose_dtype(name, values)
        columns[name] = pd.Series(values, dtype=dtype)
    return pd.DataFrame(columns)


def _choose_dtype(name: str, values: Sequence[Any]) -> str:
    """Return the pandas type of a column: float64 for metrics, Int64 for integer parameters.

    Parameters with other values than numbers are objects.
    """
    if not name.startswith("param_"):
        return "float64"
    types = {type(value) for value in values if value is not None}
    if types == {int}:
        return "Int64"
    return "float64" if types and types <= {int, float} else "object"
