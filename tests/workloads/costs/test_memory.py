"""A rank holds state by strategy, microbatches in flight by schedule, activations and buffers."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.memory import (
    compute_state_memory,
    format_layer_bytes,
    make_activations_equation,
    make_buffers_equation,
    make_state_equation,
)
from parbench.workloads.costs.parameter_table import count_elements, count_parameters
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.presets import PRESETS
from tests.support.workloads.planner_asks import make_spec

Params = dict[str, Any]
# Float32 norm input, input of the head, and float32 logits of one microbatch of llama3-8b.
HEAD_BYTES = 8192 * (2 * 4096 * 2 + 4 * 128256 + 12)


def bytes_per_parameter(view: RankView) -> list[float]:
    """Return the bytes of parameters, gradients and optimizer state for each parameter."""
    state = compute_state_memory(view)
    parts = (state.parameters, state.gradients, state.optimizer)
    assert make_state_equation(view).value == pytest.approx(sum(parts))
    return [num_bytes / count_parameters(view.spec.shape) for num_bytes in parts]


def layer_bytes(spec: StepSpec, checkpointing: str = "none") -> float:
    text = format_layer_bytes(spec, checkpointing)
    return Equation(text=text, symbols=spec.make_rank_view(0).symbols).value


def test_simulated_compute_has_no_optimizer_state() -> None:
    spec = PRESETS["ddp"]({"shape": "tiny", "compute": "simulated:1ms"}, 2)
    state = compute_state_memory(spec.make_rank_view(0))
    assert state.optimizer == 0
    assert state.gradients > 0


@pytest.mark.parametrize(("num_bytes", "expected"), [(2, [2, 2, 12]), (4, [4, 4, 8])])
def test_state_has_widths_of_precision(num_bytes: int, expected: list[float]) -> None:
    spec = make_spec("dp=8", "llama3-8b", bytes_per_element=num_bytes)
    assert bytes_per_parameter(spec.make_rank_view(0)) == expected


@pytest.mark.parametrize(
    ("mesh", "params", "num_bytes"),
    [
        ("cp=4", {}, 16),
        ("tp=4", {}, 16 / 4),
        ("fsdp=64", {}, 16 / 64),
        ("fsdp=8,cp=8", {}, 16 / 64),  # FSDP shards over fsdp x cp.
        ("dp=2,cp=4", {"zero1": "distributed"}, 4 + 12 / 8),
    ],
)
def test_axes_divide_state(mesh: str, params: Params, num_bytes: float) -> None:
    view = make_spec(mesh, "llama3-8b", **params).make_rank_view(0)
    assert sum(bytes_per_parameter(view)) == pytest.approx(num_bytes, rel=1e-3)


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=8,ep=4", "fsdp=4,cp=2,ep=2"])
def test_experts_are_divided_once(mesh: str) -> None:
    """FSDP shards only the experts that expert parallelism leaves to a rank."""
    spec = make_spec(mesh, "mixtral-8x7b")
    expected = 16 * count_parameters(spec.shape, spec.moe) / 8
    assert compute_state_memory(spec.make_rank_view(0)).state == pytest.approx(
        expected, rel=1e-6
    )


HEAD = (128256 + 1) * 4096
LOSS_BUFFERS = 2 * 4 * 8192 * 128256


def test_fsdp_buffers_at_the_loss_are_logits_and_head() -> None:
    """Two float32 gradients of the logits, and the head in bfloat16 before the first reduction."""
    view = make_spec("fsdp=8", "llama3-8b").make_rank_view(0)
    shard_gradients = compute_state_memory(view).gradients
    assert make_buffers_equation(view).value == LOSS_BUFFERS + 2 * HEAD - shard_gradients
    assert (
        make_buffers_equation(make_spec("dp=8", "llama3-8b").make_rank_view(0)).value
        == LOSS_BUFFERS
    )


def test_fsdp_buffers_after_a_layer_are_two_layers_and_gradients() -> None:
    """The activations of a layer are free when its gradients are reduced."""
    spec = make_spec("fsdp=8", "mixtral-8x7b", checkpointing="full")
    view = spec.make_rank_view(0)
    layer = (count_elements(view) - 2 * 32000 * 4096 - 4096) / 32
    expected = layer * (2 * 2 + 4) - layer_bytes(spec, "full")
    assert make_buffers_equation(view).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mesh", "params", "gathered"),
    [
        ("fsdp=4,pp=2", {"no_sync": False}, 2),
        ("fsdp=8", {"no_sync": True, "reshard": False}, 2),
    ],
)
def test_fsdp_keeps_unreduced_gradients(mesh: str, params: Params, gathered: int) -> None:
    """A pipeline reduces once per step, and others do so with ``no_sync``."""
    view = make_spec(mesh, "llama3-8b", microbatches=4, **params).make_rank_view(0)
    expected = count_elements(view) * (gathered + 4) - compute_state_memory(view).gradients
    inner_gradients = 3 * 8192 * 14336 * 2
    expected += LOSS_BUFFERS if view.has_head else inner_gradients
    assert make_buffers_equation(view).value == pytest.approx(expected)


def test_recomputed_layer_is_a_buffer() -> None:
    spec = make_spec("pp=2", "llama3-8b", checkpointing="full", microbatches=8)
    expected = layer_bytes(spec) - layer_bytes(spec, "full")
    assert make_buffers_equation(spec.make_rank_view(0)).value == pytest.approx(expected)


def test_layer_of_gpt_saves_34_bytes_of_korthikanti() -> None:
    """34 s b h / t (arXiv 2205.05198) has no statistics of norms and attention."""
    spec = make_spec("tp=8", "gpt-175b")
    tokens_by_hidden = 2048 * 12288 / 8
    statistics = 2 * 8 * 2048 / 8 + 4 * 96 * 2048 / 8
    assert 34 * tokens_by_hidden == pytest.approx(107e6, rel=1e-3)
    assert layer_bytes(spec) == pytest.approx(34 * tokens_by_hidden + statistics)
    without_dropout = replace(spec, shape=replace(spec.shape, dropout=False))
    assert layer_bytes(spec) - layer_bytes(without_dropout) == 2 * tokens_by_hidden


def test_fused_kernels_save_outputs_of_gemms_only() -> None:
    """Two inputs of norms, q, k, v and attention, gate and up, in units of b s h e."""
    spec = make_spec("dp=1", "llama3-8b", fused=True)
    unit = 2 * 8192 * 4096
    assert layer_bytes(spec) / unit == pytest.approx(2 + 2.5 + 2 * 3.5, abs=0.02)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "first", "last"),
    [("zb_v", 8, 4.5, 8), ("1f1b", 4, 4, 1)],
)
def test_unfilled_pipeline_holds_fewer_microbatches(
    schedule: str, microbatches: int, first: float, last: float
) -> None:
    spec = make_spec("pp=8", "llama3-8b", schedule=schedule, microbatches=microbatches)
    views = [spec.make_stage_view(rank) for rank in range(8)]
    assert views[0].microbatches_in_flight == first
    assert views[7].microbatches_in_flight == last
    fullest = max(make_activations_equation(view).value for view in views)
    assert fullest == max(make_activations_equation(view).value for view in spec.distinct_views)


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", 1), ("zb_h1", 8), ("zb_h2", 15)])
def test_split_backward_holds_logits(schedule: str, held: int) -> None:
    """A microbatch's logits stay until the weight gradient of the head (arXiv 2401.10241)."""
    spec = make_spec("pp=8", "llama3-8b", schedule=schedule, microbatches=32)
    stage = 4 * layer_bytes(spec)
    activations = make_activations_equation(spec.make_stage_view(7)).value
    assert activations == pytest.approx(held * (stage + HEAD_BYTES), rel=1e-3)


def test_activations_of_pipeline_ranks() -> None:
    """The first rank holds most microbatches, and only the last one has logits."""
    spec = make_spec("pp=4", "llama3-8b", microbatches=8)
    stage = 8 * layer_bytes(spec)
    activations = [
        make_activations_equation(spec.make_stage_view(rank)).value for rank in range(4)
    ]
    expected = [4 * stage, 3 * stage, 2 * stage, stage + HEAD_BYTES]
    assert activations == pytest.approx(expected, rel=1e-3)
