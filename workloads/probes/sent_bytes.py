"""The communication of a step, recorded where it is sent: every call to a process group.

A dispatch mode sees the calls of DDP's reducer, FSDP2, DTensor and functional collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.world.benchmark import Explanation
from parbench.workloads.costs.communication_pattern import bytes_by_axis, sent_bytes
from parbench.workloads.probes.probe import ResetFn, Step
from parbench.workloads.torch_internals import (
    TorchDispatchMode,
    find_group,
    make_fake_group,
    make_finished_work,
    tree_leaves,
    tree_map_only,
    unbox_group,
)

OTHER = "other"
"""The name under which calls count whose process group belongs to no mesh axis."""

Groups = Mapping[str, dist.ProcessGroup]
"""This rank's process groups, keyed by mesh axis."""
BytesByAxis = Mapping[str, float]
"""The bytes that one rank sends in a step, keyed by mesh axis."""
_NAMESPACES = ("c10d::", "_c10d_functional::")
"""The prefixes of the names of torch's communication operators."""


@dataclass(frozen=True, kw_only=True)
class SentCall:
    """One call of a collective, a send or a receive that this rank made in a recorded step."""

    axis: str
    """The mesh axis of the call's process group, ``OTHER`` if no axis has this group."""
    op: str
    """The name of the operation, such as ``all_reduce``."""
    num_bytes: int
    """The bytes of the call by the convention of nccl-tests, such as an all_gather's output."""
    ranks: int
    """The number of ranks of the call's process group."""
    sent: float = field(default=0.0, compare=False)
    """The bytes that leave this rank with a ring-optimal algorithm.

    For an uneven all_to_all they are the bytes of the rows for other ranks.
    """
    depends_on_data: bool = field(default=False, compare=False)
    """True for an uneven all_to_all, whose bytes may differ in the next step."""


