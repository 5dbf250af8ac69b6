"""A copy in memory, the ceiling of what ranks on one host can pass to each other through it."""

from bench.launch.messages import Work
from bench.operations.operation import Operation
from bench.operations.test_pattern import Code, poison
from bench.plan.dtypes import DTYPES
from bench.world.subject import Description
from bench.world.world import World


def copy(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Copy a buffer of ``size_bytes`` into another on every rank, each for itself; algbw counts each byte once."""
    code = Code(dtype, world.size, world.device)
    count = size_bytes // DTYPES[dtype].itemsize
    source = code.values(world.rank, 0, count)
    target = source.clone()
    return Operation(
        call=lambda: target.copy_(source),
        restore=lambda: poison(target),
        output=target,
        expected=lambda: code.values(world.rank, 0, count),
        description=Description(
            work=(Work(name="algbw", amount=size_bytes, unit="B/s"),),
            details={"size_bytes": size_bytes, "read_bytes": size_bytes, "written_bytes": size_bytes},
        ),
    )
