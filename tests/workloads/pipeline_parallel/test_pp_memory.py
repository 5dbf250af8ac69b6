"""Each rank's memory by component: counted, measured, and by closed form."""

from typing import Any

import pytest
from mesh_steps import Params, small_pipeline
from ranks import Ranks

from bench.world.world import World
from workloads.pipeline_parallel.pipeline_memory import counted, formula, measured, stage_parameters

Found = dict[str, Any]


def looks(world: World, cases: list[Params]) -> list[Found]:
    """Return this rank's memory from three sources, and its parameters."""
    found = []
    for params in cases:
        step = small_pipeline(world, {"microbatches": 4, **params})
        step.step()
        look = step._look()
        found.append(
            {
                "formula": formula(look, world.rank),
                "measured": measured(look.layout, world, step._forward_backward, step.reset),
                "counted": counted(look, world.rank, world.device),
                "parameters": sum(parameter.numel() for parameter in step.layout.model.parameters()),
                "said": stage_parameters(look, look.pipeline.schedule.stages_of(world.rank)),
            }
        )
        step.close()
    return found


def test_three_sources_agree(two_ranks: Ranks) -> None:
    schedules = (("gpipe", "llama"), ("1f1b", "gpt"), ("zb_v", "llama"), ("zb_v", "gpt"))
    cases = [{"schedule": name, "recipe": recipe, "hidden": 64, "sequence": 32} for name, recipe in schedules]
    for looks_of_rank in two_ranks.call("test_pp_memory:looks", cases=cases):
        for case, found in zip(cases, looks_of_rank, strict=True):
            assert found["said"] == found["parameters"], case
            for name in ("parameters", "gradients"):
                held = {found[source][name] for source in ("measured", "counted", "formula")}
                assert held == {4 * found["said"]}, (case, name)
            assert found["counted"]["optimizer"] == pytest.approx(8 * found["said"], rel=0.01)
            # the formula leaves out embeddings and head; the CPU's RMSNorm keeps more than a fused one
            assert 0.9 < found["counted"]["activations"] / found["formula"]["activations"] < 2.0, case
            assert found["measured"]["activations"] > 0.9 * found["counted"]["activations"], case


def test_schedules_and_checkpointing_change_what_is_held(two_ranks: Ranks) -> None:
    cases: list[Params] = [
        {"schedule": "gpipe", "microbatches": 8},
        {"schedule": "1f1b", "microbatches": 8},
        {"schedule": "gpipe", "checkpointing": "full"},
        {"schedule": "gpipe", "checkpointing": "selective"},
    ]
    by_rank = two_ranks.call("test_pp_memory:looks", cases=cases)
    # GPipe holds more than 1F1B, and the first rank the most
    for source in ("formula", "counted", "measured"):
        gpipe, one = ([found[at][source]["activations"] for found in by_rank] for at in (0, 1))
        assert gpipe[0] > 2.5 * one[0], source
        assert one[0] > 1.2 * one[1], source
    for _, _, full, selective in by_rank:
        # checkpointed layers hold their inputs
        plain = 4 * 2 * 2 * 16 * 32 * 4
        assert full["formula"]["activations"] == plain / 2
        assert full["counted"]["activations"] < 4 * plain
        # what selective checkpointing keeps passes by what counts saved tensors, which would find a layer's input alone
        assert set(selective["counted"]) == {"parameters", "gradients", "optimizer", "buffers"}
        assert selective["measured"]["activations"] > 0
