"""What torch's flight recorder saw of each rank's communication, and who waits for whom by it."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

Waits = dict[int, set[int]]  # of each rank, the ranks it waits for

_MOVING_NS = 500_000_000  # what was enqueued later than this may be on its way: ranks are not asked at the same time
_COALESCED = "nccl:coalesced"  # several calls between torch's start and end of coalescing, launched as one


class GroupSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's work on one group of global ``ranks``: its collectives' numbers within the group, 0 for none.

    ``pending`` is the first that is enqueued and not done; what has ``started`` is only known where torch times them
    (TORCH_NCCL_ENABLE_TIMING=1). Peers are those of sends and receives not done. ``name`` is what is not done.

    ``is_last_coalesced``: the last collective is a coalesced launch, which may not be done. torch runs it on the
    current stream, but records its end on the group's own stream, so that it seems done as soon as it is launched.
    """

    ranks: tuple[int, ...]
    enqueued: int = 0
    started: int = 0
    pending: int = 0
    name: str = ""
    sends_to: tuple[int, ...] = ()
    receives_from: tuple[int, ...] = ()
    is_last_coalesced: bool = False


Seen = Mapping[str, GroupSeen]  # by the group's name, which is the same on all its ranks


class _Entry(msgspec.Struct, frozen=True):
    pg_id: int  # of each group made on this rank another, though it has the name of one that was destroyed
    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    p2p_seq_id: int
    profiling_name: str  # "nccl:all_reduce", "nccl:recv 1<-0"
    time_created_ns: int
    state: str  # gloo's is always "scheduled", but what is done is retired
    retired: bool
    is_p2p: bool

    @property
    def done(self) -> bool:
        return self.retired or self.state == "completed"


class _Dump(msgspec.Struct, frozen=True):
    entries: list[_Entry] = []


def groups_seen(
    dumps: Iterable[bytes], groups: Mapping[str, Sequence[int]], since_ns: int, now_ns: int
) -> dict[str, GroupSeen] | None:
    """Return what a rank has done on its groups since a time; None where nothing was ever recorded: it is turned off.

    ``dumps`` are torch's in JSON; ``groups`` names those that there are, with their ranks in the group's order.
    """
    entries = [entry for dump in dumps for entry in msgspec.json.decode(dump, type=_Dump).entries]
    if not entries:
        return None
    recent = [entry for entry in entries if entry.time_created_ns >= since_ns]
    found = {}
    for name, ranks in groups.items():
        own = [entry for entry in recent if entry.process_group[0] == name]
        newest = max((entry.pg_id for entry in own), default=0)
        found[name] = _seen([entry for entry in own if entry.pg_id == newest], tuple(ranks), now_ns)
    return found


def _seen(entries: Sequence[_Entry], ranks: tuple[int, ...], now_ns: int) -> GroupSeen:
    collectives = [entry for entry in entries if not entry.is_p2p]
    # calls that are launched as one share their number, and only the entry of the launch is ever done
    done = {entry.collective_seq_id for entry in collectives if entry.done}
    begun = done | {entry.collective_seq_id for entry in collectives if entry.state == "started"}
    launches = [entry for entry in entries if entry.is_p2p or "coalesced" in entry.profiling_name]
    passed = {entry.p2p_seq_id for entry in launches if entry.done}
    waiting = [entry for entry in entries if entry.time_created_ns < now_ns - _MOVING_NS]
    pending = [entry for entry in waiting if not entry.is_p2p and entry.collective_seq_id not in done]
    pending.sort(key=lambda entry: entry.collective_seq_id)
    enqueued = max((entry.collective_seq_id for entry in collectives), default=0)
    last_names = {entry.profiling_name for entry in collectives if entry.collective_seq_id == enqueued}
    exchanges = [entry for entry in waiting if entry.is_p2p and entry.p2p_seq_id not in passed]
    peers: dict[str, set[int]] = {"send": set(), "recv": set()}
    for entry in exchanges:
        if words := re.search(r"(send|recv) \d+(?:->|<-)(\d+)$", entry.profiling_name):
            peers[words[1]].add(ranks[int(words[2])])
    return GroupSeen(
        ranks=ranks,
        enqueued=enqueued,
        started=max(begun, default=0),
        pending=pending[0].collective_seq_id if pending else 0,
        name=next((entry.profiling_name for entry in pending + exchanges), ""),
        sends_to=tuple(sorted(peers["send"])),
        receives_from=tuple(sorted(peers["recv"])),
        is_last_coalesced=_COALESCED in last_names,
    )


def waits(seen: Mapping[int, Seen]) -> Waits:
    """Return for whom each rank waits: those who have not enqueued what it waits in, nor started what it has started.

    A rank that others wait for and that waits for nobody is to blame.
    """
    found: Waits = {rank: set() for rank in sorted(seen)}
    for rank, groups in seen.items():
        for name, mine in groups.items():
            for other in set(mine.ranks) - {rank}:
                theirs = seen.get(other, {}).get(name)
                if theirs is None:
                    continue
                behind = theirs.enqueued < mine.pending or theirs.started < mine.pending <= mine.started
                unsent = other in mine.receives_from and rank not in theirs.sends_to
                unheard = other in mine.sends_to and rank not in theirs.receives_from
                if (mine.pending and behind) or unsent or unheard:
                    found[rank].add(other)
    return found
