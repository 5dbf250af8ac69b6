"""Runs for a history: the same cases day after day, as folders and as entries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, encode_record
from parbench.bench.results.runs import load_run
from parbench.reports.compare.environment import collect_points
from parbench.reports.history.check import HistoryCheck, check_candidate, check_run
from parbench.reports.history.database import History
from parbench.reports.history.runs import make_history_run, select_runs
from parbench.reports.run_data import RunData
from tests.support.reports.compare_fixtures import (
    CASE,
    OTHER_CASE,
    make_repetitions,
    run_from_records,
)

DAILY_NOISE = (1.0, 1.004, 0.997, 1.002, 0.996)
MIN_EFFECT = 0.03


def make_daily_records(
    i: int, factor: float = 1.0, cases: Sequence[Case] = (CASE, OTHER_CASE)
) -> list[Record]:
    """Return the records of day ``i``, which differ a little from those of other days."""
    factor *= DAILY_NOISE[i % 5]
    return [record for case in cases for record in make_repetitions(case, factor)]


def write_history_run(
    folder: Path,
    i: int,
    factor: float = 1.0,
    *,
    records: Iterable[Record] | None = None,
    environment: dict[str, Any] | None = None,
    preset: str = "node",
) -> Path:
    """Write the run of day ``i`` to ``folder/run-00i`` and return that path."""
    records = make_daily_records(i, factor) if records is None else list(records)
    info = run_from_records(records, environment).info
    plan = msgspec.structs.replace(info.plan, preset=preset)
    started = f"2026-{1 + i // 28:02}-{1 + i % 28:02}T00:00:00.000Z"
    info = msgspec.structs.replace(info, id=f"run-{i:03}", started=started, plan=plan)
    path = folder / info.id
    path.mkdir(parents=True)
    (path / "run.json").write_bytes(msgspec.json.encode(info) + b"\n")
    (path / "records.jsonl").write_bytes(b"".join(map(encode_record, records)))
    return path


def add_run(
    history: History,
    folder: Path,
    i: int,
    factor: float = 1.0,
    branch: str = "main",
    commit: str = "",
    **fields: Any,
) -> str:
    """Write the run of day ``i``, add it, and return the outcome."""
    run = load_run(write_history_run(folder, i, factor, **fields))
    return history.add(make_history_run(run, branch, commit), collect_points(run))


def fill_history(
    history: History, folder: Path, factors: Iterable[float], first: int = 0, **entry: Any
) -> None:
    for i, factor in enumerate(factors, start=first):
        add_run(history, folder, i, factor, **entry)


@dataclass(frozen=True)
class DailyRuns:
    """A history to which a run is added each day, with the folder of its runs."""

    history: History
    folder: Path
    file: Path

    @property
    def num_runs(self) -> int:
        return len(self.history.list_runs())

    def add(self, count: int, factor: float = 1.0, **entry: Any) -> None:
        """Add the next runs, which are slower by a factor."""
        factors = [factor] * count
        fill_history(self.history, self.folder, factors, first=self.num_runs, **entry)

    def add_records(self, records: list[Record], **entry: Any) -> HistoryCheck:
        """Add a run of these records, and check it."""
        add_run(self.history, self.folder, self.num_runs, records=records, **entry)
        return self.check()

    def check(self, run_id: str = "") -> HistoryCheck:
        """Check a run, or the newest one of the branch main."""
        run = select_runs(self.history.list_runs(), run_id or "main")[0]
        points = list(self.history.read_points(run).values())
        return check_run(self.history, run, points, MIN_EFFECT)

    def annotate(self, run_id: str, series: str) -> None:
        """Declare the changes of some series in a run intended."""
        self.history.annotate(select_runs(self.history.list_runs(), run_id)[0], series, "note")

    def check_candidate(self, factor: float = 1.0, **run: Any) -> HistoryCheck:
        """Compare a run that is not part of the history with the branch main."""
        path = write_history_run(self.folder / f"new-{factor}", 99, factor, **run)
        return check_candidate(self.file, RunData.load(path), "main", MIN_EFFECT)
