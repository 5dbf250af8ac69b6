"""The seconds of a call, by the latencies and rates of hardware, or by the fits of a run. Pure.

By hardware a call takes its launch, its hops, and its bytes over the slowest link that they pass.
Rings inside nodes and across nodes work at once, so that m ranks on each of N nodes have m - 1 hops
inside and N - 1 across. An all_reduce may use trees instead, with log2(N) hops each way. Bytes are
``sent_bytes`` of ``workloads.costs``.

By a run a call takes the time of the fit for its operation and ranks. With other ranks the latency
grows with the hops of a ring, n - 1, or 2 (n - 1) for an all_reduce. The bandwidth stays that of
the bytes that pass a link.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, format_size
from parbench.workloads.costs.communication_pattern import Call, sent_bytes
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.placement import Place

if TYPE_CHECKING:
    from parbench.bench.results.fit import CurveFit

MESSAGE = "unidirectional"
"""The point-to-point benchmark whose fit predicts a message."""
_SUBSTITUTES = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives whose fits replace the missing fit of an operation, in order of preference.

The size of the substitute is scaled, so that it sends as many bytes over a link as the replaced
call. A message without a fit takes as long as a hop of a collective.
"""


@dataclass(frozen=True, kw_only=True)
class PlacedCall:
    """Equal communication calls of a rank in a step, with the nodes that their group spans.

    They have one operation, one size and one process group.
    """

    axis: str
    """The mesh axis on which the calls run, such as dp."""
    op: str
    """The operation, such as all_reduce, or ``send`` for a message."""
    num_bytes: float
    """The bytes of one call, as nccl-tests counts them."""
    count: float
    """The number of these calls in a step."""
    place: Place
    """The nodes that the ranks of the group span."""

    @staticmethod
    def make(call: Call, place: Place) -> "PlacedCall":
        """Return ``call`` together with ``place``, the nodes that its group of ranks spans."""
        return PlacedCall(
            axis=call.axis, op=call.op, num_bytes=call.num_bytes, count=call.times, place=place
        )

    @property
    def sent(self) -> float:
        """The bytes per step that a rank sends in all of these calls, by a ring algorithm."""
        return self.count * sent_bytes(self.op, self.num_bytes, self.place.ranks)


PredictSeconds = Callable[[PlacedCall], float]
"""A function that takes equal communication calls and returns the seconds of one of them."""


def make_hardware_predictor(hardware: Hardware) -> PredictSeconds:
    """Return a function from a call to its seconds, which follow from the hardware's links.

    The seconds are the sum of three times: the launch of the call, the latency of its hops, and
    the transfer of its bytes over the slowest link.
    """

    def seconds(call: PlacedCall) -> float:
        """Return the seconds of one call, 0 on a group of one rank."""
        if call.place.ranks == 1:
            return 0.0
        return (
            hardware.launch_seconds
            + _compute_hop_seconds(hardware, call)
            + _compute_wire_seconds(hardware, call)
        )

    return seconds


def _compute_hop_seconds(hardware: Hardware, call: PlacedCall) -> float:
    """Return the latency in seconds of all successive hops of one call.

    A message and an all_to_all have one hop. Other calls have the hops of a ring, and an all_reduce
    has twice the hops of a ring or of a tree, whichever is faster.
    """
    place = call.place
    if call.op in ("send", "all_to_all"):
        return hardware.inside_hop_seconds if place.inside else hardware.across_hop_seconds
    inside = (place.on_node - 1) * hardware.inside_hop_seconds
    ring = inside + (place.nodes - 1) * hardware.across_hop_seconds
    if call.op != "all_reduce":
        return ring
    tree = inside + math.ceil(math.log2(place.nodes)) * hardware.across_hop_seconds
    return 2 * min(ring, tree)


