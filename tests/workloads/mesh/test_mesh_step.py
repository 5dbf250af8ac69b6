"""One step on a mesh of any axes computes what one process does, and sends over each axis what the closed form says."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from mesh_steps import EXPERTS, Params, small_hybrid
from ranks import Ranks
from training_steps import wrong_after_a_step

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.expert_parallel.moe_layer import mixtures
from parbench.workloads.mesh.mesh_step import HybridStep, MeshBytes
from parbench.workloads.step.layout import local
from parbench.workloads.step.sent_bytes import counted

Case = tuple[str, str, Params]
"""A mesh, the axes that send something, and what else is asked."""
ODD: Params = {"vocabulary": 65}
LLAMA: Params = {"recipe": "llama"}
NARROW: Params = {"precision": "bfloat16"}


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        yield ranks


def looked_at(world: World, params: Params) -> tuple[list[int], dict[str, tuple[float, float]]]:
    """Return what is wrong after a step on each of two batches, and bytes sent and expected by axis."""
    step = small_hybrid(world, params)
    wrong = [wrong_after_a_step(step) for _ in range(2)]
    probe = MeshBytes(step.look(), step.expected_bytes())
    tally, expected = probe.sent_and_expected(world.gather(probe.observe(step.step, step.reset)))[world.rank]
    step.close()
    sent = tally.by_axis
    return wrong, {axis: (sent.get(axis, 0.0), expected.get(axis, 0.0)) for axis in {**sent, **expected}}


def assert_right(ranks: Ranks, *cases: Case) -> None:
    for mesh, axes, more in cases:
        for wrong, by_axis in ranks.call("test_mesh_step:looked_at", params={"mesh": mesh, **more}):
            assert wrong == [0, 0], (mesh, more)
            assert by_axis.keys() == set(axes.split()), (mesh, more)
            for axis, (sent, expected) in by_axis.items():
                assert sent == pytest.approx(expected, rel=1e-12), (mesh, more, axis)
                assert sent > 0, (mesh, more, axis)


def test_each_axis_alone(two_ranks: Ranks) -> None:
    assert_right(
        two_ranks,
        ("dp=2", "dp", {}),
        ("fsdp=2", "fsdp", ODD),
        ("pp=2", "pp", LLAMA),
        ("pp=2", "pp", {"schedule": "zb_v", "layers": 4}),
        ("tp=2", "tp", LLAMA),
        ("dp=1,tp=2", "tp", NARROW),
        *(("cp=2", "cp dp", {"cp_method": method}) for method in ("ring", "striped", "zigzag", "ulysses")),
        ("cp=2", "cp dp", {"cp_method": "allgather_kv", **LLAMA}),
        ("dp=2,ep=2", "dp ep", EXPERTS),
        ("fsdp=2", "fsdp edp", EXPERTS),
        ("tp=2,etp=2", "tp etp", EXPERTS),
    )


@pytest.mark.parametrize(
    ("mesh", "axes", "more"),
    [
        ("dp=2,tp=2", "dp tp", {}),
        ("fsdp=2,pp=2", "fsdp pp", ODD),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "zigzag"}),
        ("dp=2,tp=2,ep=2", "dp tp ep edp", EXPERTS),
    ],
)
def test_axes_that_meet(four_ranks: Ranks, mesh: str, axes: str, more: Params) -> None:
    assert_right(four_ranks, (mesh, axes, more))


@pytest.mark.full
def test_all_pairs_of_axes_with_options_where_they_meet(four_ranks: Ranks) -> None:
    assert_right(
        four_ranks,
        ("dp=2,fsdp=2", "dp fsdp", ODD),
        ("dp=2,pp=2", "dp pp", {}),
        ("dp=2,cp=2", "dp cp", {}),
        ("fsdp=2,cp=2", "fsdp cp dp", {}),
        ("fsdp=2,tp=2", "fsdp tp", ODD),
        ("cp=2,tp=2", "cp tp dp", LLAMA),
        ("dp=4,ep=2", "dp ep edp", EXPERTS),
        ("fsdp=4,ep=4", "fsdp ep", EXPERTS),
        ("dp=2,pp=2,ep=2", "dp pp ep", EXPERTS),
        ("fsdp=2,cp=2,ep=4", "fsdp cp dp ep", EXPERTS),
        ("tp=2,pp=2", "pp tp", {"schedule": "zb_h1"}),
        ("pp=2,tp=2", "pp tp", {"schedule": "zb_v", "layers": 4}),
        ("cp=2,pp=2", "pp cp dp", {"schedule": "zb_h1"}),
        ("pp=2,fsdp=2", "pp fsdp", {"schedule": "interleaved", "layers": 4}),
        ("pp=2,dp=2", "pp dp", {"schedule": "gpipe", "split": "1+2", "layers": 3, "microbatches": 3}),
        *(("cp=2,tp=2", "cp tp dp", {"cp_method": method}) for method in ("ulysses", "allgather_kv")),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "striped", **LLAMA}),
        ("dp=2,tp=2,ep=2", "dp tp ep edp", {**EXPERTS, "routing": "zipf"}),
        ("tp=2,fsdp=2,etp=2,ep=2", "fsdp tp ep etp", {**EXPERTS, **LLAMA, "routing": "zipf"}),
        ("dp=2,tp=2,etp=2", "dp tp etp edp", {**EXPERTS, **NARROW}),
        ("pp=2,tp=2,etp=2", "pp tp etp", EXPERTS),
    )


def wrong_fills(world: World, params: Params) -> list[int]:
    """Return what is wrong with timed gradients, and again where sums are left out."""
    step = small_hybrid(world, {"compute": "timed:1ms", **params})
    wrong = []
    for sums in (step._sums, replace(step._sums, groups={})):
        step._sums = sums
        wrong.append(wrong_after_a_step(step))
    step.close()
    return wrong


def test_timed_gradients_are_every_rank_s(two_ranks: Ranks) -> None:
    meshes: list[tuple[str, Params]] = [("dp=2", {}), ("fsdp=2", {}), ("pp=2", {}), ("cp=2", {"cp_method": "zigzag"})]
    for mesh, more in (*meshes, ("tp=2", EXPERTS), ("cp=2,ep=2", EXPERTS), ("tp=2,etp=2", EXPERTS)):
        for right, spoilt in two_ranks.call("test_mesh_step:wrong_fills", params={"mesh": mesh, **more}):
            assert right == 0, mesh
            assert (spoilt > 0) == (mesh not in ("fsdp=2", "pp=2")), mesh


def wrong_without(world: World, params: Params, axis: str) -> tuple[int, float, float]:
    """Return what is wrong when gradients are not summed over an axis, and its bytes sent and expected."""
    step = small_hybrid(world, params)
    groups = {name: group for name, group in step._sums.groups.items() if name != axis}
    step._sums = replace(step._sums, groups=groups)
    wrong = wrong_after_a_step(step)
    sent = bytes_by_axis(counted(step.step, step.layout.axes), [axis])[axis]
    step.close()
    return wrong, sent, step.expected_bytes()[axis]


def test_a_sum_that_is_left_out_is_seen_by_gate_and_bytes(two_ranks: Ranks) -> None:
    cases: list[tuple[str, Params]] = [("dp", {"mesh": "dp=2"}), ("tp", {"mesh": "tp=2"}), ("dp", {"mesh": "cp=2"})]
    for axis, params in (*cases, ("edp", {"mesh": "dp=2", "experts": 4})):
        for wrong, sent, expected in two_ranks.call("test_mesh_step:wrong_without", params=params, axis=axis):
            assert wrong > 0, params
            assert sent < expected, params


def wrong_after_spoiling(world: World, params: Params, spoil: str) -> int:
    """Return what is wrong on all ranks together after a part of a step was spoilt on the last one."""
    step = small_hybrid(world, params)
    if world.rank == world.size - 1:
        _SPOILS[spoil](step)
    wrong = sum(world.gather(wrong_after_a_step(step)))
    step.close()
    return wrong


def _other_targets(step: HybridStep) -> None:
    step._tokens = (*step._tokens[1:], step._tokens[0])


def _one_weight(step: HybridStep) -> None:
    next(local(parameter) for parameter in step.layout.model.parameters()).data.view(-1)[0] += 0.5


def _one_expert(step: HybridStep) -> None:
    local(mixtures(step.layout.model)[0].experts.up).data.mul_(2)


_SPOILS = {"positions": _other_targets, "weight": _one_weight, "expert": _one_expert}


def test_what_one_rank_does_wrong_is_seen(two_ranks: Ranks) -> None:
    for mesh, spoil, more in (
        *((mesh, "positions", {}) for mesh in ("tp=2", "cp=2")),
        *((mesh, "weight", {}) for mesh in ("dp=2", "pp=2", "fsdp=2")),
        ("dp=2,ep=2", "expert", {"experts": 4}),
    ):
        found = two_ranks.call("test_mesh_step:wrong_after_spoiling", params={"mesh": mesh, **more}, spoil=spoil)
        assert min(found) > 0, (mesh, spoil)


def misrouted(world: World) -> list[int]:
    """Return tokens that went elsewhere than one process's would, first right, then where routers turn scores round."""
    found = []
    for turned in (False, True):
        step = small_hybrid(world, {"mesh": "dp=2,ep=2", **EXPERTS})
        if turned:
            for mixture in mixtures(step.layout.model):
                mixture.router.register_forward_hook(lambda module, args, scores: 1 - scores)
        step.step()
        assert step._routes is not None
        step._routes.frozen = step._routes._taken(step._mixtures)
        found.append(step._routes.count_misrouted(step._batch))
        step.close()
    return found


