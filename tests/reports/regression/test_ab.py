"""Two sides in turns (ABBA), until decided or out of time; ``parbench ab`` and ``aa`` as a person meets them."""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from compare_fixtures import NOISE, only, run_of
from fake_python import fake, python_that_runs
from fakes import wait_until
from refusals import refusal
from reports_fixtures import ENVIRONMENT, bad, collective, ok

from parbench import cli
from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.results.records import Samples
from parbench.bench.results.runs import Run
from parbench.reports.regression.ab import (
    LOOKS,
    OURS,
    Outcome,
    Side,
    check_words,
    launch_run,
    measure_in_turns,
    parse_side,
)
from parbench.reports.regression.noise_floor import Floor, read_floors
from parbench.reports.regression.rule import Rule

CASE = collective()
A, B = parse_side("a", "NCCL_ALGO=Ring"), parse_side("b", "NCCL_ALGO=Tree")


class Machine:
    """A machine on which a launch takes ten seconds, B is slower by a factor, and everything drifts."""

    def __init__(
        self,
        factor: float = 1.0,
        drift: float = 0.0,
        noise: float = 1.0,
        torch: Callable[[Side], object] = lambda s: {},
    ) -> None:
        self.factor, self.drift, self.noise, self.torch = factor, drift, noise, torch
        self.order: list[str] = []
        self.allowed: list[float] = []
        self.now = 0.0

    def launch(self, side: Side, seconds: float = 30.0) -> Run:
        self.allowed.append(seconds)
        i = len(self.order)
        self.order.append(side.name)
        self.now += 10.0
        wobble = NOISE[(3 * i) % 5] ** self.noise
        seconds = 1e-3 * wobble * (self.factor if side.name == "b" else 1.0) * (1 + self.drift * i)
        variables = {**ENVIRONMENT["variables"], **side.variables}  # type: ignore[dict-item]
        around = {**ENVIRONMENT, "variables": variables, "torch": self.torch(side) or ENVIRONMENT["torch"]}
        run = run_of([ok(CASE, 0, seconds)], around)
        plan = msgspec.structs.replace(run.info.plan, launches=1)
        return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))

    def clock(self) -> float:
        return self.now


def measured(machine: Machine, budget: float = 1e6, sides: tuple[Side, Side] = (A, B), **more: Any) -> Outcome:
    return measure_in_turns(sides, machine.launch, budget_seconds=budget, floor=0.03, clock=machine.clock, **more)


def word(found: Outcome) -> str:
    return only(found.comparison).word


def test_launches_take_turns_as_abba_and_end_as_soon_as_it_is_decided() -> None:
    for factor, told in ((1.2, "SLOWER"), (0.8, "FASTER"), (1.0, "SAME")):
        machine = Machine(factor=factor)
        found = measured(machine)
        assert (word(found), found.launches, found.reason) == (told, LOOKS[0], "every series is decided")
        assert "".join(machine.order) == "abbaabbaabba"
        rule = found.comparison.rule
        shares = rule.level, rule.false_discovery_rate
        assert shares == pytest.approx((0.05 / len(LOOKS), 0.04 / len(LOOKS))), "each look has its share"


def test_what_stays_open_is_launched_to_the_last_look_or_the_end_of_the_budget() -> None:
    found = measured(Machine(factor=1.03, noise=4.0))
    told = (word(found), found.launches, found.reason)
    assert told == ("AMBIGUOUS", LOOKS[-1], f"{LOOKS[-1]} launches a side were made")
    found = measured(Machine(factor=1.03, noise=4.0), launches=7)
    assert (found.launches, found.reason) == (7, "7 launches a side were made")
    found = measured(Machine(factor=1.03, noise=4.0), budget=135.0)
    assert found.launches == 6, "a seventh pair of twenty seconds would end after it"
    assert (word(found), found.reason) == ("AMBIGUOUS", "the budget ended")
    assert measured(Machine(factor=1.03, noise=4.0), budget=140.0).launches == 7, "which is in time"


def test_a_budget_too_short_to_decide_anything_is_told_after_the_first_pair_with_the_one_that_is_not() -> None:
    for budget in (99.0, 0.001):
        found = measured(Machine(), budget=budget)
        assert (found.launches, found.short) == (1, True)
        assert found.reason == "a launch of both sides takes 20 s and 5 of them are needed: --budget 110s"
    assert measured(Machine(), budget=100.0).launches == 5
    grown = measured(Machine(), budget=20.0, given=False)
    assert (grown.launches, grown.short, word(grown)) == (5, False, "SAME"), "no budget was given"