def _compute_wire_seconds(hardware: Hardware, call: PlacedCall) -> float:
    """Return the seconds in which the bytes that a rank sends in one call pass the slowest link.

    Across nodes a collective uses one network adapter (NIC) for each of its ranks on a node, at
    most ``hardware.rails`` of them. A message uses one NIC. In an all_to_all, each rank sends over
    its own NIC.
    """
    place, sent = call.place, sent_bytes(call.op, call.num_bytes, call.place.ranks)
    inside, nic_rate = hardware.inside_rate, hardware.nic_rate
    if place.inside:
        return sent / inside
    if call.op == "all_to_all":
        remote = call.num_bytes / place.ranks * (place.ranks - place.on_node)
        return max(remote / nic_rate, (sent - remote) / inside)
    nics = 1 if call.op == "send" else min(place.on_node, hardware.rails or place.on_node)
    return sent / min(inside, nics * nic_rate)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The fit of seconds over bytes for one benchmark on one group of ranks of a run."""

    op: str
    """The collective, such as all_reduce, or ``MESSAGE``."""
    ranks: int
    """The number of ranks in the group."""
    fit: "CurveFit"
    """The fitted latency and bandwidth, by range of sizes."""
    smallest: int
    """The smallest measured size in bytes."""
    largest: int
    """The largest measured size in bytes."""
    inside: bool
    """True if all ranks of the group share a node."""


def fit_curves_of_run(run: Run) -> list[Curve]:
    """Return a fit of seconds over bytes for each operation and group of ranks that a run measured.

    The fitted seconds at each size are the median over repetitions of a blocking float32 call. A
    group has all ranks, the ranks of a node, or one rank of each node. An operation with too few
    sizes has no fit.
    """
    # It imports numpy and scipy, which a plan from declared hardware does not need.
    from parbench.bench.results.fit import CurvePoint, fit_curve

    times: dict[tuple[str, int, bool], dict[int, list[float]]] = {}
    for record in run.records:
        op = record.case.short_name
        time = record.metrics.get("time")
        group = str(record.case.params.get("group", "world"))
        world = record.world
        on_node = world.size // max(1, world.nodes)
        ranks = {"world": world.size, "node": on_node, "across": world.nodes}.get(group, 1)
        if _is_plain(record) and time is not None and time.value and ranks > 1:
            inside = ranks <= on_node and group != "across"
            by_size = times.setdefault((op, ranks, inside), {})
            by_size.setdefault(_get_size(record), []).append(time.value)
    curves = []
    for (op, ranks, inside), by_size in times.items():
        points = [
            CurvePoint(size_bytes=size, seconds=median(values)) for size, values in by_size.items()
        ]
        fit = fit_curve(points)
        if fit is None:
            continue
        curve = Curve(
            op=op,
            ranks=ranks,
            fit=fit,
            smallest=min(by_size),
            largest=max(by_size),
            inside=inside,
        )
        curves.append(curve)
    return curves


def _is_plain(record: Record) -> bool:
    """Return True if the time of a record may be used to fit the seconds of calls over bytes.

    It is True for a successful measurement of a blocking float32 collective or message between
    several ranks, with a known size. The benchmark may have no parameters other than its size, data
    type, mode, process group, and the two ranks of a message.
    """
    params = record.case.params
    return (
        record.case.name.startswith(("collective.", "p2p."))
        and record.status == "ok"
        and record.world.size > 1
        and params.keys() <= {"size_bytes", "dtype", "mode", "source", "target", "group"}
        and (params.get("mode"), params.get("dtype")) == ("blocking", "float32")
        and _get_size(record) > 0
    )


def _get_size(record: Record) -> int:
    """Return the size in bytes of the record's calls, 0 if the record has no size."""
    size = record.case.params.get("size_bytes")
    return size if isinstance(size, int) else 0


def make_curve_predictor(curves: Sequence[Curve]) -> PredictSeconds:
    """Return a function from a call to its seconds, which follow from fits of measured calls.

    If the ranks of the fit differ from those of the call, the latency is scaled by the hops of a
    ring. The function raises ``UserError`` for a call without a fit.
    """

    def seconds(call: PlacedCall) -> float:
        """Return the seconds of one call, 0 on a group of one rank."""
        if call.place.ranks == 1:
            return 0.0
        curve = choose_curve(call, curves)
        if curve.op == MESSAGE:
            return curve.fit.predict(call.num_bytes)
        # The call of the curve that moves as many bytes over a link has this size.
        sent = sent_bytes(call.op, call.num_bytes, call.place.ranks)
        size = sent / sent_bytes(curve.op, 1.0, curve.ranks)
        hops = _count_ring_hops(call.op, call.place.ranks)
        more_hops = hops / _count_ring_hops(curve.op, curve.ranks) - 1
        latency = curve.fit.segments[0].latency.value
        return curve.fit.predict(size) + latency * more_hops

    return seconds


