"""Simulated compute: the parameters, shapes and communication of a model, with known compute times.

A sleep or a spinning kernel takes the place of each matrix multiplication. A sleeping rank needs no
core, so that overlap and bubbles are real even if there are more ranks than cores. T is the time of
one rank's forward pass of one microbatch. Input gradients and weight gradients take T each.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.profiler import record_function

from parbench.bench.results.stats import median
from parbench.bench.world import accelerator
from parbench.workloads.model.transformer import Attention

COMPUTE_RANGE = "parbench:compute"
"""The name of the profiler's range around simulated compute."""
_CALIBRATION_CYCLES = 20_000_000
"""The cycles of the spinning kernel in one measurement of the device's clock."""
_CALIBRATION_SPINS = 30
"""The number of spins before the cycles per second are known, about a third of a second."""
_CALIBRATION_PASSES = 3
"""The number of measured passes of which ``calibrate`` takes the median."""


class SimulatedCompute:
    """Waits for given times in place of computing, so that parts of a step have known durations.

    On a CPU it sleeps. If a sleep takes too long, the next ones are shorter by the excess (the
    debt). On CUDA a kernel spins in the current stream for a number of clock cycles. The cycles per
    second are measured once, because the host must not wait for the device during a step.
    """

    def __init__(self, device: torch.device) -> None:
        """Make an object that waits on one device."""
        self._device = device
        self._debt_seconds = 0.0
        """The seconds by which the last wait ended too late, which the next wait makes up for."""
        self.forward_scale = 1.0
        """The factor of the waits in forward passes, at most about 1. ``calibrate`` sets it."""
        self.backward_scale = 1.0
        """The factor of the waits in backward passes, at most about 1. ``calibrate`` sets it."""

    @contextmanager
    def take_seconds(self, seconds: float) -> Iterator[None]:
        """Run the body of the context, and then wait.

        On a CPU the rank sleeps until the body and the sleep together have taken ``seconds``. If
        the previous wait ended too late, it sleeps less by the excess. On CUDA a kernel spins for
        the full ``seconds`` after the work that the body put into the stream, so that the time of
        this work is added. With 0 only the body runs.
        """
        if seconds <= 0:
            yield
            return
        end = time.perf_counter() + seconds - self._debt_seconds
        with record_function(COMPUTE_RANGE):
            yield
            if self._device.type == "cuda":
                accelerator.spin(int(seconds * _calibrate_spin(self._device)))
            else:
                time.sleep(max(0.0, end - time.perf_counter()))
        # Leaving the range takes time, too.
        self._debt_seconds = time.perf_counter() - end

    def read_clock(self) -> float:
        """Return the clock's seconds, after the device has finished all simulated compute."""
        if self._device.type == "cuda":
            accelerator.synchronize(self._device)
        return time.perf_counter()

    def reset_debt(self) -> None:
        """Forget by how much earlier waits were too long, so that the next one is not shortened."""
        self._debt_seconds = 0.0


@cache
def _calibrate_spin(device: torch.device) -> float:
    """Return the cycles per second of the spinning kernel on a device.

    It is measured once per process, in the last of several runs, because the clocks of an idle GPU
    rise within part of a second.
    """
    start = accelerator.make_event()
    end = accelerator.make_event()
    accelerator.select_device(device.index)
    for _ in range(_CALIBRATION_SPINS):
        start.record()
        accelerator.spin(_CALIBRATION_CYCLES)
        end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / (float(start.elapsed_time(end)) / 1e3)


