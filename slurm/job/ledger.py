"""The ledger of a sweep: what became of each point, one append-only file for each writer, read together.

Every file has a single writer, so that no lock is needed: Lustre may be mounted without flock.
"""

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from bench.results.runs import utc_now
from bench.text import UserError, reading, writing

State = Literal["started", "done", "failed", "interrupted", "postponed", "lost-node"]
FINAL: tuple[State, ...] = ("done", "failed")
"""States that are not tried again: measured, or ended badly for a reason of its own."""

FOLDER = "ledger"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a point; ``run`` is its run's folder relative to the sweep's, ``nodes`` the hosts it used."""

    time: str
    point: str
    state: State
    job: str
    run: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a point stands: the word that counts, the seconds of all its attempts, and the runs a dead node spoilt."""

    last: Line
    seconds: float
    lost_runs: frozenset[str] = frozenset()

    @property
    def state(self) -> State:
        """The state that counts."""
        return self.last.state

    @property
    def is_final(self) -> bool:
        """Whether the point is not tried again."""
        return self.last.state in FINAL


class Ledger:
    """Appends lines to this process's own file of a sweep's ledger, each on disk before the call returns."""

    def __init__(self, sweep: Path, writer: str, job: str) -> None:
        self._job = job
        name = f"{writer}-{secrets.token_hex(3)}.jsonl"  # a process number may come again
        try:
            (sweep / FOLDER).mkdir(exist_ok=True)
            self._descriptor = os.open(sweep / FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            _sync_folder(sweep / FOLDER)
        except OSError as error:
            raise UserError(f"{sweep / FOLDER} takes no ledger: {error.strerror}") from error

    def write(
        self,
        point: str,
        state: State,
        *,
        run: str = "",
        reason: str = "",
        nodes: Iterable[str] = (),
        seconds: float = 0.0,
    ) -> Line:
        """Append a line and return it; ``UserError`` if the disk does not take it whole."""
        line = Line(
            time=utc_now(),
            point=point,
            state=state,
            job=self._job,
            run=run,
            reason=reason,
            nodes=tuple(nodes),
            seconds=round(seconds, 3),
        )
        content = msgspec.json.encode(line) + b"\n"
        with writing("the ledger", "takes no more lines"):
            taken = os.write(self._descriptor, content)
            os.fsync(self._descriptor)
        if taken != len(content):
            raise UserError(f"the ledger took {taken} of {len(content)} bytes: the disk is full")
        return line

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_ledger(sweep: Path) -> tuple[Line, ...]:
    """Return the lines of all writers in the order of their times; a last line cut short by a kill is passed over."""
    lines = [line for file in sorted((sweep / FOLDER).glob("*.jsonl")) for line in _read(file)]
    return tuple(sorted(lines, key=lambda line: line.time))


def _read(file: Path) -> list[Line]:
    with reading(file):
        *whole, _ = file.read_bytes().split(b"\n")
        return [msgspec.json.decode(line, type=Line) for line in whole]


def standings(lines: Iterable[Line]) -> Mapping[str, Standing]:
    """Return where each point stands that the ledger tells of.

    ``done`` goes before ``failed``, and both before whatever has a later time: hosts' clocks may differ.
    """
    found: dict[str, Standing] = {}
    for line in lines:
        before = found.get(line.point)
        lost = {line.run} if line.state == "lost-node" and line.run else set()
        if before is None:
            found[line.point] = Standing(last=line, seconds=line.seconds, lost_runs=frozenset(lost))
        else:
            found[line.point] = Standing(
                last=line if _weight(line) >= _weight(before.last) else before.last,
                seconds=before.seconds + line.seconds,
                lost_runs=before.lost_runs | lost,
            )
    return found


def _weight(line: Line) -> int:
    return {"done": 2, "failed": 1}.get(line.state, 0)
