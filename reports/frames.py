"""Tidy pandas frames of runs: merged results of cases, records of repetitions, and samples.

Parameters have columns ``param_NAME``, because a parameter may have the name of another column.
Unknown values are NaN, NA or None, never 0. pandas is imported by the functions that build a frame,
so that commands without one start fast.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from msgspec.structs import asdict

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_rank_samples
from parbench.bench.text import UserError
from parbench.reports.analysis.case_results import CaseResult

if TYPE_CHECKING:
    import pandas as pd

CASE_DTYPES = {
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
    "world_size": "Int64",
    "nodes": "Int64",
    "backend": "object",
    "device": "object",
    "headline": "object",
    "seconds": "float64",
    "seconds_low": "float64",
    "seconds_high": "float64",
    "result": "object",
}
"""The columns that every frame of cases has, with their pandas types."""
RECORD_COLUMNS = (
    "iterations",
    "world_size",
    "nodes",
    "backend",
    "device",
    "noise",
    "injected",
    "emulation",
    "notes",
)
"""The columns about the record that every frame with a row per case and repetition has."""
SAMPLE_COLUMNS = r"^(run|point|case|name|repetition|world_size|param_.*)$"
"""Matches the columns about the run and the case that frames of samples (iterations) have."""
Runs = Iterable[tuple[Run, str | None]]
"""Runs, each with the name of its sweep point (combination of settings), None outside sweeps."""


class CaseRepetition(NamedTuple):
    """One case in one repetition of a run, with or without a record."""

    run: Run
    """The run that planned the case."""
    record: Record | None
    """The record if the case has the status ok in this repetition, otherwise None."""
    row: dict[str, Any]
    """The cells that describe the run, the case, its parameters and its status, keyed by column.

    Metrics are not among them.
    """


def build_cases_frame(results: Sequence[CaseResult], labels: Mapping[str, str]) -> "pd.DataFrame":
    """Return a pandas frame with a row for each result. ``RunData.cases`` documents its columns.

    ``labels`` are the labels of cases, keyed by case id.
    """
    rows = [_make_case_row(result, labels[result.case.id]) for result in results]
    return _build_frame(rows, CASE_DTYPES)


def list_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a frame as dicts from column name to value."""
    return cast("list[dict[str, Any]]", frame.rename(columns=str).to_dict("records"))


def _make_case_row(result: CaseResult, label: str) -> dict[str, Any]:
    """Return one row of the frame of cases (``RunData.cases``) as a dict keyed by column.

    ``label`` is the short label of the case for tables.
    """
    headline = result.metrics.get(result.headline, MetricValue(value=None))
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
        "stop": ", ".join(stop for stop, _ in result.stops) or None,
        "check": result.check_text,
        "world_size": result.world.size,
        "nodes": result.world.nodes,
        "backend": result.world.backend,
        "device": result.world.device,
        "headline": result.headline,
        "seconds": result.seconds,
        "result": result,
    }
    row |= {f"param_{name}": value for name, value in result.case.params.items()}
    for name, metric in {"seconds": headline, **result.metrics}.items():
        row = {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high} | row
    return row


def build_metrics_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each metric of each case and repetition.

    The columns about the run, the case and its record come first. Then come ``metric`` (its name)
    and the fields of ``MetricValue``, such as ``value``, ``low`` and ``high``. A repetition without
    a measurement has one row, in which the metric is unknown. ``runs`` has each run with the name
    of its sweep point (combination of settings), which is None outside a sweep.
    """
    repetitions = _list_repetitions(runs)
    rows = []
    for index, repetition in enumerate(repetitions):
        metrics = repetition.record.metrics if repetition.record else {}
        for name, metric in metrics.items():
            rows.append({"index": index, "metric": name, **asdict(metric)})
        if not metrics:
            rows.append({"index": index, "metric": None, **asdict(MetricValue(value=None))})
    values = _build_frame(rows, {"value": "float64", "low": "float64", "high": "float64"})
    return _join(_build_repetitions(repetitions), values)


def build_samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each timed iteration of each case and repetition.

    The columns that name the case and the repetition come first. Then ``iteration`` is the index
    from 0, and ``seconds`` is the duration of a step or operation, the maximum over ranks. ``runs``
    has each run with the name of its sweep point, None outside a sweep.
    """
    repetitions = _list_repetitions(runs)
    rows = []
    for index, repetition in enumerate(repetitions):
        values = repetition.record.samples.values if repetition.record else []
        for iteration, seconds in enumerate(values):
            rows.append({"index": index, "iteration": iteration, "seconds": seconds})
    samples = _build_frame(rows, {"index": "int64", "iteration": "int64", "seconds": "float64"})
    return _join(_build_repetitions(repetitions).filter(regex=SAMPLE_COLUMNS), samples)


