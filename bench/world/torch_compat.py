"""Functions of torch that were renamed or are private. Other modules of ``bench`` use none.

Renamed: torch 2.13 has ``all_gather_single`` and ``reduce_scatter_single`` and deprecates the older
names, which are the only ones in 2.11.

Private: torch 2.11 to 2.15 have no public function for the work of the other functions. Each of
them names the private parts that it uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
"""The reduction of torch.distributed by the value of the parameter ``redop``."""


def all_gather_single(
    output: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather every rank's ``shard`` into ``output`` on all n ranks of the group, in order of rank.

    ``shard`` has s elements and ``output`` n * s. With ``async_op`` the result is torch's handle of
    the asynchronous call, whose ``wait()`` waits for its end. Otherwise it is None.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work | None, call(output, shard, group=group, async_op=async_op))


def reduce_scatter_single(
    shard: Tensor,
    source: Tensor,
    group: dist.ProcessGroup,
    redop: str = "sum",
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce ``source`` over the n ranks of the group, and write this rank's part to ``shard``.

    ``source`` has n * s elements and ``shard`` has s. ``redop`` is ``sum``, ``avg``, ``min``,
    ``max`` or ``product``. With ``async_op`` the result is torch's handle of the asynchronous call,
    whose ``wait()`` waits for its end. Otherwise it is None.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = call(shard, source, op=REDUCE_OPS[redop], group=group, async_op=async_op)
    return cast(dist.Work | None, work)


def dump_flight_records() -> tuple[dict[str, tuple[int, ...]], list[bytes]]:
    """Return this rank's process groups, and its last collectives from torch's flight recorder.

    The first element of the result holds the global ranks of each process group, by the name of the
    group. The second element is a list of JSON documents, one with the collectives of NCCL and one
    with those of gloo. A backend that this build of torch cannot dump is left out.

    Private: ``distributed_c10d._world``, ``_dump_nccl_trace_json`` and ``_dump_fr_trace_json``.
    """
    world = distributed_c10d._world
    # Copies, because another thread may make groups meanwhile.
    names = dict(world.pg_names)
    ranks = dict(world.pg_group_ranks)
    groups = {str(name): tuple(ranks[group]) for group, name in names.items() if group in ranks}
    records = []
    for function_name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(_distributed_c10d, function_name, None)
        if dump is not None:
            records.append(dump())
    return groups, records


@contextmanager
def replace_default_timeout(timeout: timedelta) -> Iterator[None]:
    """Replace torch's default timeout of collectives for all process groups made in the block.

    Groups of device meshes are included. Private: the variables ``default_pg_timeout`` and
    ``default_pg_nccl_timeout``.
    """
    variables = vars(distributed_c10d)
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    defaults = {name: variables[name] for name in names}
    variables.update(dict.fromkeys(names, timeout))
    try:
        yield
    finally:
        variables.update(defaults)
