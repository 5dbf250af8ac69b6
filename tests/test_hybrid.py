"""One step on a mesh of any axes computes what one process does, and sends over each axis what the closed form says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import RankError, Ranks
from test_training import SMALL

from bench.world import World
from workloads.definitions import DEFINITIONS
from workloads.experts.moe import mixtures
from workloads.experts.wire import wired
from workloads.hybrid.hybrid import HybridStep
from workloads.hybrid.hybrid_cp import Tokens
from workloads.hybrid.hybrid_explain import counts
from workloads.layout import local
from workloads.model import build, loss_of

[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.hybrid"]
Params = dict[str, Any]


def small(world: World, params: Params) -> HybridStep:
    """Return a small step; what is not given has its default."""
    given = {**SMALL, "kv_heads": 4, "microbatch": 1, "microbatches": 2, **params}
    return HybridStep(world, dict(DEFINITION.case(given).params))


def looked_at(world: World, params: Params) -> tuple[list[int], dict[str, tuple[float, float]]]:
    """Return what is wrong after a step on each of two batches, and bytes sent and expected by axis."""
    step = small(world, params)
    wrong = []
    for _ in range(2):
        step.reset()
        step.step()
        wrong.append(step.check())
    sent, expected, _ = counts(world, step.look(), step.step, step.reset)
    step.close()
    return wrong, {axis: (sent.get(axis, 0.0), expected.get(axis, 0.0)) for axis in {**sent, **expected}}


def assert_right(ranks: Ranks, axes: set[str], params: Params) -> None:
    for wrong, bytes_by_axis in ranks.call("test_hybrid:looked_at", params=params):
        assert wrong == [0, 0]
        assert bytes_by_axis.keys() == axes
        for axis, (sent, expected) in bytes_by_axis.items():
            assert sent == pytest.approx(expected, rel=1e-12), axis
            assert sent > 0, axis


EXPERTS: Params = {"experts": 4, "ffn": 64}

ON_TWO = [
    ("dp=2", {"dp"}, {}),
    ("fsdp=2", {"fsdp"}, {"vocabulary": 65}),
    ("pp=2", {"pp"}, {"recipe": "llama"}),
    ("cp=2", {"cp", "dp"}, {}),
    ("tp=2", {"tp"}, {"recipe": "llama"}),
    ("dp=2,ep=2", {"dp", "ep"}, EXPERTS),
    ("tp=2,etp=2", {"tp", "etp"}, EXPERTS),
    ("dp=1,tp=2", {"tp"}, {"precision": "bfloat16"}),
]


@pytest.mark.parametrize(("mesh", "axes", "more"), ON_TWO, ids=[mesh for mesh, *_ in ON_TWO])
def test_each_axis_alone(two_ranks: Ranks, mesh: str, axes: set[str], more: Params) -> None:
    assert_right(two_ranks, axes, {"mesh": mesh, **more})


PAIRS = [
    ("dp=2,fsdp=2", {"dp", "fsdp"}, {"vocabulary": 65}),
    ("dp=2,pp=2", {"dp", "pp"}, {}),
    ("dp=2,cp=2", {"dp", "cp"}, {}),
    ("dp=2,tp=2", {"dp", "tp"}, {}),
    ("fsdp=2,pp=2", {"fsdp", "pp"}, {"vocabulary": 65}),
    ("fsdp=2,cp=2", {"fsdp", "cp", "dp"}, {}),
    ("fsdp=2,tp=2", {"fsdp", "tp"}, {"vocabulary": 65}),
    ("pp=2,cp=2", {"pp", "cp", "dp"}, {}),
    ("pp=2,tp=2", {"pp", "tp"}, {}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, {"recipe": "llama"}),
    ("dp=4,ep=2", {"dp", "ep", "edp"}, EXPERTS),
    ("fsdp=4,ep=4", {"fsdp", "ep"}, EXPERTS),
    ("dp=2,pp=2,ep=2", {"dp", "pp", "ep"}, EXPERTS),
    ("fsdp=2,cp=2,ep=4", {"fsdp", "cp", "dp", "ep"}, EXPERTS),
    ("dp=2,tp=2,ep=2", {"dp", "tp", "ep", "edp"}, EXPERTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes", "more"), PAIRS, ids=[mesh for mesh, *_ in PAIRS])
def test_all_pairs_of_axes(four_ranks: Ranks, mesh: str, axes: set[str], more: Params) -> None:
    assert_right(four_ranks, axes, {"mesh": mesh, **more})


OPTIONS = [
    ("tp=2,pp=2", {"pp", "tp"}, {"schedule": "zb_h1"}),
    ("pp=2,tp=2", {"pp", "tp"}, {"schedule": "zb_v", "layers": 4}),
    ("cp=2,pp=2", {"pp", "cp", "dp"}, {"schedule": "zb_h1"}),
    ("pp=2,fsdp=2", {"pp", "fsdp"}, {"schedule": "interleaved", "layers": 4}),
    ("pp=2,dp=2", {"pp", "dp"}, {"schedule": "gpipe", "split": "1+2", "layers": 3, "microbatches": 3}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, {"cp_method": "ulysses"}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, {"cp_method": "zigzag"}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, {"cp_method": "allgather_kv"}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, {"cp_method": "striped", "recipe": "llama"}),
    ("fsdp=2,tp=2", {"fsdp", "tp"}, {"precision": "bfloat16"}),
    ("dp=2,tp=2,ep=2", {"dp", "tp", "ep", "edp"}, {**EXPERTS, "routing": "zipf"}),
    ("dp=2,tp=2,ep=2,etp=2", {"dp", "tp", "ep", "etp"}, EXPERTS),
    ("tp=2,fsdp=2,etp=2,ep=2", {"fsdp", "tp", "ep", "etp"}, {**EXPERTS, "routing": "zipf", "recipe": "llama"}),
    ("dp=2,tp=2,etp=2", {"dp", "tp", "etp", "edp"}, {**EXPERTS, "precision": "bfloat16"}),
    ("pp=2,tp=2,etp=2", {"pp", "tp", "etp"}, EXPERTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes", "more"), OPTIONS, ids=str)
def test_options_of_axes(four_ranks: Ranks, mesh: str, axes: set[str], more: Params) -> None:
    assert_right(four_ranks, axes, {"mesh": mesh, **more})


# ---- layers that are computed again


def unlike_unforgotten(world: World, params: Params, how: str) -> tuple[int, int]:
    """Return how many elements of gradients are not those of layers that forget nothing, of how many, in two steps."""
    taken: list[list[torch.Tensor]] = []
    for checkpointing in ("none", how):
        step = small(world, {**params, "checkpointing": checkpointing})
        taken.append([])
        for _ in range(2):
            step.reset()
            step.step()
            gradients = [parameter.grad for parameter in step.layout.model.parameters()]
            taken[-1] += [local(gradient).clone() for gradient in gradients if gradient is not None]
        step.close()
    unlike = sum(int((one != other).sum()) for one, other in zip(*taken, strict=True))
    return unlike, sum(one.numel() for one in taken[0])


AGAIN = [
    ("fsdp=2", {"fsdp"}, "full", {"vocabulary": 65}),
    ("pp=2", {"pp"}, "full", {}),
    ("pp=2", {"pp"}, "selective", {"recipe": "llama", "schedule": "gpipe"}),
    ("cp=2", {"cp", "dp"}, "full", {"cp_method": "zigzag"}),
    ("cp=2", {"cp", "dp"}, "selective", {}),
    ("tp=2", {"tp"}, "full", {}),
    ("tp=2", {"tp"}, "selective", {"recipe": "llama"}),
    ("dp=2,ep=2", {"dp", "ep"}, "full", EXPERTS),
]
AGAIN_ON_FOUR = [
    ("dp=2,fsdp=2", {"dp", "fsdp"}, "selective", {"vocabulary": 65}),
    ("fsdp=2,pp=2", {"fsdp", "pp"}, "full", {"schedule": "interleaved", "layers": 4}),
    ("fsdp=2,tp=2", {"fsdp", "tp"}, "full", {"precision": "bfloat16"}),
    ("pp=2,cp=2", {"pp", "cp", "dp"}, "full", {}),
    ("pp=2,tp=2", {"pp", "tp"}, "selective", {}),
    ("cp=2,tp=2", {"cp", "tp", "dp"}, "full", {"cp_method": "ulysses", "recipe": "llama"}),
    ("dp=2,pp=2,ep=2", {"dp", "pp", "ep"}, "full", {**EXPERTS, "microbatches": 4}),
    ("dp=2,pp=2,ep=2", {"dp", "pp", "ep"}, "full", {**EXPERTS, "routing": "zipf", "microbatches": 4}),
    ("dp=2,tp=2,ep=2", {"dp", "tp", "ep", "edp"}, "full", EXPERTS),
    ("dp=2,tp=2,ep=2,etp=2", {"dp", "tp", "ep", "etp"}, "full", EXPERTS),
]


def assert_again(ranks: Ranks, mesh: str, axes: set[str], how: str, more: Params) -> None:
    assert_right(ranks, axes, {"mesh": mesh, "checkpointing": how, **more})
    for unlike, count in ranks.call("test_hybrid:unlike_unforgotten", params={"mesh": mesh, **more}, how=how):
        assert unlike == 0
        assert count > 0


@pytest.mark.parametrize(("mesh", "axes", "how", "more"), AGAIN, ids=str)
def test_layers_computed_again_give_the_same_bits(
    two_ranks: Ranks, mesh: str, axes: set[str], how: str, more: Params
) -> None:
    assert_again(two_ranks, mesh, axes, how, more)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes", "how", "more"), AGAIN_ON_FOUR, ids=str)
def test_layers_computed_again_give_the_same_bits_where_axes_meet(
    four_ranks: Ranks, mesh: str, axes: set[str], how: str, more: Params
) -> None:
    assert_again(four_ranks, mesh, axes, how, more)


def wrong_fills(world: World, params: Params, spoil: bool) -> list[int]:
    """Return what is wrong with timed gradients, and again where sums are left out."""
    step = small(world, {"compute": "timed:1ms", **params})
    if spoil:
        step._sums = replace(step._sums, groups={})
    step.step()
    wrong = step.check()
    step.close()
    return [wrong, world.size]


TIMED: list[tuple[str, Params]] = [
    ("dp=2", {}),
    ("tp=2", {}),
    ("fsdp=2", {}),
    ("pp=2", {}),
    ("cp=2", {"cp_method": "zigzag"}),
    ("dp=2,ep=2", EXPERTS),
    ("tp=2", EXPERTS),
    ("cp=2,ep=2", EXPERTS),
    ("tp=2,etp=2", EXPERTS),
]


@pytest.mark.parametrize(("mesh", "more"), TIMED, ids=str)
def test_timed_gradients_are_every_rank_s(two_ranks: Ranks, mesh: str, more: Params) -> None:
    params = {"mesh": mesh, **more}
    assert two_ranks.call("test_hybrid:wrong_fills", params=params, spoil=False) == [[0, 2]] * 2
    if mesh not in ("fsdp=2", "pp=2"):
        for wrong, _ in two_ranks.call("test_hybrid:wrong_fills", params=params, spoil=True):
            assert wrong > 0


# ---- what the gate sees


def wrong_without(world: World, params: Params, axis: str) -> tuple[int, float, float]:
    """Return what is wrong when gradients are not summed over an axis, and its bytes sent and expected."""
    step = small(world, params)
    groups = {name: group for name, group in step._sums.groups.items() if name != axis}
    step._sums = replace(step._sums, groups=groups)
    step.reset()
    step.step()
    sent = wired(step.step, step.layout.axes)[axis]
    wrong = step.check()
    step.close()
    return wrong, sent, step.layout.expected_bytes[axis]


@pytest.mark.parametrize(
    ("mesh", "axis", "more"),
    [("dp=2", "dp", {}), ("tp=2", "tp", {}), ("cp=2", "dp", {}), ("dp=2", "edp", {"experts": 4})],
    ids=str,
)
def test_a_sum_that_is_left_out_is_seen_by_gate_and_bytes(two_ranks: Ranks, mesh: str, axis: str, more: Params) -> None:
    for wrong, sent, expected in two_ranks.call("test_hybrid:wrong_without", params={"mesh": mesh, **more}, axis=axis):
        assert wrong > 0
        assert sent < expected


def wrong_after_spoiling(world: World, params: Params, spoil: str) -> int:
    """Return what is wrong on all ranks together after a part of a step was spoilt on the last one."""
    step = small(world, params)
    if world.rank == world.size - 1:
        _SPOILS[spoil](step)
    step.reset()
    step.step()
    wrong = world.sum(step.check())
    step.close()
    return wrong


def _other_targets(step: HybridStep) -> None:
    mine = step._tokens.mine
    step._tokens = Tokens(attended=step._tokens.attended, mine=(*mine[1:], mine[0]))


def _one_weight(step: HybridStep) -> None:
    next(local(parameter) for parameter in step.layout.model.parameters()).data.view(-1)[0] += 0.5


def _one_expert(step: HybridStep) -> None:
    local(mixtures(step.layout.model)[0].experts.up).data.mul_(2)


_SPOILS = {"positions": _other_targets, "weight": _one_weight, "expert": _one_expert}


@pytest.mark.parametrize(
    ("mesh", "spoil", "more"),
    [
        ("tp=2", "positions", {}),
        ("cp=2", "positions", {}),
        ("dp=2", "weight", {}),
        ("pp=2", "weight", {}),
        ("fsdp=2", "weight", {}),
        ("dp=2,ep=2", "expert", {"experts": 4}),
    ],
    ids=str,
)
def test_what_one_rank_does_wrong_is_seen(two_ranks: Ranks, mesh: str, spoil: str, more: Params) -> None:
    found = two_ranks.call("test_hybrid:wrong_after_spoiling", params={"mesh": mesh, **more}, spoil=spoil)
    assert all(wrong > 0 for wrong in found)


def misrouted(world: World) -> list[int]:
    """Return tokens that went elsewhere than one process's would, first right, then where routers turn scores round."""
    found = []
    for turned in (False, True):
        step = small(world, {"mesh": "dp=2,ep=2", **EXPERTS})
        if turned:
            for mixture in mixtures(step.layout.model):
                mixture.router.register_forward_hook(lambda module, args, scores: 1 - scores)
        step.step()
        step._routes.frozen = step._taken_by_all()
        found.append(step._count_misrouted())
        step.close()
    return found