def _count_ring_hops(op: str, ranks: int) -> int:
    """Return the number of successive hops of an operation in a ring of ``ranks`` ranks."""
    if op == "send":
        return 1
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


def choose_curve(call: PlacedCall, curves: Sequence[Curve]) -> Curve:
    """Return the fit that predicts a call: of its operation, or of the first substitute with a fit.

    Several fits of an operation differ in their group of ranks. A call inside a node prefers groups
    inside a node, and a call across nodes prefers groups across nodes. The next criterion is a
    group with as many ranks as the call, and the last one is the larger group. The substitutes are
    ``_SUBSTITUTES``. Raises ``UserError`` if neither the operation nor a substitute has a fit.
    """
    measured_op = MESSAGE if call.op == "send" else call.op
    for op in (measured_op, *_SUBSTITUTES):
        candidates = [curve for curve in curves if curve.op == op]
        if candidates:
            return min(candidates, key=lambda curve: _rank_curve(curve, call.place))
    raise UserError(
        f"the time of {call.op} cannot be predicted, because the run did not measure three sizes "
        f"of {measured_op}. Measure them: parbench run {measured_op} --sizes 64K,1M,16M"
    )


def _rank_curve(curve: Curve, place: Place) -> tuple[bool, bool, int]:
    """Return the sort key of a fit. The fit with the smallest key predicts a call on ``place``.

    ``curve`` is the fit, measured on one group of ranks, and ``place`` the group of the call. The
    first element of the key is True if one group is inside a node and the other spans nodes. The
    second is True if the groups differ in their number of ranks. The third is the negative number
    of ranks of the fit. So a fit with more ranks is preferred if the first two elements are equal.
    """
    return curve.inside != place.inside, curve.ranks != place.ranks, -curve.ranks


def list_extrapolations(calls: Sequence[PlacedCall], curves: Sequence[Curve]) -> tuple[str, ...]:
    """Return a note for each call whose number of ranks, operation or size was not measured.

    The prediction of such a call extrapolates from ``curves``, the fits of measured calls.
    """
    notes = []
    for call in calls:
        curve = choose_curve(call, curves)
        is_group = curve.op == MESSAGE or (curve.op, curve.ranks) == (call.op, call.place.ranks)
        if not is_group or not curve.smallest <= call.num_bytes <= curve.largest:
            notes.append(
                f"{call.axis}: {call.op} of {call.num_bytes:,.0f} B on {call.place.ranks} ranks is "
                f"extrapolated from {curve.op} of {format_size(curve.smallest)} to "
                f"{format_size(curve.largest)} on {curve.ranks} ranks"
            )
    return tuple(dict.fromkeys(notes))


def read_peak(record: Record) -> float:
    """Return the peak FLOP/s of a device that a record contains, 0 if it contains none."""
    peak = record.details.get("peak")
    return float(peak["flops_per_second"]) if isinstance(peak, dict) else 0.0


def derive_hardware(run: Run, base: Hardware) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware on which a run was measured, and a note on its assumed figures.

    The number of GPUs per node and, if it was measured, the peak FLOP/s are those of the run. All
    other figures are those of ``base``, which the note names. ``links_from`` names the run, but the
    result does not contain its times of calls (see ``fit_curves_of_run``). Raises ``UserError`` if the run
    has no records.
    """
    if not run.records:
        raise UserError(f"{run.path} has no records to fit")
    world = max((record.world for record in run.records), key=lambda world: world.size)
    gpus_per_node = max(1, world.size // max(1, world.nodes))
    peak = max(read_peak(record) for record in run.records)
    hardware = msgspec.structs.replace(
        base,
        name=run.path.name,
        source=f"the run {run.path}",
        links_from=f"fitted to {run.path}, with latency scaled by hops for other numbers of ranks. "
        "All links are assumed equal",
        gpus_per_node=gpus_per_node,
        flops_per_second=peak or base.flops_per_second,
        float32_share=1.0 if peak else base.float32_share,
    )
    assumed = "memory" if peak else "memory and peak FLOP/s"
    return hardware, (f"{assumed}: those of {base.name}",)
