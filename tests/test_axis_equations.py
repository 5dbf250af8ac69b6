"""Equations of what each axis sends: of every rank, and every kind of step, as many bytes as its calls have."""

import pytest
from planner_asks import ask

from workloads.hybrid.constraints import CP_METHODS
from workloads.planner.ask import as_measured
from workloads.planner.axis_equations import SOURCES, axis_equation
from workloads.planner.calls import calls_of
from workloads.planner.stage_parts import parts_of


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("measured", [False, True], ids=["cluster", "measured"])
@pytest.mark.parametrize("method", CP_METHODS)
@pytest.mark.parametrize("model", ["llama3-8b", "gpt-7.5b", "mixtral-8x7b"])
def test_every_rank_sends_what_its_equations_say(model: str, method: str, measured: bool, how: str) -> None:
    mesh = "dp=2,pp=4,fsdp=4,cp=2,tp=2" + (",ep=4" if model == "mixtral-8x7b" else "")
    step = ask(mesh, model, cp_method=method, checkpointing=how, microbatches=8, microbatch=2)
    step = as_measured(step) if measured else step
    for part in parts_of(step):
        calls = calls_of(step, part, 8)
        axes = {call.axis for call in calls}
        assert axes >= {"tp", "cp", "pp", "fsdp", "dp"}
        for axis in axes:
            sent = sum(call.sent for call in calls if call.axis == axis)
            assert eval(axis_equation(step, part, axis).numbers) == pytest.approx(sent, rel=1e-9), (axis, part)


def test_every_axis_has_a_source() -> None:
    step = ask("dp=2,pp=2,fsdp=2,cp=2,tp=2,ep=2", "mixtral-8x7b", microbatches=4)
    for axis, source in SOURCES.items():
        assert source
        assert axis_equation(step, parts_of(step)[0], axis).text