def test_routes_that_no_router_of_one_process_would_take_are_counted(two_ranks: Ranks) -> None:
    for right, spoilt in two_ranks.call("test_hybrid:misrouted"):
        assert right == 0
        assert spoilt > 0


def described(world: World, params: Params) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a step tells of itself."""
    step = small(world, params)
    found = step.describe()
    step.close()
    return found.details, found.notes


def test_a_step_tells_its_mesh_and_what_is_not_hidden(two_ranks: Ranks) -> None:
    [(details, notes), _] = two_ranks.call("test_hybrid:described", params={"mesh": "dp=2,pp=1"})
    assert details["mesh"] == {"dp": 2, "pp": 1}
    assert details["axes"] == {"dp": {"ranks": 2}}
    assert any("after the last microbatch" in note for note in notes)


def test_a_mixture_tells_the_parameters_that_it_has(two_ranks: Ranks) -> None:
    [(dense, _), _] = two_ranks.call("test_hybrid:described", params={"mesh": "dp=2", "ffn": 64})
    [(details, _), _] = two_ranks.call("test_hybrid:described", params={"mesh": "dp=2,ep=2", **EXPERTS})
    assert details["expert_ffn"] == 32
    assert details["routed_parameters"] == 2 * 4 * 2 * 32 * 32  # layers, experts, matrices of hidden by expert_ffn
    assert details["parameters"] > dense["parameters"]
    assert details["flops_per_rank"] > 0
    assert "k experts" in details["flops_convention"]


def trained_on(world: World, params: Params) -> tuple[int, list[list[int]], float, float]:
    """Return this rank's number among the data ranks, its tokens, its mean loss, and the whole mean."""
    step = small(world, params)
    loss = step._forward_backward()
    mine = torch.cat(step._mine).tolist()
    whole = float(loss_of(build(step._options.shape, world.seed, world.device), step._batch).detach())
    rank = step.layout.data_rank
    step.close()
    return rank, mine, float("nan") if loss is None else float(loss), whole