class SimulatedLinear(nn.Linear):
    """A Linear that waits in place of multiplying. Its output and its input gradient are zeros.

    It multiplies no matrices, so that the values of its input and weights have no effect. Each
    element of the weight gradient and of the bias gradient is ``gradient_value``, so that reduced
    gradients can be checked. Weights may be DTensors on one mesh axis, as ``ColwiseParallel`` and
    ``RowwiseParallel`` create them.
    """

    seconds: float
    """The seconds of the forward pass, of the input gradient and of the weight gradient, each."""
    compute: SimulatedCompute
    """The object that waits, so that each of these three computations takes ``seconds``."""
    gradient_value: float = 1.0
    """The value of each element of the weight gradient and bias gradient on this rank."""
    mean_gradient_value: float = 1.0
    """The mean of ``gradient_value`` over data ranks, by which reduced gradients are checked."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in the signature of torch
        """Wait for the time of a forward pass and return zeros of the output's shape.

        Backward waits for the time of the input gradient, then for that of the weight gradient.
        Unlike in torch's Linear, DTensor operators do not run: the local parts of DTensors are
        used, and the output becomes a DTensor with the placement that torch would give it.
        """
        if not isinstance(self.weight, DTensor):
            return self._simulate(input, self.weight, self.bias)
        assert isinstance(input, DTensor), "the parallel style gives a sharded Linear a DTensor"
        [weight_placement] = self.weight.placements
        [input_placement] = input.placements
        gradient_placement = output_placement = input_placement
        if weight_placement == Shard(0):
            gradient_placement, output_placement = Partial(), Shard(input.dim() - 1)
        elif weight_placement == Shard(1):
            gradient_placement, output_placement = Shard(input.dim() - 1), Partial()
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias
        local_input = input.to_local(grad_placements=[gradient_placement])
        local_output = self._simulate(local_input, self.weight.to_local(), bias)
        output: Tensor = DTensor.from_local(
            local_output, input.device_mesh, [output_placement], run_check=False
        )
        return output

    def _simulate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Wait, and return an output of zeros (..., outputs) for local tensors.

        The output has a graph for backward, which has separate nodes for the input gradient and the
        weight gradient.
        """
        # Autograd runs the last node first: the input gradient, for which other ranks may wait.
        token: Tensor = _WeightGradient.apply(weight, bias, x.detach(), self)  # type: ignore[no-untyped-call]
        output: Tensor = _ForwardAndInputGradient.apply(x, len(weight), self)  # type: ignore[no-untyped-call]
        joined: Tensor = _Join.apply(output, token)  # type: ignore[no-untyped-call]
        return joined


class _ForwardAndInputGradient(torch.autograd.Function):
    """Waits for the time of a Linear's forward pass, and in backward of its input gradient.

    The output and the input gradient are zeros. The weight gradient is a separate autograd
    function, because some pipeline schedules run it later than the input gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_outputs: int, linear: SimulatedLinear) -> Tensor:
        """Wait for the time of the forward pass and return zeros (..., ``num_outputs``)."""
        ctx.size = x.shape
        ctx.linear = linear
        with linear.compute.take_seconds(linear.seconds * linear.compute.forward_scale):
            return x.new_zeros(*x.shape[:-1], num_outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Wait for the time of the input gradient and return zeros of the input's shape."""
        linear = ctx.linear
        with linear.compute.take_seconds(linear.seconds * linear.compute.backward_scale):
            return gradients[0].new_zeros(ctx.size), None, None


class _WeightGradient(torch.autograd.Function):
    """Waits in backward for the time of a Linear's weight gradient, whose elements are constant.

    It saves the input until backward, as a real Linear does.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor, linear: SimulatedLinear
    ) -> Tensor:
        """Save the input ``x`` and return a zero scalar.

        Backward reaches this node through the gradient of the scalar, which ``_Join`` adds to the
        graph.
        """
        ctx.save_for_backward(x)
        ctx.size = weight.shape
        ctx.has_bias = bias is not None
        ctx.linear = linear
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Wait for the time of the weight gradient, and return gradients of weight and bias.

        Their elements are ``gradient_value``. The bias gradient is None without a bias.
        """
        _ = ctx.saved_tensors  # Reading it recomputes a checkpointed layer.
        token = gradients[0]
        linear = ctx.linear
        with linear.compute.take_seconds(linear.seconds * linear.compute.backward_scale):
            weight = token.new_full(ctx.size, linear.gradient_value)
            bias = token.new_full(ctx.size[:1], linear.gradient_value) if ctx.has_bias else None
            return weight, bias, None, None


class _Join(torch.autograd.Function):
    """Makes a Linear's output depend on its weight gradient's node, so that backward reaches it.

    Its own passes take next to no time, even if backward runs it twice.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        """Return ``output`` itself, as a result of both ``output`` and ``token``.

        ``token`` is the scalar of ``_WeightGradient``.
        """
        ctx.dtype = token.dtype
        ctx.mark_dirty(output)  # neither a copy nor a view, about which FSDP warns
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the output unchanged, and a zero gradient for ``token``.

        ``token`` is the scalar of ``_WeightGradient``. Its gradient starts the backward pass of
        ``_WeightGradient``, which does not use the value.
        """
        return gradients[0], gradients[0].new_zeros((), dtype=ctx.dtype)


