"""The questions of the decision path depend on the size of the model."""

import pytest

from parbench.workloads.planner.decision import list_questions
from parbench.workloads.planner.hardware import PRESETS
from tests.support.workloads.planner_asks import H100, make_request


@pytest.mark.parametrize(
    ("model", "gpus", "last_state_answer"),
    [
        ("gpt2", 8, "yes: DDP is enough"),
        ("llama3-8b", 8, "yes: ZeRO-1 is enough"),
        ("llama3-70b", 64, "yes: FSDP is enough"),
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
