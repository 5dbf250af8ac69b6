"""Point-to-point operations as subjects."""

import torch
import torch.distributed as dist

from bench.coding import Code, dtype_of, poison
from bench.collectives import Operation, describe
from bench.dtypes import DTYPES
from bench.errors import UserError
from bench.world import World


def sendrecv(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Ring: send S bytes to the next rank while S bytes come from the one before; factor 1, not doubled."""
    if world.size < 2:
        raise UserError(f"sendrecv needs a neighbour: size({world.size}) < 2 ranks")
    count = size_bytes // DTYPES[dtype].itemsize
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    code = Code(dtype, 1, world.device)
    mine = code.values(world.rank, 0, count)
    received = torch.empty(count, dtype=dtype_of(dtype), device=world.device)

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.isend, mine, group=world.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=world.group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return Operation(
        call=exchange,
        restore=lambda: poison(received),
        output=received,
        expected=lambda: code.values(before, 0, count),
        description=describe(size_bytes, 1.0, size_bytes, size_bytes),
    )
