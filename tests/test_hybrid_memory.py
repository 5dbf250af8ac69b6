"""What ranks of a mesh hold is what the closed form says, as counted and as measured."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from ranks import Ranks
from test_hybrid import small

from bench.world import World
from workloads.experts.moe_case import moe_of
from workloads.footprint import Batch
from workloads.hybrid.hybrid_activations import activation_bytes_of
from workloads.hybrid.hybrid_costs import place_of
from workloads.hybrid.hybrid_memory import counted, footprint, formula
from workloads.pipeline.schedules import make_schedule
from workloads.shapes import SHAPES, num_parameters

TINY = SHAPES["tiny"]
BATCH = Batch(microbatch=2, element_bytes=4, checkpointing="none")
STATE = ("parameters", "gradients", "optimizer")


def test_state_is_sixteen_bytes_of_what_a_rank_holds() -> None:
    held = formula(place_of(TINY, {"fsdp": 4}), None, BATCH)
    assert sum(held[name] for name in STATE) == 16 * num_parameters(TINY) / 4


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_activations_are_the_closed_form_s_of_what_is_in_flight(mesh: dict[str, int], how: str) -> None:
    batch = replace(BATCH, checkpointing=how)
    schedule = make_schedule("1f1b", ranks=2, microbatches=4) if "pp" in mesh else None
    for at in ({"pp": rank} for rank in range(mesh.get("pp", 1))):
        expected = activation_bytes_of(TINY, mesh, at, microbatch=2, microbatches=4, element_bytes=4, checkpointing=how)
        assert formula(place_of(TINY, mesh, at), schedule, batch)["activations"] == expected


def test_a_mixture_has_a_closed_form_too() -> None:
    moe = moe_of({"ep": 1, "experts": 4}, TINY, 1)
    dense, mixed = (formula(place_of(TINY, {"dp": 2}, moe=of), None, BATCH)["activations"] for of in (None, moe))
    assert mixed == activation_bytes_of(TINY, {"dp": 2}, microbatch=2, microbatches=1, element_bytes=4, moe=moe)
    assert mixed > dense


def looked_at(world: World, params: dict[str, Any]) -> tuple[dict[str, float | None], tuple[str, ...], int]:
    """Return the metrics of a step's memory and its notes, and how many ranks it tells of."""
    step = small(world, params)
    step.step()
    found = footprint(world, step.look(), step._forward_backward, step.reset)
    step.close()
    metrics = {name: metric.value for name, metric in found.metrics.items()}
    return metrics, found.notes, len(found.details["memory_by_rank"]["parameters"])


def assert_state_agrees(metrics: dict[str, float | None]) -> None:
    for name in STATE:
        expected = metrics[f"memory_formula.{name}"]
        assert expected is not None
        # AdamW counts its steps in 4 bytes of each parameter
        assert metrics[f"memory_counted.{name}"] == pytest.approx(expected, abs=200 if name == "optimizer" else 0)
        assert metrics[f"memory.{name}"] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "pp=2", "tp=2", "cp=2"])
def test_state_agrees_on_each_axis(two_ranks: Ranks, mesh: str) -> None:
    [(metrics, notes, ranks), _] = two_ranks.call("test_hybrid_memory:looked_at", params={"mesh": mesh})
    assert_state_agrees(metrics)
    assert (notes, ranks) == ((), 2)
    assert metrics["memory_counted.activations"] == metrics["memory_formula.activations"]


def test_state_of_experts_agrees(two_ranks: Ranks) -> None:
    params = {"mesh": "fsdp=2,ep=2", "experts": 4, "ffn": 64}
    [(metrics, notes, _), _] = two_ranks.call("test_hybrid_memory:looked_at", params=params)
    assert_state_agrees(metrics)
    assert notes == (
        "memory: the closed form of activations is of even routes, what is counted of those that were taken",
    )
    # a router's routes are not even: the fullest rank has more than its part
    saved, closed = metrics["memory_counted.activations"], metrics["memory_formula.activations"]
    assert saved is not None
    assert closed is not None
    assert 0.95 * closed < saved < 1.2 * closed


SELECTIVE = [
    ({"mesh": "dp=2", "checkpointing": "selective"}, True, "selective checkpointing: what is kept"),
    ({"mesh": "cp=2", "checkpointing": "selective"}, False, "selective checkpointing with cp"),
]


@pytest.mark.parametrize(("params", "has_formula", "note"), SELECTIVE, ids=str)
def test_what_selective_checkpointing_keeps_is_not_counted(
    two_ranks: Ranks, params: dict[str, Any], has_formula: bool, note: str
) -> None:
    [(metrics, notes, _), _] = two_ranks.call("test_hybrid_memory:looked_at", params=params)
    assert "memory_counted.activations" not in metrics
    assert "memory_counted.parameters" in metrics
    assert ("memory_formula.activations" in metrics) == has_formula
    assert any(note in one for one in notes)


