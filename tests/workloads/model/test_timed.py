"""Timed compute waits as long as it says, and otherwise leaves a step as it was: shapes, names, gradients, traffic."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from fake_time import FakeTime
from ranks import Ranks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from parbench.bench.world.torch_compat import kineto_events, profiling
from parbench.bench.world.world import World
from parbench.workloads.model.shapes import Shape, shape_of
from parbench.workloads.model.timed_compute import (
    COMPUTE_RANGE,
    TimedCompute,
    TimedLinear,
    calibrate,
    fill_distinct_gradients,
    make_timed,
    settled,
)
from parbench.workloads.model.transformer import Transformer, build, checkpoint, draw_tokens, loss_of

CPU = torch.device("cpu")
GPT = shape_of({"shape": "tiny", "layers": 2, "hidden": 32, "vocabulary": 32, "sequence": 16})
LLAMA = shape_of({"shape": "tiny-llama", "layers": 2, "hidden": 32, "ffn": 64, "vocabulary": 32, "sequence": 16})


class Noted(TimedCompute):
    def __init__(self) -> None:
        super().__init__(CPU)
        self.asked: list[float] = []

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        if seconds:
            self.asked.append(seconds)
        yield


def timed_model(shape: Shape, waiter: TimedCompute, *, seconds: float = 1.0, fill: float = 1.0) -> Transformer:
    model = build(shape, 7, CPU)
    make_timed(model, seconds, waiter)
    for module in model.modules():
        if isinstance(module, TimedLinear):
            module.fill = fill
    return model


def loss(model: nn.Module, shape: Shape) -> Tensor:
    return loss_of(model, draw_tokens(shape, 3, seed=7, step=0))


def backward(tensor: Tensor) -> None:
    tensor.backward()  # type: ignore[no-untyped-call]


def on_gradient(tensor: Tensor, act: Callable[[], None]) -> None:
    tensor.register_post_accumulate_grad_hook(lambda _: act())  # type: ignore[no-untyped-call]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def sharded_step(world: World, shape: Shape) -> tuple[float, list[str], float]:
    """Return the seconds asked for in a step with weights on two ranks, what was wrong, and the seconds it took."""
    noted, wrong = Noted(), []
    model = _shard(timed_model(shape, noted, fill=world.rank + 3.0), world)
    whole = loss(model, shape)
    backward(whole)
    for name, linear in linears(model).items():
        for gradient in (parameter.grad for parameter in linear.parameters()):
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is not None and not bool((local == world.rank + 3.0).all()):
                wrong.append(f"{name}: {local}")
        if not isinstance(linear.weight.grad, DTensor) and name != "head":
            wrong.append(f"{name} is not sharded")
    if not whole.isfinite():
        wrong.append(f"loss {whole}")
    started = time.perf_counter()
    real = _shard(timed_model(shape, TimedCompute(CPU), seconds=0.05), world)
    backward(loss(real, shape))
    return sum(noted.asked), wrong, time.perf_counter() - started


def _shard(model: Transformer, world: World) -> Transformer:
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if name.endswith(("attention.out", "ffn.down")) else ColwiseParallel()
        for name in linears(model)
        if name != "head"
    }
    parallelize_module(model, DeviceMesh.from_group(world.group, "cpu"), plan)
    return model


def shapes_of_real_and_timed(world: World) -> list[bool]:
    """Return whether sharded Linears, timed as real, have the same sizes, gradients and number of collectives."""
    mesh = DeviceMesh.from_group(world.group, "cpu")
    same = []
    for style, width in ((ColwiseParallel(), 8), (RowwiseParallel(), 4)):
        real = nn.Linear(8, 6)
        timed = copy.deepcopy(real)
        make_timed(nn.ModuleDict({"layers": nn.ModuleList([timed])}), 1.0, Noted())
        results = []
        for linear in (real, timed):
            x = torch.ones(2, 3, width, requires_grad=True)
            with CommDebugMode() as traffic:  # type: ignore[no-untyped-call]
                y = parallelize_module(linear, mesh, style)(x)
                backward(y.sum())
            assert x.grad is not None
            assert isinstance(linear.weight.grad, DTensor)
            sizes = (y.shape, x.grad.shape, linear.weight.grad.shape)
            results.append((sizes, linear.weight.grad.placements, dict(traffic.get_comm_counts())))
        same.append(results[0] == results[1] and results[0][1] in ((Shard(0),), (Shard(1),)))
    return same


@pytest.mark.parametrize("late_seconds", [0.0, 0.002, 0.02])
def test_what_a_wait_takes_too_long_the_next_ones_take_less(late_seconds: float) -> None:
    fake = FakeTime(late_seconds)
    waiter = fake.waiter()
    for _ in range(100):
        with waiter.waiting(0.01):
            pass
    assert fake.now - 100 == pytest.approx(1.0, abs=late_seconds + 1e-9)
    assert min(fake.sleeps) > 0


def test_a_wait_counts_what_runs_inside_it_and_not_what_runs_between_two() -> None:
    fake = FakeTime()
    waiter = fake.waiter()
    with waiter.waiting(0.01):
        fake.now += 0.004
    fake.now += 5.0
    with waiter.waiting(0.01):
        pass
    assert fake.sleeps == pytest.approx([0.006, 0.01])
    with waiter.waiting(0.01):
        fake.now += 0.03
    with waiter.waiting(0.05):
        pass
    assert fake.now == pytest.approx(105.08), "a body longer than its wait is owed by the next"
    with waiter.waiting(0.0):
        fake.now += 1.0
    assert fake.sleeps == pytest.approx([0.006, 0.01, 0.03]), "no seconds are no wait and pay no debt"


def test_a_step_may_start_owing_nothing() -> None:
    fake = FakeTime(late_seconds=0.004)
    waiter = fake.waiter()
    for _ in range(2):
        with waiter.waiting(0.01):
            pass
        waiter.forget()
    assert fake.sleeps == pytest.approx([0.01, 0.01])


@pytest.mark.full
@pytest.mark.measures
def test_real_waits_sum_to_what_was_asked_within_a_hundredth() -> None:
    """The best of some tries: others use this machine too."""
    waiter = TimedCompute(CPU)
    apart: list[float] = []
    while len(apart) < 40 and min(apart, default=1.0) >= 0.01:
        waiter.forget()
        started = time.perf_counter()
        for _ in range(50):
            with waiter.waiting(0.004):
                pass
        apart.append(abs(time.perf_counter() - started - 0.2) / 0.2)
    assert min(apart) < 0.01


def test_only_waits_of_a_device_have_to_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.synchronize", synchronized.append)
    TimedCompute(CPU).finish()
    assert synchronized == []
    TimedCompute(torch.device("cuda:1")).finish()
    assert synchronized == [torch.device("cuda:1")]


T = 0.02


class FakeModel:
    """Waits T, then 2 T, on a fake clock, and works on the host besides; it is its own loss."""

    def __init__(self, waiter: TimedCompute, fake: FakeTime, host_seconds: float, first_seconds: float = 0.0) -> None:
        self._waiter, self._fake, self._host_seconds = waiter, fake, host_seconds
        self._extra_seconds = first_seconds

    def forward(self) -> Tensor:
        self._pass(T * self._waiter.forward_scale)
        return cast(Tensor, self)

    def backward(self) -> None:
        self._pass(2 * T * self._waiter.backward_scale)
        self._extra_seconds = 0.0

    def _pass(self, seconds: float) -> None:
        with self._waiter.waiting(seconds):
            pass
        self._fake.now += self._host_seconds + self._extra_seconds


class FakeDevice(TimedCompute):
    """Waits as a device does, in its stream, while the host goes on; its kernels take ``kernel_seconds`` a wait."""

    def __init__(self, fake: FakeTime, kernel_seconds: float) -> None:
        super().__init__(CPU, fake.clock, fake.sleep)
        self._fake, self._kernel_seconds, self._done = fake, kernel_seconds, 0.0

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        yield
        self._done = max(self._done, self._fake.now) + seconds + self._kernel_seconds

    def finish(self) -> None:
        self._fake.now = max(self._fake.now, self._done)


def calibrated(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeTime,
    waiter: TimedCompute,
    host_seconds: float,
    first_seconds: float = 0.0,
) -> FakeModel:
    model = FakeModel(waiter, fake, host_seconds, first_seconds)
    monkeypatch.setattr("parbench.workloads.model.timed_compute.time", SimpleNamespace(perf_counter=fake.clock))
    calibrate(T, waiter, model.forward)
    return model


def test_waits_shrink_by_what_the_host_takes_once_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    for host_seconds, first_seconds, late_seconds, scales in (
        (0.0, 0.0, 0.0, (1, 1)),
        (0.005, 0.0, 0.0, (1 - 0.005 / T, 1 - 0.005 / (2 * T))),
        (0.005, 1.0, 0.0, (1 - 0.005 / T, 1 - 0.005 / (2 * T))),  # only the first pass is cold
        (3 * T, 0.0, 0.0, (0, 0)),  # slower than the waits
        (0.0, 0.0, 0.004, (1 - 0.004 / T, 1)),  # each round owes nothing of what the one before took too long
    ):
        fake = FakeTime(late_seconds)
        waiter = fake.waiter()
        model = calibrated(monkeypatch, fake, waiter, host_seconds, first_seconds)
        assert (waiter.forward_scale, waiter.backward_scale) == pytest.approx(scales), (host_seconds, late_seconds)
        if min(scales) > 0 and not late_seconds:
            began = fake.now
            loss = model.forward()
            assert fake.now - began == pytest.approx(T)
            backward(loss)
            assert fake.now - began == pytest.approx(3 * T)


def test_waits_of_a_device_are_measured_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that issued them is done long before; one is still in the stream when calibration begins."""
    fake = FakeTime()
    waiter = FakeDevice(fake, kernel_seconds=0.004)
    with waiter.waiting(5.0):
        pass
    calibrated(monkeypatch, fake, waiter, host_seconds=0.001)
    assert (waiter.forward_scale, waiter.backward_scale) == pytest.approx((1 - 0.004 / T, 1 - 0.004 / (2 * T)))


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda shape: shape.recipe)
def test_forward_takes_t_and_backward_twice_t_less_by_what_the_host_takes(shape: Shape) -> None:
    model = timed_model(shape, noted := Noted(), seconds=0.6)
    for forward_scale, backward_scale in ((1.0, 1.0), (0.75, 0.5)):
        noted.forward_scale, noted.backward_scale = forward_scale, backward_scale
        noted.asked.clear()
        result = loss(model, shape)
        assert sum(noted.asked) == pytest.approx(forward_scale * 0.6)
        noted.asked.clear()
        backward(result)
        assert sum(noted.asked) == pytest.approx(backward_scale * 1.2)
    noted.asked.clear()
    with torch.no_grad():
        loss(model, shape)
    assert sum(noted.asked) == pytest.approx(0.75 * 0.6), "without gradients only the forward waits"


