"""The records of runs as tidy pandas frames: a row for each metric of a case's launch, or for each iteration.

Parameters have columns of their own, ``param_NAME``: ``method``, ``compute`` and ``skew`` are parameters and columns or
metrics alike, and ``frame.shape`` and ``frame.mode`` are pandas' own. What is unknown is NA, never 0.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.plan.cases import Case
from bench.results.records import Record
from bench.results.runs import Run, load_rank_samples, samples_name
from bench.text import UserError, listed
from reports.analysis.several import Point, gather, is_sweep

_RUN = {
    "run": "string",
    "started": "datetime64[ns, UTC]",
    "host": "string",
    "parbench": "string",
    "preset": "string",
    "point": "string",
    "case": "string",
    "name": "string",
}
_LAUNCH = {
    "launch": "int64",
    "status": "string",
    "reason": "string",
    "stop": "string",
    "iterations": "Int64",
    "check_passed": "boolean",
    "check_wrong": "Int64",
    "world_size": "Int64",
    "nodes": "Int64",
    "backend": "string",
    "device": "string",
    "noise": "string",
    "spread": "float64",
    "steady": "string",
    "late_rank": "Int64",
    "late_share": "float64",
    "injected": "string",
    "notes": "string",
    "record_started": "datetime64[ns, UTC]",
    "record_seconds": "float64",
}
_METRIC = {
    "metric": "string",
    "value": "float64",
    "low": "float64",
    "high": "float64",
    "unit": "string",
    "better": "string",
    "method": "string",
}
_OF_SAMPLES = ("run", "point", "case", "name", "launch", "world_size")


def read_runs(paths: Sequence[str | Path]) -> list[tuple[Run, Point | None]]:
    """Return the runs of these folders, each a run's, a sweep's, or one that holds runs; in a sweep also the point.

    ``UserError`` where one is none of them; what is lacking in a sweep is a warning.
    """
    folders = dict.fromkeys(folder for path in paths for folder in _folders(Path(path)))
    found = gather(list(folders), whole=True)
    for sentence in found.lacking:
        warnings.warn(sentence, stacklevel=3)
    return [(one.run, one.point) for one in found.runs]


def _folders(path: Path) -> list[Path]:
    if (path / "run.json").exists() or is_sweep(path):
        return [path]
    return sorted(file.parent for file in path.glob("*/run.json")) or [path]


def metrics_frame(runs: Iterable[tuple[Run, Point | None]]) -> pd.DataFrame:
    """Return a row for each metric of each launch of each case, and one without where nothing was measured."""
    launches, sources = _launches(runs)
    rows = [(at, *row) for at, (_, record) in enumerate(sources) for row in _metrics(record)]
    told = [pd.Series([row[i] for row in rows], name=name, dtype=_METRIC[name]) for i, name in enumerate(_METRIC, 1)]
    return pd.concat([_repeat(launches, [row[0] for row in rows]), *told], axis=1)


def _metrics(record: Record | None) -> list[tuple[Any, ...]]:
    if record is None or record.status != "ok" or not record.metrics:
        return [(None,) * len(_METRIC)]
    told = record.metrics.items()
    return [(name, one.value, one.low, one.high, one.unit, one.better, one.method) for name, one in told]


def samples_frame(runs: Iterable[tuple[Run, Point | None]]) -> pd.DataFrame:
    """Return a row for each iteration of each measured launch; ``seconds`` is one step's, the slowest rank's."""
    launches, sources = _launches(runs)
    samples = [record.samples.values if record and record.status == "ok" else [] for _, record in sources]
    frame = _repeat(_identity(launches), [at for at, values in enumerate(samples) for _ in values])
    frame["iteration"] = pd.Series([i for values in samples for i in range(len(values))], dtype="int64")
    frame["seconds"] = pd.Series([seconds for values in samples for seconds in values], dtype="float64")
    return frame


def rank_samples_frame(runs: Iterable[tuple[Run, Point | None]]) -> pd.DataFrame:
    """Return a row for each iteration and rank of each measured launch whose ``samples/*.npz`` is there.

    ``UserError`` if one is damaged, or none is there.
    """
    launches, sources = _launches(runs)
    pieces = [
        _of_ranks(found, run.path / samples_name(record)).assign(at=at)
        for at, (run, record) in enumerate(sources)
        if record and record.status == "ok" and (found := load_rank_samples(run, record))
    ]
    if not pieces:
        looked = ", ".join(dict.fromkeys(str(run.path / "samples") for run, _ in sources))
        raise UserError(f"no samples of ranks (*.npz) are in {looked}: a run's samples/ must have come with it")
    frame = pd.concat(pieces, ignore_index=True)
    return pd.concat([_repeat(_identity(launches), frame.pop("at").to_numpy()), frame], axis=1)


def _of_ranks(samples: Mapping[str, Any], file: Path) -> pd.DataFrame:
    absent = {"arrival_ns", "exit_ns", "duration_ns", "issue_ns", "steps_per_sample"} - samples.keys()
    if absent:
        raise UserError(f"{file} holds no samples that can be read: it has no {listed(sorted(absent))}")
    num_ranks, num_iterations = samples["duration_ns"].shape
    seconds = {f"{name}_seconds": samples[f"{name}_ns"].ravel() / 1e9 for name in ("arrival", "exit", "duration")}
    issued = samples["issue_ns"].ravel() / 1e9
    return pd.DataFrame(
        {
            "iteration": np.tile(np.arange(num_iterations), num_ranks),
            "rank": np.repeat(samples["ranks"], num_iterations),
            **seconds,
            "issue_seconds": np.where(issued > 0, issued, np.nan),  # 0 where issuing and waiting were not apart
            "steps_per_sample": int(samples["steps_per_sample"]),
        }
    )


def _launches(runs: Iterable[tuple[Run, Point | None]]) -> tuple[pd.DataFrame, list[tuple[Run, Record | None]]]:
    """Return a row for each launch of each case, what all rows of it share, and where it comes from."""
    told, sources = [], []
    for run, point in runs:
        for case, launch, record in _records(run):
            told.append((case.whole, {**_of_run(run, point), **_of_launch(run, case, launch, record)}))
            sources.append((run, record))
    columns = {name: pd.Series([row.get(name) for _, row in told], dtype=kind) for name, kind in _RUN.items()}
    for name in dict.fromkeys(name for params, _ in told for name in params):
        column = pd.Series(pd.array([params.get(name) for params, _ in told]))
        columns[f"param_{name}"] = column.astype("float64") if column.dtype == "Float64" else column
    columns |= {name: pd.Series([row.get(name) for _, row in told], dtype=kind) for name, kind in _LAUNCH.items()}
    return pd.DataFrame(columns), sources


def _records(run: Run) -> Iterator[tuple[Case, int, Record | None]]:
    """Yield each launch of a case with its last record; then what the plan names and no record does."""
    records = {(record.case.id, record.launch): record for record in run.records}
    yield from ((record.case, record.launch, record) for record in records.values())
    plan = run.info.plan
    planned = [(case, launch) for launch in range(plan.launches) for case in plan.cases]
    for case, launch in [*((one.case, 0) for one in plan.skipped), *planned]:
        if (case.id, launch) not in records:
            yield case, launch, None


def _of_run(run: Run, point: Point | None) -> dict[str, Any]:
    info = run.info
    told = {"run": info.id, "started": info.started, "host": info.host, "parbench": info.parbench}
    return {**told, "preset": info.plan.preset, "point": point.name if point else None}


def _of_launch(run: Run, case: Case, launch: int, record: Record | None) -> dict[str, Any]:
    told = {"case": case.id, "name": case.name, "launch": launch}
    if record is None:
        reason = next((one.reason for one in run.info.plan.skipped if one.case.id == case.id), None)
        return {**told, "status": "skipped" if reason else "missing", "reason": reason or "no record"}
    noise, arrival, world = record.noise, record.arrival, record.world
    return {
        **told,
        "status": record.status,
        "reason": record.reason or None,
        "stop": record.stop,
        "iterations": len(record.samples.values) or None,
        "check_passed": record.check.passed,
        "check_wrong": record.check.wrong,
        "world_size": world.size,
        "nodes": world.nodes,
        "backend": world.backend,
        "device": world.device,
        "noise": noise.grade if noise else None,
        "spread": noise.spread if noise else None,
        "steady": noise.steady if noise else None,
        "late_rank": arrival.late_rank if arrival else None,
        "late_share": arrival.share if arrival else None,
        "injected": record.injected or None,
        "notes": "; ".join(record.notes) or None,
        "record_started": record.started,
        "record_seconds": record.seconds,
    }


def _identity(launches: pd.DataFrame) -> pd.DataFrame:
    return launches[[name for name in launches if name in _OF_SAMPLES or str(name).startswith("param_")]]


def _repeat(launches: pd.DataFrame, at: "list[int] | np.ndarray[Any, np.dtype[np.int64]]") -> pd.DataFrame:
    return launches.take(at).reset_index(drop=True)