def test_data_ranks_take_their_own_sequences_and_the_others_share_them(two_ranks: Ranks) -> None:
    [first, second] = two_ranks.call("test_hybrid:trained_on", params={"mesh": "dp=2"})
    assert (first[0], second[0]) == (0, 1)
    assert first[1] != second[1]
    assert (first[2] + second[2]) / 2 == pytest.approx(first[3], rel=1e-5)
    for mesh in ("cp=2", "tp=2", "pp=2"):
        [first, second] = two_ranks.call("test_hybrid:trained_on", params={"mesh": mesh})
        assert first[0] == second[0] == 0
        assert first[1] == second[1]


def test_ranks_of_a_sequence_have_the_loss_of_their_own_positions(two_ranks: Ranks) -> None:
    for mesh in ("cp=2", "tp=2"):
        [first, second] = two_ranks.call("test_hybrid:trained_on", params={"mesh": mesh})
        assert first[2] != second[2]
        assert (first[2] + second[2]) / 2 == pytest.approx(first[3], rel=1e-5)


def test_the_last_stage_alone_knows_the_loss(two_ranks: Ranks) -> None:
    [first, last] = two_ranks.call("test_hybrid:trained_on", params={"mesh": "pp=2"})
    assert math.isnan(first[2])
    assert last[2] == pytest.approx(last[3], rel=1e-5)