def simulate_linears(
    model: nn.Module, seconds_per_forward: float, compute: SimulatedCompute
) -> None:
    """Replace the matrix multiplications in ``model.layers`` by waits of given length.

    The forward passes of all layers together take ``seconds_per_forward`` for one microbatch. Each
    layer takes an equal part, and in a layer each Linear takes a share by its number of weights.
    Attention becomes the sum q + k + v, which takes next to no time. The head becomes a simulated
    Linear that takes no time. Norms and activation functions are not replaced. Call it before
    weights are sharded, with all layers of ``model``.
    """
    layers = list(model.get_submodule("layers").children())
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        num_weights = sum(linear.weight.numel() for linear in linears)
        for linear in linears:
            share = linear.weight.numel() / num_weights
            _simulate_linear(linear, seconds_per_forward / len(layers) * share, compute)
        for module in layer.modules():
            if isinstance(module, Attention):
                module.core = _add_heads
                module.rotate = None
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear):
        _simulate_linear(head, 0.0, compute)


def _simulate_linear(linear: nn.Linear, seconds: float, compute: SimulatedCompute) -> None:
    """Turn a Linear into a ``SimulatedLinear`` in place.

    Its forward pass, its input gradient and its weight gradient then take ``seconds`` each.
    """
    # It keeps its name, its parameters and its base class, which other code depends on.
    linear.__class__ = SimulatedLinear
    assert isinstance(linear, SimulatedLinear)
    linear.seconds = seconds
    linear.compute = compute


def _add_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q + k + v of shape (b, heads, s, d) in place of attention.

    Keys and values are repeated for the query heads that share them.
    """
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def set_distinct_gradients(model: nn.Module, rank: int, data_size: int) -> None:
    """Give data ranks different gradient values in the ``SimulatedLinear`` modules of a model.

    ``rank`` is this rank's index among the ``data_size`` data ranks, from 0. Each Linear looks at
    one binary digit (bit) of ``rank``. All of its gradient elements are ``data_size`` if this bit
    is 0, and ``2 * data_size`` if it is 1. The first Linear looks at the lowest bit, the next
    Linear at the next bit. After the highest bit of ``data_size - 1`` the lowest follows again.
    With fewer Linears than bits, the higher bits are not used, and some ranks have equal values.

    If the reduction takes the wrong ranks, the mean over ranks changes. The reduction divides by
    ``data_size`` before it sums, so that it adds the integers 1 and 2. bfloat16 adds integers
    exactly in every order if the sum is at most 256.
    """
    num_bits = max(1, (data_size - 1).bit_length())
    linears = (module for module in model.modules() if isinstance(module, SimulatedLinear))
    for number, linear in enumerate(linears):
        bit = number % num_bits
        values = [float(data_size * (1 + (data_rank >> bit & 1))) for data_rank in range(data_size)]
        linear.gradient_value = values[rank]
        linear.mean_gradient_value = sum(values) / data_size


def calibrate(
    compute: SimulatedCompute, seconds_per_forward: float, forward: Callable[[], Tensor]
) -> None:
    """Make the waits of ``compute`` shorter, by the time that the host itself needs for the passes.

    A pass takes its waits and the time in which the host runs Python and torch. Before calibration,
    the waits of a forward pass alone add up to T, which is ``seconds_per_forward``. Afterwards,
    waits and host time together take T in forward and 2 T in backward. The results are
    ``compute.forward_scale`` and ``compute.backward_scale``, the factors of all waits. If forward
    takes 1.2 T before calibration, the factor is 0.8. The factors are never negative, so that a
    slow host may still exceed T.

    ``forward`` runs forward of one microbatch and returns the loss. It must use a model that is not
    distributed. The host time that parallelism adds is then not subtracted and stays visible.
    """
    forward_seconds = []
    backward_seconds = []
    for _ in range(1 + _CALIBRATION_PASSES):
        compute.reset_debt()
        start = compute.read_clock()
        loss = forward()
        middle = compute.read_clock()
        loss.backward()  # type: ignore[no-untyped-call]
        end = compute.read_clock()
        forward_seconds.append(middle - start)
        backward_seconds.append(end - middle)
    forward_ratio = median(forward_seconds[1:]) / seconds_per_forward
    backward_ratio = median(backward_seconds[1:]) / (2 * seconds_per_forward)
    compute.forward_scale = max(0.0, 2 - forward_ratio)
    compute.backward_scale = max(0.0, 2 - backward_ratio)
