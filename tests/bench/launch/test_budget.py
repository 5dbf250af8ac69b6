"""The order of blocks in a start of ranks, and the estimate of a run's time budget."""

from collections import Counter
from pathlib import Path

from parbench.bench.launch.budget import (
    BLOCKS,
    estimate_run_seconds,
    format_budget,
    make_blocks,
)
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.records import Record, SkipReason, WorldInfo
from parbench.bench.results.runs import RepetitionInfo, Run, RunInfo
from tests.support.fakes import make_fake_case, make_plan

ALL_REDUCES = [make_fake_case(number) for number in range(4)]
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def make_record(case: Case, skip_reason: SkipReason | None = None) -> Record:
    return Record(
        case=case,
        world=WORLD,
        repetition=0,
        status="skipped" if skip_reason else "ok",
        skip_reason=skip_reason,
        started="",
        seconds=1.0,
    )


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


def test_small_operations_have_many_blocks() -> None:
    names = ("collective.barrier", "compute.gemm", "workload.ddp", "custom.mine")
    cases = [make_fake_case(number, name) for number, name in enumerate(names)]
    for megabytes in (300, 64, 300, 128):
        cases.append(make_case("p2p.sendrecv", "a:b", {"size_bytes": megabytes << 20}))
    counts = Counter(make_blocks(cases, "0"))
    many_blocks = {index for index, count in counts.items() if count == BLOCKS}
    assert many_blocks == {0, 1, 4, 5, 7}
    assert {counts[index] for index in (2, 3, 6)} == {1}


def test_blocks_are_passes_in_random_order() -> None:
    order = make_blocks(ALL_REDUCES, "0")
    passes = [order[start : start + 4] for start in range(0, len(order), 4)]
    for places in passes:
        assert sorted(places) == [0, 1, 2, 3]
    assert passes != [passes[0]] * BLOCKS
    assert make_blocks(ALL_REDUCES, "0") == order
    assert make_blocks(ALL_REDUCES, "1") != order


def test_steps_have_one_block_each_in_random_order() -> None:
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    order = make_blocks(steps, "0")
    assert sorted(order) == [*range(8)]
    assert make_blocks(steps, "1") != order
