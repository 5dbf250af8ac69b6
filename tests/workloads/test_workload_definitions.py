"""Definitions of training steps match their functions, and impossible sizes are refused."""

import inspect
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition
from parbench.bench.plan.catalogue import DEFINITIONS as OPERATIONS
from parbench.bench.plan.params import Value
from parbench.bench.rank.runner import load_target
from parbench.bench.text import UserError
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.model.shapes import MODEL, SHAPES, Shape, shape_of
from tests.support.workloads.training_steps import DEFINITION_BY_NAME, Params

every_definition = pytest.mark.parametrize("name", DEFINITION_BY_NAME)


def refuse(name: str, ranks: int, device: str = "cpu", **params: Any) -> str | None:
    definition = DEFINITION_BY_NAME[name]
    world = WorldSpec(nproc=ranks, backend="gloo", device=device)
    return definition.refuse(definition.complete(params), world)


def test_names_are_unique() -> None:
    names = [definition.name.partition(".")[2] for definition in (*OPERATIONS, *DEFINITIONS)]
    assert len(set(names)) == len(names)


@every_definition
def test_definition_matches_its_function(name: str) -> None:
    definition = DEFINITION_BY_NAME[name]
    world, params = inspect.signature(load_target(definition.target)).parameters.values()
    assert world.name == "world"
    assert params.kind == inspect.Parameter.VAR_KEYWORD
    assert definition.help
    assert all(param.help for param in definition.params)


@every_definition
def test_impossible_models_are_refused(name: str) -> None:
    assert "hidden(130) % heads(4) != 0" in str(refuse(name, 2, hidden=130))
    assert "heads(4) % kv_heads(3) != 0" in str(refuse(name, 2, kv_heads=3))
    assert "vocabulary(1) < 2" in str(refuse(name, 2, vocabulary=1))
    message = refuse(name, 2, recipe="llama", hidden=12, heads=4)
    assert "hidden(12) / heads(4) % 2 != 0" in str(message)
    if any(param.name == "compute" for param in DEFINITION_BY_NAME[name].params):
        assert "compute = 'fast'" in str(refuse(name, 2, compute="fast"))


@every_definition
def test_gloo_limits_on_gpus(name: str) -> None:
    """Gloo has only all-reduce and broadcast of CUDA tensors."""
    message = refuse(name, 2, device="cuda", shape="tiny")
    is_allowed = name in ("ddp", "zero1", "ep_dispatch")
    assert (message is None) == is_allowed
    assert is_allowed or "gloo" in str(message)


def make_shape(**params: Value) -> Shape:
    definition = BenchmarkDefinition(
        name="workload.x", target="x:x", help="", params=tuple(MODEL)
    )
    return shape_of(definition.complete(params))


def test_shape_is_named_or_changed() -> None:
    sizes: dict[str, Any] = {"layers": 3, "hidden": 60, "heads": 6, "kv_heads": 3, "ffn": 7}
    assert make_shape() == SHAPES["tiny"]
    assert make_shape(shape="small") == SHAPES["small"]
    assert make_shape(**sizes) == replace(SHAPES["tiny"], **sizes)
    with pytest.raises(UserError, match="'llama3-8b'"):
        make_shape(shape="llama-8b")


@pytest.mark.parametrize(
    ("params", "ffn", "kv_heads"),
    [
        ({"hidden": 32}, 128, 4),
        ({"heads": 8}, 512, 8),
        ({"shape": "tiny-llama", "heads": 8}, 352, 4),
        ({"shape": "tiny-llama", "hidden": 256}, 704, 2),
        ({"hidden": 32, "ffn": 5}, 5, 4),
    ],
)
def test_shape_keeps_proportions(params: Params, ffn: int, kv_heads: int) -> None:
    shape = make_shape(**params)
    assert shape.ffn == ffn
    assert shape.kv_heads == kv_heads
