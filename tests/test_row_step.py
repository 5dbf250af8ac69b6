"""A measured step as it was asked for: its sizes, and where a group of its ranks sits."""

from workloads.definitions import with_defaults
from workloads.planner.row_step import Step, call_of
from workloads.shapes import SHAPES


def step(name: str = "ddp", *, ranks: int = 8, on_node: int = 4, **params: str | int) -> Step:
    asked = with_defaults({"shape": "tiny", "microbatch": 2, **params}, name)
    return Step(name=name, params=asked, ranks=ranks, on_node=on_node)


def test_sizes_are_those_of_its_parameters() -> None:
    asked = step(hidden=256)
    assert (asked.shape.hidden, asked.shape.layers) == (256, SHAPES["tiny"].layers)
    assert asked.activation_bytes == 2 * 64 * 256 * 4


def test_sixteen_bits_are_two_bytes() -> None:
    assert step().element_bytes == 4
    assert step(precision="bfloat16").element_bytes == 2


def test_microbatches_are_accumulated_or_a_pipelines() -> None:
    assert step().microbatches == 1
    assert step(accumulation=3).microbatches == 3
    assert step("pp", schedule="1f1b", microbatches=8).microbatches == 8


def test_a_group_sits_on_as_few_nodes_as_it_needs() -> None:
    assert [step().place(ranks).inside for ranks in (2, 4, 8)] == [True, True, False]


def test_calls_are_named_after_their_step() -> None:
    call = call_of(step(), "dp", "all_reduce", 100.0, 3, 8)
    assert (call.axis, call.op, call.num_bytes, call.count, call.why) == ("dp", "all_reduce", 100.0, 3, "ddp")
    assert call.sent == 3 * 2 * 100.0 * 7 / 8


def test_a_step_is_of_the_cpu_unless_it_says_so() -> None:
    assert step().device == "cpu"
    assert Step(name="ddp", params=step().params, ranks=2, on_node=2, device="cuda").device == "cuda"


def test_a_call_of_one_rank_sends_nothing() -> None:
    assert call_of(step(ranks=1, on_node=1), "dp", "all_reduce", 100.0, 3, 1).sent == 0


def test_a_group_of_part_of_the_ranks_is_no_larger_than_its_node() -> None:
    place = step(on_node=2).place(4)
    assert (place.ranks, place.on_node, place.nodes) == (4, 2, 2)
