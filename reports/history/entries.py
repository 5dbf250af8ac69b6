"""A run as the history keeps it: its metrics, and the path of its folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.files import convert_read_errors
from parbench.bench.results.runs import RunInfo, load_run, require_complete
from parbench.reports.compare.environment import SeriesPoint, collect_points


@dataclass(frozen=True, kw_only=True)
class About:
    """The branch and the commit that a run measured; the commit is empty where unknown."""

    branch: str
    commit: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run with its points; ``meant`` names the fields of ``about`` that change a run already in the history.

    ``digest`` is that of the run's records, by which a run that has grown is recognized.
    """

    run: RunInfo
    path: Path
    digest: str
    about: About
    meant: frozenset[str] = frozenset()
    points: tuple[SeriesPoint, ...]


def read_entry(path: Path, about: About, meant: frozenset[str] = frozenset()) -> Entry:
    """Return the entry of a run's folder; ``UserError`` if a line of it cannot be read."""
    run = require_complete(load_run(path))
    with convert_read_errors(path):
        records = (path / "records.jsonl").read_bytes()
    complete = records[: records.rfind(b"\n") + 1]  # a last line that was cut short is no record
    return Entry(
        run=run.info,
        path=path.resolve(),
        digest=hashlib.sha256(complete).hexdigest(),
        about=about,
        meant=meant,
        points=collect_points(run),
    )
