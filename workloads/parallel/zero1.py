"""ZeRO-1: every rank has all parameters and gradients, and a part of the optimizer's state.

``DistributedOptimizer`` follows the literature (ZeRO, arXiv 1910.02054, section 5; Megatron's
distributed optimizer): buckets of gradients are reduce-scattered during backward, and the updated
parts of parameters are all-gathered. Torch's ZeroRedundancyOptimizer all-reduces all gradients and
broadcasts every parameter from the rank that updates it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbench.bench.world.torch_compat import all_gather_single, reduce_scatter_single
from parbench.workloads.model.optimizer import LEARNING_RATE, choose_optimizer, make_optimizer
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES
from parbench.workloads.parallel.gradient_reducer import BucketTracker
from parbench.workloads.torch_internals import load_zero_redundancy_optimizer


class DistributedOptimizer(torch.optim.Optimizer):
    """AdamW with ZeRO-1, in which each rank updates an equal part of each bucket of parameters.

    All parameters are views of one buffer, and all gradients of another. Both are in the order of
    backward, and padded at the end to a multiple of the number of ranks. Buckets are consecutive
    parts of the buffers. Rank r updates the r-th part of each bucket.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Move the parameters of ``model`` into a buffer that is split over ``group``.

        ``bucket_bytes`` is the size of a bucket, and 0 is the default of torch's DDP, 25 MiB.
        Gradients are averaged in ``reduce_dtype``.
        """
        self._group = group
        self._dtype = reduce_dtype
        ranks = group.size()
        parameters = list(model.parameters())[::-1]
        first = parameters[0].detach()
        count = sum(parameter.numel() for parameter in parameters)
        padded = -(-count // ranks) * ranks
        weights = first.new_zeros(padded)
        self._gradients = first.new_zeros(padded)
        num_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES
        size = max(1, num_bytes // first.element_size() // ranks) * ranks
        self._weight_buckets = torch.split(weights, size)
        self._gradient_buckets = torch.split(self._gradients, size)
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        buckets: list[list[nn.Parameter]] = [[] for _ in self._weight_buckets]
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            weights[start:stop].copy_(parameter.detach().flatten())
            parameter.data = weights[start:stop].view(parameter.shape)
            self._views.append((parameter, self._gradients[start:stop].view(parameter.shape)))
            for bucket in range(start // size, (stop - 1) // size + 1):
                buckets[bucket].append(parameter)
            start = stop
        self._shards = [
            nn.Parameter(bucket.chunk(ranks)[group.rank()]) for bucket in self._weight_buckets
        ]
        super().__init__(self._shards, {"lr": LEARNING_RATE})
        self.optim = make_optimizer(self._shards, first.dtype)
        self.tracker = BucketTracker(buckets, self._reduce)
        self._reductions: list[tuple[int, Tensor, dist.Work | None]] = []
        self.zero_grad()

    def wait(self, *, is_last: bool = True) -> None:
        """Wait until this rank's parts of the gradients are reduced, and give them to AdamW.

        This happens once per step, so that ``is_last`` must be True.
        """
        assert is_last, "a distributed optimizer reduces once per step"
        for index, shard, work in self._reductions:
            if work is not None:
                work.wait()
            self._shards[index].grad = shard.to(self._shards[index].dtype)
        self._reductions.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to zero.

        Unlike in torch, no parameter's ``grad`` becomes None: each is a view of the buffer that
        holds all gradients. ``set_to_none`` applies only to the reduced gradients of this rank's
        parts of the buckets, from which AdamW updates.
        """
        self._gradients.zero_()
        self.optim.zero_grad(set_to_none)
        for parameter, gradient in self._views:
            parameter.grad = gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this rank's parts of the parameters, and all-gather the parts of all ranks.

        ``closure`` is not used.
        """
        self.optim.step()
        works = [
            all_gather_single(bucket, shard.detach(), self._group, async_op=True)
            for bucket, shard in zip(self._weight_buckets, self._shards, strict=True)
        ]
        for work in works:
            if work is not None:
                work.wait()

    def gather_gradients(self) -> None:
        """All-gather the reduced gradients, so that every rank has those of all parameters.

        Only the numerical check of a step requires it.
        """
        for bucket, shard in zip(self._gradient_buckets, self._shards, strict=True):
            assert shard.grad is not None, "gradients are gathered after a backward pass"
            all_gather_single(bucket, shard.grad, self._group)

    def _reduce(self, index: int) -> None:
        """Start the reduce_scatter that averages the gradients of one bucket over the group.

        ``index`` is the index of the bucket, a consecutive part of the buffer of all gradients.
        This rank receives the means of its part of the bucket.
        """
        # A new tensor where the type differs, the buffer itself otherwise.
        gradients = self._gradient_buckets[index].to(self._dtype)
        gradients /= self._group.size()
        shard = gradients.new_empty(len(gradients) // self._group.size())
        work = reduce_scatter_single(shard, gradients, self._group, async_op=True)
        self._reductions.append((index, shard, work))


def make_zero_redundancy_optimizer(
    model: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Return torch's ZeroRedundancyOptimizer, which shards AdamW's state over ``group``.

    ``dtype`` is the data type of the parameters.
    """
    return load_zero_redundancy_optimizer()(
        model.parameters(),
        optimizer_class=choose_optimizer(dtype),
        process_group=group,
        lr=LEARNING_RATE,
    )