def test_waits_have_no_closed_form_of_activations(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2", "compute": "timed:1ms"}
    [(metrics, notes, _), _] = two_ranks.call("test_hybrid_memory:looked_at", params=params)
    assert "memory_formula.activations" not in metrics
    assert "memory_counted.activations" in metrics
    assert any("timed compute" in one for one in notes)


# ---- activations, rank by rank


def activations(world: World, cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return what this rank's activations take as counted, and by closed form, in each of some steps."""
    found = []
    for params in cases:
        step = small(world, {"microbatch": 2, **params})
        step.step()
        look = step.look()
        closed = formula(look.place, look.schedule, look.batch)["activations"]
        found.append((counted(look, world.device)["activations"], closed))
        step.close()
    return found


def assert_activations_agree(ranks: Ranks, cases: list[dict[str, Any]]) -> None:
    for case in cases:  # one call each: a call's groups are closed when it has answered
        for [(saved, closed)] in ranks.call("test_hybrid_memory:activations", cases=[case]):
            assert saved == closed > 0, case


BOTH = [{"recipe": "gpt"}, {"recipe": "llama"}]
MIXTURE = {"experts": 4, "ffn": 64, "routing": "balanced"}


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "pp=2", "cp=2", "tp=2"])
def test_activations_agree_on_each_axis(two_ranks: Ranks, mesh: str) -> None:
    assert_activations_agree(two_ranks, [{"mesh": mesh, **recipe} for recipe in BOTH])


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "cp=2"])
def test_activations_that_are_forgotten_agree(two_ranks: Ranks, mesh: str) -> None:
    assert_activations_agree(two_ranks, [{"mesh": mesh, "checkpointing": "full", **recipe} for recipe in BOTH])
    [[(kept, _), (forgotten, _)], _] = two_ranks.call(
        "test_hybrid_memory:activations", cases=[{"mesh": mesh}, {"mesh": mesh, "checkpointing": "full"}]
    )
    assert forgotten < kept / 2


def test_activations_agree_whatever_the_method_of_cp(two_ranks: Ranks) -> None:
    methods = ("zigzag", "striped", "allgather_kv", "ulysses")
    assert_activations_agree(two_ranks, [{"mesh": "cp=2", "cp_method": method} for method in methods])


def test_activations_agree_in_narrow_types_and_with_one_head_of_a_rank(two_ranks: Ranks) -> None:
    narrow = [{"mesh": mesh, "precision": "bfloat16"} for mesh in ("tp=2", "cp=2")]
    assert_activations_agree(two_ranks, [*narrow, {"mesh": "tp=2", "heads": 2, "kv_heads": 2, "recipe": "llama"}])


def test_activations_of_experts_agree_where_routes_are_even(two_ranks: Ranks) -> None:
    cases = [{"mesh": mesh, **MIXTURE, **recipe} for mesh in ("dp=2,ep=2", "tp=2", "tp=2,etp=2") for recipe in BOTH]
    assert_activations_agree(two_ranks, cases)


PAIRS = [f"{one}=2,{other}=2" for one, other in combinations(("dp", "fsdp", "pp", "cp", "tp"), 2)]


@pytest.mark.slow
def test_activations_agree_on_all_pairs_of_axes(four_ranks: Ranks) -> None:
    assert len(PAIRS) == 10
    assert_activations_agree(four_ranks, [{"mesh": mesh, **recipe} for mesh in PAIRS for recipe in BOTH])


@pytest.mark.slow
def test_activations_agree_in_other_schedules_and_with_experts(four_ranks: Ranks) -> None:
    cases: list[dict[str, Any]] = [
        {"mesh": "dp=2,pp=2,ep=2", **MIXTURE},
        {"mesh": "dp=2,tp=2,ep=2", **MIXTURE, "checkpointing": "full"},
        {"mesh": "dp=2,tp=2,ep=2,etp=2", **MIXTURE, "precision": "bfloat16"},
        {"mesh": "pp=2,dp=2", "schedule": "interleaved", "layers": 4},
        {"mesh": "pp=2,tp=2", "schedule": "zb_v", "layers": 4},
    ]
    assert_activations_agree(four_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,pp=2", "fsdp=2,tp=2"])
def test_state_agrees_where_axes_meet(four_ranks: Ranks, mesh: str) -> None:
    [(metrics, *_), *_] = four_ranks.call("test_hybrid_memory:looked_at", params={"mesh": mesh})
    assert_state_agrees(metrics)
