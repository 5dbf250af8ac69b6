"""A rank stands where the mesh says, groups are what coordinates say, what a mesh cannot carry breaks an equation."""

from dataclasses import replace
from typing import Any

from parbench.bench.plan.groups import groups_of
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.axes import (
    DATA,
    along,
    coordinate_of,
    expert_copies,
    expert_groups,
    expert_parts,
    groups_along,
    mesh_of,
    multiplied,
    size_of,
)
from parbench.workloads.model.shapes import SHAPES, Shape

MESH = {"dp": 2, "pp": 3, "cp": 2, "tp": 2, "ep": 2}
TINY = SHAPES["tiny"]
LAYERS_8, HEADS_2 = replace(TINY, layers=8), replace(TINY, heads=2, kv_heads=2)
FFN_511 = replace(TINY, ffn=511)
TOKENS_66 = replace(TINY, sequence=66)
Given = dict[str, Any]


def test_a_mesh_keeps_the_order_in_which_it_is_written_and_experts_are_not_multiplied() -> None:
    assert list(mesh_of("dp=2,pp=2,tp=2", 8).items()) == [("dp", 2), ("pp", 2), ("tp", 2)]
    assert mesh_of("", 8) == {"dp": 8}
    assert multiplied(MESH) == {"dp": 2, "pp": 3, "cp": 2, "tp": 2}
    assert (size_of(MESH, *multiplied(MESH)), size_of(MESH, *DATA), size_of({}, *DATA)) == (
        24,
        4,
        1,
    )


def test_the_innermost_axis_varies_fastest() -> None:
    origin = {"dp": 0, "fsdp": 0, "pp": 0, "cp": 0, "tp": 0}
    for rank, place in (
        (0, {}),
        (1, {"tp": 1}),
        (2, {"cp": 1}),
        (23, {"dp": 1, "pp": 2, "cp": 1, "tp": 1}),
    ):
        assert coordinate_of(MESH, rank) == {**origin, **place}
    assert coordinate_of({"tp": 2, "dp": 3}, 1)["dp"] == 1


def test_groups_of_axes_are_those_of_collectives_and_count_the_last_fastest() -> None:
    text = " ".join(f"{name}={size}" for name, size in multiplied(MESH).items())
    for axis in ("dp", "pp", "cp", "tp"):
        assert sorted(groups_along(MESH, axis)) == sorted(
            list(ranks) for ranks in groups_of(f"{text}:{axis}", 24)
        )
    [first, *_] = groups_along(MESH, "dp", "cp")
    assert first == [0, 2, 12, 14]
    assert [along(coordinate_of(MESH, rank), MESH, "dp", "cp") for rank in first] == [0, 1, 2, 3]
    assert groups_along(MESH, "cp", "dp")[0] == [0, 12, 2, 14]


def test_every_rank_is_in_one_group_and_one_copy_of_experts() -> None:
    groups = [groups_along(MESH, *axes) for axes in (("dp",), ("dp", "cp"), ("pp", "tp"), ())]
    for ep in (1, 2, 4):
        groups += [
            make({**MESH, "ep": ep}) for make in (expert_groups, expert_copies, expert_parts)
        ]
    for partition in groups:
        assert sorted(rank for ranks in partition for rank in ranks) == list(range(24)), partition
        assert len({len(ranks) for ranks in partition}) == 1, partition


