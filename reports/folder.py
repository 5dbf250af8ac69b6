"""What the state of a run's folder itself says, and files put into it: whole, or not at all."""

import fcntl
import os
from pathlib import Path

from bench.results.runs import Run
from bench.text import writing


def warnings_of(run: Run) -> tuple[str, ...]:
    """Return what a reader must know of how the records were read, each a sentence."""
    if not _is_cut_short(run.path / "records.jsonl"):
        return ()
    told = "is being written, or was cut short by a kill, and does not count"
    return (f"The last line of records.jsonl {told}; parbench run --resume {run.path} measures its case again.",)


def is_written(path: Path) -> bool:
    """Say whether another process holds the run's lock, as ``parbench run`` does until it ends."""
    try:
        with (path / "records.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can tell, so nobody is waited for
        return False
    return False


def write_whole(target: Path, content: bytes) -> None:
    """Write a file whole or not at all; ``UserError`` if it cannot be written."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    with writing(target):
        try:
            fresh.write_bytes(content)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)


def _is_cut_short(records: Path) -> bool:
    try:
        with records.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
