"""A pipeline case has a schedule and layers per stage, or is refused before ranks start."""

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Value
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES

Params = dict[str, Value]

[PIPELINE] = [definition for definition in DEFINITIONS if definition.short_name == "pp"]


def make_world(ranks: int = 2) -> WorldSpec:
    return WorldSpec(nproc=ranks, backend="gloo", device="cpu")


def refuse(params: Params, ranks: int = 2) -> str | None:
    return PIPELINE.refuse(PIPELINE.complete(params), make_world(ranks))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layers_per_stage": "1+2"}, "'1+2' has 2 stages with 3 layers"),
        (
            {"layers_per_stage": "1+1+2"},
            "'1+1+2' has 3 stages with 4 layers instead of 2 with 4",
        ),
        ({"layers_per_stage": "3x2"}, "'3x2' has 3 stages"),
        ({"layers_per_stage": "x4"}, "'x4' is not allowed"),
        ({"layers_per_stage": "4+0"}, "'4+0'"),
    ],
)
def test_pipeline_refuses(params: Params, message: str) -> None:
    assert message in str(refuse(params))


def test_pipeline_refuses_number_of_ranks() -> None:
    assert "layers(4) % stages(3) != 0" in str(refuse({"schedule": "gpipe"}, ranks=3))


@pytest.mark.parametrize("name", SCHEDULES)
def test_checkpointing_needs_joined_backward(name: str) -> None:
    message = refuse({"schedule": name, "microbatches": 8, "checkpointing": "full"})
    splits_backward = name in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v")
    assert (message is not None) == splits_backward
