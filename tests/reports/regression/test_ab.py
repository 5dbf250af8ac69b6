"""Two sides interleaved (ABBA) until decided, and the commands `parbench ab` and `aa`."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

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
from tests.support.compare_fixtures import NOISE, find_series, run_from_records
from tests.support.fake_python import fake, python_that_runs
from tests.support.fakes import wait_until
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import ENVIRONMENT, collective_case, failed_record, ok_record

CASE = collective_case()
A, B = parse_side("a", "NCCL_ALGO=Ring"), parse_side("b", "NCCL_ALGO=Tree")


class Machine:
    """A machine on which a repetition takes ten seconds and side B is slower by a factor."""

    def __init__(self, factor: float = 1.0, drift: float = 0.0, noise: float = 1.0) -> None:
        self.factor, self.drift, self.noise = factor, drift, noise
        self.order: list[str] = []
        self.allowed: list[float] = []
        self.now = 0.0

    def torch(self, side: Side) -> object:
        return ENVIRONMENT["torch"]

    def launch(self, side: Side, seconds: float = 30.0) -> Run:
        self.allowed.append(seconds)
        i = len(self.order)
        self.order.append(side.name)
        self.now += 10.0
        factor = self.factor if side.name == "b" else 1.0
        time = 1e-3 * NOISE[(3 * i) % 5] ** self.noise * factor * (1 + self.drift * i)
        variables = {**ENVIRONMENT["variables"], **side.variables}  # type: ignore[dict-item]
        environment = {**ENVIRONMENT, "variables": variables, "torch": self.torch(side)}
        run = run_from_records([ok_record(CASE, 0, time)], environment)
        plan = msgspec.structs.replace(run.info.plan, launches=1)
        return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))


def measured(
    machine: Machine, budget: float = 1e6, sides: tuple[Side, Side] = (A, B), **options: Any
) -> Outcome:
    options = {"budget_seconds": budget, "floor": 0.03, "clock": lambda: machine.now, **options}
    return measure_in_turns(sides, machine.launch, **options)


def verdict(outcome: Outcome) -> str:
    return find_series(outcome.comparison).word


@pytest.mark.parametrize(("factor", "word"), [(1.2, "SLOWER"), (0.8, "FASTER"), (1.0, "SAME")])
def test_sides_interleave_until_decided(factor: float, word: str) -> None:
    machine = Machine(factor=factor)
    outcome = measured(machine)
    assert (verdict(outcome), outcome.launches) == (word, LOOKS[0])
    assert "".join(machine.order) == "abbaabbaabba"
    rule = outcome.comparison.rule
    levels = rule.level, rule.false_discovery_rate
    assert levels == pytest.approx((0.05 / len(LOOKS), 0.04 / len(LOOKS))), "each look has a share"


@pytest.mark.parametrize(
    ("options", "launches"),
    [({}, LOOKS[-1]), ({"launches": 7}, 7), ({"budget": 135.0}, 6), ({"budget": 140.0}, 7)],
    ids=["last-look", "limit", "budget-before-a-pair", "budget-after-a-pair"],
)
def test_ambiguous_continues_to_a_limit(options: dict[str, Any], launches: int) -> None:
    outcome = measured(Machine(factor=1.03, noise=4.0), **options)
    assert (verdict(outcome), outcome.launches) == ("AMBIGUOUS", launches)


def test_short_budget_ends_after_one_pair() -> None:
    outcome = measured(Machine(), budget=99.0)
    assert (outcome.launches, outcome.short) == (1, True)
    assert "--budget 110s" in outcome.reason
    assert measured(Machine(), budget=100.0).launches == 5


def test_default_budget_grows_to_what_is_needed() -> None:
    outcome = measured(Machine(), budget=20.0, given=False)
    assert (outcome.launches, outcome.short, verdict(outcome)) == (5, False, "SAME")


class SlowMachine(Machine):
    """A machine on which one case takes 100 s and the other one needs as much again."""

    def launch(self, side: Side, seconds: float = 30.0) -> Run:
        run, other = super().launch(side, seconds), collective_case(size_bytes=2048)
        plan = msgspec.structs.replace(run.info.plan, cases=(CASE, other), budget_seconds=1000.0)
        records = [msgspec.structs.replace(run.records[0], seconds=100.0, samples=Samples())]
        if seconds < 200.0:
            records.append(failed_record(other, 0, "skipped", LEFT_OUT))
        info = msgspec.structs.replace(run.info, plan=plan, started=run.records[0].started)
        return msgspec.structs.replace(run, info=info, records=tuple(records))


def test_repetition_gets_a_share_of_the_budget() -> None:
    for machine in (Machine(), SlowMachine()):
        outcome = measured(machine, budget=600.0)
        assert machine.allowed[:2] == [40.0, 40.0], "a twelfth of eight minutes"
    assert "--budget 35m" in outcome.reason


@pytest.mark.parametrize(("budget", "given"), [(2500.0, True), (600.0, False)])
def test_repetition_gets_time_for_all_cases(budget: float, given: bool) -> None:
    machine = SlowMachine()
    assert not measured(machine, budget=budget, given=given).short
    assert machine.allowed[2:] == pytest.approx([220.0] * 10), "twice 100 s, and a tenth"


def test_drift_affects_both_sides_alike() -> None:
    outcome = measured(Machine(drift=0.01))
    effect = find_series(outcome.comparison).effect
    assert effect is not None
    assert abs(effect.change) < 0.01


class OtherTorch(Machine):
    def torch(self, side: Side) -> object:
        return {"version": "2.14.0" if side.name == "b" else "2.13.0"}


class Threaded(Machine):
    def torch(self, side: Side) -> object:
        return {"threads": int(side.variables["OMP_NUM_THREADS"])}


def test_sides_may_differ_only_in_what_is_tested() -> None:
    assert verdict(measured(OtherTorch())) == "ENV-CHANGED"
    assert verdict(measured(OtherTorch(), across=["torch.*"])) == "SAME"
    sides = parse_side("a", "OMP_NUM_THREADS=1"), parse_side("b", "OMP_NUM_THREADS=2")
    assert verdict(measured(Threaded(), sides=sides)) == "SAME", "an effect of the variable"


def test_wrong_result_of_a_side_fails() -> None:
    class Broken(Machine):
        def launch(self, side: Side, seconds: float = 30.0) -> Run:
            run = super().launch(side)
            wrong = run_from_records([failed_record(CASE, 0, "wrong", "3 values differ")])
            return wrong if side.name == "b" else run

    outcome = measured(Broken())
    assert (verdict(outcome), outcome.comparison.code()) == ("WRONG", 1)


def test_side_has_variables_and_python() -> None:
    side = parse_side("a", "X=1 Y=a=b", "py")
    assert (side.variables, side.text) == ({"X": "1", "Y": "a=b"}, "py X=1 Y=a=b")
    for text in ("X", "=1", "1X=2", "X=1 Y"):
        assert "NAME=VALUE" in usage_error(parse_side, "a", text)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.main, words)


def test_launch_run_passes_variables_and_budget(tmp_path: Path) -> None:
    side = parse_side("b", "X=7", fake(tmp_path))
    launch = partial(launch_run, side, 30.4, out=tmp_path, words=("--only", "ddp"), tell=print)
    runs = [launch() for _ in range(2)]
    assert [run.path for run in runs] == [tmp_path / "b" / f"run-{i}" for i in range(2)]
    variable, *words = (runs[0].path / "told").read_text().splitlines()
    assert variable == "7"
    assert words[:5] == ["-m", "parbench", "run", "--only", "ddp"]
    options = ["--launches", "1", "--budget", "30s", "--out", str(tmp_path / "b"), "--json"]
    assert words[5:] == options


def test_launch_run_reports_bad_options_of_run(tmp_path: Path) -> None:
    words = ("--only", "all_reduse", "--nproc", "2")
    launch = partial(launch_run, out=tmp_path / "out", words=words, tell=print)
    message = usage_error(launch, parse_side("a", "X=1"), 60.0)
    assert "side A" in message
    assert "'all_reduse'" in message


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


def test_ab_stops_its_repetition_on_sigterm(tmp_path: Path) -> None:
    python = python_that_runs(tmp_path / "python", SLOW.format(python=sys.executable))
    out = tmp_path / "out"
    script = f"import sys; from parbench.cli import main; sys.executable = {python!r}; main()"
    words = [sys.executable, "-c", script, "ab", "--a", "X=1", "--b", "X=2", "--out", str(out)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as session:
        wait_until((out / "a" / "begun").exists, 60)
        session.send_signal(signal.SIGTERM)
        _, message = session.communicate(timeout=60)
    assert session.returncode == 4, "1 would be a regression"
    assert (out / "a" / "stopped").exists()
    assert not (out / "b").exists()
    assert str(out) in message.splitlines()[-1]


def test_ab_command_prints_its_comparison(tmp_path: Path) -> None:
    python, out = fake(tmp_path), tmp_path / "out"
    sides = ["--a", "X=1", "--b", "X=2", "--a-python", python, "--b-python", python]
    result = invoke("ab", *sides, "--out", str(out), "--", "--only", "all_reduce")
    assert result.exit_code == 0, result.output
    assert "2 SAME" in result.stdout
    assert [line[0] for line in result.stderr.splitlines()[:4]] == list("ABBA")
    assert len(list((out / "b").iterdir())) == 6


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["ab", "--a", "X=1", "--b", "X=1"], "'X=1'"),
        (["ab"], "--a and --b"),
        (["ab", "--a", "X"], "--a 'X'"),
        (["ab", "--a", "X=1", "--", "--launches", "3"], "--launches"),
        (["ab", "--a", "X=1", "--budget", "soon"], "soon"),
        (["ab", "--a", "X=1", "--a-python", "absent-python"], "absent-python"),
        (["ab", "--a", "X=1", "--b-python", "x", "--floor", "3"], "--floor '3'"),
        (["aa", "--", "--launches", "3"], "--launches"),
        (["aa", "--floor", "floors.json"], "holds no floors"),
    ],
)
def test_bad_options_are_refused_before_any_run(
    words: list[str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("floors.json").write_text("[]")
    result = invoke(words[0], "--out", "out", *words[1:])
    assert result.exit_code == 2
    assert value in result.stderr
    assert not Path("out").exists()


def test_options_of_ab_are_not_for_run() -> None:
    for word in (*OURS, "--budget=5s"):
        assert word.partition("=")[0] in usage_error(check_words, ["--only", "ddp", word])
    check_words(["--only", "ddp", "--nproc", "2"])


def run_aa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: int) -> Result:
    monkeypatch.setattr("parbench.reports.regression.ab.sys.executable", fake(tmp_path))
    files = ["--floor", str(tmp_path / "floor.json"), "--out", str(tmp_path / "out")]
    return invoke("aa", *files, "--launches", str(launches), "--", "--only", "all_reduce")


def test_aa_measures_and_keeps_noise_floors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_aa(tmp_path, monkeypatch, 5)
    assert result.exit_code == 0, result.output
    assert [line[0] for line in result.stderr.splitlines()[:10]] == list("ABBAABBAAB")
    assert str(tmp_path / "floor.json") in result.stdout
    floors = read_floors(tmp_path / "floor.json").values()
    assert {(floor.launches, floor.floor) for floor in floors} == {(10, 0.03)}
    names = {floor.series.split()[0] for floor in floors}
    assert names == {"collective.all_reduce", "collective.broadcast"}


def test_aa_compares_runs_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compared: list[str] = []

    def launch(side: Side, seconds: float, **options: object) -> Run:
        run = run_from_records([ok_record(CASE)])
        made.append(f"run-{99 - len(made)}")
        started = f"2026-01-02T03:04:{len(made):02}.000Z"
        info = msgspec.structs.replace(run.info, id=made[-1], started=started)
        return msgspec.structs.replace(run, info=info)

    def measure_floors(runs: list[Run], rule: Rule) -> tuple[dict[str, Floor], float]:
        compared.extend(run.info.id for run in runs)
        return {}, 0.0

    monkeypatch.setattr("parbench.reports.regression.ab.launch_run", launch)
    target = "parbench.reports.regression.noise_floor.measure_floors"
    monkeypatch.setattr(target, measure_floors)
    run_aa(tmp_path, monkeypatch, 6)
    assert len(made) == 12
    assert compared == made
