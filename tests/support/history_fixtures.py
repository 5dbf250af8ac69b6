"""Runs for a history: the same cases night after night, as folders and as entries."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, encode
from parbench.reports.history.database import History
from parbench.reports.history.entries import About, Entry, read_entry
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records
from tests.support.reports_fixtures import ENVIRONMENT

WOBBLE = (1.0, 1.004, 0.997, 1.002, 0.996)


def make_daily_records(
    i: int, factor: float = 1.0, cases: Sequence[Case] = (CASE, OTHER_CASE)
) -> list[Record]:
    """Return the records of night ``i``, which differs a little from the others."""
    return [record for case in cases for record in make_repetitions(case, factor * WOBBLE[i % 5])]


def write_history_run(
    folder: Path,
    i: int,
    factor: float = 1.0,
    *,
    records: Iterable[Record] | None = None,
    environment: dict[str, Any] | None = None,
    preset: str = "node",
) -> Path:
    found = make_daily_records(i, factor) if records is None else list(records)
    info = run_from_records(found, environment or ENVIRONMENT).info
    plan = msgspec.structs.replace(info.plan, preset=preset)
    started = f"2026-{1 + i // 28:02}-{1 + i % 28:02}T00:00:00.000Z"
    info = msgspec.structs.replace(info, id=f"run-{i:03}", started=started, plan=plan)
    path = folder / info.id
    path.mkdir(parents=True)
    (path / "run.json").write_bytes(msgspec.json.encode(info) + b"\n")
    (path / "records.jsonl").write_bytes(b"".join(map(encode, found)))
    return path


def make_entry(
    folder: Path, i: int, factor: float = 1.0, branch: str = "main", commit: str = "", **more: Any
) -> Entry:
    return read_entry(
        write_history_run(folder, i, factor, **more), About(branch=branch, commit=commit)
    )


def fill_history(
    history: History, folder: Path, factors: Iterable[float], first: int = 0, **more: Any
) -> None:
    for i, factor in enumerate(factors, start=first):
        history.add(make_entry(folder, i, factor, **more))