_INPUT_SHARE = -1
"""In place of an argument's index: the size is that of argument 0 times the number of ranks."""
_NAMES_BY_OPERATION = {
    ("all_reduce", 0): "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ "
    "all_reduce_coalesced",
    ("all_gather", 0): "_allgather_base_ allgather_ allgather_into_tensor_coalesced_",
    ("all_gather", _INPUT_SHARE): "all_gather_into_tensor all_gather_into_tensor_coalesced",
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
"""The names of torch's operators, by operation and by index of the argument that has the size.

With ``_INPUT_SHARE``, the size is that of the first argument times the number of ranks.
"""
_OPERATIONS = {
    name: operation for operation, names in _NAMES_BY_OPERATION.items() for name in names.split()
}
"""The operation and the index of the argument that has the size, by name of torch's operator."""


class _CommMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that passes torch's communication operators to ``handle``.

    Other operators run as usual.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``handle`` for communication operators, and run all other operators as usual.

        A communication operator has a process group, or its name, among its arguments. For
        operators on DTensors the result is ``NotImplemented``. DTensor then splits them into
        operators on local tensors, which come here again.
        """
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        group = find_group_argument(args) if func.name().startswith(_NAMESPACES) else None
        if group is None:
            return func(*args, **(kwargs or {}))
        return self.handle(func, group, args, kwargs or {})

    def handle(self, func: Any, group: dist.ProcessGroup, args: Any, kwargs: Any) -> Any:
        """Run or replace a communication operator on ``group``, and return its result.

        ``func``, ``args`` and ``kwargs`` are those of ``__torch_dispatch__``.
        """
        raise NotImplementedError


class CommRecorder(_CommMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records every communication call of this rank while it is active."""

    def __init__(self, axes: Groups) -> None:
        """Make a recorder that names the axis of a call by the process groups in ``axes``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = {group.group_name: name for name, group in axes.items()}
        self.calls: list[SentCall] = []
        """The recorded calls, in order of issue."""

    def handle(self, func: Any, group: dist.ProcessGroup, args: Any, kwargs: Any) -> Any:
        """Record the call if the operator is in ``_OPERATIONS``, run it, and return its result.

        Operators that are not in ``_OPERATIONS``, such as a barrier, run without being recorded.
        """
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _OPERATIONS:
            self.calls.append(self._make_call(name, group, args))
        return func(*args, **kwargs)

    def name_axis(self, group: dist.ProcessGroup) -> str:
        """Return the mesh axis of a process group, ``OTHER`` if no axis has this group."""
        return self._axes.get(group.group_name, OTHER)

    def _make_call(self, name: str, group: dist.ProcessGroup, args: Any) -> SentCall:
        """Return the record of one call of torch's operator ``name``, such as ``allreduce_``.

        The call is on the process group ``group``. ``args`` are the arguments of the operator, from
        which the bytes follow.
        """
        op, argument = _OPERATIONS[name]
        ranks = group.size()
        num_bytes = _count_bytes(args[max(argument, 0)])
        if argument == _INPUT_SHARE:
            num_bytes *= ranks
        sent = sent_bytes(op, num_bytes, ranks)
        rows_by_rank = list(args[4]) if name == "alltoall_base_" else []
        if rows_by_rank:
            num_rows = sum(rows_by_rank)
            row_bytes = num_bytes // num_rows if num_rows else 0
            sent = float(row_bytes * (num_rows - rows_by_rank[group.rank()]))
        return SentCall(
            axis=self.name_axis(group),
            op=op,
            num_bytes=num_bytes,
            ranks=ranks,
            sent=sent,
            depends_on_data=bool(rows_by_rank),
        )


class NoCommMode(_CommMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which communication takes no time while it is active.

    Results have the right shapes and arbitrary values. On a device, collectives of floating-point
    data launch nothing. All other data is copied within this rank by fake groups (see
    ``make_fake_groups``): integers, which may decide sizes, and data of CPUs, because uninitialized
    floats may slow the computation there.
    """

    def __init__(self, fake_groups: Groups) -> None:
        """Make a mode that replaces communication on the process groups in ``fake_groups``.

        ``fake_groups`` has one fake group for each real group, keyed by the name of the real group.
        Communication on groups with other names runs as usual.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_groups = fake_groups

    def handle(self, func: Any, group: dist.ProcessGroup, args: Any, kwargs: Any) -> Any:
        """Return the result of a communication operator without sending anything."""
        name = group.group_name
        if name not in self._fake_groups:
            return func(*args, **kwargs)
        tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
        is_float = all(tensor.is_floating_point() for tensor in tensors)
        if tensors and is_float and tensors[0].device.type != "cpu":
            return _make_empty_results(func, args, kwargs)
        fake = self._fake_groups[name]
        result = func(*(_replace_group(arg, name, fake) for arg in args), **kwargs)
        is_sequence = isinstance(result, tuple | list) and len(result) > 0
        if is_sequence and isinstance(result[-1], torch.ScriptObject):
            # DDP's reducer reads the tensors from the future of the work.
            return (*result[:-1], make_finished_work(result[0]))
        return result


def _make_empty_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Return results such as torch's collective ``func`` has, without running it.

    Tensors have the right shapes and arbitrary values. Where the operator returns a c10d work
    object, on which callers wait, the result has one that is already finished.
    """
    if func.name().startswith("c10d::"):
        work = make_finished_work(tree_leaves(args[0]))
        return work if len(func._schema.returns) == 1 else (args[0], work)
    if func._schema.is_mutable:
        return args[0]
    meta_args = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    results = func(*meta_args, **kwargs)
    return tree_map_only(Tensor, lambda result: torch.empty_like(result, device=device), results)


def make_fake_groups(axes: Groups) -> dict[str, dist.ProcessGroup]:
    """Return a fake process group for each of this rank's groups, keyed by the group's name.

    A fake group has the same ranks, but its collectives send nothing. All ranks must call this
    function.
    """
    return {group.group_name: make_fake_group(group) for group in axes.values()}


def record_calls(step: Callable[[], object], axes: Groups) -> tuple[SentCall, ...]:
    """Run a step and return its communication calls on this rank, in order of issue.

    ``axes`` has this rank's process groups, keyed by mesh axis.
    """
    with CommRecorder(axes) as mode:
        step()
    return tuple(mode.calls)


def summarize_counts(
    calls_by_rank: Sequence[Sequence[SentCall]], axes: Iterable[str]
) -> dict[str, MetricValue]:
    """Return metrics of the number of calls and the sent bytes of a step, as means over ranks.

    ``calls.AXIS`` and ``calls.AXIS.OP`` are numbers of calls per step. ``calls.AXIS`` is 0 for
    those of ``axes`` that have no calls. ``sent.AXIS.OP`` is the bytes that a rank sends in a step.
    This metric is missing if the bytes depend on data, as those of uneven all_to_alls do.
    ``calls_by_rank`` has the calls of one recorded step for each rank.
    """
    totals = dict.fromkeys((f"calls.{axis}" for axis in axes), 0.0)
    sent: defaultdict[str, float] = defaultdict(float)
    data_dependent = set()
    for call in chain.from_iterable(calls_by_rank):
        for name in (f"calls.{call.axis}", f"calls.{call.axis}.{call.op}"):
            totals[name] = totals.get(name, 0.0) + 1
        name = f"sent.{call.axis}.{call.op}"
        sent[name] += call.sent
        if call.depends_on_data:
            data_dependent.add(name)
    totals |= {name: total for name, total in sent.items() if name not in data_dependent}
    means = {name: total / len(calls_by_rank) for name, total in totals.items()}
    return make_values(means, "mean over ranks")


@dataclass(frozen=True)
class CommBytesProbe:
    """Records a step's communication and compares its bytes with the analytical ones."""

    axes: Groups
    """This rank's process groups, keyed by mesh axis."""
    compute_expected: Callable[[], BytesByAxis]
    """Returns the analytical bytes that this rank sends in a step, keyed by mesh axis.

    All ranks call it after the recorded step, whose routing decides the bytes of experts.
    """
    share = 0.0
    """0, because this probe always runs one step and needs no time budget."""

    def observe(
        self, step: Step, reset: ResetFn, budget_seconds: float
    ) -> tuple[Sequence[SentCall], BytesByAxis]:
        """Record one step, and return its calls and the analytical bytes that this rank sends."""
        reset()
        calls = record_calls(step, self.axes)
        return calls, self.compute_expected()

    def summarize(self, samples: Sequence[tuple[Sequence[SentCall], BytesByAxis]]) -> Explanation:
        """Return metrics of a step's calls, its sent bytes and its analytical bytes, by mesh axis.

        Numbers of calls are means over ranks. If an axis has analytical bytes, sent and analytical
        bytes are those of the rank on which they differ most from each other. Otherwise the sent
        bytes are the maximum over ranks. ``samples`` are the results of ``observe`` on all ranks.
        """
        calls_by_rank = [calls for calls, _ in samples]
        metrics = summarize_counts(calls_by_rank, self.axes)
        sent_by_rank = [bytes_by_axis(calls, self.axes) for calls in calls_by_rank]
        for axis in dict.fromkeys(chain.from_iterable(sent_by_rank)):
            sent = [sent_by_axis.get(axis, 0.0) for sent_by_axis in sent_by_rank]
            if not any(axis in expected for _, expected in samples):
                method = "ring-optimal, maximum over ranks"
                metrics |= make_values({f"bytes_sent.{axis}": max(sent)}, method)
                continue
            expected = [expected.get(axis, 0.0) for _, expected in samples]
            metrics |= report_worst_ratio(axis, sent, expected)
        return Explanation(metrics=metrics)


def report_worst_ratio(
    axis: str, sent: Sequence[float], expected: Sequence[float]
) -> dict[str, MetricValue]:
    """Return metrics of the bytes that one rank sends over a mesh axis in a step.

    They are ``bytes_sent.AXIS``, the analytical ``bytes_expected.AXIS``, and ``bytes_ratio.AXIS``,
    which is sent / expected. The rank is the one whose sent and expected bytes differ most, in
    bytes. Of several such ranks, the one that sends most is taken. ``sent`` and ``expected`` have
    the bytes of each rank, in order of ranks.

    The ratio is 0 if the rank sends bytes and none are expected. It is None if the rank neither
    sends nor expects any.
    """
    differences = [round(abs(a - b)) for a, b in zip(sent, expected, strict=True)]
    rank = max(range(len(sent)), key=lambda rank: (differences[rank], sent[rank]))
    ratio = None
    if expected[rank]:
        ratio = sent[rank] / expected[rank]
    elif sent[rank]:
        ratio = 0.0
    values = {
        f"bytes_sent.{axis}": sent[rank],
        f"bytes_expected.{axis}": expected[rank],
        f"bytes_ratio.{axis}": ratio,
    }
    return make_values(values, "ring-optimal, of the rank whose bytes differ most from expected")


def find_group_argument(args: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a torch operator, None if it has none.

    A functional collective has the name of its group among its arguments.
    """
    for arg in args:
        group = unbox_group(arg)
        if group is not None:
            return group
    # A functional collective has the name of its group as its last string.
    names = [arg for arg in args if isinstance(arg, str)]
    return find_group(names[-1]) if names else None


def _count_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested sequences."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_count_bytes(tensor) for tensor in tensors)


def _replace_group(arg: Any, name: str, group: dist.ProcessGroup) -> Any:
    """Return an argument of a communication operator, with its process group replaced by ``group``.

    A functional collective has the name of its process group as an argument. A text equal to
    ``name``, the name of the group to replace, becomes the name of ``group``. Other operators have
    a process group as an argument. It becomes ``group`` without a comparison with ``name``, because
    the caller has already checked that the operator is on the group ``name``. All other arguments are
    returned unchanged.
    """
    if unbox_group(arg) is not None:
        return group.boxed()
    return group.group_name if isinstance(arg, str) and arg == name else arg
