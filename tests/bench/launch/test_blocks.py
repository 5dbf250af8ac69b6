"""The order of blocks in a start of ranks."""

from collections import Counter

from parbench.bench.launch.blocks import BLOCKS, make_blocks
from parbench.bench.plan.cases import make_case
from tests.support.fakes import make_fake_case

ALL_REDUCES = [make_fake_case(number) for number in range(4)]


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


def test_two_cases_have_one_block_each() -> None:
    assert sorted(make_blocks(ALL_REDUCES[:2], "0")) == [0, 1]
