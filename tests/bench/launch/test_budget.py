"""What launches cost and how many a budget holds."""

from pathlib import Path

import msgspec

from parbench.bench.launch.budget import Prices, Spent, budget_of_all, prices_of
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, Samples, Status, WorldInfo
from parbench.bench.results.runs import LaunchInfo, Run, RunInfo
from tests.support.fakes import make_fake_case, make_plan

ONE, TWO, STEP = make_fake_case(0), make_fake_case(1), make_fake_case(2, "workload.cp")
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def record(asked: Case, launch: int, seconds: float, status: Status = "ok") -> Record:
    return Record(
        case=asked, world=WORLD, launch=launch, status=status, started="", seconds=seconds
    )


def run_of(seconds: list[float], *records: Record) -> Run:
    """Return a run whose launches took so many seconds."""
    launches = tuple(LaunchInfo(launch=launch, seconds=took) for launch, took in enumerate(seconds))
    info = RunInfo(
        id="run",
        started="",
        host="here",
        parbench="0",
        plan=make_plan([ONE, TWO], launches=5),
        launches=launches,
    )
    return Run(path=Path("run"), info=info, records=records)


def spent(*records: Record) -> list[Spent]:
    return [Spent.on(one) for one in records]


def test_a_launch_costs_its_start_and_its_cases_the_cheapest_of_each() -> None:
    prices = Prices().after(
        40.0, spent(record(ONE, 0, 10.0), record(TWO, 0, 20.0), record(STEP, 0, 3.0, "failed"))
    )
    assert (prices.start, prices.cases) == (7.0, {ONE.id: 10.0, TWO.id: 20.0})
    assert prices.launch([ONE, TWO]) == 37.0
    again = prices.after(40.0, spent(record(ONE, 1, 30.0), record(TWO, 1, 5.0)))
    assert (again.start, again.cases) == (5.0, {ONE.id: 10.0, TWO.id: 5.0})


def test_what_was_never_measured_costs_as_much_as_its_like() -> None:
    prices = Prices(start=1.0, cases={ONE.id: 4.0}, names={ONE.name: 4.0})
    assert [prices.case(one) for one in (ONE, TWO)] == [4.0, 4.0]
    prices = Prices(start=1.0, cases={ONE.id: 4.0, TWO.id: 8.0}, names={ONE.name: 6.0})
    assert prices.case(STEP) == 6.0, "as the mean of all where nothing is like it"
    assert prices.launch([ONE, TWO, STEP]) == 19.0


def test_a_launch_is_not_cheaper_than_one_of_which_a_third_measures() -> None:
    assert Prices(start=4.0, cases={ONE.id: 0.1}).launch([ONE]) == 6.0
    assert Prices(start=4.0).held(20.0, [[ONE]] * 5) == 3


def test_iterations_beyond_the_fewest_are_no_price_as_they_fill_what_time_there_is() -> None:
    seen = {"samples": Samples(values=[0.25] * 12), "details": {"steps_per_sample": 2}}
    prices = Prices().after(10.0, spent(msgspec.structs.replace(record(ONE, 0, 10.0), **seen)))
    assert prices.cases == {ONE.id: 10.0 - 2 * 6 * 0.25}
    assert prices.start == 0.0


def test_as_many_launches_fit_as_their_prices_in_turn() -> None:
    prices = Prices(start=1.0, cases={ONE.id: 4.0, TWO.id: 9.0})
    for seconds, held in ((4.9, 0), (5.0, 1), (14.9, 1), (15.0, 2), (100.0, 3)):
        assert prices.held(seconds, [[ONE], [TWO], [ONE]]) == held, seconds
    assert Prices().held(0.0, [[ONE]]) == 1, "nothing is known before the first"


def test_the_prices_of_a_run_are_those_of_its_launches() -> None:
    first, cut = (record(ONE, 0, 10.0), record(TWO, 0, 20.0)), record(ONE, 1, 0.0, "skipped")
    later = record(ONE, 2, 8.0), record(TWO, 2, 21.0)
    prices = prices_of(run_of([34.0, 0.5, 31.0], *first, cut, *later))
    assert (prices.start, prices.cases) == (2.0, {ONE.id: 8.0, TWO.id: 20.0})
    whole = run_of([34.0], *first, cut)
    assert budget_of_all(whole.info.plan, prices_of(whole)) == "4m", (
        "five launches of 34 s, and a tenth"
    )
    assert prices_of(run_of([])) == Prices()
    assert prices_of(run_of([], *first)).start == 0.0, "an earlier version did not keep it"
