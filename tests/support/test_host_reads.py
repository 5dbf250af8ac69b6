"""What would make the host wait for a device is recorded on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.host_reads import record_host_reads

NUMBERS = torch.tensor([2, 0, 1])
MASK = NUMBERS > 0


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("aten::_local_scalar_dense", lambda x: x[0].item()),
        ("aten::_local_scalar_dense", lambda x: 1 if x.any() else 0),
        ("tolist", lambda x: x.tolist()),
        ("to", lambda x: x.to(device=torch.device("cpu"), dtype=torch.float64)),
        ("aten::index.Tensor", lambda x: x[MASK]),
        ("aten::repeat_interleave.Tensor", lambda x: x.repeat_interleave(x)),
        ("aten::lift_fresh", lambda x: x[[0, 1]]),
        ("aten::lift_fresh", lambda x: x.clone().__setitem__(x, 1)),
        ("aten::index_put_", lambda x: x.clone().__setitem__(MASK, x[0])),
    ],
)
def test_host_read_is_recorded(name: str, operation: Callable[[Tensor], object]) -> None:
    [read] = record_host_reads(lambda: operation(NUMBERS))
    assert read.split(" in ")[0].split(" outside ")[0] == name


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[x],
        lambda x: x[1:].to(torch.float32),
        lambda x: x.to(torch.float32).to(x),
        lambda x: x.clone().__setitem__(MASK, 1),
        lambda x: torch.ones(3, 2).__setitem__((MASK, slice(None)), 0.0),
        lambda x: x.repeat_interleave(x, output_size=3),
    ],
)
def test_operation_on_device_is_not_recorded(operation: Callable[[Tensor], object]) -> None:
    assert record_host_reads(lambda: operation(NUMBERS)) == []


def test_host_read_in_backward_is_recorded() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * float(gradient.sum()))  # type: ignore[no-untyped-call]
    [read] = record_host_reads((x * 2).sum().backward)
    assert "_local_scalar_dense" in read


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_counts_steps_on_host(foreach: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([x], foreach=foreach)
    assert record_host_reads(optimizer.step) == []
