"""The saved state of each point of a sweep, ``states/<point>.json``.

Only the job that measures a point writes its file: an array's task has its own point, and ``resume`` submits nothing
while a job of the sweep lives. So no lock is needed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_read_errors, decode_json, read_file, write_output
from parbench.slurm.sweep.folder import Point

State = Literal["started", "done", "failed", "interrupted", "postponed", "lost-node"]
FINAL: tuple[State, ...] = ("done", "failed")
"""States that are not tried again: measured, or ended badly for a reason of the point's own."""

FOLDER = "states"


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a point so far."""

    state: State
    job: str
    time: str  # UTC, when the state changed
    run: str = ""  # the run folder, relative to the folder of the sweep
    reason: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0  # of all attempts
    has_wrong_results: bool = False
    lost_runs: tuple[str, ...] = ()  # runs in which a node died; they are not resumed

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


def write_state(folder: Path, point_id: str, state: SavedState) -> None:
    """Save a state; it is on disk before this returns. UserError if the disk does not take it."""
    write_output(folder / FOLDER / f"{point_id}.json", msgspec.json.encode(state))


def read_states(folder: Path, points: Iterable[Point]) -> dict[str, SavedState]:
    """Read the states by point id; a point that was never begun has none."""
    states = {}
    for point in points:
        file = folder / FOLDER / f"{point.id}.json"
        with convert_read_errors(file):
            if file.exists():
                states[point.id] = decode_json(read_file(file), SavedState)
    return states


def exit_code(states: Mapping[str, SavedState], points: Iterable[Point]) -> int:
    """Return the exit code of a sweep: bad for a wrong result, did not run for a point that is not done."""
    codes = []
    for point in points:
        state = states.get(point.id)
        if state is not None and state.has_wrong_results:
            codes.append(ExitCode.BAD)
        if state is None or state.state != "done":
            codes.append(ExitCode.DID_NOT_RUN)
    return combine_exit_codes(codes)
