"""The waits of ranks for each other, derived from torch's flight recorder.

The flight recorder keeps the last operations of each rank on each process group, with their states.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

Waits = dict[int, set[int]]
"""The global ranks that each rank waits for, by the waiting rank.

The set is empty for a rank that waits for no rank.
"""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank's operations on one process group, from torch's flight recorder.

    torch numbers the collectives within the group from 1. The number 0 stands for no collective.
    """

    ranks: tuple[int, ...]
    """The global ranks of the group, in the order of their group ranks."""
    enqueued: int = 0
    """The number of the last collective that the rank has enqueued."""
    pending: int = 0
    """The number of the first collective that is enqueued and not done, 0 if all are done."""


class _Entry(msgspec.Struct, frozen=True):
    """One operation in the records of torch's flight recorder, with torch's field names."""

    process_group: tuple[str, str]
    """The name and the description of the process group."""
    collective_seq_id: int
    """The number of the collective within the group, from 1."""
    time_created_ns: int
    """The time at which the rank enqueued the operation, in ns since the epoch."""
    state: str
    """The state of the operation: ``scheduled``, ``started`` or ``completed``.

    An operation of gloo stays ``scheduled``, but is retired once it is done.
    """
    retired: bool
    """True if the operation is done, so that torch no longer watches it."""
    is_p2p: bool
    """True for a send or a receive."""


def parse_groups(
    dumps: Iterable[bytes], groups: Mapping[str, Sequence[int]], since_ns: int
) -> dict[str, GroupState]:
    """Return the state of a rank's operations by name of the process group.

    Args:
        dumps: torch's flight records of this rank as JSON, one for each backend.
        groups: the global ranks of each group by the name of the group, in the order of group
            ranks.
        since_ns: the time in ns since the epoch before which operations are ignored.
    """
    entries = []
    for dump in dumps:
        records = msgspec.json.decode(dump)
        entries += msgspec.convert(records.get("entries", []), list[_Entry])
    states = {}
    for name, ranks in groups.items():
        enqueued = set()
        done = set()
        for entry in entries:
            is_own = entry.process_group[0] == name and not entry.is_p2p
            if is_own and entry.time_created_ns >= since_ns:
                enqueued.add(entry.collective_seq_id)
                if entry.retired or entry.state == "completed":
                    done.add(entry.collective_seq_id)
        states[name] = GroupState(
            ranks=tuple(ranks),
            enqueued=max(enqueued, default=0),
            # Calls that are launched as one share their number, and only the launch is ever done.
            pending=min(enqueued - done, default=0),
        )
    return states


def find_waits(groups_by_rank: Mapping[int, Mapping[str, GroupState]]) -> Waits:
    """Return for each rank the set of ranks that it waits for.

    Take the first collective of a process group that rank A has enqueued and that is not done. Rank
    A waits for each rank of the group that has not enqueued this collective. Sends and receives are
    ignored.

    A rank that others wait for and that waits for no rank is the probable cause of a hang.

    ``groups_by_rank`` holds the states of the operations, by global rank and then by name of the
    process group.
    """
    waiting: Waits = {rank: set() for rank in sorted(groups_by_rank)}
    for rank, groups in groups_by_rank.items():
        for name, group in groups.items():
            for peer_rank in group.ranks:
                peer = groups_by_rank.get(peer_rank, {}).get(name)
                if peer is not None and peer.enqueued < group.pending:
                    waiting[rank].add(peer_rank)
    return waiting