def build_rank_samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each timed iteration and rank of each case and repetition.

    The columns that name the case and the repetition come first. Then come ``iteration``, ``rank``,
    ``steps_per_sample`` (steps in an iteration), and ``arrival_seconds``, ``exit_seconds``,
    ``duration_seconds`` and ``issue_seconds`` of the iteration on the rank. Arrival and exit are
    relative to the first arrival, on the clock of rank 0. Raises ``UserError`` if a file of samples
    is corrupt, or if no run has a file of samples.
    """
    import pandas as pd

    repetitions = _list_repetitions(runs)
    frames = []
    for index, (run, record, _) in enumerate(repetitions):
        samples = load_rank_samples(run, record) if record else None
        if samples:
            frames.append(_build_rank_samples(samples).assign(index=index))
    if not frames:
        raise UserError(
            "no run has samples of ranks (*.npz)", hint="copy a run with its folder samples/"
        )
    return _join(_build_repetitions(repetitions).filter(regex=SAMPLE_COLUMNS), pd.concat(frames))


def _build_rank_samples(samples: Mapping[str, Any]) -> "pd.DataFrame":
    """Return a frame with a row for each rank and iteration from the arrays of one sample file.

    ``samples`` has the arrays by name (``load_rank_samples``). The columns are ``iteration``,
    ``rank``, ``steps_per_sample``, and ``arrival``, ``exit``, ``duration`` and ``issue`` with the
    suffix ``_seconds``. An issue time of 0 becomes NaN.
    """
    import pandas as pd

    num_ranks, num_iterations = samples["duration_ns"].shape
    frame = pd.DataFrame(
        {
            "iteration": np.tile(np.arange(num_iterations), num_ranks),
            "rank": np.repeat(samples["ranks"], num_iterations),
            "steps_per_sample": int(samples["steps_per_sample"]),
        }
    )
    for name in ("arrival", "exit", "duration", "issue"):
        frame[f"{name}_seconds"] = samples[f"{name}_ns"].ravel() / 1e9
    # The issue time is 0 in modes that do not separate the call from the wait.
    frame["issue_seconds"] = frame["issue_seconds"].replace(0, np.nan)
    return frame


def _list_repetitions(runs: Runs) -> list[CaseRepetition]:
    """Return each case in each repetition of all runs, in the order of runs.

    In each run, cases with a record come first, then cases that the plan skips (one element each),
    then planned repetitions without a record.
    """
    repetitions = []
    for run, point in runs:
        info, plan = run.info, run.info.plan
        records = {(record.case.id, record.repetition): record for record in run.records}
        cases = {key: record.case for key, record in records.items()}
        reasons = {skipped.case.id: skipped.reason for skipped in plan.skipped}
        cases |= {(skipped.case.id, 0): skipped.case for skipped in plan.skipped}
        for index in range(plan.repetitions):
            cases = {(case.id, index): case for case in plan.cases} | cases
        for (case_id, index), case in cases.items():
            row: dict[str, Any] = {
                "run": info.id,
                "started": info.started,
                "host": info.host,
                "preset": plan.preset,
                "point": point,
                "case": case_id,
                "name": case.name,
                "repetition": index,
                "status": "skipped" if case_id in reasons else "missing",
                "reason": reasons.get(case_id, "no record"),
            }
            row |= {f"param_{name}": value for name, value in case.all_params.items()}
            record = records.get((case_id, index))
            if record:
                row |= {
                    "status": record.status,
                    "reason": record.reason or None,
                    "iterations": len(record.samples.values) or None,
                    "world_size": record.world.size,
                    "nodes": record.world.nodes,
                    "backend": record.world.backend,
                    "device": record.world.device,
                    "noise": record.noise.grade if record.noise else None,
                    "injected": record.injected or None,
                    "emulation": record.emulation or None,
                    "notes": "; ".join(record.notes) or None,
                }
            is_measured = record is not None and record.status == "ok"
            repetitions.append(CaseRepetition(run, record if is_measured else None, row))
    return repetitions


def _build_repetitions(repetitions: Sequence[CaseRepetition]) -> "pd.DataFrame":
    """Return a frame with ``CaseRepetition.row`` of each element, and ``started`` as a date."""
    import pandas as pd

    rows = [repetition.row for repetition in repetitions]
    frame = _build_frame(rows, dict.fromkeys(["run", "started", *RECORD_COLUMNS]))
    return frame.assign(started=pd.to_datetime(frame["started"], utc=True))


def _build_frame(
    rows: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str | None]
) -> "pd.DataFrame":
    """Return rows as a frame with the columns of ``dtypes`` first, then the others.

    ``dtypes`` are pandas types keyed by column. The type of other columns, and of columns whose
    type is None, follows from their values (``_choose_dtype``).
    """
    import pandas as pd

    names = dict.fromkeys([*dtypes, *(name for row in rows for name in row)])
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pd.Series(values, dtype=dtypes.get(name) or _choose_dtype(values))
    return pd.DataFrame(columns)


def _choose_dtype(values: Sequence[Any]) -> str:
    """Return the pandas type of a column: Int64, boolean, float64 for numbers, otherwise object.

    None stands for an unknown value. A column without known values has the type float64.
    """
    types = {type(value) for value in values if value is not None}
    if types == {int}:
        return "Int64"
    if types == {bool}:
        return "boolean"
    return "float64" if types <= {int, float} else "object"


def _join(repetitions: "pd.DataFrame", values: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of ``values`` with the columns of their case and repetition on the left.

    The column ``index`` of ``values`` is the row number in ``repetitions``. It is left out of the
    result.
    """
    return repetitions.join(values.set_index("index"), how="inner").reset_index(drop=True)
