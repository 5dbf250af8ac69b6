"""The communication of each rank in torch's flight recorder, and the ranks that it waits for."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

Waits = dict[int, set[int]]
"""The ranks that each rank waits for, keyed by the waiting rank."""
_MOVING_NS = 500_000_000
"""The age in ns below which work may still arrive, because ranks report at different times."""
_COALESCED = "nccl:coalesced"
"""Several calls between torch's start and end of coalescing, launched as one."""
_PEER = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one rank on one process group.

    Collectives are numbered within the group from 1, and 0 stands for none.
    """

    ranks: tuple[int, ...]
    """The global ranks of the group."""
    enqueued: int = 0
    """The number of the last enqueued collective."""
    started: int = 0
    """The number of the last started collective, 0 unless TORCH_NCCL_ENABLE_TIMING=1."""
    pending: int = 0
    """The number of the first collective that is enqueued and not done."""
    name: str = ""
    """The name of the operation that is not done, empty if all are done."""
    sends_to: tuple[int, ...] = ()
    """The global ranks of the receivers of sends that are not done."""
    receives_from: tuple[int, ...] = ()
    """The global ranks of the senders of receives that are not done."""
    is_last_coalesced: bool = False
    """True if the last collective is a coalesced launch, which may not be done.

    torch runs it on the current stream, but records its end on the group's own stream, so that it
    seems done as soon as it is launched.
    """


class _Entry(msgspec.Struct, frozen=True):
    """One operation in torch's flight records."""

    pg_id: int  # differs from that of a destroyed group with the same name
    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    p2p_seq_id: int
    profiling_name: str  # "nccl:all_reduce", "nccl:recv 1<-0"
    time_created_ns: int
    state: str  # that of gloo is always "scheduled", but its completed work is retired
    retired: bool
    is_p2p: bool

    @property
    def is_done(self) -> bool:
        return self.retired or self.state == "completed"


class _Dump(msgspec.Struct, frozen=True):
    """The flight records of one backend."""

    entries: list[_Entry] = []


def parse_groups(
    dumps: Iterable[bytes], groups: Mapping[str, Sequence[int]], since_ns: int, now_ns: int
) -> dict[str, GroupState] | None:
    """Return the work of a rank by group name, None if nothing was ever recorded.

    Args:
        dumps: torch's records in JSON.
        groups: the ranks of each group by its name, in the group's order.
        since_ns: the time before which work is ignored.
        now_ns: the time of the dumps.
    """
    entries = []
    for dump in dumps:
        entries += msgspec.json.decode(dump, type=_Dump).entries
    if not entries:
        return None
    states = {}
    for name, ranks in groups.items():
        own = [entry for entry in entries if entry.process_group[0] == name]
        recent = [entry for entry in own if entry.time_created_ns >= since_ns]
        newest = max((entry.pg_id for entry in recent), default=0)
        current = [entry for entry in recent if entry.pg_id == newest]
        states[name] = _parse_group(current, tuple(ranks), now_ns)
    return states


def _parse_group(entries: Sequence[_Entry], ranks: tuple[int, ...], now_ns: int) -> GroupState:
    """Return the state of one group from its recorded entries."""
    collectives = [entry for entry in entries if not entry.is_p2p]
    # Calls that are launched as one share their number, and only the launch itself is ever done.
    done = {entry.collective_seq_id for entry in collectives if entry.is_done}
    started = {entry.collective_seq_id for entry in collectives if entry.state == "started"}
    launches = [entry for entry in entries if entry.is_p2p or "coalesced" in entry.profiling_name]
    done_exchanges = {entry.p2p_seq_id for entry in launches if entry.is_done}
    pending = []
    exchanges = []
    for entry in entries:
        if entry.time_created_ns >= now_ns - _MOVING_NS:
            continue
        if entry.is_p2p and entry.p2p_seq_id not in done_exchanges:
            exchanges.append(entry)
        if not entry.is_p2p and entry.collective_seq_id not in done:
            pending.append(entry)
    pending.sort(key=lambda entry: entry.collective_seq_id)
    enqueued = max((entry.collective_seq_id for entry in collectives), default=0)
    last = [entry for entry in collectives if entry.collective_seq_id == enqueued]
    peers: dict[str, set[int]] = {"send": set(), "recv": set()}
    for entry in exchanges:
        match = _PEER.search(entry.profiling_name)
        if match is not None:
            peers[match[1]].add(ranks[int(match[2])])
    return GroupState(
        ranks=ranks,
        enqueued=enqueued,
        started=max(done | started, default=0),
        pending=pending[0].collective_seq_id if pending else 0,
        name=next((entry.profiling_name for entry in pending + exchanges), ""),
        sends_to=tuple(sorted(peers["send"])),
        receives_from=tuple(sorted(peers["recv"])),
        is_last_coalesced=any(entry.profiling_name == _COALESCED for entry in last),
    )


def find_waits(groups_by_rank: Mapping[int, Mapping[str, GroupState]]) -> Waits:
    """Return for each rank the set of ranks that it waits for.

    These have not enqueued the operation in which the rank waits, or have not started one that the
    rank has started. A rank that others wait for and that waits for nobody is to blame. The
    argument holds the state of each group by rank and group name.
    """
    waiting: Waits = {rank: set() for rank in sorted(groups_by_rank)}
    for rank, groups in groups_by_rank.items():
        for name, group in groups.items():
            for peer_rank in set(group.ranks) - {rank}:
                peer = groups_by_rank.get(peer_rank, {}).get(name)
                if peer is not None and _is_waiting(rank, group, peer_rank, peer):
                    waiting[rank].add(peer_rank)
    return waiting


def _is_waiting(rank: int, group: GroupState, peer_rank: int, peer: GroupState) -> bool:
    """Return True if ``rank`` waits for ``peer_rank``, from their work on the same group."""
    if group.pending:
        if peer.enqueued < group.pending:
            return True
        if peer.started < group.pending <= group.started:
            return True
    if peer_rank in group.receives_from and rank not in peer.sends_to:
        return True
    return peer_rank in group.sends_to and rank not in peer.receives_from
