"""``parbench ab`` as a person meets it."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from compare_fixtures import CASE, run_of
from reports_fixtures import ok
from test_ab_launch import fake

import parbench
from bench.runs import Run
from reports.comparing.ab import Side
from reports.comparing.ab_launch import Launcher
from reports.comparing.compare_rule import Rule
from reports.comparing.noise_floor import Floor, read_floors


def run(*words: str) -> Result:
    return CliRunner().invoke(parbench.main, ["ab", *words])


def test_a_session_ends_with_its_comparison(tmp_path: Path) -> None:
    python = fake(tmp_path)
    words = ["--a", "X=1", "--b", "X=2", "--a-python", python, "--b-python", python, "--out", str(tmp_path / "out")]
    done = run(*words, "--", "--only", "all_reduce")
    assert done.exit_code == 0, done.output
    assert "Verdict: 2 SAME" in done.stdout
    assert "6 launches a side in turns (ABBA); ended because every series is decided." in done.stdout
    assert [line[0] for line in done.stderr.splitlines()[:4]] == list("ABBA")
    assert len(list((tmp_path / "out" / "b").iterdir())) == 6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--a", "X=1", "--b", "X=1"], "--a and --b are the same"),
        ([], "--a and --b are the same, 'as it is'"),
        (["--a", "X"], "--a 'X' is not understood"),
        (["--a", "X=1", "--", "--launches", "3"], "--launches is for parbench ab to set"),
        (["--a", "X=1", "--budget", "soon"], "soon"),
        (["--a", "X=1", "--a-python", "absent-python"], "absent-python cannot be started"),
        (["--a", "X=1", "--b-python", "x", "--floor", "3"], "--floor '3'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], told: str) -> None:
    refused = run("--out", str(tmp_path / "out"), *words)
    assert refused.exit_code == 2, refused.output
    lines = [line for line in refused.stderr.splitlines() if line.startswith("parbench: ")]
    assert len(lines) == 1
    assert told in lines[0]


# --- aa ---


def floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.setattr("reports.comparing.ab_launch.sys.executable", fake(tmp_path))
    file, out = str(tmp_path / "floor.json"), str(tmp_path / "out")
    return CliRunner().invoke(
        parbench.main, ["aa", "--floor", file, "--out", out, *words, "--", "--only", "all_reduce"]
    )


def test_the_noise_floor_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = floors(tmp_path, monkeypatch, "--launches", "5")
    assert done.exit_code == 0, done.output
    assert [line[0] for line in done.stderr.splitlines()[:10]] == list("ABBAABBAAB")
    assert done.stdout.splitlines()[0].split() == ["noise", "floor", "series"]
    assert done.stdout.splitlines()[-1] == f"10 launches in turns; {tmp_path / 'floor.json'} has 2 floors of them."
    kept = read_floors(tmp_path / "floor.json")
    assert {(one.launches, one.floor) for one in kept.values()} == {(10, 0.03)}
    assert {one.series.split()[0] for one in kept.values()} == {"collective.all_reduce", "collective.broadcast"}


def test_launches_are_compared_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []
    compared: list[Run] = []

    def launch(self: Launcher, side: Side) -> Run:
        run = run_of([ok(CASE)])
        started = f"2026-01-02T03:04:{len(made):02}.000Z"
        info = msgspec.structs.replace(run.info, id=f"run-{99 - len(made)}", started=started)
        made.append(msgspec.structs.replace(run, info=info))
        return made[-1]

    def measured(runs: list[Run], rule: Rule) -> dict[str, Floor]:
        compared.extend(runs)
        return {}

    monkeypatch.setattr("reports.comparing.ab_launch.Launcher.launch", launch)
    monkeypatch.setattr("reports.comparing.noise_floor.measure_floors", measured)
    floors(tmp_path, monkeypatch, "--launches", "6")
    assert len(made) == 12
    assert [run.info.id for run in compared] == [run.info.id for run in made]


def test_too_few_launches_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = floors(tmp_path, monkeypatch, "--budget", "1ms")
    assert done.exit_code == 4
    assert "No floor: 2 launches were made, and a series needs 10 that measured it." in done.stdout
    assert not (tmp_path / "floor.json").exists()


def test_a_file_that_is_none_of_ours_is_refused_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "floor.json").write_text(json.dumps([]))
    done = floors(tmp_path, monkeypatch)
    assert done.exit_code == 2
    assert "holds no floors as parbench aa writes them" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [["--floor", "5%"], []])
def test_a_percentage_is_no_file_to_keep_floors_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reports.comparing.ab_launch.sys.executable", fake(tmp_path))
    out = tmp_path / "out"
    refused = CliRunner().invoke(parbench.main, ["aa", *given, "--out", str(out)], env={"PARBENCH_FLOOR": "5%"})
    assert refused.exit_code == 2
    [line] = refused.stderr.splitlines()
    assert line == (
        "parbench: --floor 5% is a percentage, and aa measures one: name the file for it, or unset PARBENCH_FLOOR"
    )
    assert not out.exists()
    assert not (tmp_path / "5%").exists()


def test_what_aa_sets_itself_is_refused() -> None:
    done = CliRunner().invoke(parbench.main, ["aa", "--", "--launches", "3"])
    assert done.exit_code == 2
    assert "--launches is for parbench aa to set" in done.stderr
