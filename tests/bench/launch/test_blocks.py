"""The order of a repetition: small cases have many blocks in passes, large ones one."""

from collections import Counter

import pytest

from parbench.bench.launch.budget import BLOCKS, make_blocks
from parbench.bench.plan.cases import Case, make_case
from tests.support.fakes import make_fake_case

ALL_REDUCES = [make_fake_case(number) for number in range(4)]


def compute_order(cases: list[Case], *, seed: str = "0", shuffles: bool = False) -> list[int]:
    """Return the index of the case of each block."""
    numbers = [0.0] * len(cases)
    blocks = make_blocks(cases, numbers, numbers, seed, shuffles_single=shuffles)
    return [block.case for block in blocks]


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


def test_order_depends_on_the_seed() -> None:
    order = compute_order(ALL_REDUCES)
    assert compute_order(ALL_REDUCES) == order
    assert compute_order(ALL_REDUCES, seed="1") != order


def test_steps_are_shuffled_on_request() -> None:
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    in_order = [*range(8)]
    later_order = compute_order(steps, shuffles=True)
    assert compute_order(steps) == in_order
    assert later_order != in_order
    assert sorted(later_order) == in_order


def test_weights_and_costs_are_divided_over_the_planned_blocks() -> None:
    cases = [make_fake_case(0), make_fake_case(1, "workload.ddp")]
    *planned, extra = make_blocks(cases, [1.0, 4.0], [2.0, 6.0], "0", num_extra=1)
    assert sum(block.weight for block in planned if block.case == 0) == pytest.approx(1.0)
    assert sum(block.cost_seconds for block in planned if block.case == 0) == pytest.approx(2.0)
    [step] = [block for block in planned if block.case == 1]
    assert (step.weight, step.cost_seconds) == (4.0, 6.0)
    assert (extra.weight, extra.cost_seconds) == (0.0, 0.0)
