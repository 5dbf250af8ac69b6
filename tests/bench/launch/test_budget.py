"""The cost of repetitions, and how many of them a budget allows."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from parbench.bench.launch.budget import CostModel, compute_costs, suggest_budget
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, Samples, WorldInfo
from parbench.bench.results.runs import RepetitionInfo, Run, RunInfo
from tests.support.fakes import make_fake_case, make_plan

FIRST = make_fake_case(0)
SECOND = make_fake_case(1)
STEP = make_fake_case(2, "workload.cp")
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def make_record(case: Case, repetition: int, seconds: float) -> Record:
    return Record(
        case=case, world=WORLD, repetition=repetition, status="ok", started="", seconds=seconds
    )


def make_run(repetition_seconds: list[float], *records: Record) -> Run:
    repetitions = []
    for repetition, seconds in enumerate(repetition_seconds):
        repetitions.append(RepetitionInfo(repetition=repetition, seconds=seconds))
    plan = make_plan([FIRST, SECOND], repetitions=5)
    info = RunInfo(
        id="run", started="", host="n1", parbench="0", plan=plan, repetitions=tuple(repetitions)
    )
    return Run(path=Path("run"), info=info, records=records)


def test_costs_are_the_minimum_over_repetitions() -> None:
    run = make_run(
        [40.0, 0.5, 40.0],
        make_record(FIRST, 0, 10.0),
        make_record(SECOND, 0, 20.0),
        replace(make_record(STEP, 0, 3.0), status="failed"),
        replace(make_record(FIRST, 1, 0.0), status="skipped"),
        make_record(FIRST, 2, 30.0),
        make_record(SECOND, 2, 5.0),
    )
    costs = compute_costs(run)
    assert costs.startup_seconds == 5.0
    assert costs.case_seconds == {FIRST.id: 10.0, SECOND.id: 5.0}
    assert costs.estimate_repetition([FIRST, SECOND]) == 20.0
    assert compute_costs(make_run([])) == CostModel()


def test_iterations_beyond_the_minimum_cost_nothing() -> None:
    # Six iterations are the minimum, of two steps of 0.25 s each.
    samples = Samples(values=[0.25] * 12)
    details = {"steps_per_sample": 2}
    record = replace(make_record(FIRST, 0, 10.0), samples=samples, details=details)
    costs = CostModel().with_repetition(10.0, [record])
    assert costs.case_seconds == {FIRST.id: 7.0}


def test_unmeasured_case_costs_the_mean_of_others() -> None:
    costs = CostModel(startup_seconds=1.0, case_seconds={FIRST.id: 4.0, STEP.id: 8.0})
    assert costs.estimate_case(FIRST) == 4.0
    assert costs.estimate_case(SECOND) == 6.0


@pytest.mark.parametrize(("seconds", "count"), [(4.9, 0), (5.0, 1), (15.0, 2), (100.0, 3)])
def test_repetitions_that_fit_in_a_budget(seconds: float, count: int) -> None:
    costs = CostModel(startup_seconds=1.0, case_seconds={FIRST.id: 4.0, SECOND.id: 9.0})
    assert costs.count_fitting(seconds, [[FIRST], [SECOND], [FIRST]]) == count


def test_suggested_budget_exceeds_one_that_did_not_suffice() -> None:
    """Repetitions fill their share of a budget, so fewer fit than their least cost suggests."""
    run = make_run([34.0], make_record(FIRST, 0, 10.0), make_record(SECOND, 0, 20.0))
    # Five repetitions of 34 s and ten percent are 187 s.
    assert suggest_budget(run.info.plan, compute_costs(run), 5) == "4m"
    plan = replace(run.info.plan, repetitions=3, budget_seconds=20.0)
    costs = CostModel(startup_seconds=3.0, case_seconds={FIRST.id: 1.0, SECOND.id: 1.0})
    assert suggest_budget(plan, costs, num_fitting=2) == "40s"
