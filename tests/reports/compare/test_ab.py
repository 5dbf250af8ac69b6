"""The commands `parbench ab` and `aa`: two sides, interleaved (ABBA) until decided."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from parbench import cli
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.compare.ab import (
    TEST_POINTS,
    PairedResult,
    Side,
    compare_interleaved,
    measure_pairs,
    parse_side,
    run_repetition,
)
from parbench.reports.compare.thresholds import read_thresholds
from tests.studies.compare_study import simulate_session
from tests.support.fakes import wait_until
from tests.support.refusals import usage_error
from tests.support.reports.compare_fixtures import NOISE, find_series, run_from_records
from tests.support.reports.history_fixtures import write_history_run
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    ok_record,
    out_of_budget_record,
)

CASE = collective_case()
OTHER_CASE = collective_case("broadcast")
RING = parse_side("a", "NCCL_ALGO=Ring")
TREE = parse_side("b", "NCCL_ALGO=Tree")


class Machine:
    """A machine on which a repetition takes 10 s and side B takes longer by a factor."""

    def __init__(self, factor: float = 1.0, noise: float = 1.0) -> None:
        self.factor = factor
        self.noise = noise
        self.order = ""

    def measure(self, side: Side, seconds: float) -> Run:
        factor = self.factor if side.name == "b" else 1.0
        noise = NOISE[(3 * len(self.order)) % 5] ** self.noise
        self.order += side.name
        environment = {**ENVIRONMENT, "variables": dict(side.variables)}
        return run_from_records([ok_record(CASE, 0, 1e-3 * noise * factor)], environment)


def measure(machine: Machine, budget_seconds: float = 1e6, **options: Any) -> PairedResult:
    return compare_interleaved(
        (RING, TREE),
        machine.measure,
        budget_seconds=budget_seconds,
        min_effect=0.03,
        clock=lambda: 10.0 * len(machine.order),
        **options,
    )


def verdict(outcome: PairedResult) -> str:
    return find_series(outcome.comparison).verdict


@pytest.mark.parametrize(("factor", "expected"), [(1.2, "SLOWER"), (1.0, "NO CHANGE")])
def test_sides_interleave_until_decided(factor: float, expected: str) -> None:
    machine = Machine(factor)
    outcome = measure(machine)
    assert verdict(outcome) == expected
    assert machine.order == "abbaabbaabba"
    assert outcome.comparison.rule.level == pytest.approx(0.05 / len(TEST_POINTS))


@pytest.mark.parametrize(
    ("options", "repetitions"),
    [({}, TEST_POINTS[-1]), ({"max_pairs": 7}, 7), ({"budget_seconds": 135.0}, 6)],
)
def test_ambiguous_sides_continue_to_a_limit(options: dict[str, Any], repetitions: int) -> None:
    outcome = measure(Machine(factor=1.03, noise=4.0), **options)
    assert verdict(outcome) == "UNDECIDED"
    assert outcome.num_pairs == repetitions


@pytest.mark.parametrize(("effect", "verdict"), [(0.06, "SLOWER"), (0.0, "NO CHANGE")])
def test_ab_decides_under_drift(effect: float, verdict: str) -> None:
    for trial in range(3):
        result = simulate_session(drift=0.15, effect=effect, noise=0.01, seed=(trial,))
        assert {series.verdict for series in result.comparison.series} == {verdict}


def test_short_budget_is_refused_after_one_pair() -> None:
    machine = Machine()
    with pytest.raises(UserError, match="takes 20 s") as error:
        measure(machine, budget_seconds=99.0)
    assert error.value.hint == "use --budget 2m"
    assert machine.order == "ab"
    assert measure(Machine(), budget_seconds=100.0).num_pairs == 5


def test_repetitions_become_long_enough_for_all_cases() -> None:
    limits = []

    def measure_half(side: Side, seconds: float) -> Run:
        limits.append(seconds)
        records = [ok_record(CASE), out_of_budget_record(OTHER_CASE)]
        return run_from_records(records)

    pairs: dict[str, Any] = {"min_pairs": 2, "max_pairs": 2, "planned_pairs": 10_000}
    list(measure_pairs((RING, TREE), measure_half, budget_seconds=1e5, **pairs))
    assert limits == [30.0, 30.0, 60.0, 60.0]


def test_differences_of_the_sides_do_not_block() -> None:
    comparison = measure(Machine()).comparison
    assert find_series(comparison).verdict == "NO CHANGE"
    [change] = comparison.environment_changes
    assert change.text == "variables.NCCL_ALGO: Ring -> Tree"


COPY_A_RUN = """#!/bin/sh
printf '%s\\n' "$X" "$@" > {folder}/arguments
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
cp -r {folder}/run-000 "$2/run-$(ls "$2" | wc -l)"
"""


def write_python(file: Path, script: str) -> str:
    file.write_text(script)
    file.chmod(0o755)
    return str(file)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args)


def test_repetition_run_reports_bad_options_of_run(tmp_path: Path) -> None:
    options = ("all_reduse", "--nproc", "2")
    measure_side = partial(run_repetition, out=tmp_path / "out", options=options, log=print)
    message = usage_error(measure_side, parse_side("a", "X=1"), 60.0)
    assert "side A" in message
    assert "'all_reduse'" in message


SLOW_RUN = """#!{python}
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
def stop(number, frame):
    time.sleep(0.2)
    (folder / "stopped").touch()
    sys.exit(4)
