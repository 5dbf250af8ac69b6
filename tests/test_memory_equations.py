"""Equations of what a rank holds: of every rank, and every kind of step, as many bytes as the closed forms."""

import pytest
from planner_asks import ask

from workloads.planner.ask import as_measured
from workloads.planner.memory_equations import (
    activations_equation,
    buffers_equation,
    dense_equation,
    experts_equation,
    state_equation,
)
from workloads.planner.rank_memory import memory_of
from workloads.planner.stage_parts import elements_of, parts_of


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("device", ["", "cpu", "cuda"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("model", ["llama3-8b", "gpt-7.5b", "mixtral-8x7b"])
def test_every_rank_holds_what_its_equations_say(model: str, schedule: str, device: str, how: str) -> None:
    mesh = "pp=4,fsdp=8,cp=2,tp=2" + (",ep=4" if model == "mixtral-8x7b" else "")
    step = ask(mesh, model, schedule=schedule, checkpointing=how, microbatches=8, microbatch=2)
    step = as_measured(step, device) if device else step
    for part in parts_of(step):
        memory = memory_of(step, part)
        for equation, value in (
            (state_equation, memory.state),
            (activations_equation, memory.activations),
            (buffers_equation, memory.buffers),
            (dense_equation, elements_of(step, part)[0]),
        ):
            assert eval(equation(step, part).numbers) == pytest.approx(value, rel=1e-6), part


def test_experts_are_dealt_out_and_their_shards_told_apart() -> None:
    step = ask("fsdp=16,ep=4", "mixtral-8x7b", element_bytes=4)
    [part] = parts_of(step)
    assert eval(experts_equation(step, part).numbers) == elements_of(step, part)[1]
    assert state_equation(step, part).text == "(4 + 4 + 8) (Psi / fsdp + experts / shards)"
    assert state_equation(step, part).symbols["shards"] == 4


@pytest.mark.parametrize(
    ("mesh", "text"), [("fsdp=8", "3 Psi e / L"), ("pp=2,fsdp=2", "2 Psi e")], ids=["layers", "stages"]
)
def test_buffers_are_of_layers_or_of_a_stage(mesh: str, text: str) -> None:
    step = ask(mesh, "llama3-8b", microbatches=4)
    assert buffers_equation(step, parts_of(step)[0]).text == text


def test_a_layer_that_is_computed_again_is_one_more() -> None:
    step = ask("tp=2", "llama3-8b", checkpointing="full")
    layer = "(b s h e (2 / t + 2 + (2 + 2 g + 4 f / h) / t) + 4 a b s / t)"
    head = "r (b s h e (1 / t + 1) + b s V (e + 4) / t)"
    assert activations_equation(step, parts_of(step)[0]).text == f"n L b s h e / t + {layer} + {head}"
