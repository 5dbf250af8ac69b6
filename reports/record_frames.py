"""The frames of ``parbench.load`` and ``parbench.load_samples``: records of runs as pandas frames.

Parameters have columns ``param_NAME``, because a parameter may have the name of another column.
Unknown values are NA, never 0. pandas is imported by the functions that build a frame.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import asdict

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_rank_samples, make_samples_path
from parbench.bench.text import UserError, format_list

if TYPE_CHECKING:
    import pandas as pd

Runs = Iterable[tuple[Run, str | None]]
"""Runs, each with the name of the point of a sweep that it measured."""

TEXT, INTEGER, NUMBER, TIME = "string", "Int64", "float64", "datetime64[ns, UTC]"
RUN_DTYPES = {
    "run": TEXT,
    "started": TIME,
    "host": TEXT,
    "parbench": TEXT,
    "preset": TEXT,
    "point": TEXT,
    "case": TEXT,
    "name": TEXT,
}
"""The columns about the run and the case, with their pandas types."""
RECORD_DTYPES = {
    "repetition": "int64",
    "status": TEXT,
    "reason": TEXT,
    "stop": TEXT,
    "iterations": INTEGER,
    "check_passed": "boolean",
    "check_wrong": INTEGER,
    "world_size": INTEGER,
    "nodes": INTEGER,
    "backend": TEXT,
    "device": TEXT,
    "noise": TEXT,
    "spread": NUMBER,
    "late_rank": INTEGER,
    "late_share": NUMBER,
    "injected": TEXT,
    "emulation": TEXT,
    "notes": TEXT,
    "record_started": TIME,
    "record_seconds": NUMBER,
}
"""The columns about the record of a repetition, with their pandas types."""
METRIC_DTYPES = {
    "metric": TEXT,
    "value": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "unit": TEXT,
    "better": TEXT,
    "method": TEXT,
}
"""The columns about one metric of a record, with their pandas types."""
SAMPLE_COLUMNS = r"^(run|point|case|name|repetition|world_size|param_.*)$"
"""The columns of a repetition that frames of samples have."""
RANK_SAMPLE_ARRAYS = {"arrival_ns", "exit_ns", "duration_ns", "issue_ns", "steps_per_sample"}
"""The arrays that a sample file must contain, besides the ranks."""


class CaseRepetition(NamedTuple):
    """One case in one repetition of a run, with or without a record."""

    run: Run
    record: Record | None
    """The record if the repetition measured the case, otherwise None."""
    row: dict[str, Any]
    """The known values of the columns of ``RUN_DTYPES`` and ``RECORD_DTYPES``, keyed by column."""
    params: Mapping[str, Any]
    """The parameters of the case with their defaults."""


def build_metrics_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each metric of each case and repetition.

    The columns describe the run, the case's parameters, the record and the metric. A repetition
    without a measurement has one row, in which the metric is unknown. ``runs`` has each run with
    the name of its sweep point (combination of settings), which is None outside a sweep.
    """
    repetitions = list_repetitions(runs)
    rows: list[dict[str, Any]] = []
    for index, repetition in enumerate(repetitions):
        metrics = repetition.record.metrics if repetition.record else {}
        for name, metric in metrics.items():
            rows.append({"index": index, "metric": name, **asdict(metric)})
        if not metrics:
            rows.append({"index": index})
    values = _build_frame(rows, {"index": "int64", **METRIC_DTYPES}).set_index("index")
    return _join(_build_repetitions(repetitions), values)


def build_samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each iteration and its seconds, the maximum over ranks.

    The columns that name the case and the repetition come first, then ``iteration`` and
    ``seconds``.
    """
    repetitions = list_repetitions(runs)
    rows = []
    for index, repetition in enumerate(repetitions):
        values = repetition.record.samples.values if repetition.record else []
        for iteration, seconds in enumerate(values):
            rows.append({"index": index, "iteration": iteration, "seconds": seconds})
    dtypes = {"index": "int64", "iteration": "int64", "seconds": NUMBER}
    samples = _build_frame(rows, dtypes).set_index("index")
    return _join(_build_repetitions(repetitions).filter(regex=SAMPLE_COLUMNS), samples)


def build_rank_samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a frame with a row for each iteration and rank: arrival, exit and duration in seconds.

    Raises ``UserError`` if a file of samples is corrupt, or if no run has such a file.
    """
    import pandas as pd

    repetitions = list_repetitions(runs)
    frames = []
    for index, (run, record, *_) in enumerate(repetitions):
        samples = load_rank_samples(run, record) if record else None
        if record and samples:
            frame = _build_rank_samples(samples, run.path / make_samples_path(record))
            frames.append(frame.set_index(np.full(len(frame), index)))
    if not frames:
        folders = dict.fromkeys(str(repetition.run.path / "samples") for repetition in repetitions)
        problem = f"no samples of ranks (*.npz) are in {', '.join(folders)}"
        raise UserError(f"{problem}: copy a run with its folder samples/")
    return _join(_build_repetitions(repetitions).filter(regex=SAMPLE_COLUMNS), pd.concat(frames))


