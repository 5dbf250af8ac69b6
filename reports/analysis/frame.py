"""The rows of reports in groups, and the records of runs as tidy pandas frames, a row a metric or an iteration.

Parameters have columns of their own, ``param_NAME``: ``method``, ``compute`` and ``skew`` are parameters and columns or
metrics alike, and ``frame.shape`` and ``frame.mode`` are pandas' own. What is unknown is NA, never 0.
pandas is imported where a frame is made: commands that only show runs make none.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.samples import load_rank_samples, make_samples_path
from parbench.bench.text import UserError, format_list

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
K = TypeVar("K")
Runs = Iterable[tuple[Run, str | None]]
"""Runs, each with the name of the sweep's point that it measured."""


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key of each, in the order of the first of each."""
    groups = defaultdict[K, list[T]](list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def group_rows(
    items: Iterable[T],
    case_of: Callable[[T], Case],
    *,
    without: Iterable[str] = (),
    by: Callable[[T], tuple[object, ...]] = lambda item: (),
) -> list[list[T]]:
    """Return items in groups, in the order of the first of each.

    Those of a group are alike in the case's name, in its parameters but those ``without``, and in what ``by`` says.
    """
    left_out = set(without)

    def key(item: T) -> object:
        case = case_of(item)
        return (
            case.name,
            frozenset(one for one in case.params.items() if one[0] not in left_out),
            by(item),
        )

    return [*group_by(items, key).values()]


def pivot_rows(groups: Iterable[Sequence[T]], at: Callable[[T], K]) -> list[dict[K, list[T]]]:
    """Return the items of each group by their place ``at``, of the groups that have items in two places or more."""
    return [places for group in groups if len(places := group_by(group, at)) > 1]


_TEXT, _WHOLE, _NUMBER, _TIME = "string", "Int64", "float64", "datetime64[ns, UTC]"
_OF_RUN = dict.fromkeys(
    ("run", "started", "host", "parbench", "preset", "point", "case", "name"), _TEXT
)
_OF_RUN["started"] = _TIME
_OF_REPETITION = {"repetition": "int64", "status": _TEXT, "reason": _TEXT}
_OF_RECORD: dict[str, tuple[str, Callable[[Record], object]]] = {
    "stop": (_TEXT, lambda one: one.stop),
    "iterations": (_WHOLE, lambda one: len(one.samples.values) or None),
    "check_passed": ("boolean", lambda one: one.check.passed),
    "check_wrong": (_WHOLE, lambda one: one.check.wrong),
    "world_size": (_WHOLE, lambda one: one.world.size),
    "nodes": (_WHOLE, lambda one: one.world.nodes),
    "backend": (_TEXT, lambda one: one.world.backend),
    "device": (_TEXT, lambda one: one.world.device),
    "noise": (_TEXT, lambda one: one.noise and one.noise.grade),
    "spread": (_NUMBER, lambda one: one.noise and one.noise.spread),
    "effective": (_NUMBER, lambda one: one.noise and one.noise.effective),
    "steady": (_TEXT, lambda one: one.noise and one.noise.steady),
    "late_rank": (_WHOLE, lambda one: one.arrival and one.arrival.late_rank),
    "late_share": (_NUMBER, lambda one: one.arrival and one.arrival.share),
    "injected": (_TEXT, lambda one: one.injected or None),
    "emulation": (_TEXT, lambda one: one.emulation or None),
    "notes": (_TEXT, lambda one: "; ".join(one.notes) or None),
    "record_started": (_TIME, lambda one: one.started),
    "record_seconds": (_NUMBER, lambda one: one.seconds),
}
_OF_METRIC = {
    "value": _NUMBER,
    "low": _NUMBER,
    "high": _NUMBER,
    "unit": _TEXT,
    "better": _TEXT,
    "method": _TEXT,
}
_OF_SAMPLES = "^(run|point|case|name|repetition|world_size|param_.*)$"


def metrics_frame(runs: Runs) -> "pd.DataFrame":
    """Return a row for each metric of each repetition of each case, and one without where nothing was measured."""
    repetitions, measured = _repetitions(runs)
    rows: list[tuple[object, ...]] = []
    for at, (_, record) in enumerate(measured):
        told = record.metrics.items() if record else ()
        rows += [
            (at, name, *(getattr(metric, field) for field in _OF_METRIC)) for name, metric in told
        ]
        rows += [] if told else [(at, *[None] * (1 + len(_OF_METRIC)))]
    return _joined(repetitions, _frame(rows, {"at": "int64", "metric": _TEXT, **_OF_METRIC}))


def samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a row for each iteration of each measured repetition; ``seconds`` is one step's, the slowest rank's."""
    repetitions, measured = _repetitions(runs)
    values = [record.samples.values if record else [] for _, record in measured]
    rows = [(at, i, seconds) for at, of in enumerate(values) for i, seconds in enumerate(of)]
    samples = _frame(rows, {"at": "int64", "iteration": "int64", "seconds": _NUMBER})
    return _joined(repetitions.filter(regex=_OF_SAMPLES), samples)


