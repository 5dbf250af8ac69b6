"""A step with experts on other ranks computes what one process does, drops included, and says what it sends."""

from typing import Any

import pytest
from ep_steps import DROPS, NARROW, step_of, wrong_after
from ranks import Ranks
from training_steps import Params

from parbench.bench.world.world import World
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.step.probe import run_probes


def wrong_in(world: World, cases: list[Params], steps: int = 2) -> list[tuple[Params, list[int]]]:
    found = []
    for params in cases:
        wrong = wrong_after(step_of(world, params), steps)
        found += [(params, wrong)] if any(wrong) else []
    return found


def test_two_ranks_train_as_one_process_would(two_ranks: Ranks) -> None:
    """Every variant, drops, chunks, precisions, recipes and scores, a copy on each rank, FSDP2, split attention."""
    cases: list[Params] = [
        {"recipe": "llama", "aux": 0.1, "scores": "sigmoid"},
        {"variant": "allgather", "routing": "zipf", **DROPS},
        {"checkpointing": "full", "shared": 0, "routing": "hot_rank"},
        {"chunks": 3, "accumulation": 2, "routing": "hot_rank", **DROPS},
        {"accumulation": 2, **NARROW},
        {"ep": 1, "routing": "balanced", **DROPS},
        {"fsdp": True, "accumulation": 2, "vocabulary": 61},
        {"tp": 2, "recipe": "llama", "routing": "zipf", "aux": 0.1, "accumulation": 2, **DROPS},
        {"tp": 2, "etp": 2, "checkpointing": "full", "aux": 0.5, **DROPS},
    ]
    assert two_ranks.call("test_expert_step:wrong_in", cases=cases) == [[], []]


def test_four_ranks_train_as_one_process_would(four_ranks: Ranks) -> None:
    """Copies of experts, split ones, and both beside split attention."""
    cases: list[Params] = [
        {"ep": 2, "routing": "zipf", "accumulation": 2, **DROPS},
        {"etp": 2, "variant": "allgather", **DROPS},
        {"tp": 2, "ep": 2, "recipe": "llama", "aux": 0.1},
    ]
    assert four_ranks.call("test_expert_step:wrong_in", cases=cases, steps=1) == [[]] * 4


def ratios(world: World, cases: list[Params]) -> list[dict[str, float | None]]:
    """Return for each case what a step sends over its closed form, by axis."""
    found = []
    for params in cases:
        step = step_of(world, params)
        for _ in range(2):
            step.reset()
            step.step()
        told = run_probes(world, [step.expert_probe()], step.step, step.reset, 0.0).metrics
        found.append({axis: told[f"bytes_ratio.{axis}"].value for axis in step.layout.axes})
        step.close()
    return found


def test_bytes_of_every_axis_are_those_of_the_closed_form(two_ranks: Ranks, four_ranks: Ranks) -> None:
    of_two: list[tuple[str, Params]] = [
        ("ep dp", {"routing": "hot_rank", "capacity": 1.0}),
        ("ep dp", {"variant": "allgather", "checkpointing": "full", "shared": 0}),
        ("ep dp", {"chunks": 4, "routing": "zipf", "accumulation": 2, **NARROW}),
    ]
    of_four: list[tuple[str, Params]] = [
        ("ep dp tp adp edp", {"tp": 2, "ep": 2, "recipe": "llama", **NARROW}),
        ("ep etp dp", {"etp": 2, "routing": "zipf", "fsdp": True, **DROPS}),
        ("ep etp dp", {"etp": 2, "variant": "allgather", "capacity": 0.5, "checkpointing": "full"}),
    ]
    for ranks, cases in ((two_ranks, of_two), (four_ranks, of_four)):
        for found in ranks.call("test_expert_step:ratios", cases=[params for _, params in cases]):
            for (axes, params), one in zip(cases, found, strict=True):
                assert one == dict.fromkeys(axes.split(), 1.0), params


def explained(world: World, cases: list[Params]) -> list[dict[str, float | None]]:
    found = []
    for params in cases:
        step = step_of(world, params)
        for _ in range(2):
            step.reset()
            step.step()
        found.append({name: metric.value for name, metric in step.explain(step.reset, 0.0).metrics.items()})
        step.close()
    return found


def test_an_explanation_has_state_and_time_and_what_routes_cost(two_ranks: Ranks) -> None:
    cases: list[Params] = [{"fsdp": True, **NARROW}, {"tp": 2, "capacity": 1.0}]
    costs = {"exposed_comm.ep", "ect", "imbalance.rank", "imbalance_time", "drop_rate"}
    for of_rank in two_ranks.call("test_expert_step:explained", cases=cases):
        for params, found in zip(cases, of_rank, strict=True):
            for part in ("parameters", "gradients", "optimizer"):
                assert found[f"memory_formula.{part}"] == pytest.approx(found[f"memory_counted.{part}"], rel=0.01)
            assert "memory_formula.activations" not in found
            axes = {"ep", "dp", *(["tp"] if "tp" in params else [])}
            assert {f"bytes_ratio.{axis}" for axis in axes} == {name for name in found if name.startswith("bytes_rat")}
            assert all(found[f"bytes_ratio.{axis}"] == 1.0 for axis in axes), params
            assert costs <= found.keys()


def described(world: World) -> list[tuple[dict[str, Any], tuple[str, ...], float]]:
    found = []
    for tp in (1, 2):
        step = step_of(world, {"capacity": 1.0, "tp": tp})
        per_token = flops_per_token(step.spec.shape, step.moe)
        found.append((step.describe().details, step.describe().notes, per_token))
        step.close()
    return found


def test_a_row_says_what_it_may_claim_and_counts_the_positions_of_one_rank(two_ranks: Ranks) -> None:
    for (details, notes, per_token), (split, of_split, _) in two_ranks.call("test_expert_step:described"):
        assert (details["slots"], split["slots"], details["expert_ffn"]) == (8, 4, 64)
        assert details["flops_per_rank"] == details["tokens_per_step"] * per_token / 2 == 2 * split["flops_per_rank"]
        assert details["parameters"] > details["routed_parameters"] == 2 * 8 * 2 * 32 * 64
        assert split["tokens_per_step"] * 2 == details["tokens_per_step"]
        assert split["axes"] == {axis: {"ranks": 2} for axis in ("dp", "tp", "ep")}
        claims = [any(note.startswith("attention over tp: ") for note in of) for of in (notes, of_split)]
        assert claims == [False, True]


def timed(world: World) -> tuple[int, bool, int]:
    """Return what is wrong of waiting experts, whether a note says what waits, and the axes."""
    step = step_of(world, {"compute": "timed:4ms", "routing": "hot_rank"})
    step.reset()
    step.step()
    wrong, axes = step.check(), len(step.layout.axes)
    start = "timed experts: T is their forward at the mean load"
    noted = any(note.startswith(start) for note in step.describe().notes)
    step.close()
    return wrong, noted, axes


def test_timed_experts_leave_the_right_fills_and_a_note(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_expert_step:timed") == [(0, True, 2)] * 2
