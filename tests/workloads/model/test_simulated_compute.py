"""Simulated compute waits for the requested time and leaves shapes, names and gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parbench.workloads.model import simulated_compute
from parbench.workloads.model.shapes import Shape, build_shape
from parbench.workloads.model.simulated_compute import (
    SimulatedCompute,
    simulate_linears,
)
from parbench.workloads.model.transformer import (
    Transformer,
    checkpoint_layers,
    compute_loss,
    draw_tokens,
    initialize,
    make_meta_model,
)
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")
GPT = build_shape(
    {"shape": "tiny", "layers": 2, "hidden": 32, "vocabulary": 32, "sequence": 16}
)
LLAMA = build_shape(
    {"shape": "tiny-llama", "layers": 2, "hidden": 32, "ffn": 64, "sequence": 16}
)


class RecordingCompute(SimulatedCompute):
    """Records the requested seconds and does not wait."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.requests: list[float] = []

    @contextmanager
    def take_seconds(self, seconds: float) -> Iterator[None]:
        self.requests.append(seconds)
        yield

    def take_total(self) -> float:
        """Return the sum of all requests since the last call."""
        total = sum(self.requests)
        self.requests.clear()
        return total


def build_simulated(
    shape: Shape, compute: SimulatedCompute, seconds: float = 1.0
) -> Transformer:
    model = make_meta_model(shape, torch.float32)
    initialize(model, 7, CPU)
    simulate_linears(model, seconds, compute)
    return model


def run_forward(model: nn.Module, shape: Shape) -> Tensor:
    return compute_loss(model, draw_tokens(shape, 3, seed=7, step=0))


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("late_seconds", [0.0, 0.002, 0.02])
def test_late_wait_shortens_the_next(
    late_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime(late_seconds)
    monkeypatch.setattr(simulated_compute, "time", clock)
    compute = SimulatedCompute(CPU)
    start = clock.now
    for _ in range(100):
        with compute.take_seconds(0.01):
            pass
    assert clock.now - start == pytest.approx(1.0, abs=late_seconds + 1e-9)
    assert min(clock.sleeps) > 0


def test_wait_contains_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that takes longer than its wait shortens the next wait."""
    clock = FakeTime()
    monkeypatch.setattr(simulated_compute, "time", clock)
    compute = SimulatedCompute(CPU)
    with compute.take_seconds(0.01):
        clock.now += 0.004
    clock.now += 5.0
    with compute.take_seconds(0.01):
        clock.now += 0.03
    with compute.take_seconds(0.05):
        pass
    assert clock.sleeps == pytest.approx([0.006, 0.03])


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_backward_waits_twice_as_long_as_forward(shape: Shape) -> None:
    """Scales shorten the waits by the time that the host takes."""
    compute = RecordingCompute()
    compute.forward_scale = 0.75
    compute.backward_scale = 0.5
    model = build_simulated(shape, compute, seconds=0.6)
    loss = run_forward(model, shape)
    assert compute.take_total() == pytest.approx(0.75 * 0.6)
    run_backward(loss)
    assert compute.take_total() == pytest.approx(0.5 * 1.2)


def test_checkpointed_layer_waits_again() -> None:
    """Recomputing each of the two layers stops before its last GEMM, which takes 0.4 s."""
    compute = RecordingCompute()
    model = build_simulated(GPT, compute, seconds=2.4)
    checkpoint_layers(model, "full")
    run_backward(run_forward(model, GPT))
    assert compute.take_total() == pytest.approx(4 * 2.4 - 2 * 0.4)


def test_simulated_linear_saves_its_input() -> None:
    """Activations in flight therefore take as much memory as those of a real step."""
    linear = build_simulated(GPT, RecordingCompute()).layers.get_submodule("0.ffn.up")
    x = torch.ones(1, 2, 32, requires_grad=True)
    pointers: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        pointers.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x)
    assert pointers == [x.data_ptr()]
