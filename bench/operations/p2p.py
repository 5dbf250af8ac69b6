"""Point-to-point operations as benchmarks: a ring, and pairs of ranks while others are idle."""

from dataclasses import replace

import torch.distributed as dist

from parbench.bench.operations.operation import Operation, describe_operation, make_pattern
from parbench.bench.plan.groups import choose_pairs, format_pairs
from parbench.bench.text import UserError
from parbench.bench.world.world import World


def sendrecv(world: World, *, size_bytes: int, dtype: str) -> Operation:
    """Send S = ``size_bytes`` bytes to the next rank and receive S bytes from the previous one."""
    if world.size < 2:
        raise UserError(f"sendrecv needs a neighbour: size({world.size}) < 2 ranks")
    target = (world.rank + 1) % world.size
    source = (world.rank - 1) % world.size
    return _exchange(world, size_bytes, dtype, target, source)


def unidirectional(
    world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1
) -> Operation:
    """Send S bytes from rank ``source`` to rank ``target``."""
    send_to = target if world.rank == source else None
    recv_from = source if world.rank == target else None
    return _exchange(world, size_bytes, dtype, send_to, recv_from)


def bidirectional(
    world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1
) -> Operation:
    """Send S bytes from ``source`` to ``target`` and S bytes back at the same time."""
    peer = {source: target, target: source}.get(world.rank)
    return _exchange(world, size_bytes, dtype, peer, peer)


def pingpong(
    world: World, *, size_bytes: int, dtype: str, source: int = 0, target: int = 1
) -> Operation:
    """Send S bytes from ``source`` to ``target`` and back. The time is half the round trip."""
    peer = {source: target, target: source}.get(world.rank)
    return _exchange(world, size_bytes, dtype, peer, peer, in_turn=True)


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

    The rounds are a round-robin tournament unless ``pairs`` are given. A rank without a pair is
    idle. Each rank's own samples are its pair's. ``direction`` is at_once or in_turn. ``repeat``
    only distinguishes measurements of the same round.
    """
    if world.size < 2:
        raise UserError(f"a round needs a pair: size({world.size}) < 2 ranks")
    round_pairs = choose_pairs(world.size, round, pairs)
    peers = {}
    for first, second in round_pairs:
        peers[first] = second
        peers[second] = first
    peer = peers.get(world.rank)
    in_turn = direction == "in_turn"
    operation = _exchange(world, size_bytes, dtype, peer, peer, in_turn=in_turn)
    details = {**operation.description.details, "pairs": format_pairs(round_pairs)}
    return replace(operation, description=replace(operation.description, details=details))


def _exchange(
    world: World,
    size_bytes: int,
    dtype: str,
    target: int | None,
    source: int | None,
    *,
    in_turn: bool = False,
) -> Operation:
    """Return the operation that sends S bytes to one rank and receives S bytes from another.

    None stands for no rank. With ``in_turn`` the smaller of two ranks sends first and then
    receives, and the time is half the round trip.
    """
    pattern = make_pattern(world, dtype)
    sent = pattern.compute_values(world.rank, 0, size_bytes // pattern.itemsize)
    received = pattern.allocate(0 if source is None else len(sent))

    def there_and_back() -> None:
        if target is None:
            return
        if world.rank < target:
            dist.send(sent, group=world.group, group_dst=target)
        dist.recv(received, group=world.group, group_src=source)
        if world.rank > target:
            dist.send(sent, group=world.group, group_dst=target)

    def at_once(*, async_op: bool = False) -> list[dist.Work]:
        ops = []
        if target is not None:
            ops.append(dist.P2POp(dist.isend, sent, group=world.group, group_peer=target))
        if source is not None:
            ops.append(dist.P2POp(dist.irecv, received, group=world.group, group_peer=source))
        works = dist.batch_isend_irecv(ops) if ops else []
        if not async_op:
            for work in works:
                work.wait()
        return works

    return Operation(
        call=there_and_back if in_turn else at_once,
        output=received,
        expected=lambda: pattern.compute_values(source or 0, 0, len(received)),
        description=describe_operation(
            "sendrecv", world.size, size_bytes, hops=2 if in_turn else 1
        ),
    )
