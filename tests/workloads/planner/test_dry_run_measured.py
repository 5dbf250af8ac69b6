"""Dry runs of meshes that real ranks can make: bytes by axis, state and activations are what the measured step has."""

from typing import Any

import pytest
from planner_asks import PLAIN
from ranks import Ranks

from bench.world.world import World
from workloads.catalogue import DEFINITIONS
from workloads.mesh.mesh_probe import MeshBytes, counted
from workloads.mesh.mesh_step import HybridStep
from workloads.planner.ask import Ask, as_measured, parse_mesh
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.models import model_of

[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.hybrid"]
MICROBATCH, MICROBATCHES = 2, 3


def taken(world: World, mesh: str, model: str) -> tuple[dict[str, float], dict[str, float]]:
    given: dict[str, Any] = {"shape": model, "mesh": mesh, "microbatch": MICROBATCH, "microbatches": MICROBATCHES}
    step = HybridStep(world, DEFINITION.whole(given))
    step.reset()
    step.step()
    sent = MeshBytes(step.look()).observe(step.step, step.reset).sent
    held = counted(step.look())
    step.close()
    return dict(sent), dict(held)


def asked(mesh: str, model: str) -> Ask:
    sizes: dict[str, Any] = {"microbatch": MICROBATCH, "microbatches": MICROBATCHES, "element_bytes": 4}
    return Ask(model=model_of(model), mesh=parse_mesh(mesh), **sizes)


def most(run: DryRun, component: str) -> float:
    return float(max(getattr(held.memory, component) for held in run.ranks))


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ("fsdp=2,tp=2", "tiny-llama"),
        *(
            pytest.param(mesh, model, marks=pytest.mark.full)
            for mesh, model in (
                ("dp=2,pp=2", "tiny"),
                ("pp=2,tp=2", "tiny-llama"),
                ("dp=2,tp=2", "tiny-llama"),
                ("fsdp=2,tp=2", "tiny"),
            )
        ),
    ],
)
def test_bytes_state_and_activations_are_what_was_counted(four_ranks: Ranks, mesh: str, model: str) -> None:
    told = four_ranks.call("test_dry_run_measured:taken", mesh=mesh, model=model)
    sent, held = ({name: max(one[i][name] for one in told) for name in told[0][i]} for i in (0, 1))
    run = dry_run(as_measured(asked(mesh, model)), PLAIN)
    assert {axis.name: axis.sent_bytes for axis in run.time.axes} == pytest.approx(sent, rel=1e-9)
    assert sent.keys() == parse_mesh(mesh).keys()
    for component in ("parameters", "gradients", "optimizer"):
        assert most(run, component) == pytest.approx(held[component], rel=0.01), component
    assert most(run, "activations") == pytest.approx(held["activations"], rel=0.05)


def test_a_step_as_large_clusters_take_it_differs_where_it_says_so() -> None:
    """The same mesh with a split vocabulary, gradients scattered each time, a float32 loss and fused kernels."""
    large = dry_run(asked("fsdp=2,tp=2", "tiny-llama"), PLAIN)
    ours = dry_run(as_measured(large.ask), PLAIN)
    theirs, mine = ({axis.name: axis.sent_bytes for axis in run.time.axes} for run in (large, ours))
    assert theirs["fsdp"] != mine["fsdp"]
    assert theirs["tp"] != mine["tp"]
    assert most(large, "parameters") < most(ours, "parameters")
