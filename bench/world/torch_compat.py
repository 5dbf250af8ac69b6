"""The names that torch renamed or keeps private, in one place.

torch 2.13 has ``all_gather_single`` and ``reduce_scatter_single`` and deprecates the older names; 2.11 has only those.
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import _functional_collectives, distributed_c10d

REDUCE_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "min", "max", "product")}


def lost_cuda() -> bool:
    """Return whether this process is a fork of one that had asked for GPUs, so that it cannot use them."""
    return bool(torch.cuda._is_in_bad_fork())


def all_gather_single(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Gather every rank's ``shard`` (s elements) into ``output`` (n * s elements), in rank order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work | None, call(output, shard, group=group, async_op=async_op))


def reduce_scatter_single(
    shard: Tensor, whole: Tensor, group: dist.ProcessGroup, redop: str = "sum", *, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``whole`` (n * s elements) over ranks and leave this rank's ``shard`` (s elements) of it."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work | None, call(shard, whole, op=REDUCE_OPS[redop], group=group, async_op=async_op))


def all_reduce_apart(tensor: Tensor, group: dist.ProcessGroup, redop: str) -> Tensor:
    """Return the reduction of ``tensor`` in a new tensor: torch's functional collective, its copy included."""
    out = _functional_collectives.all_reduce(tensor, redop, group)
    return cast(Tensor, _functional_collectives.wait_tensor(out))  # type: ignore[no-untyped-call]


def coalescing(group: dist.ProcessGroup, device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which collectives are gathered and launched as one; torch keeps it private.

    Without a device, as gloo needs it, only calls of one kind are gathered, and only some kinds.
    """
    return distributed_c10d._coalescing_manager(group=group, device=device)


def recorded_work() -> tuple[dict[str, tuple[int, ...]], list[bytes]]:
    """Return this rank's groups by name, with their ranks, and torch's records of work on NCCL and on gloo, in JSON."""
    world = distributed_c10d._world
    names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)  # copies, for another thread makes groups
    groups = {str(name): tuple(ranks[group]) for group, name in names.items() if group in ranks}
    dumps = [getattr(_distributed_c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return groups, [dump() for dump in dumps if dump is not None]


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Let every group that is made within have this time-out, meshes' and torch's own too, rather than torch's."""
    theirs = vars(distributed_c10d)
    before = {name: theirs[name] for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    theirs.update(dict.fromkeys(before, timeout))
    try:
        yield
    finally:
        theirs.update(before)


def nccl_version() -> str:
    """Return the version of the NCCL that is loaded; torch's own function tells what it was compiled with."""
    number = ctypes.c_int()
    try:  # the library that torch is linked to, or torch's own
        failed = ctypes.CDLL("libtorch_cuda.so").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        failed = True
    if failed:
        compiled = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"{compiled} when torch was compiled"
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
