"""What cannot be dealt out is refused by its equation, before any rank starts."""

import pytest

from bench.cases import Setting
from bench.errors import UserError
from bench.params import Value
from workloads.context.cp_case import (
    PARAMS,
    parse_attention,
    refusal_of_place,
    refuse_context,
    refuse_place,
    ulysses_of,
)
from workloads.context.cp_plan import METHODS
from workloads.definitions import DEFINITIONS
from workloads.shapes import shape_of

[DEFINITION] = [definition for definition in DEFINITIONS if definition.name == "workload.cp"]
SHAPE: dict[str, Value] = {"shape": "tiny", "hidden": 48, "heads": 6, "kv_heads": 2, "sequence": 48}


def refusal(nproc: int, **given: Value) -> str | None:
    return refuse_context(shape_of({**SHAPE, **given}), given, nproc)


@pytest.mark.parametrize(
    ("nproc", "given", "told"),
    [
        (
            3,
            {"method": "zigzag", "sequence": 129},
            "sequence(129) % (2 * cp(3)) != 0: zigzag gives each rank two chunks",
        ),
        (5, {"method": "ring"}, "sequence(48) % cp(5) != 0"),
        (5, {"method": "striped"}, "sequence(48) % cp(5) != 0"),
        (4, {"method": "allgather_kv", "sequence": 20}, "sequence(20) % (2 * cp(4)) != 0: zigzag gives each rank two"),
        (4, {"method": "ulysses"}, "heads(6) % ulysses(4) != 0"),
        (3, {"method": "ulysses"}, "kv_heads(2) % ulysses(3) != 0"),
        (2, {"method": "ulysses", "sequence": 47}, "sequence(47) % cp(2) != 0"),
        (4, {"method": "usp", "ulysses": 3}, "ulysses(3) * ring(1) != cp(4)"),
        (6, {"method": "usp", "sequence": 54, "ulysses": 2}, None),
        (6, {"method": "usp", "sequence": 42, "ulysses": 1}, "sequence(42) % (2 * ring(6)) != 0"),
        (4, {"method": "ring", "ulysses": 2}, "ulysses = 2 is not allowed with method = ring"),
        (4, {"method": "torch_cp", "mask": "full"}, "mask = full is not allowed with method = torch_cp"),
        (3, {"method": "ring"}, None),
        (2, {"method": "ulysses"}, None),
        (4, {"method": "usp"}, None),
        (1, {"method": "zigzag"}, None),
    ],
)
def test_what_does_not_fit_is_told_by_its_numbers(nproc: int, given: dict[str, Value], told: str | None) -> None:
    found = refusal(nproc, **given)
    assert found is None if told is None else (found or "").startswith(told)


@pytest.mark.parametrize(
    ("method", "given", "ranks", "expected"),
    [
        ("ulysses", 0, 4, 4),
        ("usp", 0, 4, 2),
        ("usp", 0, 2, 1),
        ("usp", 4, 4, 4),
        ("ring", 0, 4, 1),
        ("zigzag", 0, 8, 1),
    ],
)
def test_the_inner_axis_is_all_half_or_what_was_given(method: str, given: int, ranks: int, expected: int) -> None:
    assert ulysses_of(method, given, ranks) == expected


# ---- times


def test_attention_is_real_or_takes_a_time() -> None:
    assert parse_attention("real") is None
    assert parse_attention("timed:20ms") == 0.02
    with pytest.raises(UserError, match="attention = 'fast' is not allowed: attention is real or timed:DURATION"):
        parse_attention("fast")


def test_timed_attention_wants_timed_compute() -> None:
    told = refusal(2, attention="timed:5ms")
    assert told == ("attention = timed:5ms is not allowed with compute = real: what waits has no results to train on")
    assert refusal(2, attention="timed:5ms", compute="timed:5ms") is None
    assert refusal(2, compute="timed:5ms") is None


def test_attention_in_other_words_is_refused_not_raised() -> None:
    assert (refusal(2, attention="fast") or "").startswith("attention = 'fast' is not allowed")
    assert (refusal(2, attention="timed:5 apples") or "").startswith("duration '5 apples'")


# ---- places


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("gloo", "cuda"), ("mpi", "cpu")])
def test_torchs_own_method_is_refused_on_cpus_with_torchs_reason(backend: str, device: str) -> None:
    assert refusal_of_place("torch_cp", backend, device) == (
        f"method = torch_cp is not allowed on {backend} and {device}: "
        "torch's context_parallel raises NotImplementedError on cpu"
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_allowed_on_gpus_and_all_but_torchs_on_cpus(method: str) -> None:
    assert refusal_of_place(method, "nccl", "cuda") is None
    assert (refuse_place({"method": method}, Setting(nproc=2, backend="gloo", device="cpu")) is None) == (
        method != "torch_cp"
    )


def test_the_definition_refuses_shape_plan_and_place_in_this_order() -> None:
    setting = Setting(nproc=3, backend="gloo", device="cpu")
    refuse = DEFINITION.refuse
    assert refuse({"shape": "tiny", "hidden": 130}, setting) == "hidden(130) % heads(4) != 0"
    assert refuse({"shape": "tiny", "method": "torch_cp"}, setting) == "sequence(64) % cp(3) != 0"
    divided = refuse({"shape": "tiny", "method": "torch_cp", "sequence": 66}, setting)
    assert divided is not None
    assert "NotImplementedError" in divided
    assert refuse({"shape": "tiny", "method": "ring", "sequence": 66}, setting) is None


def test_all_parameters_but_the_method_are_optional() -> None:
    assert [param.name for param in PARAMS if not param.optional] == ["method"]
    assert set(PARAMS) <= set(DEFINITION.params)
