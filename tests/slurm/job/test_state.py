"""The saved state of each point, and the exit code that follows from the states."""

from pathlib import Path

import pytest

from parbench.slurm.job.state import FOLDER, SavedState, exit_code, read_states, write_state
from tests.support.refusals import usage_error
from tests.support.sweeps import make_folder, make_point, make_sweep

POINTS = (make_point(0), make_point(1))
DONE = SavedState(
    state="done", job="7", time="t", run="runs/a", nodes=("n1", "n2"), seconds=1.5
)
FAILED = SavedState(state="failed", job="7", time="t")
WRONG = SavedState(state="failed", job="7", time="t", has_wrong_results=True)


def test_write_state_replaces_the_previous_state(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(POINTS))
    assert read_states(folder, POINTS) == {}
    point_id = POINTS[1].id
    write_state(folder, point_id, FAILED)
    write_state(folder, point_id, DONE)
    assert read_states(folder, POINTS) == {point_id: DONE}


def test_read_states_refuses_a_damaged_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(POINTS))
    name = f"{POINTS[0].id}.json"
    (folder / FOLDER / name).write_text('{"state": "lost"}')
    assert name in usage_error(read_states, folder, POINTS)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(DONE, DONE, 0), (DONE, None, 4), (DONE, FAILED, 4), (FAILED, WRONG, 1), (WRONG, None, 1)],
)
def test_exit_code_puts_wrong_results_first(
    first: SavedState, second: SavedState | None, code: int
) -> None:
    states = {POINTS[0].id: first}
    if second is not None:
        states[POINTS[1].id] = second
    assert exit_code(states, POINTS) == code