def test_a_copy_waits_too_and_a_profiler_sees_every_wait() -> None:
    model = copy.deepcopy(timed_model(GPT, Noted()))
    backward(loss(model, GPT))
    waiter = next(module.waiter for module in model.modules() if isinstance(module, TimedLinear))
    assert isinstance(waiter, Noted)
    assert sum(waiter.asked) == pytest.approx(3.0)
    model = timed_model(GPT, TimedCompute(CPU), seconds=0.001)
    with profiling(CPU) as profiled:
        backward(loss(model, GPT))
    assert sum(event.name() == COMPUTE_RANGE for event in kineto_events(profiled)) == 3 * 2 * 6


def test_layers_share_evenly_and_linears_by_their_weights() -> None:
    model = timed_model(GPT, Noted(), seconds=2.4)
    for layer in model.layers:
        seconds = {name: module.seconds for name, module in layer.named_modules() if isinstance(module, TimedLinear)}
        assert seconds == pytest.approx(
            {f"attention.{name}": 0.1 for name in ("q", "k", "v", "out")} | {"ffn.up": 0.4, "ffn.down": 0.4}
        )
    assert isinstance(model.head, TimedLinear)
    assert model.head.seconds == 0


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda shape: shape.recipe)
def test_weight_gradients_are_the_fill_and_add_up(shape: Shape) -> None:
    model = timed_model(shape, Noted(), fill=3.0)
    for expected in (3.0, 6.0):
        backward(loss(model, shape))
        for linear in linears(model).values():
            for parameter in linear.parameters():
                assert parameter.grad is not None
                assert parameter.grad.unique().tolist() == [expected]  # type: ignore[no-untyped-call]


