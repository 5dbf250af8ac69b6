"""Seconds of a call: bytes over the slowest link, hops by what the network looks like, nothing for one rank."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import H100, PLAIN

from workloads.costs import sent_bytes
from workloads.planner.link_time import Call, by_hardware, inside_rate, rate_of
from workloads.planner.placement import Place

INSIDE = Place(ranks=8, on_node=8)
ACROSS = Place(ranks=32, on_node=8)
ONE_A_NODE = Place(ranks=4, on_node=1)
SLOW_START = msgspec.structs.replace(PLAIN, launch_seconds=1e-3, inside_hop_seconds=1e-4, across_hop_seconds=1e-2)


def call(op: str = "all_reduce", num_bytes: float = 8e9, place: Place = INSIDE, count: float = 1) -> Call:
    return Call(axis="dp", op=op, num_bytes=num_bytes, count=count, place=place, why="a test")


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_inside_a_node_bytes_pass_the_inside_link(op: str) -> None:
    assert by_hardware(PLAIN)(call(op)) == sent_bytes(op, 8e9, 8) / 100e9


@pytest.mark.parametrize(
    ("on_node", "rails", "cards"), [(1, 0, 1), (4, 0, 4), (8, 0, 8), (8, 1, 1), (8, 4, 4), (2, 8, 2)]
)
def test_a_collective_drives_a_card_for_each_of_its_ranks_on_a_node(on_node: int, rails: int, cards: int) -> None:
    hardware = msgspec.structs.replace(PLAIN, rails=rails)
    assert rate_of(hardware, "all_gather", Place(ranks=2 * on_node, on_node=on_node)) == cards * 10e9


def test_cards_cannot_be_faster_than_what_feeds_them() -> None:
    hardware = msgspec.structs.replace(PLAIN, across_bytes_per_second=50e9)
    assert rate_of(hardware, "all_gather", ACROSS) == inside_rate(hardware) == 100e9


def test_a_message_has_one_card() -> None:
    assert rate_of(PLAIN, "send", ACROSS) == 10e9
    assert rate_of(PLAIN, "send", INSIDE) == 100e9


def test_an_exchange_across_nodes_sends_what_is_far_over_its_own_card() -> None:
    far = 8e9 * 24 / 32
    assert by_hardware(PLAIN)(call("all_to_all", place=ACROSS)) == far / 10e9


def test_an_exchange_may_be_bound_by_the_inside_links() -> None:
    hardware = msgspec.structs.replace(PLAIN, across_bytes_per_second=1e15)
    near = 8e9 * 7 / 32
    assert by_hardware(hardware)(call("all_to_all", place=ACROSS)) == pytest.approx(near / 100e9)


def test_efficiencies_slow_the_links_that_they_are_of() -> None:
    assert inside_rate(H100) == 0.8 * 450e9
    assert rate_of(H100, "all_gather", ONE_A_NODE) == 0.8 * 50e9


@pytest.mark.parametrize(
    ("op", "place", "hops"),
    [
        ("all_gather", INSIDE, 7e-4),
        ("reduce_scatter", ONE_A_NODE, 3e-2),
        ("all_gather", ACROSS, 7e-4 + 3e-2),
        ("all_reduce", INSIDE, 14e-4),
        ("all_reduce", ACROSS, 2 * (7e-4 + 2e-2)),
        ("send", INSIDE, 1e-4),
        ("send", ACROSS, 1e-2),
        ("all_to_all", ACROSS, 1e-2),
    ],
)
def test_latency_is_a_launch_and_the_hops_of_the_way(op: str, place: Place, hops: float) -> None:
    assert by_hardware(SLOW_START)(call(op, 0.0, place)) == pytest.approx(1e-3 + hops)


def test_many_nodes_sum_over_trees_but_gather_in_rings() -> None:
    place = Place(ranks=1024, on_node=1)
    seconds = by_hardware(SLOW_START)
    assert seconds(call("all_reduce", 0.0, place)) == pytest.approx(1e-3 + 2 * 10 * 1e-2)
    assert seconds(call("all_gather", 0.0, place)) == pytest.approx(1e-3 + 1023 * 1e-2)


def test_one_rank_takes_no_time() -> None:
    assert by_hardware(SLOW_START)(call(place=Place(ranks=1, on_node=1))) == 0.0


@given(
    st.floats(0, 1e12), st.sampled_from([2, 8, 64, 1024]), st.sampled_from(["all_reduce", "all_gather", "all_to_all"])
)
@settings(deadline=None)
def test_more_bytes_and_more_nodes_never_take_less(num_bytes: float, ranks: int, op: str) -> None:
    seconds = by_hardware(H100)
    here, there = Place(ranks=ranks, on_node=min(8, ranks)), Place(ranks=2 * ranks, on_node=min(8, ranks))
    assert seconds(call(op, num_bytes, here)) <= seconds(call(op, num_bytes + 1e6, here))
    assert seconds(call(op, num_bytes, here)) <= seconds(call(op, num_bytes, there))


def test_what_is_sent_is_that_of_all_calls() -> None:
    assert call("all_gather", 800, count=3).sent == 3 * 700
