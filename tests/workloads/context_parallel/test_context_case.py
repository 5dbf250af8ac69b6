"""What cannot be dealt out is refused by its equation, before any rank starts."""

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Value
from parbench.bench.text import UserError
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.context_parallel.context_case import (
    PARAMS,
    parse_attention,
    ulysses_of,
)

[DEFINITION] = [definition for definition in DEFINITIONS if definition.name == "workload.cp"]
SHAPE: dict[str, Value] = {"shape": "tiny", "hidden": 48, "heads": 6, "kv_heads": 2, "sequence": 48}


def refusal(nproc: int, **given: Value) -> str | None:
    spec = WorldSpec(nproc=nproc, backend="nccl", device="cuda")
    return DEFINITION.refuse({"method": "ring", **SHAPE, **given}, spec)


def test_what_does_not_fit_is_told_by_its_numbers() -> None:
    chunks = ": zigzag gives each rank two chunks"
    refused: list[tuple[int, dict[str, Value], str]] = [
        (3, {"method": "zigzag", "sequence": 129}, f"sequence(129) % (2 * cp(3)) != 0{chunks}"),
        (5, {"method": "ring"}, "sequence(48) % cp(5) != 0"),
        (5, {"method": "striped"}, "sequence(48) % cp(5) != 0"),
        (4, {"method": "allgather_kv", "sequence": 20}, f"sequence(20) % (2 * cp(4)) != 0{chunks}"),
        (4, {"method": "ulysses"}, "heads(6) % ulysses(4) != 0"),
        (3, {"method": "ulysses"}, "kv_heads(2) % ulysses(3) != 0"),
        (2, {"method": "ulysses", "sequence": 47}, "sequence(47) % cp(2) != 0"),
        (4, {"method": "usp", "ulysses": 3}, "ulysses(3) * ring(1) != cp(4)"),
        (
            6,
            {"method": "usp", "sequence": 42, "ulysses": 1},
            f"sequence(42) % (2 * ring(6)) != 0{chunks}",
        ),
        (
            4,
            {"method": "ring", "ulysses": 2},
            "ulysses = 2 is not allowed with method = ring: it is the inner axis",
        ),
    ]
    for nproc, given, told in refused:
        assert (refusal(nproc, **given) or "").startswith(told), (nproc, given)
    assert refusal(6, method="usp", sequence=54, ulysses=2) is None
    for method, nproc in (("ring", 3), ("ulysses", 2), ("usp", 4), ("zigzag", 1)):
        assert refusal(nproc, method=method) is None, method


def test_the_inner_axis_is_all_half_or_what_was_given() -> None:
    asked = {
        ("ulysses", 0, 4): 4,
        ("usp", 0, 4): 2,
        ("usp", 0, 2): 1,
        ("usp", 0, 1): 1,
        ("usp", 4, 4): 4,
    }
    for of, ranks in {**asked, ("ring", 0, 4): 1, ("zigzag", 0, 8): 1}.items():
        assert ulysses_of(*of) == ranks, of


def test_attention_is_real_or_takes_a_time_beside_timed_compute() -> None:
    assert parse_attention("real") is None
    assert parse_attention("timed:20ms") == 0.02
    with pytest.raises(
        UserError, match="attention = 'fast' is not allowed: attention is real or timed:DURATION"
    ):
        parse_attention("fast")
    assert (refusal(2, attention="fast") or "").startswith("attention = 'fast' is not allowed")
    assert (refusal(2, attention="timed:5 apples") or "").startswith("duration '5 apples'")
    told = "attention = timed:5ms is not allowed with compute = real: what waits has no results to train on"
    assert refusal(2, attention="timed:5ms") == told
    assert (
        refusal(2, attention="timed:5ms", compute="timed:5ms")
        is refusal(2, compute="timed:5ms")
        is None
    )


def test_the_definition_refuses_shape_and_plan() -> None:
    spec = WorldSpec(nproc=3, backend="gloo", device="cpu")
    refuse = DEFINITION.refuse
    assert refuse({"shape": "tiny", "hidden": 130}, spec) == "hidden(130) % heads(4) != 0"
    assert refuse({"shape": "tiny", "method": "ring"}, spec) == "sequence(64) % cp(3) != 0"
    assert refuse({"shape": "tiny", "method": "ring", "sequence": 66}, spec) is None
    assert [param.name for param in PARAMS if not param.optional] == ["method"]
    assert set(PARAMS) <= set(DEFINITION.params)
