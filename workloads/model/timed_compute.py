"""Timed compute: the same parameters, shapes and communication, with matrix products replaced by waits of known length.

A sleeping rank needs no core, so that overlap and bubbles are real even where ranks outnumber cores. Rows made this way
are labelled "timed compute". T is one rank's whole forward of one microbatch; input- and weight-gradients take T each.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.profiler import record_function

from parbench.bench.results.stats import median
from parbench.bench.world.torch_compat import spin
from parbench.workloads.model.transformer import Attention

COMPUTE_RANGE = "parbench:compute"
_CALIBRATION_CYCLES = 20_000_000
_CALIBRATION_ROUNDS = 3
_SETTLED = 0.01
_LEAST_SPIN_SECONDS, _MOST_SPINS = (
    0.25,
    60,
)  # an idle GPU takes some of a second until its clocks are up


class TimedCompute:
    """Waits of a wanted sum: what one takes too long, the next ones take less; on CUDA the device waits in its stream.

    On CUDA lengths come from one calibration and what runs inside a wait is not deducted: the host is not to wait.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device, self._clock, self._sleep = device, clock, sleep
        self._late_seconds = 0.0
        self.forward_scale = self.backward_scale = 1.0

    @property
    def doubts(self) -> tuple[str, ...]:
        """What to say of a calibration in which clocks did not settle."""
        return _calibration(self._device)[1] if self._device.type == "cuda" else ()

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Let the body and a wait after it take ``seconds`` together; 0 neither waits nor counts."""
        if seconds <= 0:
            yield
            return
        end = self._clock() + seconds - self._late_seconds
        with record_function(COMPUTE_RANGE):
            yield
            if self._device.type == "cuda":
                spin(int(seconds * _calibration(self._device)[0]))
            elif (left := end - self._clock()) > 0:
                self._sleep(left)
        self._late_seconds = self._clock() - end  # only now: leaving the range takes time too

    def finish(self) -> None:
        """Return when all waits are over; on CUDA the device may still be in them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """Start a step owing nothing."""
        self._late_seconds = 0.0


@cache
def _calibration(device: torch.device) -> tuple[float, tuple[str, ...]]:
    """Return the cycles per second of the device's spinning kernel, and what makes them doubtful."""
    seconds, apart = settled(lambda: _spin(device))
    unsettled = (
        f"timed compute: waits may be off by {apart:.0%}, for the GPU's clock did not settle"
    )
    return _CALIBRATION_CYCLES / seconds, (unsettled,) if apart > _SETTLED else ()