def fills(rank: int, data_size: int, divisor: int) -> list[tuple[float, float]]:
    """Return what a rank fills into each Linear's gradient, and what it expects as the mean."""
    model = timed_model(GPT, Noted())
    fill_distinct_gradients(model, rank, data_size, divisor)
    return [(linear.fill, linear.mean_fill) for linear in model.modules() if isinstance(linear, TimedLinear)]


def test_the_mean_fill_is_the_mean_of_what_data_ranks_fill_in_and_of_no_half_of_them() -> None:
    """Neither of neighbours nor of those a stride apart: a sum that is left out over one axis of two is seen."""
    for data_size in (1, 2, 3, 5, 8):
        by_rank = [fills(rank, data_size, 8) for rank in range(data_size)]
        assert len(by_rank[0]) == 13
        for of_linear in zip(*by_rank, strict=True):
            filled, expected = [fill for fill, _ in of_linear], {mean for _, mean in of_linear}
            assert set(filled) == ({8.0, 16.0} if data_size > 1 else {8.0}), data_size
            assert expected == {sum(filled) / data_size}, data_size
    by_rank = [fills(rank, 4, 4) for rank in range(4)]
    for half in ((0, 1), (2, 3), (0, 2), (1, 3)):
        assert any(sum(by_rank[rank][i][0] for rank in half) / 2 != by_rank[0][i][1] for i in range(13)), half


