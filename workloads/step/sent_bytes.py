"""What a step sends, seen where it is sent: every call to a process group, by mesh axis, and the step without them.

A dispatch mode sees the calls of DDP's reducer, of FSDP2, of DTensor and of functional collectives alike.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.world.benchmark import Explanation
from parbench.workloads.costs.communication_pattern import bytes_by_axis, sent_bytes
from parbench.workloads.step.layout import Grouped
from parbench.workloads.step.probe import ResetFn, Step
from parbench.workloads.torch_internals import (
    TorchDispatchMode,
    boxed_group,
    done_work,
    fake_group,
    group_named,
)

OTHER = "other"
"""The axis of calls on groups that belong to no axis."""

ByAxis = Mapping[str, float]
_NAMESPACES = ("c10d::", "_c10d_functional::")


@dataclass(frozen=True, kw_only=True)
class SentCall:
    """One communication: ``num_bytes`` is its size as nccl-tests counts it, on ``ranks`` ranks of an axis.

    ``peer`` is the rank of the group that a send goes to, None of all else. ``sent`` are the bytes that leave this
    rank: ring-optimal, but of an uneven all-to-all the rows for others, which no factor of its size tells: they are
    ``by_data``, for another step may send more.
    """

    axis: str
    op: str
    num_bytes: int
    ranks: int
    peer: int | None = None
    sent: float = field(default=0.0, compare=False)
    by_data: bool = field(default=False, compare=False)


SHARE = -1  # The size is that of the first argument times the number of ranks.
_CALLS_OF_OPERATIONS = {
    (
        "all_reduce",
        0,
    ): "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced",
    ("all_gather", 0): "_allgather_base_ allgather_ allgather_into_tensor_coalesced_",
    ("all_gather", SHARE): "all_gather_into_tensor all_gather_into_tensor_coalesced",
    ("reduce_scatter", 0): "reduce_scatter_tensor reduce_scatter_tensor_coalesced",
    ("reduce_scatter", 1): "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_",
    ("all_to_all", 0): "all_to_all_single",
    ("all_to_all", 1): "alltoall_base_ alltoall_",
    ("broadcast", 0): "broadcast_ broadcast",
    ("reduce", 0): "reduce_",
    ("gather", 0): "gather_",
    ("scatter", 1): "scatter_",
    ("send", 0): "send",
    ("recv", 0): "recv_",
}
"""The calls of each operation that have the size in this argument: the first (0), the second (1), or a share."""
_CALLS = {name: call for call, names in _CALLS_OF_OPERATIONS.items() for name in names.split()}


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, keeps every call in ``calls``, in order."""

    def __init__(self, axes: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = {group.group_name: name for name, group in axes.items()}
        self.calls: list[SentCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count what goes to a process group; a DTensor's operator is taken apart first, into those it is made of."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.name().partition(".")[0]
        if name.startswith(_NAMESPACES):
            self._count(name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def axis_of(self, group: dist.ProcessGroup) -> str:
        return self._axes.get(group.group_name, OTHER)

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = group_of(args)
        if group is None or name not in _CALLS:
            return
        op, at = _CALLS[name]
        num_bytes = _bytes(args[0]) * group.size() if at == SHARE else _bytes(args[at])
        axis, ranks = self.axis_of(group), group.size()
        peer = int(args[2]) if op == "send" else None
        sent = sent_bytes(op, num_bytes, ranks)
        if sends := list(args[4]) if name == "alltoall_base_" else []:
            row = _bytes(args[1]) // sum(sends) if sum(sends) else 0
            sent = float((sum(sends) - sends[group.rank()]) * row)
        call = SentCall(
            axis=axis,
            op=op,
            num_bytes=num_bytes,
            ranks=ranks,
            peer=peer,
            sent=sent,
            by_data=bool(sends),
        )
        self.calls.append(call)


class Silenced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, communication costs nothing: it goes to a group of torch's fake backend, and is done at once.

    Results are meaningless numbers of the right shape. The twins of process groups are made by ``fake_twins``.
    """

    def __init__(self, twins: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._twins = twins

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Send what goes to a process group to its twin instead, and of a DTensor's operator what it is made of."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.name()
        group = group_of(args) if name.startswith(_NAMESPACES) else None
        if group is None or group.group_name not in self._twins:
            return func(*args, **(kwargs or {}))
        twin = self._twins[group.group_name]
        swapped = [_swap(arg, group.group_name, twin) for arg in args]
        result = func(*swapped, **(kwargs or {}))
        if (
            isinstance(result, tuple | list)
            and result
            and isinstance(result[-1], torch.ScriptObject)
        ):
            return (
                *result[:-1],
                done_work(result[0]),
            )  # with its tensors, as DDP's reducer expects of it
        return result


def fake_twins(axes: Mapping[str, dist.ProcessGroup]) -> dict[str, dist.ProcessGroup]:
    """Return by name a silent group of the same ranks for each axis; every rank of the world takes part."""
    return {group.group_name: fake_group(group) for group in axes.values()}


def counted(
    step: Callable[[], object], axes: Mapping[str, dist.ProcessGroup]
) -> tuple[SentCall, ...]:
    with Counted(axes) as mode:
        step()
    return tuple(mode.calls)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What one rank sends in a step: bytes by axis, and by axis and operation its calls with their bytes.

    The latter are None where data tell how many there are.
    """

    by_axis: ByAxis
    by_op: Mapping[tuple[str, str], tuple[int, float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Sequence[SentCall], axes: Iterable[str]) -> "Tally":
        """Return what calls sent, 0 over one of ``axes`` without calls."""
        alike: defaultdict[tuple[str, str], list[SentCall]] = defaultdict(list)
        for call in calls:
            alike[call.axis, call.op].append(call)
        by_op = {
            key: (
                len(of),
                None if any(call.by_data for call in of) else sum(call.sent for call in of),
            )
            for key, of in alike.items()
        }
        return cls(by_axis=bytes_by_axis(calls, axes), by_op=by_op)


def counts_of(told: Sequence[Tally]) -> dict[str, MetricValue]:
    """Return the calls of a step by axis, and by axis and operation with their bytes, as means over ranks."""
    calls: dict[str, float] = dict.fromkeys((axis for one in told for axis in one.by_axis), 0.0)
    found: dict[str, float] = {}
    for axis, op in dict.fromkeys(key for one in told for key in one.by_op):
        each = [one.by_op.get((axis, op), (0, 0.0)) for one in told]
        found[f"calls.{axis}.{op}"] = sum(count for count, _ in each) / len(told)
        calls[axis] += found[f"calls.{axis}.{op}"]
        known = [sent for _, sent in each if sent is not None]
        if len(known) == len(told):
            found[f"sent.{axis}.{op}"] = sum(known) / len(told)
    return make_values(
        {f"calls.{axis}": count for axis, count in calls.items()} | found, "mean over ranks"
    )


class SentBytes:
    """The probe of what a rank sends in a step by axis, counted and by closed form."""

    share = 0.0

    def __init__(self, layout: Grouped, expected: ByAxis) -> None:
        self.layout, self.expected = layout, expected

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> tuple[Tally, ByAxis]:
        begin()
        return Tally.of(counted(step, self.layout.axes), self.layout.axes), self.expected

    @staticmethod
    def summarize(told: Sequence[tuple[Tally, ByAxis]]) -> Explanation:
        """Return calls, what the rank that sends most sends over each axis, the ratio to theory farthest from 1."""
        metrics = counts_of([sent for sent, _ in told])
        for axis in dict.fromkeys(name for sent, _ in told for name in sent.by_axis):
            most, formula = max(told, key=lambda one: one[0].by_axis.get(axis, 0.0))
            busiest = most.by_axis.get(axis, 0.0)
            metrics |= make_values(
                {f"bytes_sent.{axis}": busiest}, "ring-optimal, the rank that sends most"
            )
            if all(axis not in expected for _, expected in told):
                continue
            pairs = [
                (sent.by_axis.get(axis, 0.0), expected.get(axis, 0.0)) for sent, expected in told
            ]
            ratios = [
                sent / expected if expected else float(sent == 0)
                for sent, expected in pairs
                if sent or expected
            ]
            ratio = max(ratios, key=lambda one: abs(one - 1), default=None)
            metrics |= make_values(
                {f"bytes_expected.{axis}": formula.get(axis, 0.0)}, "the same rank"
            )
            metrics |= make_values(
                {f"bytes_ratio.{axis}": ratio}, "the rank where they differ most"
            )
        return Explanation(metrics=metrics)


def group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among a call's arguments: an object of c10d's, a name in functional collectives."""
    for arg in args:
        if (group := boxed_group(arg)) is not None:
            return group
    names = [arg for arg in args if isinstance(arg, str)]
    # a functional reduction names its kind before its group
    return group_named(names[-1]) if names else None


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _swap(arg: Any, name: str, twin: dist.ProcessGroup) -> Any:
    if boxed_group(arg) is not None:
        return twin.boxed()
    return twin.group_name if isinstance(arg, str) and arg == name else arg
