"""A step on a mesh computes what one process does, and sends the analytical bytes on each axis."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.expert_parallel.moe_layer import mixtures
from parbench.workloads.mesh.mesh_step import HybridStep, MeshBytes
from parbench.workloads.step.layout import local
from parbench.workloads.step.sent_bytes import counted
from tests.support.mesh_steps import EXPERT_PARAMS, Params, build_small_hybrid
from tests.support.ranks import Ranks
from tests.support.training_steps import count_wrong_after_step

Case = tuple[str, str, Params]
"""A mesh, the axes that send bytes, and other parameters."""
ODD: Params = {"vocabulary": 65}
LLAMA: Params = {"recipe": "llama"}
NARROW: Params = {"precision": "bfloat16"}
ZB_V: Params = {"schedule": "zb_v", "layers": 4}


def step_results(world: World, params: Params) -> tuple[list[int], dict[str, tuple[float, float]]]:
    """Return wrong elements of two batches, and sent and expected bytes by axis."""
    step = build_small_hybrid(world, params)
    wrong = [count_wrong_after_step(step) for _ in range(2)]
    probe = MeshBytes(step.look(), step.expected_bytes())
    records = world.gather(probe.observe(step.step, step.reset))
    tally, expected = probe.sent_and_expected(records)[world.rank]
    step.close()
    sent = tally.by_axis
    return wrong, {axis: (sent[axis], expected[axis]) for axis in {**sent, **expected}}


def assert_right(ranks: Ranks, *cases: Case) -> None:
    for mesh, axes, more in cases:
        params = {"mesh": mesh, **more}
        for wrong, by_axis in ranks.call(
            "tests.workloads.mesh.test_mesh_step:step_results", params=params
        ):
            assert wrong == [0, 0], params
            assert by_axis.keys() == set(axes.split()), params
            for axis, (sent, expected) in by_axis.items():
                assert sent == pytest.approx(expected, rel=1e-12), (params, axis)
                assert sent > 0, (params, axis)


@pytest.mark.parametrize(
    "case",
    [
        ("dp=2", "dp", {}),
        ("fsdp=2", "fsdp", ODD),
        ("pp=2", "pp", LLAMA),
        ("pp=2", "pp", ZB_V),
        ("dp=1,tp=2", "tp", {**LLAMA, **NARROW}),
        *(("cp=2", "cp dp", {"cp_method": method}) for method in ("ring", "zigzag", "ulysses")),
        ("cp=2", "cp dp", {"cp_method": "allgather_kv", **LLAMA}),
        ("dp=2,ep=2", "dp ep", EXPERT_PARAMS),
        ("fsdp=2", "fsdp edp", EXPERT_PARAMS),
        ("tp=2,etp=2", "tp etp", EXPERT_PARAMS),
    ],
)
def test_single_axis(two_ranks: Ranks, case: Case) -> None:
    assert_right(two_ranks, case)


@pytest.mark.parametrize(
    "case",
    [
        ("fsdp=2,pp=2", "fsdp pp", ODD),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "zigzag"}),
        ("dp=2,tp=2,ep=2", "dp tp ep edp", EXPERT_PARAMS),
    ],
)
def test_two_axes(four_ranks: Ranks, case: Case) -> None:
    assert_right(four_ranks, case)


@pytest.mark.full
def test_all_pairs_of_axes(four_ranks: Ranks) -> None:
    assert_right(
        four_ranks,
        ("dp=2,tp=2", "dp tp", {}),
        ("dp=2,fsdp=2", "dp fsdp", ODD),
        ("dp=2,cp=2", "dp cp", {}),
        ("fsdp=2,cp=2", "fsdp cp dp", {}),
        ("fsdp=2,tp=2", "fsdp tp", ODD),
        ("cp=2,pp=2", "pp cp dp", {"schedule": "zb_h1"}),
        ("pp=2,tp=2", "pp tp", ZB_V),
        ("pp=2,fsdp=2", "pp fsdp", {"schedule": "interleaved", "layers": 4}),
        ("pp=2,dp=2", "pp dp", {"schedule": "gpipe", "split": "1+2", "layers": 3}),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "ulysses"}),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "allgather_kv"}),
        ("cp=2,tp=2", "cp tp dp", {"cp_method": "striped", **LLAMA}),
    )


@pytest.mark.full
def test_experts_with_other_axes(four_ranks: Ranks) -> None:
    zipf = {**EXPERT_PARAMS, "routing": "zipf"}
    assert_right(
        four_ranks,
        ("dp=4,ep=2", "dp ep edp", EXPERT_PARAMS),
        ("fsdp=4,ep=4", "fsdp ep", EXPERT_PARAMS),
        ("dp=2,pp=2,ep=2", "dp pp ep", EXPERT_PARAMS),
        ("fsdp=2,cp=2,ep=4", "fsdp cp dp ep", EXPERT_PARAMS),
        ("dp=2,tp=2,ep=2", "dp tp ep edp", zipf),
        ("tp=2,fsdp=2,etp=2,ep=2", "fsdp tp ep etp", {**zipf, **LLAMA}),
        ("dp=2,tp=2,etp=2", "dp tp etp edp", {**EXPERT_PARAMS, **NARROW}),
        ("pp=2,tp=2,etp=2", "pp tp etp", EXPERT_PARAMS),
    )


def wrong_fills(world: World, params: Params) -> tuple[int, int]:
    """Return wrong timed gradients, with sums over ranks and without."""
    step = build_small_hybrid(world, {"compute": "timed:1ms", **params})
    right = count_wrong_after_step(step)
    step._sums = replace(step._sums, groups={})
    wrong = count_wrong_after_step(step)
    step.close()
    return right, wrong


@pytest.mark.parametrize(
    "params",
    [
        {"mesh": "dp=2"},
        {"mesh": "fsdp=2"},
        {"mesh": "pp=2"},
        {"mesh": "cp=2", "cp_method": "zigzag"},
        {"mesh": "tp=2,etp=2", **EXPERT_PARAMS},
        {"mesh": "cp=2,ep=2", **EXPERT_PARAMS},
    ],
)
def test_timed_gradients_are_summed(two_ranks: Ranks, params: Params) -> None:
    for right, wrong in two_ranks.call(
        "tests.workloads.mesh.test_mesh_step:wrong_fills", params=params
    ):
        assert right == 0
        assert (wrong > 0) == (params["mesh"] not in ("fsdp=2", "pp=2"))


def results_without_sum(world: World, params: Params, axis: str) -> tuple[int, float, float]:
    """Return wrong elements, and sent and expected bytes, if an axis is not summed over."""
    step = build_small_hybrid(world, params)
    groups = {name: group for name, group in step._sums.groups.items() if name != axis}
    step._sums = replace(step._sums, groups=groups)
    wrong = count_wrong_after_step(step)
    sent = bytes_by_axis(counted(step.step, step.layout.axes), [axis])[axis]
    step.close()
    return wrong, sent, step.expected_bytes()[axis]


@pytest.mark.parametrize(
    ("axis", "params"),
    [
        ("dp", {"mesh": "dp=2"}),
        ("tp", {"mesh": "tp=2"}),
        ("dp", {"mesh": "cp=2"}),
        ("edp", {"mesh": "dp=2", "experts": 4}),
    ],
)
def test_missing_sum_is_detected(two_ranks: Ranks, axis: str, params: Params) -> None:
    arguments = {"params": params, "axis": axis}
    for wrong, sent, expected in two_ranks.call(
        "tests.workloads.mesh.test_mesh_step:results_without_sum", **arguments
    ):
        assert wrong > 0
        assert sent < expected


def shift_targets(step: HybridStep) -> None:
    step._tokens = (*step._tokens[1:], step._tokens[0])


def change_weight(step: HybridStep) -> None:
    parameter = next(iter(step.layout.model.parameters()))
    local(parameter).data.view(-1)[0] += 0.5


def double_expert(step: HybridStep) -> None:
    local(mixtures(step.layout.model)[0].experts.up).data.mul_(2)


CORRUPTIONS = {"targets": shift_targets, "weight": change_weight, "expert": double_expert}


def wrong_after_corruption(world: World, mesh: str, corruption: str) -> int:
    """Return wrong elements of all ranks after the last rank's corruption."""
    experts = {"experts": 4} if corruption == "expert" else {}
    step = build_small_hybrid(world, {"mesh": mesh, **experts})
    if world.rank == world.size - 1:
        CORRUPTIONS[corruption](step)
    wrong = sum(world.gather(count_wrong_after_step(step)))
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("mesh", "corruption"),
    [
        ("tp=2", "targets"),
        ("cp=2", "targets"),
        ("dp=2", "weight"),
        ("pp=2", "weight"),
        ("fsdp=2", "weight"),
        ("dp=2,ep=2", "expert"),
    ],
)
def test_corruption_of_one_rank_is_detected(two_ranks: Ranks, mesh: str, corruption: str) -> None:
    arguments = {"mesh": mesh, "corruption": corruption}
    assert (
        min(
            two_ranks.call(
                "tests.workloads.mesh.test_mesh_step:wrong_after_corruption", **arguments
            )
        )
        > 0
    )