def drawn(world: World, params: Params) -> list[list[list[int]]]:
    """Return the routes of the first layer that a generator gave in each of two steps."""
    step = small(world, params)
    found = []
    for _ in range(2):
        step.reset()
        step.step()
        found.append(
            torch.cat([routes for _, routes in sorted(mixtures(step.layout.model)[0].chosen.items())]).tolist()
        )
    step.close()
    return found


@pytest.mark.parametrize("routing", ["zipf", "hot_rank", "ragged"])
def test_routes_of_a_generator_do_not_depend_on_the_mesh(two_ranks: Ranks, routing: str) -> None:
    given = {"experts": 4, "routing": routing, "microbatch": 2}
    over_data = two_ranks.call("test_hybrid:drawn", params={"mesh": "dp=2", **given})
    over_experts = two_ranks.call("test_hybrid:drawn", params={"mesh": "dp=2,ep=2", **given})
    over_stages = two_ranks.call("test_hybrid:drawn", params={"mesh": "pp=2", **given, "microbatches": 4})
    for step in (0, 1):
        assert [*over_data[0][step], *over_data[1][step]] == over_stages[0][step] == over_stages[1][step]
    assert over_experts == over_data
    assert over_data[0][0] != over_data[0][1]


def test_the_last_of_ragged_sources_alone_sends_all_its_tokens(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,ep=2", "experts": 4, "routing": "ragged", "microbatch": 2}
    first, last = two_ranks.call("test_hybrid:drawn", params=params)
    sent = [sum(route[0] >= 0 for route in routes[0]) / len(routes[0]) for routes in (first, last)]
    assert sent == [0.25, 1.0]


def test_a_mesh_of_other_ranks_is_refused_by_equation(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"dp\(2\) \* tp\(2\) != world size\(2\)"):
        two_ranks.call("test_hybrid:described", params={"mesh": "dp=2,tp=2"})
