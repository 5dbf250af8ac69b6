"""The time budget of a run: the starts that fit, and the order of blocks in a start of ranks."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from parbench.bench.launch import budget as module
from parbench.bench.launch.budget import (
    BLOCKS,
    TimeBudget,
    estimate_run_seconds,
    format_budget,
    make_blocks,
)
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record, Samples, SkipReason, WorldInfo
from parbench.bench.results.runs import RepetitionInfo, Run, RunInfo
from tests.support.fakes import make_fake_case, make_plan

ALL_REDUCES = [make_fake_case(number) for number in range(4)]
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def make_record(
    case: Case, samples: Samples | None = None, skip_reason: SkipReason | None = None
) -> Record:
    return Record(
        case=case,
        world=WORLD,
        repetition=0,
        status="skipped" if skip_reason else "ok",
        skip_reason=skip_reason,
        samples=samples or Samples(),
        details={"steps_per_sample": 2},
        started="",
        seconds=1.0,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock whose ``now`` the test sets."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_starts_share_the_time_as_far_as_they_fit(clock: SimpleNamespace) -> None:
    budget = TimeBudget(100.0, num_starts=5)
    assert budget.count_fitting() == 5
    clock.now = 10.0
    assert budget.compute_deadline(began=0.0) == 20.0
    # Six iterations are the minimum, of two steps of 0.5 s each, so 24 s were not needed.
    samples = Samples(values=[0.5] * 30)
    clock.now = 50.0
    budget.complete_start(50.0, [make_record(ALL_REDUCES[0], samples)])
    assert budget.count_fitting() == 2
    assert budget.compute_deadline(began=50.0) == 75.0
    clock.now = 90.0
    budget.complete_start(40.0, [])
    assert budget.count_fitting() == 0


def test_estimate_covers_all_measurements() -> None:
    plan = make_plan(ALL_REDUCES[:2], repetitions=5)
    repetitions = (RepetitionInfo(repetition=0, seconds=10.0),)
    info = RunInfo(
        id="run",
        started="",
        host="n1",
        parbench="0",
        plan=plan,
        repetitions=repetitions,
    )
    records = (
        make_record(ALL_REDUCES[0]),
        make_record(ALL_REDUCES[1], skip_reason=SkipReason.OUT_OF_BUDGET),
    )
    run = Run(path=Path("run"), info=info, records=records)
    assert estimate_run_seconds(run) == 100.0
    assert [format_budget(seconds) for seconds in (100.0, 187.0)] == ["110s", "4m"]


def compute_order(cases: list[Case], *, seed: str = "0", shuffles: bool = False) -> list[int]:
    """Return the index of the case of each block."""
    return [block.case for block in make_blocks(cases, seed, shuffles_single=shuffles)]


def test_small_operations_have_many_blocks() -> None:
    names = ("collective.barrier", "compute.gemm", "workload.ddp", "custom.mine")
    cases = [make_fake_case(number, name) for number, name in enumerate(names)]
    for megabytes in (300, 64, 300, 128):
        cases.append(make_case("p2p.sendrecv", "a:b", {"size_bytes": megabytes << 20}))
    counts = Counter(compute_order(cases))
    many_blocks = {index for index, count in counts.items() if count == BLOCKS}
    assert many_blocks == {0, 1, 4, 5, 7}
    assert {counts[index] for index in (2, 3, 6)} == {1}


def test_blocks_are_passes_in_random_order() -> None:
    order = compute_order(ALL_REDUCES)
    passes = [order[start : start + 4] for start in range(0, len(order), 4)]
    for places in passes:
        assert sorted(places) == [0, 1, 2, 3]
    assert passes != [passes[0]] * BLOCKS
    assert compute_order(ALL_REDUCES) == order
    assert compute_order(ALL_REDUCES, seed="1") != order


def test_steps_are_shuffled_on_request() -> None:
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    in_order = [*range(8)]
    later_order = compute_order(steps, shuffles=True)
    assert compute_order(steps) == in_order
    assert later_order != in_order
    assert sorted(later_order) == in_order


def test_weight_is_divided_over_the_planned_blocks() -> None:
    cases = [make_fake_case(0), make_fake_case(1, "workload.ddp")]
    blocks = make_blocks(cases, "0")
    assert sum(block.weight for block in blocks if block.case == 0) == pytest.approx(1.0)
    assert [block.weight for block in blocks if block.case == 1] == [20.0]
