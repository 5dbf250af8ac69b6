"""What really leaves a rank: of an uneven all-to-all the rows for other ranks, which no factor of its size tells."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from workloads.costs.communication_pattern import sent_bytes
from workloads.step.sent_bytes import OTHER, Counted, group_of

_ALL_TO_ALL = "alltoall_base_"


class Wired(Counted):  # type: ignore[no-untyped-call]
    """While entered, adds up the bytes that this rank sends to others in ``sent``, by axis."""

    def __init__(self, axes: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__(axes)
        self.sent: defaultdict[str, float] = defaultdict(float)

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        before = len(self.calls)
        super()._count(name, args)
        for call in self.calls[before:]:
            if name == _ALL_TO_ALL:
                self.sent[call.axis] += bytes_for_others(args)
            else:
                self.sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)


def bytes_for_others(args: tuple[Any, ...]) -> float:
    """Return the bytes of an all-to-all's input without this rank's own part; even parts where none are given."""
    given, group, sends = args[1], group_of(args), list(args[4])
    assert group is not None, "an all-to-all has a group"
    sends = sends or [len(given) // group.size()] * group.size()
    row = given[:1].numel() * given.element_size() if len(given) else 0
    return float((sum(sends) - sends[group.rank()]) * row)


def wired(step: Callable[[], object], axes: Mapping[str, dist.ProcessGroup]) -> dict[str, float]:
    """Return the bytes that one step sends to other ranks, by axis."""
    with Wired(axes) as mode:
        step()
    return {axis: mode.sent[axis] for axis in (*axes, *mode.sent) if axis != OTHER or mode.sent[axis]}
