"""Waiting experts take time by their rows, and leave nothing behind but zeros."""

import pytest
import torch
from torch import Tensor

from workloads.experts.timed_experts import ExpertWait, wait_instead
from workloads.timed import Waiter

SECONDS_PER_ROW = 0.25


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def waited(clock: Clock, rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return rows, what they become, and the weights."""
    x = torch.ones(rows, 3, requires_grad=True)
    weights = [torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, 4, 3, requires_grad=True)]
    wait = ExpertWait(seconds_per_row=SECONDS_PER_ROW, waiter=Waiter(torch.device("cpu"), clock, clock.sleep))
    return x, wait_instead(x, weights, wait), weights


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_each_row_takes_its_time_forward_and_twice_that_backward(rows: int) -> None:
    clock = Clock()
    _, out, _ = waited(clock, rows)
    assert clock.slept == [rows * SECONDS_PER_ROW]
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert clock.slept == pytest.approx([rows * SECONDS_PER_ROW, 2 * rows * SECONDS_PER_ROW])


def test_nothing_is_waited_for_without_rows() -> None:
    clock = Clock()
    x, out, _ = waited(clock, 0)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert clock.slept == []
    assert x.grad is not None


def test_outputs_and_all_gradients_are_zeros_of_their_size() -> None:
    x, out, weights = waited(Clock(), 4)
    assert torch.equal(out, torch.zeros(4, 3))
    out.sum().backward()  # type: ignore[no-untyped-call]
    for tensor in (x, *weights):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