def _build_rank_samples(samples: Mapping[str, Any], file: Path) -> "pd.DataFrame":
    """Return a frame with a row for each rank and iteration from the arrays of one sample file.

    Times are converted from nanoseconds to seconds. Raises ``UserError``, which names ``file``, if
    arrays are missing.
    """
    import pandas as pd

    missing_arrays = RANK_SAMPLE_ARRAYS - samples.keys()
    if missing_arrays:
        names = format_list(sorted(missing_arrays))
        raise UserError(f"{file} is not a file of samples: it does not contain {names}")
    num_ranks, num_iterations = samples["duration_ns"].shape
    seconds = {
        name: samples[f"{name}_ns"].ravel() / 1e9
        for name in ("arrival", "exit", "duration", "issue")
    }
    # The issue time is 0 in modes that do not separate the call from the wait.
    issue_seconds = np.where(seconds["issue"] > 0, seconds["issue"], np.nan)
    return pd.DataFrame(
        {
            "iteration": np.tile(np.arange(num_iterations), num_ranks),
            "rank": np.repeat(samples["ranks"], num_iterations),
            "arrival_seconds": seconds["arrival"],
            "exit_seconds": seconds["exit"],
            "duration_seconds": seconds["duration"],
            "issue_seconds": issue_seconds,
            "steps_per_sample": int(samples["steps_per_sample"]),
        }
    )


def list_repetitions(runs: Runs) -> list[CaseRepetition]:
    """Return each case in each repetition of all runs.

    In each run, those with a record come first, then cases that the plan skips, then missing ones.
    """
    return [repetition for run, point in runs for repetition in _iterate_repetitions(run, point)]


def _iterate_repetitions(run: Run, point: str | None) -> Iterator[CaseRepetition]:
    """Yield each case in each repetition of one run: recorded, then skipped, then missing ones.

    ``point`` is the name of the sweep point (combination of settings) that the run measured.
    """
    info, plan = run.info, run.info.plan
    records = {(record.case.id, record.repetition): record for record in run.records}
    cases = {key: record.case for key, record in records.items()}
    for skipped in plan.skipped:
        cases.setdefault((skipped.case.id, 0), skipped.case)
    for index in range(plan.repetitions):
        for case in plan.cases:
            cases.setdefault((case.id, index), case)
    skip_reasons = {skipped.case.id: skipped.reason for skipped in plan.skipped}
    for (case_id, index), case in cases.items():
        row = {
            "run": info.id,
            "started": info.started,
            "host": info.host,
            "parbench": info.parbench,
            "preset": plan.preset,
            "point": point,
            "case": case_id,
            "name": case.name,
            "repetition": index,
            "status": "skipped" if case_id in skip_reasons else "missing",
            "reason": skip_reasons.get(case_id, "no record"),
        }
        record = records.get((case_id, index))
        if record:
            row |= _describe_record(record)
        measured = record if record and record.status == "ok" else None
        yield CaseRepetition(run, measured, row, case.all_params)


def _describe_record(record: Record) -> dict[str, Any]:
    """Return the values of a record (status, check, ranks, noise, ...), keyed by column."""
    noise = record.noise
    arrival = record.arrival
    return {
        "status": record.status,
        "reason": record.reason or None,
        "stop": record.stop,
        "iterations": len(record.samples.values) or None,
        "check_passed": record.check.passed,
        "check_wrong": record.check.wrong,
        "world_size": record.world.size,
        "nodes": record.world.nodes,
        "backend": record.world.backend,
        "device": record.world.device,
        "noise": noise.grade if noise else None,
        "spread": noise.spread if noise else None,
        "late_rank": arrival.late_rank if arrival else None,
        "late_share": arrival.share if arrival else None,
        "injected": record.injected or None,
        "emulation": record.emulation or None,
        "notes": "; ".join(record.notes) or None,
        "record_started": record.started,
        "record_seconds": record.seconds,
    }


def _build_repetitions(repetitions: Sequence[CaseRepetition]) -> "pd.DataFrame":
    """Return a frame with a row for each case and repetition: run, parameters, then record."""
    import pandas as pd

    params = [repetition.params for repetition in repetitions]
    columns = {}
    for name in dict.fromkeys(name for values in params for name in values):
        column = pd.Series(pd.array([values.get(name) for values in params]))
        is_number = column.dtype == "Float64"
        columns[f"param_{name}"] = column.astype("float64") if is_number else column
    rows = [repetition.row for repetition in repetitions]
    frames = [_build_frame(rows, RUN_DTYPES), pd.DataFrame(columns)]
    return pd.concat([*frames, _build_frame(rows, RECORD_DTYPES)], axis="columns")


def _build_frame(rows: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str]) -> "pd.DataFrame":
    """Return a frame with the columns of ``dtypes`` from rows keyed by column.

    Missing values are NA.
    """
    import pandas as pd

    columns = {name: [row.get(name) for row in rows] for name in dtypes}
    return pd.DataFrame(columns, dtype=object).astype(dict(dtypes))


def _join(repetitions: "pd.DataFrame", values: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of ``values``, each after the columns of its case and repetition.

    The index of ``values`` is the row number in ``repetitions``.
    """
    return repetitions.join(values, how="inner").reset_index(drop=True)