def test_a_launch_has_its_part_of_the_session_or_as_much_as_all_cases_need() -> None:
    class Short(Machine):
        """A case takes 100 s of a launch, for the other there is no time."""

        def launch(self, side: Side, seconds: float = 30.0) -> Run:
            run, other = super().launch(side, seconds), collective(size_bytes=2048)
            plan = msgspec.structs.replace(run.info.plan, cases=(CASE, other), budget_seconds=1000.0)
            records = [msgspec.structs.replace(run.records[0], seconds=100.0, samples=Samples())]
            if seconds < 200.0:
                records.append(bad(other, 0, "skipped", LEFT_OUT))
            info = msgspec.structs.replace(run.info, plan=plan, started=run.records[0].started)
            return msgspec.structs.replace(run, info=info, records=tuple(records))

    machine = Machine()
    measured(machine, budget=600.0)
    assert machine.allowed[:2] == [40.0, 40.0], "a twelfth of eight minutes"
    cut = Short()
    found = measured(cut, budget=600.0)
    told = "a launch of both sides takes 6 min 20 s and 5 of them are needed: --budget 35m"
    assert (found.reason, cut.allowed) == (told, [40.0, 40.0]), "twenty seconds, and twice 180 s more"
    for budget, given in ((2500.0, True), (600.0, False)):
        cut = Short()
        found = measured(cut, budget=budget, given=given)
        assert (found.short, found.reason) == (False, "every series is decided")
        assert cut.allowed[2:] == pytest.approx([220.0] * 10), "twice 100 s, and a tenth"


def test_drift_falls_on_both_sides_alike() -> None:
    found = measured(Machine(drift=0.01))
    effect = only(found.comparison).effect
    assert effect is not None
    assert abs(effect.change) < 0.01
    assert word(found) != "SLOWER"


def test_only_what_is_tested_may_differ() -> None:
    def version(side: Side) -> object:
        return {"version": "2.14.0" if side.name == "b" else "2.13.0"}

    def threads(side: Side) -> object:
        return {"threads": int(side.variables["OMP_NUM_THREADS"])}

    assert word(measured(Machine(torch=version))) == "ENV-CHANGED"
    assert word(measured(Machine(torch=version), across=["torch.*"])) == "SAME"
    sides = parse_side("a", "OMP_NUM_THREADS=1"), parse_side("b", "OMP_NUM_THREADS=2")
    assert word(measured(Machine(torch=threads), sides=sides)) == "SAME", "what a variable sets elsewhere is meant too"


def test_what_breaks_on_a_side_ends_it() -> None:
    class Broken(Machine):
        def launch(self, side: Side, seconds: float = 30.0) -> Run:
            run = super().launch(side)
            return run_of([bad(CASE, 0, "wrong", "3 values differ")]) if side.name == "b" else run

    found = measured(Broken())
    assert (word(found), found.launches, found.comparison.code()) == ("WRONG", LOOKS[0], 1)


def test_a_side_is_its_variables_and_its_python() -> None:
    side = parse_side("a", "X=1 Y=a=b", "py")
    assert (side.variables, side.text) == ({"X": "1", "Y": "a=b"}, "py X=1 Y=a=b")
    assert parse_side("a", "").text == "as it is"
    for text in ("X", "=1", "1X=2", "X=1 Y"):
        assert "is not understood: write variables as NAME=VALUE" in refusal(parse_side, "a", text)


def invoke(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, words, env=variables)


def test_a_launch_is_a_run_with_the_sides_variables_and_time_to_start(tmp_path: Path) -> None:
    heard: list[str] = []
    side = parse_side("b", "X=7", fake(tmp_path))
    for seconds, given in ((60.0, "60s"), (30.4, "30s")):
        out = tmp_path / given
        words = ("--only", "ddp")
        runs = [launch_run(side, seconds, out=out, words=words, tell=heard.append) for _ in range(2)]
        assert [run.path for run in runs] == [out / "b" / f"run-{i}" for i in range(2)], "each is the one just made"
        variable, *said = (runs[0].path / "told").read_text().splitlines()
        assert variable == "7"
        assert said[:5] == ["-m", "parbench", "run", "--only", "ddp"]
        assert said[5:] == ["--launches", "1", "--budget", given, "--out", str(out / "b"), "--json"]
    assert heard == [f"B: {side.text}"] * 4


def test_bad_options_of_run_are_told_in_its_words(tmp_path: Path) -> None:
    words = ("--only", "all_reduse", "--nproc", "2")
    launch = partial(launch_run, out=tmp_path / "out", words=words, tell=lambda text: None)
    told = refusal(launch, parse_side("a", "X=1"), 60.0)
    assert told.startswith("side A has no run: no case is named 'all_reduse'")


SLOW = """#!{python}
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
def stop(number, frame):
    time.sleep(0.2)
    (folder / "stopped").touch()
    sys.exit(4)
signal.signal(signal.SIGTERM, stop)
folder.mkdir(parents=True)
(folder / "begun").touch()
time.sleep(60)
"""


