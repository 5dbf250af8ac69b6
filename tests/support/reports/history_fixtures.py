"""Runs for a history: the same cases day after day, as folders and as entries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, encode_record
from parbench.reports.history.check import (
    HistoryCheck,
    check_candidate,
    check_stored_run,
    find_newest_run,
)
from parbench.reports.history.database import History, RunEntry
from parbench.reports.history.levels import LevelRule
from parbench.reports.history.runs import read_entry
from parbench.reports.run_data import RunData
from tests.support.reports.compare_fixtures import (
    CASE,
    OTHER_CASE,
    make_repetitions,
    run_from_records,
)

DAILY_NOISE = (1.0, 1.004, 0.997, 1.002, 0.996)
RULE = LevelRule()


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


def make_entry(
    folder: Path,
    i: int,
    factor: float = 1.0,
    branch: str = "main",
    commit: str = "",
    **run: Any,
) -> RunEntry:
    path = write_history_run(folder, i, factor, **run)
    return read_entry(path, branch, commit)


def fill_history(
    history: History, folder: Path, factors: Iterable[float], first: int = 0, **entry: Any
) -> None:
    for i, factor in enumerate(factors, start=first):
        history.add(make_entry(folder, i, factor, **entry))


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
        self.history.add(make_entry(self.folder, self.num_runs, records=records, **entry))
        return self.check()

    def check(self, run_id: str = "", rule: LevelRule = RULE) -> HistoryCheck:
        """Check a run, or the newest one of the branch main."""
        if run_id:
            run = self.history.find_run(run_id)
        else:
            run = find_newest_run(self.history, "main")
        return check_stored_run(self.history, run, rule)

    def check_candidate(self, factor: float = 1.0, **run: Any) -> HistoryCheck:
        """Compare a run that is not part of the history with the branch main."""
        path = write_history_run(self.folder / f"new-{factor}", 99, factor, **run)
        return check_candidate(self.file, RunData.load(path), "main", RULE)
