"""Data parallelism by torch: DistributedDataParallel, and FSDP2 with the units of torchtitan."""

import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrap_in_ddp(
    model: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    bucket_bytes: int,
    reduce_dtype: torch.dtype,
) -> DistributedDataParallel:
    """Return the model wrapped in torch's DDP, with gradients that are views of the buckets.

    Gradients are averaged over ``group`` in ``reduce_dtype``. ``bucket_bytes`` is the size of a
    gradient bucket, and 0 is torch's default: 1 MiB for the first bucket, 25 MiB for the others.
    """
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=bucket_bytes / 2**20 if bucket_bytes else None,
        gradient_as_bucket_view=True,
        device_ids=[device] if device.type == "cuda" else None,
    )
    if any(parameter.dtype != reduce_dtype for parameter in model.parameters()):
        ddp.register_comm_hook(group, make_reduce_hook(reduce_dtype))
    return ddp


def make_reduce_hook(
    dtype: torch.dtype,
) -> Callable[[dist.ProcessGroup, GradBucket], torch.futures.Future[Tensor]]:
    """Return a communication hook for DDP that all-reduces buckets of gradients in ``dtype``.

    Gradients are divided by the number of ranks before the sum, and copied back in their own type.
    """

    def reduce(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the all_reduce of a bucket, and return the future of its mean over ranks."""
        gradients = bucket.buffer()
        reduced = gradients.to(dtype).div_(group.size())
        work = dist.all_reduce(reduced, group=group, async_op=True)
        assert work is not None
        future = work.get_future()
        return future.then(lambda _: gradients.copy_(reduced))  # type: ignore[no-any-return]

    return reduce


def shard_modules(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard: bool,
    reduce_dtype: torch.dtype,
    ignored: Iterable[nn.Parameter] = (),
) -> FSDPModule:
    """Make modules one FSDP2 unit, whose parameters are gathered and reduced together.

    The last dimension of ``mesh`` shards the parameters. If there are two dimensions, the first one
    replicates the shards (HSDP). ``reshard`` frees gathered parameters after forward. Gradients are
    reduced in ``reduce_dtype``. ``ignored`` parameters stay as they are. Return the first module,
    as an ``FSDPModule``.
    """
    # Split logits are a view of a DTensor, and no operation changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        ignored_params=set(ignored),
    )
    first = modules[0]
    assert isinstance(first, FSDPModule)
    return first


def prefetch_units(root: FSDPModule, units: list[list[FSDPModule]], device_type: str) -> None:
    """Let FSDP gather the parameters of each unit while the unit before it computes.

    This is done in forward, and in the opposite order in backward. ``root`` is the FSDP module that
    contains all units. ``units`` are in the order of forward. A unit is a list of FSDP modules,
    such as a layer and its experts. ``device_type`` is "cpu" or "cuda".
    """
    if device_type == "cpu":
        # On CUDA this would give up FSDP's own streams.
        root._set_unshard_async_op(async_op=True)
    for unit, following in pairwise(units):
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(unit)