signal.signal(signal.SIGTERM, stop)
folder.mkdir(parents=True)
(folder / "started").touch()
time.sleep(60)
"""


def test_ab_stops_its_repetition_on_sigterm(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", SLOW_RUN.format(python=sys.executable))
    folder = tmp_path / "out"
    options = ["--a", "X=1", "--b", "X=2", "--a-python", python, "--out", str(folder)]
    command = [sys.executable, "-m", "parbench", "ab", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as session:
        wait_until((folder / "a" / "started").exists, 60)
        session.send_signal(signal.SIGTERM)
        _, message = session.communicate(timeout=60)
    assert session.returncode == 4  # 1 would be a regression
    assert (folder / "a" / "stopped").exists()
    assert not (folder / "b").exists()
    assert str(folder) in message.splitlines()[-1]


def test_ab_runs_both_sides_and_prints_their_comparison(tmp_path: Path) -> None:
    write_history_run(tmp_path, 0)
    python = write_python(tmp_path / "python", COPY_A_RUN.format(folder=tmp_path))
    folder = tmp_path / "out"
    sides = ["--a", "X=1", "--b", "X=2", "--a-python", python, "--b-python", python]
    result = invoke("ab", *sides, "--out", str(folder), "all_reduce", "--nproc=2")
    assert result.exit_code == 0, result.output
    assert "2 NO CHANGE" in result.stdout
    assert [line[0] for line in result.stderr.splitlines()[:4]] == list("ABBA")
    assert f"X=1, stored in {folder / 'a'}" in result.stderr
    assert len(list((folder / "b").iterdir())) == 6
    command = "1 -m parbench run all_reduce --nproc=2 --repetitions 1 --budget 40s --out"
    arguments = [*command.split(), str(folder / "a"), "--format=json"]
    assert (tmp_path / "arguments").read_text().splitlines() == arguments


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("ab --a X=1 --b X=1", "'X=1'"),
        ("ab --a X=1 -- --repetitions=3", "Give --repetitions before --"),
        ("aa -- --resume RUN", "--resume is not allowed after --"),
        ("ab --a X=1 --a-python absent-python", "absent-python"),
        ("ab --a X=1 --min-effect 3", "--min-effect '3'"),
        ("aa --thresholds thresholds.json", "thresholds.json"),
    ],
)
def test_bad_options_are_refused_before_any_run(
    command: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thresholds.json").write_text("[]")
    name, *options = command.split()
    result = invoke(name, "--out", "out", *options)
    assert result.exit_code == 2
    assert value in result.stderr
    assert not Path("out").exists()


def test_aa_writes_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def measure_side(side: Side, seconds: float, **options: object) -> Run:
        run = machine.measure(side, seconds)
        started = f"2026-01-02T03:04:{len(machine.order):02}.000Z"
        return replace(run, info=replace(run.info, started=started))

    monkeypatch.setattr("parbench.reports.compare.ab.run_repetition", measure_side)
    file = tmp_path / "thresholds.json"
    result = invoke("aa", "--thresholds", str(file), "--repetitions", "6", "--", "all_reduce")
    assert result.exit_code == 0, result.output
    assert str(file) in result.stdout
    assert machine.order == "abbaabbaabba"
    [threshold] = read_thresholds(file).values()
    assert threshold.series == CASE.label
    assert threshold.min_effect == 0.03
