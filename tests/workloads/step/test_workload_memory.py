"""Counted memory: each storage once, parameters apart, freed buffers not at all, and the peak of a step."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import record_function

from parbench.workloads.model.optimizer import LEARNING_RATE, MasterAdamW, make_optimizer
from parbench.workloads.step.memory import (
    OverTime,
    SavedTensors,
    curve,
    peak_during,
)

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_layer_saves_its_input_and_only_what_is_not_excluded_and_each_once() -> None:
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)
    with SavedTensors(layer) as saved:
        layer(x)
    assert saved.num_bytes == 4 * 16 * 4
    with SavedTensors(nn.Module()) as saved:
        layer(x.requires_grad_())
    assert saved.num_bytes == (4 * 16 + 16 * 8) * 4
    with SavedTensors(nn.Module()) as saved, torch.no_grad():
        layer(x)
    assert saved.num_bytes == 0
    x = torch.randn(10, requires_grad=True)
    with SavedTensors(nn.Module()) as saved:
        y = (x * x).sum() + x.exp().sum()
    assert saved.num_bytes == 2 * 40  # x, and the result of exp
    y.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x + x.exp())


def test_what_is_freed_counts_nothing_and_what_takes_its_place_counts() -> None:
    """As FSDP frees what it gathered; an allocator likes to give the same address again."""
    buffers: list[Tensor] = []

    class Frees(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            buffers.append(torch.zeros(MIB))
            ctx.save_for_backward(buffers[0])
            return x.clone()

    x = torch.zeros(MIB, requires_grad=True)
    with SavedTensors(nn.Module()) as saved:
        y = Frees.apply(x)  # type: ignore[no-untyped-call]
        buffers.pop().untyped_storage().resize_(0)
        results = [y.exp() for _ in range(4)]  # each saves its result
    assert len(results) == 4
    assert saved.num_bytes == 4 * 4 * MIB


def test_the_peak_of_a_step_is_what_it_held_at_once() -> None:
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(3 * MIB, dtype=torch.uint8)
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second, third

    assert peak_during(step, CPU) == 5 * MIB
    assert peak_during([torch.empty(MIB)].clear, CPU) == 0, "a step that frees what was there"
    assert peak_during(lambda: None, torch.device("meta")) is None


def test_the_peak_of_a_training_step_sees_the_thread_of_backward() -> None:
    x = torch.randn(512, 512, requires_grad=True)  # 1 MiB
    peak = peak_during(lambda: x.exp().sum().backward(), CPU)  # type: ignore[no-untyped-call]
    assert peak is not None
    assert 2 * MIB <= peak < 3 * MIB  # the result, saved, and the gradient


def test_memory_over_time_has_the_peak_of_every_part_when_it_was_and_how_it_ended() -> None:
    assert curve([]) == ()
    assert curve([(3, 5), (3, -5), (7, 2)]) == ((3, 5), (7, 2)), (
        "what came and went in a microsecond is seen"
    )
    changes = [(at, 10 if at % 2 else -10) for at in range(1, 1001)]
    thinned = curve(changes, most=10)
    assert len(thinned) == 11
    assert [held for _, held in thinned] == [*[10] * 10, 0]
    peak = curve(sorted([*changes, (500, 90), (501, -90)]), most=10)
    assert max(peak, key=lambda point: point[1]) == (500, 90)


def test_a_step_is_seen_from_its_start_with_its_phases_and_the_fullest_rank_tells() -> None:
    def step() -> None:
        with record_function("parbench:forward"):
            first = torch.empty(4 * MIB, dtype=torch.uint8)
        with record_function("parbench:backward"):
            second = torch.empty(2 * MIB, dtype=torch.uint8)
            time.sleep(0.002)
            del first
            time.sleep(0.002)
        del second

    probe, begun = OverTime(CPU), list[bool]()
    seen = probe.observe(step, lambda: begun.append(True), 0.0)
    assert begun == [True]
    assert seen is not None
    (at, held), (_, left) = seen.peak, seen.points[-1]
    assert (held, left, seen.phase_at(at)) == (6 * MIB, 0, "backward")
    assert [name for name, *_ in seen.phases] == ["forward", "backward"]
    more = msgspec.structs.replace(seen, points=((0, 1), (9, 8 * MIB)))
    assert probe.summarise([seen, more, None]).details["memory_over_time"]["rank"] == 1
    assert probe.observe(lambda: None, lambda: None, 0.0) is None
    assert probe.summarise([None]).details == {}


def test_weights_with_masters_are_torchs_rounded_and_updates_smaller_than_a_step_of_bfloat16_add_up() -> (
    None
):
    start = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    narrow, wide = start.clone().requires_grad_(), start.float().requires_grad_()
    ours, theirs = (
        make_optimizer([narrow], torch.bfloat16),
        torch.optim.AdamW([wide], lr=LEARNING_RATE),
    )
    for number in range(20):
        gradient = torch.sin(torch.arange(64.0) + number).bfloat16()
        narrow.grad, wide.grad = gradient.clone(), gradient.float()
        ours.step()
        theirs.step()
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert not torch.equal(narrow.detach(), start)
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer, seen = MasterAdamW([weight], lr=1e-4), []
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        seen.append(float(weight.detach()[0]))
    assert seen[0] == 1 > seen[-1]