def settled(spin: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a spin once clocks are up, and by what part it differs from the one before.

    Spins for a while and until two agree within 1 %, but not for ever.
    """
    spins = [spin()]
    apart = inf
    while len(spins) < _MOST_SPINS and (apart > _SETTLED or sum(spins) < _LEAST_SPIN_SECONDS):
        spins.append(spin())
        apart = abs(spins[-1] / spins[-2] - 1)
    return spins[-1], apart


def _spin(device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        start.record()
        spin(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class TimedLinear(nn.Linear):
    """A Linear that waits instead of multiplying: outputs and input gradients are 0, weight gradients ``fill``.

    ``mean_fill`` is the mean of that over data ranks. Weights may be DTensors on one axis, as ``ColwiseParallel`` and
    ``RowwiseParallel`` make them.
    """

    seconds: float
    waiter: TimedCompute
    fill: float = 1.0
    mean_fill: float = 1.0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, part of the signature
        """Wait once; backward waits for the input gradient, then for the weight gradient."""
        if not isinstance(self.weight, DTensor):
            return self._work(input, self.weight, self.bias)
        assert isinstance(input, DTensor), (
            "a sharded Linear is given a DTensor by its parallel style"
        )
        [weight_placement] = self.weight.placements
        [input_placement] = input.placements
        gradient, output = _placements(weight_placement, input_placement, input.dim() - 1)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias
        local = self._work(input.to_local(grad_placements=[gradient]), self.weight.to_local(), bias)
        whole: Tensor = DTensor.from_local(local, input.device_mesh, [output], run_check=False)
        return whole

    def _work(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # autograd runs first what was made last: the input gradient, which other ranks may be waiting for
        token: Tensor = _WeightGradient.apply(weight, bias, x.detach(), self)  # type: ignore[no-untyped-call]
        output: Tensor = _ForwardAndInputGradient.apply(x, len(weight), self)  # type: ignore[no-untyped-call]
        joined: Tensor = _Join.apply(output, token)  # type: ignore[no-untyped-call]
        return joined


def _placements(weight: Placement, given: Placement, last: int) -> tuple[Placement, Placement]:
    """Return where the input's gradient and the output lie; ``last`` is the number of the features' dim."""
    if weight == Shard(0):
        assert given == Replicate(), f"columns are given {given}"
        return Partial(), Shard(last)
    if weight == Shard(1):
        assert given in (Shard(last), Shard(-1)), f"rows are given {given}"
        return Shard(last), Partial()
    assert weight == Replicate(), f"weights are {weight}"
    return given, given


class _ForwardAndInputGradient(torch.autograd.Function):
    """Forward and the input-gradient node; nothing of the weights hangs on it, so that a schedule can run it alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_outputs: int, linear: TimedLinear) -> Tensor:
        ctx.size, ctx.linear = x.shape, linear
        with linear.waiter.waiting(linear.seconds * linear.waiter.forward_scale):
            return x.new_zeros(*x.shape[:-1], num_outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with ctx.linear.waiter.waiting(ctx.linear.seconds * ctx.linear.waiter.backward_scale):
            return gradients[0].new_zeros(ctx.size), None, None


class _WeightGradient(torch.autograd.Function):
    """The weight-gradient node; it keeps the Linear's input until then, as a real one must."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor, linear: TimedLinear
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size, ctx.biased, ctx.linear = weight.shape, bias is not None, linear
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        _ = ctx.saved_tensors  # where layers are checkpointed, asking for it computes them again
        token, linear = gradients[0], ctx.linear
        with linear.waiter.waiting(linear.seconds * linear.waiter.backward_scale):
            weight = token.new_full(ctx.size, linear.fill)
            return (
                weight,
                token.new_full(ctx.size[:1], linear.fill) if ctx.biased else None,
                None,
                None,
            )


class _Join(torch.autograd.Function):
    """The node where the two gradients part: it costs nothing, so that running it twice costs nothing either."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        ctx.dtype = token.dtype
        ctx.mark_dirty(output)  # neither a copy nor a view, of which FSDP warns
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_zeros((), dtype=ctx.dtype)


def make_timed(model: nn.Module, seconds_per_forward: float, waiter: TimedCompute) -> None:
    """Replace the arithmetic of ``model.layers`` by waits, T spread evenly over layers, then by weight over Linears.

    Attention becomes a sum that keeps shapes and gradients flowing, the head a Linear that neither waits nor
    multiplies; norms and activations stay. Call it before weights are sharded, on all the layers that this rank holds.
    """
    layers = list(model.get_submodule("layers").children())
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        num_weights = sum(linear.weight.numel() for linear in linears)
        for linear in linears:
            share = linear.weight.numel() / num_weights
            _time(linear, seconds_per_forward / len(layers) * share, waiter)
        for module in layer.modules():
            if isinstance(module, Attention):
                module.core, module.rotate = _add_heads, None
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear):
        _time(head, 0.0, waiter)


def fill_distinct_gradients(model: nn.Module, rank: int, data_size: int, divisor: int) -> None:
    """Let data ranks fill in gradients by which each of them, and each group of them, is missed in the mean.

    Each fills in ``divisor`` once or twice, by one bit of its number, another bit in the next Linear. That is what
    gradients are divided by before they are summed: whole numbers add up to 256 in bfloat16, in whatever order.
    """
    bits = max(1, (data_size - 1).bit_length())
    linears = (module for module in model.modules() if isinstance(module, TimedLinear))
    for number, linear in enumerate(linears):
        fills = [float(divisor * (1 + (each >> number % bits & 1))) for each in range(data_size)]
        linear.fill, linear.mean_fill = fills[rank], sum(fills) / data_size


def calibrate(
    seconds_per_forward: float, waiter: TimedCompute, forward: Callable[[], Tensor]
) -> None:
    """Shorten the waits by what the model's own host work takes, so that its whole forward takes T and backward 2 T.

    ``forward`` is the plain model's, before it is laid out over ranks: what a layout adds stays to be seen.
    """

    def finished() -> float:
        waiter.finish()
        return time.perf_counter()

    forwards, backwards = [], []
    for _ in range(1 + _CALIBRATION_ROUNDS):
        waiter.forget()
        began = finished()
        loss = forward()
        between = finished()
        loss.backward()  # type: ignore[no-untyped-call]
        forwards.append(between - began)
        backwards.append(finished() - between)
    waiter.forward_scale = max(0.0, 2 - median(forwards[1:]) / seconds_per_forward)
    waiter.backward_scale = max(0.0, 2 - median(backwards[1:]) / (2 * seconds_per_forward))


def _time(linear: nn.Linear, seconds: float, waiter: TimedCompute) -> None:
    linear.__class__ = (
        TimedLinear  # its name, its parameters and being a Linear stay, for what looks at them
    )
    assert isinstance(linear, TimedLinear)
    linear.seconds, linear.waiter = seconds, waiter


def _add_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q + k + v, (b, a, s, d), each key and value head for its group of query heads."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
