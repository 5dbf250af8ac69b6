"""Two sides in turns: the order is ABBA, it ends when decided or out of time, and what is tested forbids nothing."""

from typing import Any

import msgspec
import pytest
from compare_fixtures import NOISE, run_of
from reports_fixtures import ENVIRONMENT, bad, collective, ok

from bench.errors import UserError
from bench.runs import Run
from reports.comparing.ab import LOOKS, Outcome, Side, check_sides, launch_in_turns, measure_in_turns, parse_side
from reports.comparing.noise_floor import Floor, fingerprints

CASE = collective()
A, B = parse_side("a", "NCCL_ALGO=Ring"), parse_side("b", "NCCL_ALGO=Tree")


class Machine:
    """A machine on which a launch takes ten seconds, B is slower by a factor, and everything drifts."""

    def __init__(self, factor: float = 1.0, drift: float = 0.0, noise: float = 1.0) -> None:
        self.factor, self.drift, self.noise = factor, drift, noise
        self.order: list[str] = []
        self.now = 0.0

    def launch(self, side: Side) -> Run:
        i = len(self.order)
        self.order.append(side.name)
        self.now += 10.0
        wobble = NOISE[(3 * i) % 5] ** self.noise
        seconds = 1e-3 * wobble * (self.factor if side.name == "b" else 1.0) * (1 + self.drift * i)
        variables = {**ENVIRONMENT["variables"], **side.variables}  # type: ignore[dict-item]
        run = run_of([ok(CASE, 0, seconds)], {**ENVIRONMENT, "variables": variables})
        plan = msgspec.structs.replace(run.info.plan, launches=1)
        return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))

    def clock(self) -> float:
        return self.now


def measured(machine: Machine, budget: float = 1e6, **more: Any) -> Outcome:
    return measure_in_turns((A, B), machine.launch, budget_seconds=budget, floor=0.03, clock=machine.clock, **more)


def word(found: Outcome) -> str:
    [one] = found.comparison.series
    return one.word


def test_launches_take_turns_as_abba() -> None:
    machine = Machine(factor=1.2)
    measured(machine)
    assert "".join(machine.order[:8]) == "abbaabba"


@pytest.mark.parametrize(("factor", "told"), [(1.2, "SLOWER"), (0.8, "FASTER"), (1.0, "SAME")])
def test_it_ends_as_soon_as_it_is_decided(factor: float, told: str) -> None:
    found = measured(Machine(factor=factor))
    assert word(found) == told
    assert found.launches == LOOKS[0]
    assert found.reason == "every series is decided"


def test_what_stays_open_is_launched_to_the_last_look() -> None:
    found = measured(Machine(factor=1.03, noise=4.0))
    assert word(found) == "AMBIGUOUS"
    assert found.launches == LOOKS[-1]
    assert found.reason == f"{LOOKS[-1]} launches a side were made"


def test_it_ends_within_its_budget() -> None:
    machine = Machine(factor=1.03, noise=4.0)
    found = measured(machine, budget=75.0)
    assert found.launches == 3, "a fourth pair of twenty seconds would end at eighty"
    assert machine.now <= 75.0
    assert found.reason == "the budget ended"
    assert word(found) == "INSUFFICIENT"


def test_one_pair_is_always_made() -> None:
    assert measured(Machine(), budget=0.001).launches == 1


def test_launches_in_turns_are_shown_after_each_pair() -> None:
    machine = Machine()
    seen = [
        [len(runs[name]) for name in "ab"]
        for runs in launch_in_turns((A, B), machine.launch, 3, budget_seconds=1e6, clock=machine.clock)
    ]
    assert seen == [[1, 1], [2, 2], [3, 3]]
    assert "".join(machine.order) == "abbaab"


def test_a_measured_floor_is_the_series_own() -> None:
    machine = Machine(factor=1.2)
    name = fingerprints(Machine().launch(B))[CASE.id]
    floor = Floor(series="", host="", measured="2026-01-02T00:00:00Z", launches=20, noise=0.1, floor=0.5)
    assert word(measured(machine, floors={name: floor})) == "SAME"
    assert word(measured(Machine(factor=1.2), floors={"another": floor})) == "SLOWER"


def test_drift_falls_on_both_sides_alike() -> None:
    found = measured(Machine(drift=0.01))
    [one] = found.comparison.series
    assert one.effect is not None
    assert abs(one.effect.change) < 0.01
    assert word(found) != "SLOWER"


def test_each_look_has_its_share_of_the_false_discoveries() -> None:
    assert measured(Machine()).comparison.rule.false_discovery_rate == pytest.approx(0.05 / len(LOOKS))


def test_only_what_is_tested_may_differ() -> None:
    class Other(Machine):
        def launch(self, side: Side) -> Run:
            run = super().launch(side)
            torch = {"version": "2.14.0" if side.name == "b" else "2.13.0"}
            info = msgspec.structs.replace(run.info, environment={**(run.info.environment or {}), "torch": torch})
            return msgspec.structs.replace(run, info=info)

    assert word(measured(Other())) == "ENV-CHANGED"
    assert word(measured(Other(), across=["torch.*"])) == "SAME"


def test_what_a_variable_sets_elsewhere_is_meant_too() -> None:
    class Threads(Machine):
        def launch(self, side: Side) -> Run:
            run = super().launch(side)
            torch = {"threads": int(side.variables["OMP_NUM_THREADS"])}
            info = msgspec.structs.replace(run.info, environment={**(run.info.environment or {}), "torch": torch})
            return msgspec.structs.replace(run, info=info)

    machine = Threads()
    sides = parse_side("a", "OMP_NUM_THREADS=1"), parse_side("b", "OMP_NUM_THREADS=2")
    assert word(measure_in_turns(sides, machine.launch, budget_seconds=1e6, floor=0.03, clock=machine.clock)) == "SAME"


def test_what_breaks_on_a_side_ends_it() -> None:
    class Broken(Machine):
        def launch(self, side: Side) -> Run:
            run = super().launch(side)
            return run_of([bad(CASE, 0, "wrong", "3 values differ")]) if side.name == "b" else run

    found = measured(Broken())
    assert word(found) == "WRONG"
    assert found.launches == LOOKS[0]
    assert found.comparison.code() == 1


def test_a_side_is_its_variables() -> None:
    side = parse_side("a", "X=1 Y=a=b", "py")
    assert side.variables == {"X": "1", "Y": "a=b"}
    assert side.text == "py X=1 Y=a=b"
    assert parse_side("a", "").text == "as it is"


@pytest.mark.parametrize("text", ["X", "=1", "1X=2", "X=1 Y"])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not understood: write variables as NAME=VALUE"):
        parse_side("a", text)


def test_two_equal_sides_are_refused() -> None:
    check_sides((A, B))
    with pytest.raises(UserError, match="--a and --b are the same, 'NCCL_ALGO=Ring'"):
        check_sides((A, parse_side("b", "NCCL_ALGO=Ring")))
