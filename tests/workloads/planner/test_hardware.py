"""Machines as numbers, how long a call takes on one, and where its ranks sit: against groups written out by rank."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.mesh.axes import (
    DATA,
    coordinate_of,
    expert_copies,
    expert_groups,
    groups_along,
)
from parbench.workloads.planner.hardware import PRESETS, Efficiency, Hardware, hardware_of
from parbench.workloads.planner.link_time import PlacedCall, by_hardware
from parbench.workloads.planner.placement import Place, place_of
from parbench.workloads.step.peaks import datasheet_peak
from tests.support.planner_asks import H100, SIMPLE_HARDWARE

WHOLE = """
flops_per_second = 1e15
memory_bytes = 96e9
memory_bytes_per_second = 4e12
gpus_per_node = 4
inside_bytes_per_second = 2e11
across_bytes_per_second = 25e9
rails = 1

[efficiency]
gemm = 0.4
overlap = { fsdp = 0.5 }
"""
# memory in bytes, its rate, NVLink both ways in bytes a second, the dense peak, a card in bits a second
VENDORS = {
    "a100": (80e9, 2.039e12, 600e9, 312e12, 200e9),
    "h100": (80e9, 3.35e12, 900e9, 989.4e12, 400e9),
    "h800": (80e9, 3.35e12, 400e9, 989.4e12, 400e9),
    "h200": (141e9, 4.8e12, 900e9, 989.4e12, 400e9),
    "b200": (1440e9 / 8, 8e12, 14.4e12 / 8, 2250e12, 400e9),
}


def test_presets_are_the_vendors_and_say_where_their_figures_are_from() -> None:
    assert PRESETS.keys() == VENDORS.keys()
    for name, (memory, rate, nvlink, peak, card) in VENDORS.items():
        found = PRESETS[name]
        assert (found.memory_bytes, found.memory_bytes_per_second, found.flops_per_second) == (
            memory,
            rate,
            peak,
        )
        assert (2 * found.inside_bytes_per_second, 8 * found.across_bytes_per_second) == (
            nvlink,
            card,
        ), name
        device = {
            "h100": (h100 := "NVIDIA H100 80GB HBM3"),
            "h800": h100,
            "h200": "NVIDIA H200",
        }.get(name, f"NVIDIA {name.upper()}")
        assert peak == datasheet_peak(device, "bfloat16"), name
        assert "NVIDIA" in found.source, name
        assert "not checked" in found.source, name
    assert len({preset.source for preset in PRESETS.values()}) == len(PRESETS)
    assert "cards of 400 Gbit/s not checked" not in PRESETS["h200"].source
    assert PRESETS["h100"].usable_bytes == pytest.approx(80e9 * 0.92)
    assert (
        msgspec.convert(msgspec.to_builtins(PRESETS["b200"]), type(PRESETS["b200"]))
        == PRESETS["b200"]
    )


def test_a_name_is_found_in_any_case_and_a_file_declares_a_machine_of_its_own(
    tmp_path: Path,
) -> None:
    assert hardware_of("H100") is PRESETS["h100"]
    file = tmp_path / "mine.toml"
    file.write_text(WHOLE)
    found = hardware_of(str(file))
    assert (found.name, found.source) == ("mine", str(file))
    assert (found.gpus_per_node, found.rails, found.memory_bytes) == (4, 1, 96e9)
    assert found.efficiency == Efficiency(gemm=0.4, overlap={"fsdp": 0.5})
    assert found.launch_seconds == PRESETS["h100"].launch_seconds
    file.write_text('name = "ours"\n' + WHOLE)
    assert hardware_of(str(file)).name == "ours"


def test_a_wrong_name_or_file_is_refused_with_the_place_and_what_is_allowed(tmp_path: Path) -> None:
    for name, told in (
        ("h10", r"hardware 'h10' is not a100, h100, h800, h200 or b200, .*did you mean 'h100'"),
        ("absent.toml", r"absent\.toml cannot be read: No such file"),
    ):
        with pytest.raises(UserError, match=told):
            hardware_of(name)
    file = tmp_path / "mine.toml"
    for part, wrong, told in (
        ("gpus_per_node = 4", "gpus_per_node = 0", r">= 1.*gpus_per_node"),
        ("gemm = 0.4", "gemm = 1.4", r"<= 1.*efficiency.gemm"),
        ("memory_bytes = 96e9", "memory_bytes = 1e-320", r">= 1.*memory_bytes"),
        ("rails", "rail", r"unknown field `rail`; allowed are .*rails.*did you mean 'rails'"),
        ("memory_bytes = 96e9", "", r"missing required field `memory_bytes`"),
        (WHOLE, "flops_per_second = ", "is no TOML"),
        (
            "fsdp = 0.5",
            "fsd = 0.5",
            r": overlap of 'fsd' is not of dp, edp, fsdp, cp or ep.*did you mean 'fsdp'",
        ),
    ):
        file.write_text(WHOLE.replace(part, wrong))
        with pytest.raises(UserError, match=told) as caught:
            hardware_of(str(file))
        assert str(caught.value).startswith(f"hardware file {file}")


def test_out_of_a_pod_go_the_cards_of_a_groups_ranks_there_over_the_oversubscription() -> None:
    thin = msgspec.structs.replace(SIMPLE_HARDWARE, nodes_per_pod=4, oversubscription=8.0)
    flat, pods = by_hardware(SIMPLE_HARDWARE), by_hardware(thin)
    # of 64 ranks on 8 nodes, 32 share a pod: 32 cards / 8 are half of the 8 cards of a node
    eight = place_of({"fsdp": 64}, ("fsdp",), 8, 4)
    assert (eight.in_pod, eight.pods, eight.nodes) == (32, 2, 8)
    assert eight.words == "across 8 nodes in 2 pods, 8 a node"
    assert pods(call("all_gather", place=eight)) == pytest.approx(
        2 * flat(call("all_gather", place=eight))
    )
    one = place_of({"fsdp": 32}, ("fsdp",), 8, 4)
    assert pods(call("all_gather", place=one)) == flat(call("all_gather", place=one))
    far = place_of({"pp": 2, "fsdp": 32}, ("pp",), 8, 4)
    assert (far.ranks, far.in_pod) == (2, 1)
    assert pods(call("send", place=far)) == pytest.approx(8 * flat(call("send", place=far)))
    assert pods(call("all_to_all", place=eight)) == pytest.approx(8e9 * 32 / 64 * 8 / 10e9)


def test_ranks_that_split_experts_are_neighbours_of_tp() -> None:
    mesh = {"dp": 4, "tp": 8, "ep": 2, "etp": 4}
    assert place_of(mesh, ("etp",), 8) == Place(ranks=4, on_node=4)
    assert place_of(mesh, ("edp",), 8) == Place(ranks=4, on_node=2)
    assert place_of(mesh, ("tp",), 8) == Place(ranks=8, on_node=8)


INSIDE, ACROSS, ONE_A_NODE = (
    Place(ranks=ranks, on_node=node) for ranks, node in ((8, 8), (32, 8), (4, 1))
)
SLOW_START = msgspec.structs.replace(
    SIMPLE_HARDWARE, launch_seconds=1e-3, inside_hop_seconds=1e-4, across_hop_seconds=1e-2
)


def call(
    op: str = "all_reduce", num_bytes: float = 8e9, place: Place = INSIDE, count: float = 1
) -> PlacedCall:
    return PlacedCall(axis="dp", op=op, num_bytes=num_bytes, count=count, place=place)


def test_bytes_pass_the_inside_link_and_what_is_far_its_own_card() -> None:
    seconds = by_hardware(SIMPLE_HARDWARE)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        assert seconds(call(op)) == sent_bytes(op, 8e9, 8) / 100e9, op
    assert seconds(call("all_to_all", place=ACROSS)) == 8e9 * 24 / 32 / 10e9
    fast_cards = by_hardware(msgspec.structs.replace(SIMPLE_HARDWARE, across_bytes_per_second=1e15))
    assert fast_cards(call("all_to_all", place=ACROSS)) == pytest.approx(8e9 * 7 / 32 / 100e9)
    assert call("all_gather", 800, count=3).sent == 3 * 700


def test_a_collective_drives_a_card_for_each_of_its_ranks_on_a_node_no_faster_than_what_feeds_them() -> (
    None
):
    def rate(hardware: Hardware, place: Place, op: str = "all_gather") -> float:
        return sent_bytes(op, 8e9, place.ranks) / by_hardware(hardware)(call(op, place=place))

    for on_node, rails, cards in ((1, 0, 1), (4, 0, 4), (8, 0, 8), (8, 1, 1), (8, 4, 4), (2, 8, 2)):
        hardware = msgspec.structs.replace(SIMPLE_HARDWARE, rails=rails)
        assert rate(hardware, Place(ranks=2 * on_node, on_node=on_node)) == pytest.approx(
            cards * 10e9
        ), (
            on_node,
            rails,
        )
    hardware = msgspec.structs.replace(SIMPLE_HARDWARE, across_bytes_per_second=50e9)
    assert rate(hardware, ACROSS) == hardware.inside_rate == 100e9
    assert (rate(SIMPLE_HARDWARE, ACROSS, "send"), rate(SIMPLE_HARDWARE, INSIDE, "send")) == (
        10e9,
        100e9,
    )
    assert (H100.inside_rate, H100.card_rate) == (0.8 * 450e9, 0.8 * 50e9)


def test_latency_is_a_launch_and_the_hops_of_the_way() -> None:
    seconds, many = by_hardware(SLOW_START), Place(ranks=1024, on_node=1)
    for op, place, hops in (
        ("all_gather", INSIDE, 7e-4),
        ("reduce_scatter", ONE_A_NODE, 3e-2),
        ("all_gather", ACROSS, 7e-4 + 3e-2),
        ("all_reduce", INSIDE, 14e-4),
        ("all_reduce", ACROSS, 2 * (7e-4 + 2e-2)),
        ("send", INSIDE, 1e-4),
        ("send", ACROSS, 1e-2),
        ("all_to_all", ACROSS, 1e-2),
        ("all_reduce", many, 2 * 10 * 1e-2),  # a tree, where gathers go in rings
        ("all_gather", many, 1023 * 1e-2),
    ):
        assert seconds(call(op, 0.0, place)) == pytest.approx(1e-3 + hops), (op, place)
    assert seconds(call(place=Place(ranks=1, on_node=1))) == 0.0


AXES = ("dp", "pp", "fsdp", "cp", "tp")
NODES = st.sampled_from([1, 2, 4, 6, 8, 9, 72])


def at(ranks: int, on_node: int) -> Place:
    return Place(ranks=ranks, on_node=on_node)


def counted(groups: list[list[int]], gpus_per_node: int) -> Place:
    nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
    return at(len(groups[0]), -(-len(groups[0]) // nodes))


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    mesh = {name: draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for name in draw(st.permutations(AXES))}
    while math.prod(mesh.values()) > 512:
        mesh[max(mesh, key=lambda name: mesh[name])] = 1
    return mesh


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, int]:
    mesh, ep = draw(meshes()), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    assume(math.prod(mesh[name] for name in DATA) % ep == 0)
    return {**mesh, "ep": ep}


@given(meshes(), NODES, st.sampled_from([*AXES, "dp+cp", "dp+fsdp+tp"]))
@settings(deadline=None, max_examples=50)
def test_a_group_sits_as_its_ranks_do(mesh: dict[str, int], gpus_per_node: int, axes: str) -> None:
    names = tuple(axes.split("+"))
    assert place_of(mesh, names, gpus_per_node) == counted(
        groups_along(mesh, *names), gpus_per_node
    )


def shards_and_copies(mesh: dict[str, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that share an expert, and those that hold the same part of it, written out one by one.

    Blocks of ``ep`` are numbered as (dp, fsdp, cp), of what ``ep`` leaves of fsdp and cp.
    """
    taken = math.gcd(mesh["ep"], mesh["cp"])
    cp, shards = mesh["cp"] // taken, mesh["fsdp"] // math.gcd(mesh["fsdp"], mesh["ep"] // taken)
    sharing: dict[tuple[int, ...], list[int]] = {}
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(mesh[name] for name in AXES)):
        place = coordinate_of(mesh, rank)
        block, inner = divmod(
            (place["dp"] * mesh["fsdp"] + place["fsdp"]) * mesh["cp"] + place["cp"], mesh["ep"]
        )
        rest, sequence = divmod(block, cp)
        replica, shard = divmod(rest, shards)
        sharing.setdefault((place["pp"], inner, replica, sequence, place["tp"]), []).append(rank)
        same.setdefault((place["pp"], inner, shard), []).append(rank)
    return list(sharing.values()), list(same.values())


@given(mixtures(), NODES)
@settings(deadline=None, max_examples=50)
def test_experts_sit_as_their_ranks_do(mesh: dict[str, int], gpus_per_node: int) -> None:
    shards, copies = shards_and_copies(mesh)
    for group, written_out in (
        ("ep", expert_groups(mesh)),
        ("expert_shards", shards),
        ("edp", copies),
    ):
        assert place_of(mesh, (group,), gpus_per_node) == counted(written_out, gpus_per_node), group
    every = [set(ranks) for ranks in expert_copies(mesh)]
    assert all(any(set(ranks) <= whole for whole in every) for ranks in (*shards, *copies))
    assert len(shards[0]) * len(copies[0]) == len(every[0])
