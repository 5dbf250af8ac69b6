"""Dry runs of meshes that real ranks can make: bytes by axis, state and activations are what the measured step has."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from planner_asks import PLAIN
from ranks import Ranks

from bench.world import World
from workloads.definitions import DEFINITIONS
from workloads.hybrid.hybrid import HybridStep
from workloads.hybrid.hybrid_explain import counts
from workloads.hybrid.hybrid_memory import counted
from workloads.planner.ask import Ask, as_measured, parse_mesh
from workloads.planner.catalog import model_of
from workloads.planner.dry_run import DryRun, dry_run

[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.hybrid"]
MESHES = ("dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "fsdp=2,tp=2")
CASES = [
    *((mesh, "tiny") for mesh in MESHES),
    *(pytest.param(mesh, "tiny-llama", marks=pytest.mark.slow) for mesh in MESHES),
]
MICROBATCH, MICROBATCHES = 2, 3

Measured = tuple[dict[str, float], dict[str, float]]


def taken(world: World, mesh: str, model: str) -> Measured:
    """Return the bytes that a step sends by axis, and what this rank's memory holds."""
    given: dict[str, Any] = {"shape": model, "mesh": mesh, "microbatch": MICROBATCH, "microbatches": MICROBATCHES}
    step = HybridStep(world, dict(DEFINITION.case(given).params))
    step.reset()
    step.step()
    sent, _, _ = counts(world, step.look(), step.step, step.reset)
    held = counted(step.look(), world.device)
    step.close()
    return dict(sent), dict(held)


@pytest.fixture(scope="module")
def measured(four_ranks: Ranks) -> Callable[[str, str], Measured]:
    """Return the bytes of each axis and each component of memory, of the rank that has most of it."""

    @cache
    def of(mesh: str, model: str) -> Measured:
        told = four_ranks.call("test_dry_run_measured:taken", mesh=mesh, model=model)
        return _largest([sent for sent, _ in told]), _largest([held for _, held in told])

    return of


def _largest(told: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in told) for name in told[0]}


@cache
def planned(mesh: str, model: str) -> DryRun:
    """Return the dry run of a step as it is measured."""
    ask = Ask(
        model=model_of(model),
        mesh=parse_mesh(mesh),
        microbatch=MICROBATCH,
        microbatches=MICROBATCHES,
        element_bytes=4,
    )
    return dry_run(as_measured(ask), PLAIN)


def most(run: DryRun, component: str) -> float:
    """Return what the rank with most of a component holds of it."""
    return float(max(getattr(held.memory, component) for held in run.ranks))


@pytest.mark.parametrize(("mesh", "model"), CASES)
def test_bytes_of_each_axis_are_those_that_were_sent(
    measured: Callable[[str, str], Measured], mesh: str, model: str
) -> None:
    sent = measured(mesh, model)[0]
    found = {axis.name: axis.sent_bytes for axis in planned(mesh, model).time.axes}
    assert found == pytest.approx(sent, rel=1e-9)
    assert found.keys() == set(parse_mesh(mesh))


@pytest.mark.parametrize(("mesh", "model"), CASES)
@pytest.mark.parametrize("component", ["parameters", "gradients", "optimizer"])
def test_state_is_what_was_counted(
    measured: Callable[[str, str], Measured], mesh: str, model: str, component: str
) -> None:
    assert most(planned(mesh, model), component) == pytest.approx(measured(mesh, model)[1][component], rel=0.01)


@pytest.mark.parametrize(("mesh", "model"), CASES)
def test_activations_are_what_was_saved_for_backward(
    measured: Callable[[str, str], Measured], mesh: str, model: str
) -> None:
    found = most(planned(mesh, model), "activations")
    assert found == pytest.approx(measured(mesh, model)[1]["activations"], rel=0.05)


def test_a_step_as_large_clusters_take_it_differs_where_it_says_so() -> None:
    """The same mesh with a split vocabulary, gradients scattered each time, a float32 loss and fused kernels."""
    asked = planned("fsdp=2,tp=2", "tiny-llama").ask
    large = dry_run(Ask(model=asked.model, mesh=asked.mesh, microbatch=2, microbatches=3, element_bytes=4), PLAIN)
    sent = {axis.name: axis.sent_bytes for axis in large.time.axes}
    ours = {axis.name: axis.sent_bytes for axis in planned("fsdp=2,tp=2", "tiny-llama").time.axes}
    assert sent["fsdp"] != ours["fsdp"]
    assert sent["tp"] != ours["tp"]
    assert most(large, "parameters") < most(planned("fsdp=2,tp=2", "tiny-llama"), "parameters")
