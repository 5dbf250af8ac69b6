"""The ledger: a file for each writer, whole lines only, and a point's standing that no later word undoes."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from bench.errors import UserError
from slurm.ledger import FOLDER, Ledger, Line, State, read_ledger, standings


def line(state: State, second: int = 0, point: str = "p", **more: object) -> Line:
    return Line(time=f"2026-01-01T00:00:{second:02}.000Z", point=point, state=state, job="7", **more)  # type: ignore[arg-type]


def test_lines_are_read_back_as_written(tmp_path: Path) -> None:
    with Ledger(tmp_path, "7-r0-n1-42", "7") as ledger:
        written = (
            ledger.write("p", "started", nodes=("n1", "n2")),
            ledger.write("p", "failed", run="runs/p/a", reason="hang: of n2\nand n3", nodes=["n1"], seconds=1.23456),
        )
    assert read_ledger(tmp_path) == written
    assert written[1].seconds == 1.235
    assert written[0].job == "7"


def test_each_writer_has_a_file_of_its_own_even_with_the_same_name(tmp_path: Path) -> None:
    with Ledger(tmp_path, "same", "7") as one, Ledger(tmp_path, "same", "7") as other:
        one.write("p", "started")
        other.write("q", "started")
        one.write("p", "done")
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) == 2
    assert all(file.name.startswith("same-") for file in files)
    assert sorted((line.point, line.state) for line in read_ledger(tmp_path)) == [
        ("p", "done"),
        ("p", "started"),
        ("q", "started"),
    ]


def test_a_line_is_on_disk_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(tmp_path, "w", "7") as ledger:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        ledger.write("p", "started")
        assert len(synced) == 1
        assert len(read_ledger(tmp_path)) == 1


def test_a_killed_writer_loses_at_most_the_line_in_flight(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom slurm.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), 'w', '7')\nledger.write('p', 'started')\nledger.write('p', 'done')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, cwd=Path(__file__).parent.parent)
    assert [line.state for line in read_ledger(tmp_path)] == ["started", "done"]
    (file,) = (tmp_path / FOLDER).iterdir()
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        file.write_bytes(whole[:length])
        assert [line.state for line in read_ledger(tmp_path)] == ["started"]


def test_lines_of_all_writers_are_merged_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(f"2026-01-01T00:00:0{second}.000Z" for second in range(4))
    monkeypatch.setattr("slurm.ledger.utc_now", lambda: next(times))
    with Ledger(tmp_path, "b", "7") as one, Ledger(tmp_path, "a", "8") as other:
        for number, ledger in enumerate((one, other, one, other)):
            ledger.write(f"p{number}", "started")
    assert [(line.point, line.job) for line in read_ledger(tmp_path)] == [
        ("p0", "7"),
        ("p1", "8"),
        ("p2", "7"),
        ("p3", "8"),
    ]


def test_no_ledger_yet_is_an_empty_one(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == ()


def test_a_foreign_line_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "x.jsonl").write_text('{"time": 3}\n')
    with pytest.raises(UserError, match=r"x\.jsonl is not what parbench wrote: .*time"):
        read_ledger(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(UserError, match="takes no ledger: File exists"):
        Ledger(tmp_path, "w", "7")


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda descriptor, content: 3, "took 3 of"),
        (lambda descriptor, content: os.write(-1, content), "takes no more lines: Bad file"),
    ],
)
def test_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], int], told: str
) -> None:
    real = os.write
    with Ledger(tmp_path, "w", "7") as ledger:
        monkeypatch.setattr(
            os, "write", lambda number, content: write(number, content) if number >= 0 else real(-1, b"")
        )
        with pytest.raises(UserError, match=told):
            ledger.write("p", "started")


def test_the_last_word_counts_until_one_is_final() -> None:
    words: list[State] = ["postponed", "started", "interrupted", "started"]
    lines = [line(state, second) for second, state in enumerate(words)]
    for upto in range(1, 5):
        found = standings(lines[:upto])["p"]
        assert found.state == words[upto - 1]
        assert not found.is_final


def test_done_stays_whatever_order_clocks_give() -> None:
    """Two hosts' clocks may differ: the end of one job may bear a later time than the success of the next."""
    for order in permutations(["started", "interrupted", "failed", "done"]):
        found = standings(line(state, second) for second, state in enumerate(order))  # type: ignore[arg-type]
        assert found["p"].state == "done"
        assert found["p"].is_final


def test_failed_is_final_and_lost_is_not() -> None:
    assert standings([line("failed"), line("started", 1)])["p"].state == "failed"
    lost = standings([line("started"), line("lost-node", 1, run="runs/p/a"), line("postponed", 2)])["p"]
    assert not lost.is_final
    assert lost.state == "postponed"


def test_runs_that_a_dead_node_spoilt_are_remembered() -> None:
    lines = [
        line("lost-node", 0, run="runs/p/a"),
        line("interrupted", 1, run="runs/p/b"),
        line("lost-node", 2, run="runs/p/c"),
        line("lost-node", 3),
        line("done", 4, run="runs/p/d"),
    ]
    assert standings(lines)["p"].lost_runs == {"runs/p/a", "runs/p/c"}


def test_seconds_of_all_attempts_are_summed_and_points_kept_apart() -> None:
    lines = [line("interrupted", 0, seconds=2.0), line("done", 1, seconds=3.0), line("done", 2, "q", seconds=7.0)]
    found = standings(lines)
    assert {name: standing.seconds for name, standing in found.items()} == {"p": 5.0, "q": 7.0}
