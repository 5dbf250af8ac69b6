"""What a history keeps of a run: its points, and the bytes of its two files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parbench.bench.files import decode_json, read_file
from parbench.bench.limits import Name
from parbench.bench.results.runs import RunInfo, load_run, whole
from parbench.bench.text import reading
from parbench.reports.regression.environment import Point, points_of

MOST_RECORDS_BYTES = 256 << 20
ABOUT = "history.json"  # in an exported run's folder: its branch and commit


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does not know of itself: the branch that was measured, and the commit, empty where unknown."""

    branch: Name
    commit: Name = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run with its points and the bytes of its two files; ``meant`` names what of ``about`` moves a known run."""

    run: RunInfo
    about: About
    meant: frozenset[str] = frozenset()
    points: tuple[Point, ...]
    info_json: bytes
    records_jsonl: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.info_json + b"\0" + self.records_jsonl).hexdigest()


def read_entry(path: Path, about: About, meant: frozenset[str] = frozenset()) -> Entry:
    """Return a run's folder as an entry; the folder's own ``history.json``, where it has one, says the branch."""
    run, file = whole(load_run(path)), path / ABOUT
    with reading(file):
        own = decode_json(read_file(file), About) if file.exists() else None
        records = read_file(path / "records.jsonl", MOST_RECORDS_BYTES)
    return Entry(
        run=run.info,
        about=own or about,
        meant=frozenset() if own else meant,
        points=points_of(run),
        info_json=read_file(path / "run.json"),
        records_jsonl=records[: records.rfind(b"\n") + 1],  # a line cut short is no record
    )
