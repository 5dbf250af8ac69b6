"""The planned memory of a step is what real ranks count, by component."""

from collections.abc import Mapping
from typing import Any

import pytest

from parbench.bench.results.details import STATE_COMPONENTS
from parbench.bench.world.world import World
from parbench.workloads.planner.measured.validate import predict_torch_memory
from parbench.workloads.presets import PRESETS
from parbench.workloads.probes.memory_probe import MemoryProbe
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import DEFINITION_BY_NAME, build_trained_step

MAX_STATE_ERROR = 0.01
MAX_ACTIVATION_ERROR = 0.25
"""RMSNorm on a CPU saves float32 copies, and DTensor saves sums before it scatters them."""

SELECTIVE = {"shape": "tiny-llama", "checkpointing": "selective"}


def count_memory(world: World, name: str, params: dict[str, Any]) -> Mapping[str, float]:
    step = build_trained_step(world, name, **params)
    [probe] = [probe for probe in step.list_probes() if isinstance(probe, MemoryProbe)]
    counted = probe.observe(step.step, world.barrier, 0.0)["memory_counted"]
    step.close()
    return counted


def assert_planned(ranks: Ranks, name: str, params: dict[str, Any]) -> None:
    """Compare the maximum over the ranks of each pipeline stage."""
    params = DEFINITION_BY_NAME[name].complete({"microbatch": 2, **params})
    target = f"{__name__}:{count_memory.__name__}"
    counts = ranks.call(target, name=name, params=params)
    spec = PRESETS[name](params, ranks.size)
    views = [spec.make_rank_view(rank) for rank in range(ranks.size)]
    for stage in range(spec.dims.pp):
        members = [rank for rank, view in enumerate(views) if view.pp_rank == stage]
        memories = [predict_torch_memory(views[rank]) for rank in members]
        for component in (*STATE_COMPONENTS, "activations"):
            is_state = component in STATE_COMPONENTS
            planned = max(getattr(memory, component) for memory in memories)
            counted = max(counts[rank][component] for rank in members)
            max_error = MAX_STATE_ERROR if is_state else MAX_ACTIVATION_ERROR
            assert planned == pytest.approx(counted, rel=max_error), (stage, component)


def test_planned_memory_is_counted_on_two_ranks(two_ranks: Ranks) -> None:
    assert_planned(two_ranks, "tp_sp", SELECTIVE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("zero1", {"shape": "tiny", "optimizer": "distributed"}),
        ("fsdp", SELECTIVE),
        ("cp", {"shape": "tiny", "cp_method": "usp", "ulysses": 2}),
        ("pp", {"shape": "tiny", "schedule": "zb_v", "microbatches": 4, "layers": 8}),
        ("hybrid", {"shape": "tiny-llama", "mesh": "fsdp=2,tp=2"}),
        (
            "hybrid",
            {
                "shape": "tiny",
                "mesh": "fsdp=2,tp=2,ep=2,etp=2",
                "routing": "balanced",
                "experts": 8,
            },
        ),
    ],
    ids=["zero1", "fsdp", "cp", "pp", "tensor", "experts"],
)
def test_planned_memory_is_counted_on_four_ranks(
    name: str, params: dict[str, Any], four_ranks: Ranks
) -> None:
    assert_planned(four_ranks, name, params)