def rank_samples_frame(runs: Runs) -> "pd.DataFrame":
    """Return a row for each iteration and rank of each repetition with samples; ``UserError`` if damaged, or none."""
    import pandas as pd

    repetitions, measured = _repetitions(runs)
    pieces = [
        _of_ranks(found, run.path / make_samples_path(record)).assign(at=at)
        for at, (run, record) in enumerate(measured)
        if record and (found := load_rank_samples(run, record))
    ]
    if not pieces:
        looked = ", ".join(dict.fromkeys(str(run.path / "samples") for run, _ in measured))
        raise UserError(
            f"no samples of ranks (*.npz) are in {looked}: a run's samples/ must have come with it"
        )
    return _joined(repetitions.filter(regex=_OF_SAMPLES), pd.concat(pieces))


def _of_ranks(samples: Mapping[str, Any], file: Path) -> "pd.DataFrame":
    import pandas as pd

    absent = {
        "arrival_ns",
        "exit_ns",
        "duration_ns",
        "issue_ns",
        "steps_per_sample",
    } - samples.keys()
    if absent:
        raise UserError(
            f"{file} holds no samples that can be read: it has no {format_list(sorted(absent))}"
        )
    num_ranks, num_iterations = samples["duration_ns"].shape
    issued = samples["issue_ns"].ravel() / 1e9
    return pd.DataFrame(
        {
            "iteration": np.tile(np.arange(num_iterations), num_ranks),
            "rank": np.repeat(samples["ranks"], num_iterations),
            **{
                f"{name}_seconds": samples[f"{name}_ns"].ravel() / 1e9
                for name in ("arrival", "exit", "duration")
            },
            "issue_seconds": np.where(
                issued > 0, issued, np.nan
            ),  # 0 where issuing and waiting were not apart
            "steps_per_sample": int(samples["steps_per_sample"]),
        }
    )


def _repetitions(runs: Runs) -> "tuple[pd.DataFrame, list[tuple[Run, Record | None]]]":
    """Return a row for each repetition of each case, what all rows of it share, and the record where it was
    measured."""
    import pandas as pd

    rows, params, measured = [], [], []
    for run, point in runs:
        info, plan = run.info, run.info.plan
        skipped = {one.case.id: one.reason for one in plan.skipped}
        records = {(one.case.id, one.repetition): one for one in run.records}
        cases = {at: one.case for at, one in records.items()}
        planned = [
            (case, repetition) for repetition in range(plan.repetitions) for case in plan.cases
        ]
        for case, repetition in [*((one.case, 0) for one in plan.skipped), *planned]:
            cases.setdefault((case.id, repetition), case)
        for (case_id, repetition), case in cases.items():
            record = records.get((case_id, repetition))
            left_out = (
                ("skipped", skipped[case_id]) if case_id in skipped else ("missing", "no record")
            )
            status, reason = (record.status, record.reason) if record else left_out
            of_run = (info.id, info.started, info.host, info.parbench, plan.preset, point)
            of_record = (tell(record) if record else None for _, tell in _OF_RECORD.values())
            rows.append(
                (*of_run, case_id, case.name, repetition, status, reason or None, *of_record)
            )
            params.append(case.all_params)
            measured.append((run, record if status == "ok" else None))
    frame = _frame(
        rows, _OF_RUN | _OF_REPETITION | {name: kind for name, (kind, _) in _OF_RECORD.items()}
    )
    for name in reversed(dict.fromkeys(name for of in params for name in of)):
        column = pd.Series(pd.array([of.get(name) for of in params]))
        column = column.astype("float64") if column.dtype == "Float64" else column
        frame.insert(len(_OF_RUN), f"param_{name}", column)
    return frame, measured


def _frame(rows: Sequence[tuple[object, ...]], kinds: Mapping[str, str]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(rows, columns=list(kinds), dtype=object).astype(dict(kinds))


def _joined(repetitions: "pd.DataFrame", told: "pd.DataFrame") -> "pd.DataFrame":
    return repetitions.join(told.set_index("at"), how="inner").reset_index(drop=True)
