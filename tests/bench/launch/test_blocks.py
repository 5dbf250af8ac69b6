"""The order of a repetition: small cases have many blocks in passes, large ones one."""

from collections import Counter

from parbench.bench.launch.budget import BLOCKS, make_blocks, order_blocks
from parbench.bench.plan.cases import Case, make_case
from tests.support.fakes import make_fake_case

ALL_REDUCES = [make_fake_case(number) for number in range(4)]


def make_sized_case(megabytes: int) -> Case:
    return make_case("p2p.sendrecv", "a:b", {"size_bytes": megabytes << 20})


def compute_order(cases: list[Case], *, seed: int = 0, repetition: int = 0) -> list[int]:
    order, _ = order_blocks(cases, seed, repetition)
    return order


def test_operations_have_many_blocks_and_steps_one() -> None:
    cases = [
        make_fake_case(0, "collective.barrier"),
        make_fake_case(1, "compute.gemm"),
        make_fake_case(2, "workload.ddp"),
        make_fake_case(3, "custom.mine"),
    ]
    counts = Counter(compute_order(cases))
    assert counts == {0: BLOCKS, 1: BLOCKS, 2: 1, 3: 1}


def test_blocks_are_passes_in_random_order() -> None:
    order = compute_order(ALL_REDUCES)
    passes = [order[start : start + 4] for start in range(0, len(order), 4)]
    for places in passes:
        assert sorted(places) == [0, 1, 2, 3]
    assert passes != [passes[0]] * BLOCKS


def test_order_depends_on_seed_and_repetition() -> None:
    order = compute_order(ALL_REDUCES)
    assert compute_order(ALL_REDUCES) == order
    assert compute_order(ALL_REDUCES, seed=1) != order
    assert compute_order(ALL_REDUCES, repetition=1) != order


def test_large_cases_have_one_block() -> None:
    cases = [make_sized_case(megabytes) for megabytes in (300, 64, 300, 128)]
    counts = Counter(compute_order(cases))
    assert counts == {0: BLOCKS, 1: BLOCKS, 2: 1, 3: BLOCKS}


def test_steps_are_shuffled_only_in_later_repetitions() -> None:
    steps = [make_fake_case(number, "custom.mine") for number in range(8)]
    in_order = [*range(8)]
    later_order = compute_order(steps, repetition=1)
    assert compute_order(steps) == in_order
    assert later_order != in_order
    assert sorted(later_order) == in_order


def test_extra_blocks_are_passes_after_the_planned_ones() -> None:
    order, extra = order_blocks(ALL_REDUCES, 0, 0, num_extra=2)
    assert order == compute_order(ALL_REDUCES)
    assert sorted(extra[:4]) == [0, 1, 2, 3]
    assert sorted(extra[4:]) == [0, 1, 2, 3]


def test_weights_and_costs_are_divided_over_the_planned_blocks() -> None:
    blocks = make_blocks([0, 2, 1, 2], [0, 2], [1.0, 4.0, 3.0], [2.0, 0.0, 6.0])
    assert [block.case for block in blocks] == [0, 2, 1, 2, 0, 2]
    assert [block.weight for block in blocks] == [1.0, 1.5, 4.0, 1.5, 0.0, 0.0]
    assert [block.cost_seconds for block in blocks] == [2.0, 3.0, 0.0, 3.0, 0.0, 0.0]
