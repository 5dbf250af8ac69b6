"""A rank holds state by strategy, microbatches in flight by schedule, and activations."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.memory import (
    activations_of,
    buffers_equation,
    layer_equation,
    state_equation,
    state_memory,
)
from parbench.workloads.costs.parameter_table import count_elements, num_parameters
from parbench.workloads.costs.step_spec import RankView
from parbench.workloads.model.shapes import MIXED, Widths
from parbench.workloads.presets import PRESETS
from tests.support.planner_asks import make_spec
from tests.support.training_steps import DEFINITION_BY_NAME

Params = dict[str, Any]


def bytes_per_parameter(position: RankView) -> list[float]:
    """Return the bytes of parameters, gradients and optimizer state for each parameter."""
    state = state_memory(position)
    parts = (state.parameters, state.gradients, state.optimizer)
    assert state_equation(position).value == pytest.approx(sum(parts))
    return [num_bytes / num_parameters(position.spec.shape) for num_bytes in parts]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("ddp", {}, [2, 2, 12]),
        ("ddp", {"precision": "float32"}, [4, 4, 8]),
        ("zero1", {}, [2, 2, 12 / 4]),
        ("zero1", {"optimizer": "distributed"}, [2, 2, 12 / 4]),
        ("fsdp", {"reshard": False}, [2, 2 / 4, 12 / 4]),
        ("fsdp", {}, [2 / 4, 2 / 4, 12 / 4]),
    ],
)
def test_strategies_divide_state(name: str, params: Params, expected: list[float]) -> None:
    """ZeRO (arXiv 1910.02054) divides parameters, gradients and the optimizer's state."""
    defaults = {"shape": "tiny", "precision": "bfloat16"}
    case = DEFINITION_BY_NAME[name].complete({**defaults, **params})
    position = PRESETS[name](case, 4).rank_view(0)
    assert bytes_per_parameter(position) == pytest.approx(expected)


def test_timed_compute_has_no_optimizer_state() -> None:
    spec = PRESETS["ddp"]({"shape": "tiny", "compute": "simulated:1ms"}, 2)
    state = state_memory(spec.rank_view(0))
    assert state.optimizer == 0
    assert state.gradients > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("moments=bfloat16", [2, 2, 8]),
        ("parameters=float32,gradients=float32,master=none", [4, 4, 8]),
        ("moments=float8,master=float32", [2, 2, 6]),
    ],
)
def test_state_has_chosen_widths(text: str, expected: list[float]) -> None:
    position = make_spec("dp=8", "llama3-8b", state=Widths.parse(text, MIXED)).rank_view(0)
    assert bytes_per_parameter(position) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("moment=bfloat16", "'moments'"), ("moments=bf16", "'bf16'"), ("moments=none", "'none'")],
)
def test_wrong_widths_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Widths.parse(text, MIXED)


@pytest.mark.parametrize(
    ("mesh", "params", "num_bytes"),
    [
        ("cp=4", {}, 16),
        ("tp=4", {}, 16 / 4),
        ("fsdp=64", {}, 16 / 64),
        ("dp=2,cp=4", {"zero1": "distributed"}, 4 + 12 / 8),
    ],
)
def test_axes_divide_state(mesh: str, params: Params, num_bytes: float) -> None:
    position = make_spec(mesh, "llama3-8b", **params).rank_view(0)
    assert sum(bytes_per_parameter(position)) == pytest.approx(num_bytes, rel=1e-3)


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=8,ep=4"])
def test_experts_are_divided_once(mesh: str) -> None:
    """FSDP shards only the experts that expert parallelism leaves to a rank."""
    spec = make_spec(mesh, "mixtral-8x7b")
    expected = 16 * num_parameters(spec.shape, spec.moe) / 8
    assert state_memory(spec.rank_view(0)).state == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "layers"), [("dp=8", 0), ("fsdp=8", 3), ("fsdp=4,pp=2", 2 * 32)]
)
def test_buffers_are_gathered_parameters(mesh: str, layers: int) -> None:
    """Two layers of parameters and one of gradients, or parameters and gradients of a stage."""
    position = make_spec(mesh, "llama3-8b", microbatches=4).rank_view(0)
    layer_bytes = 2 * count_elements(position, "replicated", "split") / 32
    assert buffers_equation(position).value == pytest.approx(layers * layer_bytes)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "first", "last"),
    [("zb_v", 8, 4.5, 8), ("interleaved", 4, 4, 2.5)],
)
def test_unfilled_pipeline_holds_fewer_microbatches(
    schedule: str, microbatches: int, first: float, last: float
) -> None:
    spec = make_spec("pp=8", "llama3-8b", schedule=schedule, microbatches=microbatches)
    assert spec.microbatches_in_flight(0) == first
    assert spec.microbatches_in_flight(7) == last
    fullest = max(activations_of(spec.stage_view(rank)) for rank in range(8))
    assert fullest == max(map(activations_of, spec.distinct_views))


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", 1), ("zb_h1", 8), ("zb_h2", 15)])
def test_split_backward_holds_logits(schedule: str, held: int) -> None:
    """A microbatch's logits stay until the weight gradient of the head (arXiv 2401.10241)."""
    position = make_spec("pp=8", "llama3-8b", schedule=schedule, microbatches=32).stage_view(7)
    stage = 4 * layer_equation(position, "none").value
    head = 8192 * 4096 * 4 + 8192 * 128256 * 6
    assert activations_of(position) == pytest.approx(held * (stage + head), rel=1e-3)


def test_activations_of_pipeline_ranks() -> None:
    """The first rank holds most microbatches, and only the last one has logits."""
    spec = make_spec("pp=4", "llama3-8b", microbatches=8)
    stage = 8 * layer_equation(spec.rank_view(0), "none").value
    head = 8192 * 4096 * 4 + 8192 * 128256 * 6
    activations = [activations_of(spec.stage_view(rank)) for rank in range(4)]
    expected = [4 * stage, 3 * stage, 2 * stage, stage + head]
    assert activations == pytest.approx(expected, rel=1e-3)
    last = activations_of(replace(spec, schedule="gpipe").stage_view(3))
    assert last == pytest.approx(8 * (stage + head), rel=1e-3)
