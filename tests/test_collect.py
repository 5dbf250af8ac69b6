"""Collecting lists each point's verdict and run, and hands the runs that ended to the report."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import FakeSlurm, job, make_folder, make_sweep, point

from slurm.collect import collect
from slurm.ledger import Ledger, State

P = tuple(point(number) for number in range(3))


def sweep(tmp_path: Path, *ends: tuple[State, str]) -> Path:
    """Return a sweep's folder whose points ended so; each has a run folder."""
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    with Ledger(folder, "7", "7") as ledger:
        for one, (state, reason) in zip(P, ends, strict=False):
            run = folder / "runs" / one.id / "r"
            run.mkdir(parents=True)
            (run / "run.json").touch()
            ledger.write(one.id, state, run=f"runs/{one.id}/r", reason=reason)
    return folder


def collected(folder: Path) -> tuple[int, list[Path]]:
    given: list[Path] = []

    def report(runs: Sequence[Path], output: Path) -> None:
        given.extend(runs)
        output.write_text("a report")

    return collect(folder, report, FakeSlurm()), given


def test_all_done_is_0_and_every_run_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path, ("done", ""), ("done", ""), ("done", ""))
    assert collected(folder) == (0, [folder / "runs" / one.id / "r" for one in P])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{P[0].id}  done         {P[0].label}  runs/{P[0].id}/r"
    assert told[3:] == ["3 of 3 done; no job is left", str(folder / "report.html")]


def test_a_wrong_result_is_1_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path, ("done", ""), ("failed", "wrong: 3 results"), ("done", ""))
    code, runs = collected(folder)
    assert code == 1
    assert len(runs) == 3
    assert f"{P[1].id}  failed       {P[1].label}  runs/{P[1].id}/r  (wrong: 3 results)" in capsys.readouterr().out


def test_what_is_not_measured_is_4_named_and_not_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep(tmp_path, ("done", ""), ("lost-node", "n3 is down"))
    code, runs = collected(folder)
    assert code == 4
    assert [run.parent.name for run in runs] == [P[0].id]
    told = capsys.readouterr().out
    assert "(n3 is down)" in told
    assert f"{P[2].id}  missing      {P[2].label}  (not begun: job 7 ended)" in told
    assert told.endswith(f"next: parbench slurm resume {folder}\n")


def test_what_failed_for_its_own_sake_is_not_for_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collected(sweep(tmp_path, ("done", ""), ("failed", "hang: x"), ("done", "")))[0] == 4
    assert "resume" not in capsys.readouterr().out


def test_a_run_that_is_gone_is_left_out(tmp_path: Path) -> None:
    folder = sweep(tmp_path, ("done", ""), ("done", ""), ("done", ""))
    (folder / "runs" / P[1].id / "r" / "run.json").unlink()
    assert len(collected(folder)[1]) == 2


def test_without_any_run_or_without_a_report_nothing_is_written(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep(P), job("7", P))
    assert collected(folder) == (4, [])
    assert not (folder / "report.html").exists()
    assert collect(sweep(tmp_path / "other", ("done", "")), None, FakeSlurm()) == 4
