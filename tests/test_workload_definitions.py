"""What is declared of a training step is what its function takes, and what cannot be built is refused in words."""

import inspect

import pytest

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS as OPERATIONS
from bench.errors import UserError
from bench.params import Value
from bench.runner import load_target
from workloads.definitions import DEFINITIONS

SETTINGS = [Setting(nproc=nproc, backend="gloo", device="cpu") for nproc in (1, 2, 3, 8)]
[DDP] = [definition for definition in DEFINITIONS if definition.name == "workload.ddp"]


def refusal(definition: Definition, **given: Value) -> str | None:
    return definition.refuse(definition.case(given).params, SETTINGS[1])


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_function_takes_exactly_the_declared_parameters(definition: Definition) -> None:
    signature = inspect.signature(load_target(definition.target))
    world, *params = signature.parameters.values()
    assert world.name == "world"
    assert [param.name for param in params] == [param.name for param in definition.params]
    assert all(param.kind is inspect.Parameter.KEYWORD_ONLY for param in params)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_annotations_say_the_declared_kinds(definition: Definition) -> None:
    kinds = {"int": int, "float": float, "str": str, "bool": bool, "size": int}
    hints = inspect.get_annotations(load_target(definition.target), eval_str=True)
    for param in definition.params:
        assert hints[param.name] is kinds[param.kind], param.name


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.nproc} ranks")
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_defaults_are_refused_nowhere(definition: Definition, setting: Setting) -> None:
    assert definition.refuse(definition.case({}).params, setting) is None


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_every_definition_and_parameter_explains_itself(definition: Definition) -> None:
    assert definition.kind == "workload"
    assert definition.help
    assert all(param.help for param in definition.params)


def test_no_step_bears_the_name_of_an_operation() -> None:
    names = [definition.name.partition(".")[2] for definition in (*OPERATIONS, *DEFINITIONS)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("hidden", "heads", "told"),
    [
        (128, 3, "hidden(128) % heads(3) != 0"),
        (4, 8, "hidden(4) % heads(8) != 0"),
        (128, 4, None),
        (5, 5, None),
        (7, 1, None),
    ],
)
def test_heads_must_divide_the_hidden_size_and_the_refusal_is_the_equation(
    hidden: int, heads: int, told: str | None
) -> None:
    assert refusal(DDP, hidden=hidden, heads=heads) == told


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "sequence", "microbatch", "vocabulary", "bucket_mb"])
def test_no_size_may_be_nothing(name: str) -> None:
    with pytest.raises(UserError, match=name):
        DDP.case({name: 0})


def test_one_word_leaves_nothing_to_predict() -> None:
    with pytest.raises(UserError, match="vocabulary"):
        DDP.case({"vocabulary": 1})