def test_names_sizes_dtypes_and_types_stay_and_all_parameters_have_a_gradient() -> None:
    for shape, dtype in [(shape, dtype) for shape in (GPT, LLAMA) for dtype in (torch.float32, torch.bfloat16)]:
        real, timed = build(shape, 7, CPU, dtype), build(shape, 7, CPU, dtype)
        make_timed(timed, 1.0, Noted())
        assert [(name, p.shape, p.dtype) for name, p in real.named_parameters()] == [
            (name, p.shape, p.dtype) for name, p in timed.named_parameters()
        ]
        tokens = draw_tokens(shape, 2, seed=0, step=0)[:, :-1]
        assert (timed(tokens).shape, timed(tokens).dtype) == (real(tokens).shape, dtype)
        backward(timed(tokens).float().sum())
        gradients = [p.grad for p in timed.parameters() if p.grad is not None]
        assert [(g.shape, g.dtype) for g in gradients] == [(p.shape, p.dtype) for p in timed.parameters()]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert linears(real).keys() == linears(timed).keys()


def test_a_linears_gradients_come_input_first_each_with_its_own_wait_or_one_alone() -> None:
    """One alone is how schedules take them that split the backward."""
    model = timed_model(GPT, noted := Noted(), seconds=2.4)
    linear, x = model.layers.get_submodule("0.ffn.up"), torch.ones(1, 2, 32, requires_grad=True)
    assert isinstance(linear, nn.Linear)
    y = linear(x)
    noted.asked.clear()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), linear.weight)
    assert noted.asked == pytest.approx([0.4, 0.4])
    y, seen = linear(x), []
    noted.asked.clear()
    on_gradient(x, lambda: seen.append(("input", len(noted.asked))))
    on_gradient(linear.weight, lambda: seen.append(("weight", len(noted.asked))))
    backward(y.sum())
    assert seen == [("input", 1), ("weight", 2)]


def test_an_input_is_kept_for_the_weight_gradient_as_a_real_linear_keeps_it() -> None:
    """Or activations in flight would weigh less than those of a real step."""
    linear, x = timed_model(GPT, Noted()).layers.get_submodule("0.ffn.up"), torch.ones(1, 2, 32, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def test_layers_run_back_in_order_each_linear_before_the_one_below() -> None:
    """No weight gradient is put off to the end, or its traffic would have nothing to hide under."""
    model = timed_model(GPT, Noted())
    order: list[int] = []
    for number, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            on_gradient(parameter, partial(order.append, number))
    backward(loss(model, GPT))
    assert order == sorted(order, reverse=True)


def test_a_checkpointed_layer_waits_again() -> None:
    """For nearly a whole forward: nobody needs the last Linear's result again."""
    for how, seconds in (("none", 3 * 2.4), ("full", 4 * 2.4 - 2 * 0.4)):
        model = timed_model(GPT, noted := Noted(), seconds=2.4)
        checkpoint(model, how)
        backward(loss(model, GPT))
        assert sum(noted.asked) == pytest.approx(seconds), how


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda shape: shape.recipe)
def test_each_tensor_parallel_rank_waits_the_whole_t(two_ranks: Ranks, shape: Shape) -> None:
    for asked, wrong, took in two_ranks.call("test_timed:sharded_step", shape=shape):
        assert wrong == []
        assert asked == pytest.approx(3.0)
        assert took > 0.149


def test_sharded_linears_give_and_take_what_real_ones_do(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_timed:shapes_of_real_and_timed") == [[True, True]] * 2


def test_a_gpus_clock_is_read_once_it_is_up_or_called_doubtful() -> None:
    """Spins of 58 ms at an idle clock, then shorter ones, and 10 ms in the end; or 3 % apart for ever."""
    rising = iter([0.058, 0.058, 0.058, 0.03, 0.02, 0.0101, 0.01, 0.01, 7.0])
    assert settled(rising.__next__) == (0.01, 0.0)
    assert list(rising) == [7.0]
    quick = iter([0.01] * 60)
    assert settled(quick.__next__) == (0.01, 0.0)
    assert 24 <= 60 - len(list(quick)) <= 26  # a quarter of a second
    unsteady = iter([0.01, 0.0103] * 60)
    assert settled(unsteady.__next__)[1] == pytest.approx(0.03, rel=0.05)
    assert len(list(unsteady)) == 60


def test_waits_on_a_clock_that_does_not_settle_are_called_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 7)  # as no other test has, for each is calibrated once
    spins = iter([0.01, 0.0103] * 60)
    monkeypatch.setattr("parbench.workloads.model.timed_compute._spin", lambda device: next(spins))
    assert TimedCompute(gpu).doubts == ("timed compute: waits may be off by 3%, for the GPU's clock did not settle",)
    assert TimedCompute(CPU).doubts == ()
