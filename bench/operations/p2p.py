"""Point-to-point operations as benchmarks: a ring, and pairs of ranks while the others stand by."""

from dataclasses import replace

import torch.distributed as dist

from parbench.bench.operations.operation import DataPattern, Operation, describe
from parbench.bench.plan.groups import format_pairs, pairs_of
from parbench.bench.text import UserError
from parbench.bench.world.world import World


def sendrecv(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Ring: send S bytes to the next rank while S bytes come from the one before."""
    if world.size < 2:
        raise UserError(f"sendrecv needs a neighbour: size({world.size}) < 2 ranks")
    return _exchange(world, size_bytes, dtype, (world.rank + 1) % world.size, (world.rank - 1) % world.size)


def unidirectional(world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1) -> Operation:
    return _exchange(world, size_bytes, dtype, {source: target}.get(world.rank), {target: source}.get(world.rank))


def bidirectional(world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1) -> Operation:
    peer = {source: target, target: source}.get(world.rank)
    return _exchange(world, size_bytes, dtype, peer, peer)


def pingpong(world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1) -> Operation:
    """Send S bytes there and back, one after the other; the time is half the round trip."""
    code = DataPattern(dtype, world.size, world.device)
    mine = code.values(source, 0, size_bytes // code.itemsize)
    received = code.empty(len(mine) if world.rank in (source, target) else 0)

    def bounce() -> None:
        if world.rank == source:
            dist.send(mine, group=world.group, group_dst=target)
            dist.recv(received, group=world.group, group_src=target)
        elif world.rank == target:
            dist.recv(received, group=world.group, group_src=source)
            dist.send(received, group=world.group, group_dst=source)

    return Operation(
        call=bounce,
        output=received,
        expected=lambda: code.values(source, 0, len(received)),
        description=describe("pingpong", world.size, size_bytes, size_bytes, size_bytes, hops=2),
    )


def round_of_pairs(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    round: int = 0,  # noqa: A002 - a benchmark takes its declared parameters by name
    pairs: str = "",
    direction: str = "at_once",
    repeat: int = 0,
) -> Operation:
    """Send S bytes each way between the two ranks of every pair of a round, all pairs at once.

    The rounds are a round-robin tournament unless ``pairs`` are given; a rank that is in no pair stands by. Each rank's
    own samples are its pair's. With ``direction`` in_turn the smaller rank sends first and then receives, so that S
    bytes go there and S back. The time is half the round trip. ``repeat`` only tells measurements of the same round
    apart.
    """
    if world.size < 2:
        raise UserError(f"a round needs a pair: size({world.size}) < 2 ranks")
    met = pairs_of(world.size, round, pairs)
    peer = {one: other for pair in met for one, other in (pair, pair[::-1])}.get(world.rank)
    operation = _exchange(world, size_bytes, dtype, peer, peer, in_turn=direction == "in_turn")
    details = {**operation.description.details, "pairs": format_pairs(met)}
    return replace(operation, description=replace(operation.description, details=details))


def _exchange(
    world: World, size_bytes: int, dtype: str, to: int | None, source: int | None, *, in_turn: bool = False
) -> Operation:
    """Send S bytes to one rank while S come from another; None stands by. In turn, the smaller of two sends first."""
    code = DataPattern(dtype, world.size, world.device)
    mine = code.values(world.rank, 0, size_bytes // code.itemsize)
    received = code.empty(0 if source is None else len(mine))

    def there_and_back() -> None:
        if to is None:
            return
        if world.rank < to:
            dist.send(mine, group=world.group, group_dst=to)
        dist.recv(received, group=world.group, group_src=source)
        if world.rank > to:
            dist.send(mine, group=world.group, group_dst=to)

    def at_once(*, async_op: bool = False) -> list[dist.Work]:
        ends = ((dist.isend, mine, to), (dist.irecv, received, source))
        ops = [dist.P2POp(do, data, group=world.group, group_peer=peer) for do, data, peer in ends if peer is not None]
        works = dist.batch_isend_irecv(ops) if ops else []
        for work in [] if async_op else works:
            work.wait()
        return works

    return Operation(
        call=there_and_back if in_turn else at_once,
        output=received,
        expected=lambda: code.values(source or 0, 0, len(received)),
        description=describe("sendrecv", world.size, size_bytes, size_bytes, size_bytes, hops=2 if in_turn else 1),
    )
