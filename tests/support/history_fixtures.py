"""Runs for a history: the same cases day after day, as folders and as entries."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, encode
from parbench.reports.history.database import History
from parbench.reports.history.entries import About, Entry, read_entry
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records

DAILY_NOISE = (1.0, 1.004, 0.997, 1.002, 0.996)


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
    (path / "records.jsonl").write_bytes(b"".join(map(encode, records)))
    return path


def make_entry(
    folder: Path, i: int, factor: float = 1.0, branch: str = "main", commit: str = "", **run: Any
) -> Entry:
    path = write_history_run(folder, i, factor, **run)
    return read_entry(path, About(branch=branch, commit=commit))


def fill_history(
    history: History, folder: Path, factors: Iterable[float], first: int = 0, **entry: Any
) -> None:
    for i, factor in enumerate(factors, start=first):
        history.add(make_entry(folder, i, factor, **entry))
