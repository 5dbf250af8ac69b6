"""Counted memory: each storage once, parameters apart, freed buffers not at all, and the peak of a step."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from workloads.memory import SavedTensors, gradients, peak_during, peak_of, state_tensors, storage_bytes

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_views_of_one_storage_count_it_once_and_whole() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base.view(10, 10).t(), base[:3]]) == 400
    assert storage_bytes([base[:3]]) == 400


def test_storages_of_a_generator_are_all_counted() -> None:
    assert storage_bytes(torch.zeros(10) for _ in range(5)) == 5 * 40


def test_what_has_no_memory_counts_nothing() -> None:
    assert storage_bytes([torch.empty(7, device="meta"), torch.empty(0)]) == 0
    assert storage_bytes([]) == 0


def test_a_dtensor_counts_by_its_local_part(alone: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.zeros(8, 4), alone, [Shard(0)])
    assert isinstance(sharded, DTensor)
    assert storage_bytes([sharded, sharded.to_local()]) == 8 * 4 * 4


def test_gradients_are_those_that_there_are() -> None:
    used, unused = nn.Linear(3, 2), nn.Linear(5, 5)
    used(torch.ones(1, 3)).sum().backward()
    found = gradients([*used.parameters(), *unused.parameters()])
    assert storage_bytes(found) == (3 * 2 + 2) * 4
    assert storage_bytes(gradients(unused.parameters())) == 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def test_adam_holds_two_moments_of_every_parameter_and_a_step_each() -> None:
    model = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_tensors(optimizer) == []
    train(model, optimizer)
    assert storage_bytes(state_tensors(optimizer)) == 2 * 4 * (64 * 32 + 32) + 2 * 4


def test_the_state_of_a_zero_redundancy_optimizer_is_that_of_the_one_it_wraps(alone: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13 scripts as it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.Linear(64, 32)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    train(model, optimizer)
    assert storage_bytes(state_tensors(optimizer)) == 2 * 4 * (64 * 32 + 32) + 2 * 4


def test_a_linear_layer_saves_its_input_and_not_its_weight() -> None:
    layer = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    with SavedTensors(layer.parameters()) as saved:
        layer(x)
    assert saved.num_bytes == 4 * 16 * 4
    with SavedTensors() as saved:
        layer(x.requires_grad_())
    assert saved.num_bytes == (4 * 16 + 16 * 8) * 4


def test_what_is_saved_twice_counts_once_and_backward_still_works() -> None:
    x = torch.randn(10, requires_grad=True)
    with SavedTensors() as saved:
        y = (x * x).sum() + x.exp().sum()
    assert saved.num_bytes == 2 * 40  # x, and the result of exp
    y.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x + x.exp())


def test_a_pass_without_gradients_saves_nothing() -> None:
    with SavedTensors() as saved, torch.no_grad():
        nn.Linear(4, 4)(torch.randn(2, 4))
    assert saved.num_bytes == 0


def test_bytes_are_not_known_before_the_end() -> None:
    saved = SavedTensors()
    with pytest.raises(RuntimeError, match="when their context ends"):
        _ = saved.num_bytes


def test_after_an_error_tensors_are_saved_as_ever() -> None:
    x = torch.randn(10, requires_grad=True)
    saved = SavedTensors()
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), saved:
        x.exp() @ torch.ones(3)
    assert saved.num_bytes > 0
    before = saved.num_bytes
    x.exp()
    assert saved.num_bytes == before
    assert saved._kept == [], "the hook is gone"


class FreesAndReuses(torch.autograd.Function):
    """Saves a buffer and frees it, as FSDP does with what it gathered."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        buffer = torch.zeros(MIB)
        ctx.save_for_backward(buffer)
        BUFFERS.append(buffer)
        return x.clone()


BUFFERS: list[Tensor] = []


def test_what_is_freed_counts_nothing_and_what_takes_its_place_counts() -> None:
    x = torch.zeros(MIB, requires_grad=True)
    with SavedTensors() as saved:
        y = FreesAndReuses.apply(x)  # type: ignore[no-untyped-call]
        buffer = BUFFERS.pop()
        address = buffer.data_ptr()
        buffer.untyped_storage().resize_(0)
        results = [
            y.exp() for _ in range(4)
        ]  # each saves its result; an allocator likes to give the same address again
    assert len(results) == 4
    assert address != 0
    assert saved.num_bytes == 4 * 4 * MIB


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_parameters_of_fsdp_are_parameters_and_not_activations(alone: DeviceMesh, reshard: bool) -> None:
    plain = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    with SavedTensors(plain) as expected:
        plain(torch.ones(4, 16))
    sharded = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    fully_shard(sharded, mesh=alone, reshard_after_forward=reshard)
    with SavedTensors(sharded) as saved:
        sharded(torch.ones(4, 16))
    assert saved.num_bytes == expected.num_bytes == (4 * 16 + 4 * 32) * 4


def test_the_peak_of_a_sum_is_its_highest_point_and_never_below_the_start() -> None:
    assert peak_of([5, -2, 4, -7]) == 7
    assert peak_of([-10, 3]) == 0
    assert peak_of([]) == 0


def test_the_peak_of_a_step_is_what_it_held_at_once() -> None:
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(3 * MIB, dtype=torch.uint8)
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second, third

    assert peak_during(step, CPU) == 5 * MIB


def test_the_peak_of_a_training_step_sees_the_thread_of_backward() -> None:
    x = torch.randn(512, 512, requires_grad=True)  # 1 MiB

    def step() -> None:
        x.exp().sum().backward()  # type: ignore[no-untyped-call]

    peak = peak_during(step, CPU)
    assert peak is not None
    assert 2 * MIB <= peak < 3 * MIB  # the result, saved, and the gradient


def test_a_step_that_frees_what_was_there_has_no_peak() -> None:
    held = [torch.empty(MIB)]
    assert peak_during(held.clear, CPU) == 0


def test_on_a_device_that_cannot_tell_the_peak_is_unknown() -> None:
    assert peak_during(lambda: None, torch.device("meta")) is None


@pytest.mark.gpu
def test_on_cuda_the_peak_is_the_allocators() -> None:
    def step() -> None:
        torch.empty(MIB, dtype=torch.uint8, device="cuda")

    assert peak_during(step, torch.device("cuda")) == MIB
