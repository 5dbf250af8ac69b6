"""What is measured is a subject, and so is the step that the README shows."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Ranks

from bench.cases import Definition, make_case
from bench.custom import params_of
from bench.definitions import DEFINITIONS
from bench.messages import Outcome
from bench.plan import Measure
from bench.progress import Progress
from bench.runner import load_target, run_case
from bench.subject import Description, Explained, Explanation, Subject
from bench.world import World
from workloads.definitions import DEFINITIONS as STEPS

README = Path(__file__).parent.parent / "README.md"
METHODS = {name: call for name, call in vars(Subject).items() if inspect.isfunction(call) and not name.startswith("_")}


def missing_of(world: World, name: str) -> list[str]:
    """Prepare a definition with its defaults; return what it lacks to be a subject."""
    definition = next(definition for definition in (*DEFINITIONS, *STEPS) if definition.name == name)
    params = {key: value for key, value in definition.case({}).params.items() if key != "mode"}
    subject = load_target(definition.target)(world, **params)
    subject.reset()
    subject.step()
    lacks = [method for method in METHODS if not callable(getattr(subject, method, None))]
    if not isinstance(subject.describe(), Description):
        lacks.append("a description")
    if subject.check() != 0:
        lacks.append("a right result")
    subject.close()
    return lacks


def measured_from(world: World, folder: str, num_elements: int) -> Outcome:
    """Measure the README's step, which lies in a folder."""
    sys.path.append(folder)
    sys.modules.pop("mystep", None)
    try:
        case = make_case("custom.mystep", "mystep:prepare", {"num_elements": num_elements, "mode": "blocking"})
        return run_case(case, world, Measure(max_iterations=8), 30.0, Progress())
    finally:
        sys.path.remove(folder)


@pytest.fixture
def mystep(tmp_path: Path) -> Path:
    """The README's example as a file, as a reader would copy it."""
    [code] = re.findall(r"^```python\n(# mystep\.py\n.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "mystep.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize("definition", [*DEFINITIONS, *STEPS], ids=lambda definition: definition.name)
def test_what_is_declared_is_prepared_as_a_subject(two_ranks: Ranks, definition: Definition) -> None:
    assert two_ranks.call("test_subject:missing_of", name=definition.name) == [[], []]


def test_a_subject_has_five_methods_that_take_nothing() -> None:
    assert list(METHODS) == ["step", "reset", "check", "describe", "close"]
    assert all(list(inspect.signature(method).parameters) == ["self"] for method in METHODS.values())


def test_the_type_checker_takes_operations_and_steps_for_subjects() -> None:
    """mypy proves the assignments; that they run at all is proved above."""
    from bench.operation import Operation
    from workloads.training import TrainingStep

    kinds: list[type[Subject]] = [Operation, TrainingStep]
    explained: list[type[Explained]] = [TrainingStep]
    assert (len(kinds), len(explained)) == (2, 1)


def test_a_description_says_nothing_that_it_was_not_told() -> None:
    description = Description()
    assert (description.headline, description.work, description.notes) == ("time", (), ())
    assert description.details == {}
    assert description.details is not Description().details


def test_an_explanation_says_nothing_that_it_was_not_told() -> None:
    explanation = Explanation()
    assert (explanation.metrics, explanation.details, explanation.notes) == ({}, {}, ())
    assert explanation.metrics is not Explanation().metrics


def test_what_can_explain_itself_is_known_by_its_method_and_nothing_else_has_to_be() -> None:
    class Mute:
        def step(self) -> None: ...

    class Talkative(Mute):
        def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
            return Explanation()

    assert isinstance(Talkative(), Explained)
    assert not isinstance(Mute(), Explained)


@pytest.mark.parametrize("num_elements", [1024, 65536])
def test_the_readmes_own_step_is_measured_and_right(two_ranks: Ranks, mystep: Path, num_elements: int) -> None:
    outcome, _ = two_ranks.call("test_subject:measured_from", folder=str(mystep), num_elements=num_elements)
    assert (outcome.status, outcome.check.passed) == ("ok", True)
    assert outcome.details["num_elements"] == num_elements
    assert len(outcome.seconds) >= 6


def test_the_check_of_the_readmes_step_can_fail(two_ranks: Ranks, mystep: Path) -> None:
    file = mystep / "mystep.py"
    file.write_text(file.read_text().replace("dist.all_reduce(self.buffer, group=self.world.group)", "pass"))
    outcome, _ = two_ranks.call("test_subject:measured_from", folder=str(mystep), num_elements=1024)
    assert (outcome.status, outcome.check.wrong) == ("wrong", 2048)


def test_the_readmes_step_has_the_parameter_that_the_readme_sets(mystep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mystep)
    monkeypatch.delitem(sys.modules, "mystep", raising=False)
    [param] = params_of(load_target("mystep:prepare"))
    assert (param.name, param.kind, param.default) == ("num_elements", "int", 1024)
    assert f"--set {param.name}=1024,65536" in README.read_text()
    monkeypatch.delitem(sys.modules, "mystep")
