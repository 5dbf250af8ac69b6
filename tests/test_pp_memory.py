"""Each rank's memory by component: counted, measured, and by closed form."""

from typing import Any

import pytest
from ranks import Ranks
from test_pp import small

from bench.world import World
from workloads.footprint import Batch
from workloads.pipeline.pipeline_case import pipeline_of
from workloads.pipeline.pp_memory import Look, counted, formula, measured, stage_parameters
from workloads.shapes import SHAPES, num_parameters


def looks(world: World, params: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's memory from three sources, and its parameters."""
    step = small(world, params)
    step.step()
    look = step._look()
    found = {
        "formula": formula(look, world.rank),
        "measured": measured(look.layout, world, step._forward_backward, step.reset),
        "counted": counted(look, world.rank, world.device),
        "parameters": sum(parameter.numel() for parameter in step.layout.model.parameters()),
        "said": stage_parameters(look, look.pipeline.schedule.stages_of(world.rank)),
    }
    step.close()
    return found


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
def test_three_sources_agree(two_ranks: Ranks, schedule: str, recipe: str) -> None:
    params = {"schedule": schedule, "microbatches": 4, "recipe": recipe, "hidden": 64, "sequence": 32}
    for found in two_ranks.call("test_pp_memory:looks", params=params):
        assert found["said"] == found["parameters"]
        for name in ("parameters", "gradients"):
            assert found["measured"][name] == found["counted"][name] == found["formula"][name] == 4 * found["said"]
        assert found["counted"]["optimizer"] == pytest.approx(8 * found["said"], rel=0.01)
        # the formula leaves out embeddings and head; the CPU's RMSNorm keeps more than a fused one
        assert 0.9 < found["counted"]["activations"] / found["formula"]["activations"] < 2.0
        assert found["measured"]["activations"] > 0.9 * found["counted"]["activations"]


def test_gpipe_holds_more_than_1f1b_and_the_first_rank_the_most(two_ranks: Ranks) -> None:
    by_schedule = {
        schedule: two_ranks.call("test_pp_memory:looks", params={"schedule": schedule, "microbatches": 8})
        for schedule in ("gpipe", "1f1b")
    }
    for source in ("formula", "counted", "measured"):
        gpipe, one = ([found[source]["activations"] for found in by_schedule[name]] for name in ("gpipe", "1f1b"))
        assert gpipe[0] > 2.5 * one[0]
        assert one[0] > 1.2 * one[1]


def test_checkpointed_layers_hold_their_inputs(two_ranks: Ranks) -> None:
    params = {"schedule": "gpipe", "microbatches": 4, "checkpointing": "full"}
    for found in two_ranks.call("test_pp_memory:looks", params=params):
        plain = 4 * 2 * 2 * 16 * 32 * 4
        assert found["formula"]["activations"] == plain / 2
        assert found["counted"]["activations"] < 4 * plain


def test_what_selective_checkpointing_keeps_is_not_counted(two_ranks: Ranks) -> None:
    """It passes by what counts saved tensors, which would find a layer's input alone."""
    params = {"schedule": "gpipe", "microbatches": 4, "checkpointing": "selective"}
    for found in two_ranks.call("test_pp_memory:looks", params=params):
        assert set(found["counted"]) == {"parameters", "gradients", "optimizer", "buffers"}
        assert found["measured"]["activations"] > 0


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_the_stages_parameters_are_the_models(name: str) -> None:
    shape = SHAPES[name]
    pipeline = pipeline_of({"schedule": "interleaved", "microbatches": 4}, shape, 2)
    look = Look(
        layout=None,  # type: ignore[arg-type]
        chunks={},
        pipeline=pipeline,
        shape=shape,
        batch=Batch(microbatch=1, element_bytes=4, checkpointing="none"),
        timed_seconds=None,
    )
    assert stage_parameters(look, [0, 2]) + stage_parameters(look, [1, 3]) == num_parameters(shape)
