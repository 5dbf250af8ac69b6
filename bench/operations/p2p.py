"""Point-to-point operations as benchmarks: a ring, and pairs of ranks while others are idle."""

import torch.distributed as dist

from parbench.bench.operations.operation import Operation, describe_operation, make_pattern
from parbench.bench.plan.groups import choose_pairs, format_pairs
from parbench.bench.world.world import World


def sendrecv(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
) -> Operation:
    """Return the benchmark of a ring: each rank sends ``size_bytes`` to the next rank.

    At the same time each rank receives ``size_bytes`` from the previous rank.
    """
    target = (world.rank + 1) % world.size
    source = (world.rank - 1) % world.size
    return _exchange(world, size_bytes, dtype, target, source)


def unidirectional(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    source: int = 0,
    target: int = 1,
) -> Operation:
    """Return the benchmark of sending ``size_bytes`` from rank ``source`` to rank ``target``.

    Other ranks are idle.
    """
    send_to = target if world.rank == source else None
    recv_from = source if world.rank == target else None
    return _exchange(world, size_bytes, dtype, send_to, recv_from)


matrix = unidirectional
"""The same benchmark, which is measured for every ordered pair of ranks."""


def bidirectional(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    source: int = 0,
    target: int = 1,
) -> Operation:
    """Return the benchmark of two ranks that send ``size_bytes`` to each other at the same time.

    The two ranks are ``source`` and ``target``. Other ranks are idle.
    """
    peer = {source: target, target: source}.get(world.rank)
    return _exchange(world, size_bytes, dtype, peer, peer)


def pingpong(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    source: int = 0,
    target: int = 1,
) -> Operation:
    """Return the benchmark of sending ``size_bytes`` from one rank to another and then back.

    The two ranks are ``source`` and ``target``. The recorded time is half of the round trip. Other
    ranks are idle.
    """
    peer = {source: target, target: source}.get(world.rank)
    return _exchange(world, size_bytes, dtype, peer, peer, in_turn=True)


def pairwise(
    world: World,
    *,
    size_bytes: int,
    dtype: str,
    round: int = 0,  # noqa: A002 - a benchmark takes its declared parameters by name
    pairs: str = "",
    direction: str = "at_once",
    repeat: int = 0,
) -> Operation:
    """Return the benchmark of pairs of ranks that exchange ``size_bytes``, all pairs at once.

    The pairs are those of round ``round`` of a round-robin tournament of all ranks, or those of the
    text ``pairs``, such as ``0-3 1-2``. A rank without a partner is idle. With ``direction``
    ``at_once`` both ranks of a pair send at the same time, with ``in_turn`` one after the other.
    ``repeat`` has no effect except that the same round can be measured as several cases. The
    samples of a rank show the time of its pair.
    """
    round_pairs = choose_pairs(world.size, round, pairs)
    peers = {}
    for first, second in round_pairs:
        peers[first] = second
        peers[second] = first
    peer = peers.get(world.rank)
    in_turn = direction == "in_turn"
    operation = _exchange(world, size_bytes, dtype, peer, peer, in_turn=in_turn)
    operation.description.details["pairs"] = format_pairs(round_pairs)
    return operation


def _exchange(
    world: World,
    size_bytes: int,
    dtype: str,
    target: int | None,
    source: int | None,
    *,
    in_turn: bool = False,
) -> Operation:
    """Return the benchmark in which this rank sends ``size_bytes`` and receives as many.

    ``target`` is the rank to which this rank sends, None if it does not send. ``source`` is the
    rank from which this rank receives, None if it does not receive. Without ``in_turn``, this rank
    sends and receives at the same time. With ``in_turn``, ``target`` and ``source`` must be the
    same partner. Then the smaller rank of the pair sends first, its partner answers, and the
    recorded time is half of the round trip.
    """
    pattern = make_pattern(world, dtype)
    sent = pattern.compute_values(world.rank, 0, size_bytes // pattern.itemsize)
    received = pattern.allocate(0 if source is None else len(sent))

    def there_and_back() -> None:
        """Send to the partner and then receive. The larger rank of the pair receives first."""
        if target is None:
            return
        if world.rank < target:
            dist.send(sent, group=world.group, group_dst=target)
        dist.recv(received, group=world.group, group_src=source)
        if world.rank > target:
            dist.send(sent, group=world.group, group_dst=target)

    def at_once(*, async_op: bool = False) -> list[dist.Work]:
        """Start to send and to receive, and return the works of both.

        Without ``async_op``, the function also waits for the works.
        """
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
