"""ZeRO-1: every rank has all parameters and gradients, and the optimizer's state of its share.

``optimizer`` zero_redundancy is torch's: DDP sums all gradients on every rank, and a parameter's owner broadcasts it.
``distributed`` is as the literature has it (ZeRO, arXiv 1910.02054, section 5; Megatron's distributed optimizer): flat
buckets of gradients are reduce-scattered under backward, and the updated shards of parameters all-gathered.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.plan.params import Value
from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.bench.world.world import World
from parbench.workloads.costs import strategies
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.data_parallel.ddp import wrap
from parbench.workloads.model.optimizer import LEARNING_RATE, make_optimizer, optimizer_class
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES
from parbench.workloads.model.transformer import Transformer
from parbench.workloads.step.gate import prepared
from parbench.workloads.step.layout import Layout, dtype_of
from parbench.workloads.torch_internals import load_zero_redundancy_optimizer

_NOTE = (
    "zero1: torch's ZeroRedundancyOptimizer sums all gradients on every rank, 2 Psi e (n-1)/n, and then broadcasts "
    "every parameter, Psi e more than the literature's reduce_scatter and all_gather"
)


def lay_out(
    model: Transformer, world: World, spec: StepSpec, params: Mapping[str, Value]
) -> Layout:
    if params["optimizer"] == "distributed":
        return _distributed(model, world, spec)
    ddp = wrap(model, world, float(params["bucket_mb"]))
    optimizer = load_zero_redundancy_optimizer()(
        model.parameters(),
        optimizer_class=optimizer_class(dtype_of(spec), timed=spec.timed),
        process_group=world.group,
        lr=LEARNING_RATE,
    )
    layout = Layout.of(spec, world, model, {"dp": world.group}, module=ddp, optimizer=optimizer)
    return replace(layout, notes=(_NOTE,))


def _distributed(model: Transformer, world: World, spec: StepSpec) -> Layout:
    bucket_bytes = spec.bucket_bytes or DEFAULT_BUCKET_BYTES
    optimizer = DistributedOptimizer(model, world, bucket_bytes, timed=spec.timed)
    blocking = "exposed on gloo: reduce_scatter, which blocks where it is issued, and the parameters' all_gather"
    return replace(
        Layout.of(spec, world, model, {"dp": world.group}, optimizer=optimizer),
        gradient_sync=optimizer.gradient_sync,
        finalize_gradients=optimizer.wait,
        gather_gradients=optimizer.gather_gradients,
        notes=(blocking,) if world.backend == "gloo" else (),
    )


class DistributedOptimizer(torch.optim.Optimizer):
    """AdamW whose rank r updates the r-th part of each bucket, of parameters that lie in one flat buffer.

    Parameters and their gradients are views of two buffers in the order of backward, padded at the end to a multiple of
    the ranks. A bucket of gradients is reduce-scattered as soon as the last microbatch has added all of its own.
    """

    def __init__(
        self, model: nn.Module, world: World, bucket_bytes: int, *, timed: bool = False
    ) -> None:
        self._group, self._ranks = world.group, world.size
        parameters = list(model.parameters())[::-1]
        count, first = sum(parameter.numel() for parameter in parameters), parameters[0].detach()
        padded = -(-count // self._ranks) * self._ranks
        weights, self._gradients = first.new_zeros(padded), first.new_zeros(padded)
        size = max(1, bucket_bytes // first.element_size() // self._ranks) * self._ranks
        self._buckets = list(
            zip(torch.split(weights, size), torch.split(self._gradients, size), strict=True)
        )
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._waits_for: list[int] = [0] * len(self._buckets)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            weights[start:stop].copy_(parameter.detach().flatten())
            parameter.data = weights[start:stop].view(parameter.shape)
            self._views.append((parameter, self._gradients[start:stop].view(parameter.shape)))
            touched = range(start // size, (stop - 1) // size + 1)
            for bucket in touched:
                self._waits_for[bucket] += 1
            hook = partial(self._accumulated, touched)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            start = stop
        self._shards = [
            nn.Parameter(bucket.chunk(self._ranks)[world.rank]) for bucket, _ in self._buckets
        ]
        super().__init__(self._shards, {"lr": LEARNING_RATE})
        self.optim = make_optimizer(self._shards, first.dtype, timed=timed)
        self._syncs, self._missing, self._works = (
            True,
            list(self._waits_for),
            list[dist.Work | None](),
        )
        self.zero_grad()

    def gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        """Surround a microbatch: gradients are summed over ranks after the last one."""
        self._syncs = last
        return nullcontext()

    def _accumulated(self, touched: range, _: Tensor) -> None:
        if not self._syncs:
            return
        for bucket in touched:
            self._missing[bucket] -= 1
            if self._missing[bucket]:
                continue
            whole, shard = self._buckets[bucket][1], self._shards[bucket]
            whole.div_(self._ranks)
            shard.grad = torch.empty_like(shard)
            self._works.append(reduce_scatter_single(shard.grad, whole, self._group, async_op=True))

    def wait(self) -> None:
        """Return when this rank's shards of gradients are there."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works.clear()
        self._missing = list(self._waits_for)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of parameters stay views of the buffer."""
        self.wait()
        self._gradients.zero_()
        self.optim.zero_grad(set_to_none)
        for parameter, gradient in self._views:
            parameter.grad = gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optim.step()
        pairs = zip(self._buckets, self._shards, strict=True)
        self._works += [
            all_gather_single(whole, s.detach(), self._group, async_op=True)
            for (whole, _), s in pairs
        ]
        self.wait()

    def gather_gradients(self) -> None:
        """Let every rank have all gradients, as a check wants them; no step needs it."""
        for (_, whole), shard in zip(self._buckets, self._shards, strict=True):
            assert shard.grad is not None, "gradients are gathered after a backward pass"
            all_gather_single(whole, shard.grad, self._group)


prepare = prepared(lay_out, strategies.zero1)
