"""The decision path and the rule of thumb depend on the size of the model."""

import pytest

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.decision import apply_rule_of_thumb, list_questions
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.models import model_of
from tests.support.workloads.planner_asks import H100, make_request


@pytest.mark.parametrize(
    ("model", "gpus", "last_state_answer"),
    [
        ("gpt2", 8, "yes: DDP is enough"),
        ("llama3-8b", 8, "yes: ZeRO-1 is enough"),
        ("llama3-70b", 64, "yes: FSDP holds the state"),
        ("llama3-405b", 8, "no: use more GPUs"),
    ],
)
def test_questions_shard_state_until_it_fits(
    model: str, gpus: int, last_state_answer: str
) -> None:
    questions = list(list_questions(make_request(model, gpus), H100))
    texts = ("Do parameters", "Do they fit")
    states = [question for question in questions if question.text.startswith(texts)]
    assert states[-1].answer == last_state_answer
    assert not any(question.is_yes for question in states[:-1])


def test_questions_print_what_they_compute() -> None:
    for question in list_questions(make_request("deepseek-v3", 2048), PRESETS["h800"]):
        numbers = eval(question.equation.numbers)
        assert numbers == pytest.approx(question.equation.value)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "axes"),
    [
        (model_of("llama3-8b"), 64, 64, {"fsdp": 64}),
        (model_of("llama3-70b"), 64, 64, {"fsdp": 8, "tp": 8}),
        (model_of("mixtral-8x7b"), 64, 64, {"fsdp": 64, "ep": 8}),
        (model_of("llama3-405b"), 4096, 1024, {"dp": 64, "pp": 8, "tp": 8}),
        (model_of("llama3-405b", 131072), 4096, 1024, {"dp": 4, "pp": 8, "cp": 16, "tp": 8}),
    ],
)
def test_rule_of_thumb_follows_the_size(
    model: StepSpec, gpus: int, batch: int, axes: dict[str, int]
) -> None:
    rule = apply_rule_of_thumb(make_request(model, gpus, batch), H100)
    assert rule.run is not None
    assert rule.run.spec.dims.sizes == axes
    assert rule.run.fits
