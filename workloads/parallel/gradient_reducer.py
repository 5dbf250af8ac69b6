"""Sums of gradients over a process group, bucket by bucket, during the last backward pass.

DistributedDataParallel does the same, but rejects DTensors and knows no pipelines.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parbench.workloads.mesh.mesh import get_local_tensor
from parbench.workloads.model.shapes import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES


class BucketTracker:
    """Starts the reduction of a bucket as soon as backward has computed all of its gradients.

    A bucket is a list of parameters whose gradients are reduced by one collective. Autograd's hooks
    count gradients between ``activate`` and ``start_remaining``. A parameter may be in several
    buckets.
    """

    def __init__(
        self, buckets: Sequence[Sequence[nn.Parameter]], start: Callable[[int], None]
    ) -> None:
        """Register the hooks of all parameters.

        ``start(index)`` is called when all parameters of ``buckets[index]`` have their gradients.
        """
        self._start = start
        self._sizes = [len(parameters) for parameters in buckets]
        self._missing: list[int] = []
        """By index of the bucket, the number of gradients that are still missing in this pass.

        Empty unless a backward pass runs after which gradients are reduced.
        """
        self._hooks: list[RemovableHandle] = []
        indices: dict[nn.Parameter, list[int]] = {}
        for index, parameters in enumerate(buckets):
            for parameter in parameters:
                indices.setdefault(parameter, []).append(index)
        for parameter, touched in indices.items():
            hook = partial(self._count, touched)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks from the parameters.

        Without this call, parameters and tracker would keep each other alive, because the garbage
        collector does not find the cycle through the hooks.
        """
        for hook in self._hooks:
            hook.remove()

    def activate(self) -> None:
        """Start to count gradients, before a backward pass after which gradients are reduced."""
        self._missing = list(self._sizes)

    def start_remaining(self) -> None:
        """Start the reduction of each bucket that has not started, and stop counting gradients.

        Some buckets remain if gradients were written without autograd's hooks.
        """
        for index, missing in enumerate(self._missing):
            if missing:
                self._start(index)
        self._missing = []

    def _count(self, touched: Sequence[int], _: Tensor) -> None:
        """Count one gradient in the buckets with the indices ``touched``, and start complete ones.

        It does nothing while the tracker is not active. The unnamed argument is the parameter.
        """
        if not self._missing:
            return
        for index in touched:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._start(index)


class GradientReducer:
    """Averages gradients over data ranks by asynchronous all_reduces of buckets during backward."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        divisor: int,
        dtype: torch.dtype,
        bucket_bytes: int = 0,
    ) -> None:
        """Make a reducer that divides gradients by ``divisor`` and sums them over ``group``.

        Both are done in ``dtype``. Without a group, gradients are only divided. ``parameters`` are
        in the order of forward. ``bucket_bytes`` is the size of a bucket, and 0 is torch's default
        for DDP: 1 MiB for the first bucket, 25 MiB for the others.
        """
        self._group = group
        self._divisor = divisor
        self._dtype = dtype
        backward_order = list(parameters)[::-1]
        self._buckets = split_buckets(backward_order, bucket_bytes)
        self.tracker = BucketTracker(self._buckets, self._reduce)
        self._reductions: list[tuple[int, Tensor, dist.Work | None]] = []

    def wait(self, *, is_last: bool = True) -> None:
        """Wait until all gradients are reduced, and write the means into the ``grad`` tensors.

        A mean is the sum over the group, divided by the ``divisor`` of the constructor.

        ``is_last`` is True for the last reduction of a step. If it is False, the means are
        multiplied by ``divisor`` / group size. The next microbatch adds its gradients to the
        result, and the next reduction divides both by ``divisor`` and sums them over the group. The
        factor cancels this second reduction of the earlier gradients.
        """
        scale = self._divisor / (1 if self._group is None else self._group.size())
        for index, flat, work in self._reductions:
            if work is not None:
                work.wait()
            if not is_last:
                flat *= scale
            unflatten_gradients(self._buckets[index], flat)
        self._reductions.clear()

    def _reduce(self, index: int) -> None:
        """Start the all_reduce of the bucket with number ``index``."""
        flat = flatten_gradients(self._buckets[index], self._dtype)
        flat /= self._divisor
        work = None
        if self._group is not None:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._reductions.append((index, flat, work))


def sum_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    """Sum the gradients of parameters over a group by one all_reduce in ``dtype``."""
    flat = flatten_gradients(parameters, dtype)
    dist.all_reduce(flat, group=group)
    unflatten_gradients(parameters, flat)


def split_buckets(
    parameters: Iterable[nn.Parameter], bucket_bytes: int
) -> list[list[nn.Parameter]]:
    """Return parameters split into buckets for the reduction of gradients, in their order.

    A bucket is full as soon as the local parts of its parameters have ``bucket_bytes`` bytes. 0
    means the default of torch's DDP: 1 MiB for the first bucket, 25 MiB for the others.
    """
    buckets: list[list[nn.Parameter]] = []
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        bucket.append(parameter)
        num_bytes += get_local_tensor(parameter).nbytes
        default = DEFAULT_BUCKET_BYTES if buckets else DEFAULT_FIRST_BUCKET_BYTES
        if num_bytes >= (bucket_bytes or default):
            buckets.append(bucket)
            bucket = []
            num_bytes = 0
    if bucket:
        buckets.append(bucket)
    return buckets


def flatten_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Tensor:
    """Return a new one-dimensional tensor with the gradients of all parameters, in their order.

    For a DTensor, the result has only this rank's part. All gradients are converted to ``dtype``.
    """
    parts = []
    for parameter in parameters:
        assert parameter.grad is not None, "every parameter has a gradient in every step"
        parts.append(get_local_tensor(parameter.grad).flatten().to(dtype))
    return torch.cat(parts)


def unflatten_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Copy the elements of ``flat`` into the gradients of parameters.

    ``flat`` has the order and length of ``flatten_gradients`` for the same parameters.
    """
    parts = torch.split(flat, [get_local_tensor(parameter).numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        assert parameter.grad is not None
        gradient = get_local_tensor(parameter.grad)
        gradient.copy_(part.view_as(gradient))