def count_misrouted(world: World, inverted: bool) -> int:
    step = build_small_hybrid(world, {"mesh": "dp=2,ep=2", **EXPERT_PARAMS})
    for mixture in mixtures(step.layout.model) if inverted else ():
        mixture.router.register_forward_hook(lambda module, args, scores: 1 - scores)
    step.step()
    assert step._routes is not None
    step._routes.frozen = step._routes._taken(step._mixtures)
    count = step._routes.count_misrouted(step._batch)
    step.close()
    return count


def test_misrouted_tokens_are_counted(two_ranks: Ranks) -> None:
    assert two_ranks.call(
        "tests.workloads.mesh.test_mesh_step:count_misrouted", inverted=False
    ) == [0, 0]
    assert (
        min(two_ranks.call("tests.workloads.mesh.test_mesh_step:count_misrouted", inverted=True))
        > 0
    )


def describe(world: World, params: Params) -> dict[str, Any]:
    step = build_small_hybrid(world, params)
    details = step.describe().details
    step.close()
    return details


def test_description_of_mesh(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,pp=1", "ffn": 64}
    [dense, _] = two_ranks.call("tests.workloads.mesh.test_mesh_step:describe", params=params)
    assert (dense["mesh"], dense["axes"]) == ({"dp": 2, "pp": 1}, {"dp": {"ranks": 2}})
    params = {"mesh": "dp=2,ep=2", **EXPERT_PARAMS}
    [details, _] = two_ranks.call("tests.workloads.mesh.test_mesh_step:describe", params=params)
    assert details["routed_parameters"] == 2 * 4 * 2 * 32 * 32
    assert details["parameters"] > dense["parameters"]


def draw_routes(world: World, mesh: str, microbatches: int = 2) -> list[list[list[int]]]:
    """Return the generated routes of this rank's tokens in two steps."""
    params = {"experts": 4, "routing": "zipf", "microbatch": 2, "microbatches": microbatches}
    step = build_small_hybrid(world, {"mesh": mesh, **params})
    routes = []
    for _ in range(2):
        step.reset()
        step.step()
        chosen = mixtures(step.layout.model)[0].chosen
        routes.append(torch.cat([chosen[number] for number in sorted(chosen)]).tolist())
    step.close()
    return routes


def test_generated_routes_do_not_depend_on_mesh(two_ranks: Ranks) -> None:
    data = two_ranks.call("tests.workloads.mesh.test_mesh_step:draw_routes", mesh="dp=2")
    experts = two_ranks.call("tests.workloads.mesh.test_mesh_step:draw_routes", mesh="dp=2,ep=2")
    stages = two_ranks.call(
        "tests.workloads.mesh.test_mesh_step:draw_routes", mesh="pp=2", microbatches=4
    )
    assert experts == data
    for step in (0, 1):
        assert [*data[0][step], *data[1][step]] == stages[0][step] == stages[1][step]
    assert data[0][0] != data[0][1]
