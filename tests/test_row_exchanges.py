"""Calls of attention over ranks and of experts: the bytes of their own closed forms, and why others are not told."""

from collections import defaultdict
from typing import Any

import pytest

from workloads.context.cp_case import ulysses_of
from workloads.context.cp_costs import AttentionSizes, attention_bytes
from workloads.definitions import with_defaults
from workloads.experts.moe_case import moe_of, num_moe_parameters, num_routed_parameters
from workloads.experts.moe_costs import Moved, Sizes, sent_by
from workloads.planner.link_time import Call
from workloads.planner.row_calls import expected
from workloads.planner.row_exchanges import attention_calls, expert_step
from workloads.planner.row_step import Expected, Step

METHODS = ("ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp")
EVEN: dict[str, Any] = {"routing": "balanced", "experts": 8, "top_k": 2}


def step(name: str, ranks: int = 4, **params: Any) -> Step:
    asked = with_defaults({"shape": "small-llama", "microbatch": 2, **params}, name)
    return Step(name=name, params=asked, ranks=ranks, on_node=ranks)


def by_axis(calls: tuple[Call, ...]) -> dict[str, float]:
    sent: dict[str, float] = defaultdict(float)
    for call in calls:
        sent[call.axis] += call.sent
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("checkpointing", "forwards"), [("none", 1), ("selective", 2), ("full", 2)])
@pytest.mark.parametrize("method", METHODS)
def test_attention_sends_what_its_method_s_closed_form_says(
    method: str, checkpointing: str, forwards: int, precision: str
) -> None:
    asked = step("cp", method=method, accumulation=3, checkpointing=checkpointing, precision=precision)
    shape = asked.shape
    sizes = AttentionSizes(
        microbatch=2,
        sequence=shape.sequence,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        element_bytes=asked.element_bytes,
    )
    theirs = attention_bytes(method, sizes, 4, ulysses_of(method, 0, 4)).step(shape.layers, 3, forwards=forwards)
    assert by_axis(attention_calls(asked)) == pytest.approx(theirs)


def test_a_ring_sends_one_message_a_hop_and_gradients_beside_them() -> None:
    keys, gradients = attention_calls(step("cp", method="ring"))
    assert (keys.op, keys.count, gradients.count) == ("send", 2 * 3 * 8, 3 * 8)
    assert keys.num_bytes == gradients.num_bytes == 2 * 2 * 32 * 192 / 2 * 4


def test_ulysses_exchanges_twice_a_pass() -> None:
    mixed, back = attention_calls(step("cp", method="ulysses"))
    assert (mixed.op, mixed.count, back.count) == ("all_to_all", 2 * 8, 2 * 8)
    assert mixed.num_bytes == 2 * back.num_bytes


def test_a_step_over_sequences_averages_its_gradients_as_well() -> None:
    found = expected(step("cp", method="usp"))
    assert isinstance(found, Expected)
    assert by_axis(found.calls).keys() == {"ring", "ulysses", "dp"}


def test_the_ranks_of_usp_can_be_given() -> None:
    calls = attention_calls(step("cp", 8, method="usp", ulysses=2))
    assert {call.axis: call.place.ranks for call in calls} == {"ring": 4, "ulysses": 2}


def even(**params: Any) -> Expected:
    found = expert_step(step("ep_step", **{**EVEN, **params}))
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("ep", [2, 4])
def test_even_experts_send_what_their_closed_form_says(ep: int) -> None:
    asked = step("ep_step", ep=ep, accumulation=2, **EVEN)
    shape, tokens = asked.shape, 2 * asked.shape.sequence
    sizes = Sizes(hidden=shape.hidden, element_bytes=4, top_k=2, tokens=tokens, experts_per_rank=8 // ep)
    pairs = [[tokens * 2 // ep] * ep] * ep
    each = sent_by("all_to_all", 0, Moved(pairs=pairs, rows=pairs), sizes)
    found = by_axis(even(ep=ep, accumulation=2).calls)
    assert found["ep"] == pytest.approx(2 * shape.layers * (each.forward + each.backward))


def test_gradients_of_experts_are_averaged_over_their_copies_and_the_rest_over_all() -> None:
    asked = step("ep_step", ep=2, **EVEN)
    moe = moe_of(asked.params, asked.shape, 4)
    routed = num_routed_parameters(asked.shape, moe)
    rest = num_moe_parameters(asked.shape, moe) - routed
    found = by_axis(even(ep=2).calls)
    assert found["dp"] == pytest.approx(2 * rest * 4 * 3 / 4)
    assert found["edp"] == pytest.approx(2 * routed / 2 * 4 / 2)
    assert "edp" not in by_axis(even(ep=4).calls)


def test_experts_are_held_by_the_ranks_they_are_dealt_to() -> None:
    asked = step("ep_step", ep=4, **EVEN)
    moe = moe_of(asked.params, asked.shape, 4)
    routed = num_routed_parameters(asked.shape, moe)
    assert even(ep=4).state.parameters == 4 * (num_moe_parameters(asked.shape, moe) - routed * 3 / 4)


def test_layers_computed_again_send_their_tokens_again() -> None:
    plain, again = (by_axis(even(checkpointing=how).calls)["ep"] for how in ("none", "full"))
    assert again / plain == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"routing": "router"}, "routing = router: who sends how much is known once routes were drawn"),
        ({"routing": "zipf"}, "routing = zipf"),
        ({"variant": "dedup"}, "variant = dedup, capacity = 0, chunks = 1: only dropless"),
        ({"capacity": 1.25}, "variant = all_to_all, capacity = 1.25"),
        ({"chunks": 2}, "chunks = 2"),
        ({"tp": 2}, "tp = 2, etp = 1, fsdp = false: only whole experts"),
        ({"fsdp": True}, "fsdp = true"),
    ],
)
def test_what_has_no_closed_form_says_which_choice_it_is(params: dict[str, Any], reason: str) -> None:
    found = expert_step(step("ep_step", **{**EVEN, **params}))
    assert isinstance(found, str)
    assert found.startswith("ep_step: ")
    assert reason in found


# what runs of two ranks counted by axis, of the shape tiny with microbatch 4
COUNTED: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("cp", {"method": "zigzag"}, {"cp": 1572864, "dp": 3728384}),
    ("cp", {"method": "allgather_kv"}, {"cp": 1572864, "dp": 3728384}),
    ("cp", {"method": "ulysses"}, {"cp": 1048576, "dp": 3728384}),
    ("ep_step", {"routing": "balanced"}, {"ep": 2097280, "dp": 2692096}),
]


@pytest.mark.parametrize(("name", "params", "counted"), COUNTED)
def test_bytes_are_those_that_a_run_counted(name: str, params: dict[str, Any], counted: dict[str, float]) -> None:
    found = expected(step(name, 2, shape="tiny", **{"microbatch": 4, **params}))
    assert isinstance(found, Expected)
    assert by_axis(found.calls) == counted
