"""The ledger of a sweep: what became of each point, one append-only file for each writer, read together.

Every file has a single writer, so that no lock is needed: Lustre may be mounted without flock.
"""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from parbench.bench.files import decode_json, read_lines
from parbench.bench.results.runs import utc_now
from parbench.bench.text import UserError, reading, writing

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
        return self.last.state

    @property
    def is_final(self) -> bool:
        return self.last.state in FINAL


class Ledger:
    """Appends lines to this process's own file of a sweep's ledger, each on disk before the call returns."""

    def __init__(self, sweep: Path, writer: str, job: str) -> None:
        self._job, folder = job, sweep / FOLDER
        with writing(folder, "takes no ledger"):
            folder.mkdir(exist_ok=True)
            file = folder / f"{writer}-{secrets.token_hex(3)}.jsonl"  # a process number may come again
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            names = os.open(folder, os.O_RDONLY)
            os.fsync(names)
            os.close(names)

    def write(
        self, point: str, state: State, run: str = "", reason: str = "", nodes: Sequence[str] = (), seconds: float = 0
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def read_ledger(sweep: Path) -> tuple[Line, ...]:
    """Return the lines of all writers in the order of their times; a last line cut short by a kill is passed over."""
    lines: list[Line] = []
    for file in sorted((sweep / FOLDER).glob("*.jsonl")):
        with reading(file):
            lines += [decode_json(line, Line) for _, line in read_lines(file)]
    return tuple(sorted(lines, key=lambda line: line.time))


def standings(lines: Iterable[Line]) -> Mapping[str, Standing]:
    """Return where each point stands that the ledger tells of.

    ``done`` goes before ``failed``, and both before whatever has a later time: hosts' clocks may differ.
    """
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.point, []).append(line)
    weights = {"done": 2, "failed": 1}
    return {
        point: Standing(
            last=max(reversed(told), key=lambda line: weights.get(line.state, 0)),
            seconds=sum(line.seconds for line in told),
            lost_runs=frozenset(line.run for line in told if line.state == "lost-node" and line.run),
        )
        for point, told in found.items()
    }
