"""The cost of launches, and how many of them a budget allows."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.launch.budget import Prices, Spent, budget_of_all, prices_of
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, Samples, WorldInfo
from parbench.bench.results.runs import LaunchInfo, Run, RunInfo
from tests.support.fakes import make_fake_case, make_plan

FIRST = make_fake_case(0)
SECOND = make_fake_case(1)
STEP = make_fake_case(2, "workload.cp")
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def make_record(case: Case, launch: int, seconds: float) -> Record:
    return Record(
        case=case, world=WORLD, launch=launch, status="ok", started="", seconds=seconds
    )


def make_run(launch_seconds: list[float], *records: Record) -> Run:
    launches = []
    for launch, seconds in enumerate(launch_seconds):
        launches.append(LaunchInfo(launch=launch, seconds=seconds))
    plan = make_plan([FIRST, SECOND], launches=5)
    info = RunInfo(
        id="run", started="", host="n1", parbench="0", plan=plan, launches=tuple(launches)
    )
    return Run(path=Path("run"), info=info, records=records)


def test_prices_are_the_minimum_over_launches() -> None:
    run = make_run(
        [40.0, 0.5, 40.0],
        make_record(FIRST, 0, 10.0),
        make_record(SECOND, 0, 20.0),
        replace(make_record(STEP, 0, 3.0), status="failed"),
        replace(make_record(FIRST, 1, 0.0), status="skipped"),
        make_record(FIRST, 2, 30.0),
        make_record(SECOND, 2, 5.0),
    )
    prices = prices_of(run)
    assert prices.start == 5.0
    assert prices.cases == {FIRST.id: 10.0, SECOND.id: 5.0}
    assert prices.launch([FIRST, SECOND]) == 20.0
    assert prices_of(make_run([])) == Prices()


def test_iterations_beyond_the_minimum_have_no_price() -> None:
    # Six iterations are the minimum, of two steps of 0.25 s each.
    samples = Samples(values=[0.25] * 12)
    details = {"steps_per_sample": 2}
    record = replace(make_record(FIRST, 0, 10.0), samples=samples, details=details)
    prices = Prices().after(10.0, [Spent.on(record)])
    assert prices.cases == {FIRST.id: 7.0}


def test_unmeasured_case_costs_as_much_as_similar_ones() -> None:
    costs = {FIRST.id: 4.0, STEP.id: 8.0}
    names = {FIRST.name: 4.0, STEP.name: 8.0}
    prices = Prices(start=1.0, cases=costs, names=names)
    assert prices.case(SECOND) == 4.0
    # Nothing has this name: the mean of all cases.
    assert prices.case(make_fake_case(3, "p2p.sendrecv")) == 6.0


@pytest.mark.parametrize(("seconds", "launches"), [(4.9, 0), (5.0, 1), (15.0, 2), (100.0, 3)])
def test_launches_that_a_budget_allows(seconds: float, launches: int) -> None:
    prices = Prices(start=1.0, cases={FIRST.id: 4.0, SECOND.id: 9.0})
    assert prices.held(seconds, [[FIRST], [SECOND], [FIRST]]) == launches


def test_budget_of_all_launches_has_a_reserve() -> None:
    run = make_run([34.0], make_record(FIRST, 0, 10.0), make_record(SECOND, 0, 20.0))
    # Five launches of 34 s and ten percent are 187 s.
    assert budget_of_all(run.info.plan, prices_of(run)) == "4m"