def stopped(tmp_path: Path, command: str, sign: signal.Signals) -> None:
    python = python_that_runs(tmp_path / "python", SLOW.format(python=sys.executable))
    out = tmp_path / "out"
    script = f"import sys; from parbench.cli import main; sys.executable = {python!r}; main()"
    sides = ["--a", "X=1", "--b", "X=2"] if command == "ab" else ["--floor", str(tmp_path / "floor.json")]
    words = [sys.executable, "-c", script, command, *sides, "--out", str(out)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as session:
        wait_until((out / "a" / "begun").exists, 60)
        session.send_signal(sign)
        _, told = session.communicate(timeout=60)
    assert session.returncode == 4, "1 would be a regression"
    assert (out / "a" / "stopped").exists(), "it was waited for"
    assert not (out / "b").exists()
    assert told.splitlines()[-1] == f"interrupted: nothing more is launched, and what was measured is in {out}"


def test_a_signal_stops_the_launch_and_begins_no_other(tmp_path: Path) -> None:
    stopped(tmp_path, "ab", signal.SIGTERM)


def test_a_session_ends_with_its_comparison(tmp_path: Path) -> None:
    python = fake(tmp_path)
    words = ["--a", "X=1", "--b", "X=2", "--a-python", python, "--b-python", python, "--out", str(tmp_path / "out")]
    done = invoke("ab", *words, "--", "--only", "all_reduce")
    assert done.exit_code == 0, done.output
    assert "Verdict: 2 SAME" in done.stdout
    assert "6 launches a side in turns (ABBA); ended because every series is decided." in done.stdout
    assert [line[0] for line in done.stderr.splitlines()[:4]] == list("ABBA")
    assert len(list((tmp_path / "out" / "b").iterdir())) == 6


def test_bad_input_is_one_sentence_and_nothing_is_launched(tmp_path: Path) -> None:
    (tmp_path / "floors.json").write_text("[]")
    table = [
        (["ab", "--a", "X=1", "--b", "X=1"], "--a and --b are the same, 'X=1': nothing would be compared"),
        (["ab"], "--a and --b are the same, 'as it is'"),
        (["ab", "--a", "X"], "--a 'X' is not understood"),
        (["ab", "--a", "X=1", "--", "--launches", "3"], "--launches is for parbench ab to set"),
        (["ab", "--a", "X=1", "--budget", "soon"], "soon"),
        (["ab", "--a", "X=1", "--b", "X=1", "--a-python", "absent-python"], "absent-python cannot be started"),
        (["ab", "--a", "X=1", "--b-python", "x", "--floor", "3"], "--floor '3'"),
        (["aa", "--", "--launches", "3"], "--launches is for parbench aa to set"),
        (["aa", "--floor", str(tmp_path / "floors.json")], "holds no floors as parbench aa writes them"),
    ]
    for (command, *words), told in table:
        refused = invoke(command, "--out", str(tmp_path / "out"), *words)
        lines = [line for line in refused.stderr.splitlines() if line.startswith("parbench: ")]
        assert (refused.exit_code, len(lines), told in lines[0]) == (2, 1, True), (words, refused.output)
    assert not (tmp_path / "out").exists()
    for word in (*OURS, "--budget=5s"):
        assert "is for parbench ab to set" in refusal(check_words, ["--only", "ddp", word])
    check_words(["--only", "ddp", "--nproc", "2"])


def floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.setattr("parbench.reports.regression.ab.sys.executable", fake(tmp_path))
    file, out = str(tmp_path / "floor.json"), str(tmp_path / "out")
    return invoke("aa", "--floor", file, "--out", out, *words, "--", "--only", "all_reduce")


def test_the_noise_floor_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = floors(tmp_path, monkeypatch, "--launches", "5")
    assert done.exit_code == 0, done.output
    assert [line[0] for line in done.stderr.splitlines()[:10]] == list("ABBAABBAAB")
    assert done.stdout.splitlines()[0].split() == ["noise", "floor", "series"]
    assert done.stdout.splitlines()[-1] == f"10 launches in turns; {tmp_path / 'floor.json'} has 2 floors of them."
    assert "96s" in (tmp_path / "out" / "a" / "run-0" / "told").read_text().split(), "a tenth of most of the time"
    kept = read_floors(tmp_path / "floor.json")
    assert {(one.launches, one.floor) for one in kept.values()} == {(10, 0.03)}
    assert {one.series.split()[0] for one in kept.values()} == {"collective.all_reduce", "collective.broadcast"}


def test_launches_are_compared_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []
    compared: list[Run] = []

    def launch(side: Side, seconds: float, **more: object) -> Run:
        run = run_of([ok(CASE)])
        started = f"2026-01-02T03:04:{len(made):02}.000Z"
        info = msgspec.structs.replace(run.info, id=f"run-{99 - len(made)}", started=started)
        made.append(msgspec.structs.replace(run, info=info))
        return made[-1]

    def floors_of(runs: list[Run], rule: Rule) -> tuple[dict[str, Floor], float]:
        compared.extend(runs)
        return {}, 0.0

    monkeypatch.setattr("parbench.reports.regression.ab.launch_run", launch)
    monkeypatch.setattr("parbench.reports.regression.noise_floor.measure_floors", floors_of)
    floors(tmp_path, monkeypatch, "--launches", "6")
    assert len(made) == 12
    assert [run.info.id for run in compared] == [run.info.id for run in made]