def test_experts_are_dealt_out_in_the_data_axes_and_split_in_tp_and_copies_hold_the_same() -> None:
    pipes, split = {"dp": 2, "pp": 2, "cp": 2, "ep": 2}, {"dp": 2, "tp": 2, "etp": 2}
    for make, mesh, groups in (
        (expert_groups, pipes, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (expert_groups, {**pipes, "ep": 4}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (expert_parts, {"dp": 2, "tp": 4, "etp": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (expert_parts, {"tp": 2, "dp": 2, "etp": 2}, [[0, 2], [1, 3]]),
        (expert_parts, {"dp": 2, "tp": 2}, [[0], [1], [2], [3]]),
        (expert_copies, pipes, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (expert_copies, {"dp": 4, "tp": 2, "ep": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (expert_copies, {**split, "ep": 2}, [[0], [1], [2], [3]]),
        (expert_copies, split, [[0, 2], [1, 3]]),
        (expert_copies, {**split, "tp": 4, "ep": 2}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ):
        assert sorted(make(mesh)) == groups, (make, mesh)


def reason(mesh: dict[str, int], *, shape: Shape = TINY, **more: Any) -> str | None:
    asked = {name: more.pop(name) for name in ("world", "experts") if name in more}
    given = {"microbatches": 4, "cp_method": "ring", **more}
    return StepSpec(shape=shape, mesh=mesh, **given).refusal(**asked)


def test_what_does_not_fit_is_refused_by_equation() -> None:
    experts = {"experts": 8}
    zigzag, rings = {"shape": TOKENS_66, "cp_method": "zigzag"}, {"cp_method": "rings"}
    methods = "ring, striped, zigzag, allgather_kv or ulysses"
    interleaved: Given = {"schedule": "interleaved", "chunks": 4, "shape": LAYERS_8}
    gathered = "torch's runtime keeps so many stages gathered and would gather the others again"
    refused: tuple[tuple[dict[str, int], Given, str], ...] = (
        ({"dp": 2, "tp": 4}, {"world": 6}, "dp(2) * tp(4) != world size(6)"),
        ({"dp": 2, "ep": 2}, {"world": 4, **experts}, "dp(2) != world size(4)"),
        (
            {"fdsp": 2},
            {},
            "mesh axis 'fdsp' is not dp, fsdp, pp, cp, tp, ep or etp; did you mean 'fsdp'?",
        ),
        ({"dp": 0}, {"world": 1}, "dp(0) < 1"),
        ({"tp": 2, "etp": 2}, {}, "etp(2) > 1 without experts: a dense model has none to split"),
        ({"dp": 2, "tp": 2, "etp": 4}, experts, "tp(2) % etp(4) != 0"),
        ({"tp": 4}, {"shape": HEADS_2}, "heads(2) % tp(4) != 0"),
        ({"dp": 2, "tp": 2}, {"shape": FFN_511}, "ffn(511) % tp(2) != 0"),
        ({"cp": 3}, {}, "sequence(64) % cp(3) != 0"),
        ({"cp": 2}, zigzag, "sequence(66) % (2 * cp(2)) != 0: zigzag gives each rank two chunks"),
        ({"cp": 2, "tp": 2}, {"shape": TOKENS_66}, "sequence(66) % (cp(2) * tp(2)) != 0"),
        (
            {"cp": 4, "tp": 2},
            {"cp_method": "ulysses"},
            "heads(4) / tp(2) % cp(4) != 0: ulysses deals out heads",
        ),
        (
            {"cp": 2},
            rings,
            f"cp method 'rings' is not {methods}; did you mean 'ring'?",
        ),
        ({"pp": 2}, {"microbatches": 0}, "microbatches(0) < 1"),
        ({"pp": 8}, {}, "layers(4) < pp(8) * chunks(1)"),
        ({"pp": 4}, {"schedule": "interleaved"}, "layers(4) < pp(4) * chunks(2)"),
        ({"pp": 2, "fsdp": 2}, interleaved, f"chunks(4) > 3 with fsdp(2): {gathered}"),
        ({"dp": 2, "ep": 2}, {}, "ep(2) > 1 without experts: a dense model has none to deal out"),
        ({"dp": 2, "tp": 2, "ep": 4}, experts, "(dp(2) * fsdp(1) * cp(1)) % ep(4) != 0"),
        ({"dp": 2}, {"microbatch": 0}, "microbatch(0) < 1"),
    )
    for mesh, more, equation in refused:
        assert reason(mesh, **more) == equation