def test_routes_that_no_router_of_one_process_would_take_are_counted(two_ranks: Ranks) -> None:
    for right, spoilt in two_ranks.call("test_mesh_step:misrouted"):
        assert right == 0 < spoilt


def described(world: World, params: Params) -> dict[str, Any]:
    step = small_hybrid(world, params)
    details = step.describe().details
    step.close()
    return details


def test_a_step_tells_its_mesh_and_the_parameters_that_it_has(two_ranks: Ranks) -> None:
    [dense, _] = two_ranks.call("test_mesh_step:described", params={"mesh": "dp=2,pp=1", "ffn": 64})
    assert (dense["mesh"], dense["axes"]) == ({"dp": 2, "pp": 1}, {"dp": {"ranks": 2}})
    [details, _] = two_ranks.call("test_mesh_step:described", params={"mesh": "dp=2,ep=2", **EXPERTS})
    assert details["routed_parameters"] == 2 * 4 * 2 * 32 * 32  # layers, experts, matrices of hidden by expert_ffn
    assert details["parameters"] > dense["parameters"]
    assert details["flops_per_rank"] > 0


def drawn(world: World, params: Params) -> list[list[list[int]]]:
    step = small_hybrid(world, params)
    found = []
    for _ in range(2):
        step.reset()
        step.step()
        chosen = sorted(mixtures(step.layout.model)[0].chosen.items())
        found.append(torch.cat([routes for _, routes in chosen]).tolist())
    step.close()
    return found


def test_routes_of_a_generator_do_not_depend_on_the_mesh(two_ranks: Ranks) -> None:
    given = {"experts": 4, "routing": "zipf", "microbatch": 2}
    over_data = two_ranks.call("test_mesh_step:drawn", params={"mesh": "dp=2", **given})
    over_experts = two_ranks.call("test_mesh_step:drawn", params={"mesh": "dp=2,ep=2", **given})
    over_stages = two_ranks.call("test_mesh_step:drawn", params={"mesh": "pp=2", **given, "microbatches": 4})
    for step in (0, 1):
        assert [*over_data[0][step], *over_data[1][step]] == over_stages[0][step] == over_stages[1][step]
    assert over_experts == over_data
    assert over_data[0][0] != over_data[0][1]
