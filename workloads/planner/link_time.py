"""The seconds of a call, by the latencies and rates of hardware, or by the fits of a run. Pure.

By hardware a call takes its launch, its hops, and its bytes over the slowest link that they pass.
Rings inside nodes and across nodes work at once, so that m ranks on each of N nodes have m - 1 hops
inside and N - 1 across. An all_reduce may use trees instead, with log2(N) hops each way. Bytes are
``sent_bytes`` of ``workloads.costs``.

On a torus a ring along each axis uses its links in both directions, so that a collective over d
axes has 2 d links (Jouppi et al., arXiv 2304.01433, section 2.6).

By a run a call takes the time of the fit for its operation and ranks. With other ranks the latency
grows with the hops of a ring, n - 1, or 2 (n - 1) for an all_reduce. The bandwidth stays that of
the bytes that pass a link.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import UserError
from parbench.workloads.costs.communication_pattern import Call, sent_bytes
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.placement import Place

if TYPE_CHECKING:
    from parbench.bench.results.fit import CurveFit

# what stands in for an operation that a run did not measure: the same bytes over the same links
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_reduce": ("all_gather", "reduce_scatter"),
    "all_to_all": ("all_gather", "all_reduce"),
    "broadcast": ("all_gather", "all_reduce"),
    "send": ("unidirectional", "sendrecv", "pingpong", "bidirectional"),
}
MESSAGES = ("send", *_INSTEAD["send"])
_AS_A_MESSAGE = ("all_gather", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class PlacedCall:
    """Calls of a step that are alike: ``num_bytes`` as nccl-tests counts one call's size; ``axis`` is shown as one."""

    axis: str
    op: str
    num_bytes: float
    count: float
    place: Place

    @staticmethod
    def of(call: Call, place: Place) -> "PlacedCall":
        return PlacedCall(
            axis=call.axis, op=call.op, num_bytes=call.num_bytes, count=call.times, place=place
        )

    @property
    def sent(self) -> float:
        return self.count * sent_bytes(self.op, self.num_bytes, self.place.ranks)


Seconds = Callable[[PlacedCall], float]
"""How long one of the calls takes."""


def by_hardware(hardware: Hardware) -> Seconds:
    """Return the rule that takes latency and bandwidth from declared hardware."""

    def seconds(call: PlacedCall) -> float:
        if call.place.ranks == 1:
            return 0.0
        if call.place.extents:
            return hardware.launch_seconds + _torus_seconds(hardware, call)
        return (
            hardware.launch_seconds + _hop_seconds(hardware, call) + _wire_seconds(hardware, call)
        )

    return seconds


def _torus_seconds(hardware: Hardware, call: PlacedCall) -> float:
    """Return the seconds of a call on a torus without its launch.

    In an all_to_all the links of the longest axis carry most: each rank's bytes pass a quarter of a
    ring of that length, in both directions.
    """
    extents = call.place.extents
    rate, hop = hardware.inside_rate, hardware.inside_hop_seconds
    if call.op == "send":
        return hop + call.num_bytes / rate
    hops = sum(extent // 2 for extent in extents)
    if call.op == "all_to_all":
        return hops * hop + call.num_bytes * max(extents) / 8 / rate
    links = 2 * sum(extent > 1 for extent in extents)
    passes = 2 if call.op == "all_reduce" else 1
    sent = sent_bytes(call.op, call.num_bytes, call.place.ranks)
    return passes * hops * hop + sent / (links * rate)


def _hop_seconds(hardware: Hardware, call: PlacedCall) -> float:
    place = call.place
    if call.op in ("send", "all_to_all"):
        return hardware.inside_hop_seconds if place.inside else hardware.across_hop_seconds
    inside = (place.on_node - 1) * hardware.inside_hop_seconds
    ring = inside + (place.nodes - 1) * hardware.across_hop_seconds
    if call.op != "all_reduce":
        return ring
    tree = inside + math.ceil(math.log2(place.nodes)) * hardware.across_hop_seconds
    return 2 * min(ring, tree)


def _wire_seconds(hardware: Hardware, call: PlacedCall) -> float:
    """Return the bytes of one rank over its links.

    Across nodes a collective drives as many of a node's cards as it has ranks there, ``rails`` at most; a message
    between two ranks has one card, and in an all_to_all each rank sends what is far over its own. Out of a pod the
    groups of its ranks share its links: one has those of its ranks' cards there, over the oversubscription.
    """
    place, sent = call.place, sent_bytes(call.op, call.num_bytes, call.place.ranks)
    inside, card = hardware.inside_rate, hardware.card_rate
    if place.inside:
        return sent / inside
    if call.op == "all_to_all":
        remote = call.num_bytes * (place.ranks - place.on_node) / place.ranks
        far = call.num_bytes * (place.ranks - place.in_pod) / place.ranks if place.pods > 1 else 0.0
        return max(remote / card, (sent - remote) / inside, far * hardware.oversubscription / card)
    cards = 1 if call.op == "send" else min(place.on_node, hardware.rails or place.on_node)
    rate = min(inside, cards * card)
    if place.pods > 1:
        rate = min(
            rate, (1 if call.op == "send" else place.in_pod) * card / hardware.oversubscription
        )
    return sent / rate


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An operation's fit, the ranks it was measured on, and the smallest and largest size.

    ``inside`` is whether they share a node, None where nothing was asked of the kind of group.
    """

    op: str
    ranks: int
    fit: "CurveFit"
    smallest: int
    largest: int
    inside: bool | None = None


def curves_of(run: Run, *, grouped: bool = False) -> list[Curve]:
    """Return the fits of blocking float32 calls of whole worlds, by operation and ranks; medians over repetitions.

    ``grouped`` takes those of the ranks of each node and of one rank of each as well, and tells where each is.
    """
    # It imports numpy and scipy, which a plan from declared hardware does not need.
    from parbench.bench.results.fit import CurvePoint, fit_curve

    times: dict[tuple[str, int, bool | None], dict[int, list[float]]] = {}
    for record in run.records:
        op = record.case.short_name
        time = record.metrics.get("time")
        group = str(record.case.params.get("group", "world")) if grouped else "world"
        world = record.world
        on_node = world.size // max(1, world.nodes)
        ranks = {"world": world.size, "node": on_node, "across": world.nodes}.get(group, 1)
        if _is_plain(record, grouped) and time is not None and time.value and ranks > 1:
            inside = ranks <= on_node and group != "across" if grouped else None
            by_size = times.setdefault((op, ranks, inside), {})
            by_size.setdefault(_size_of(record), []).append(time.value)
    found = []
    for (op, ranks, inside), by_size in times.items():
        fitted = fit_curve(
            [
                CurvePoint(size_bytes=size, seconds=median(values))
                for size, values in by_size.items()
            ]
        )
        if fitted is not None:
            sizes = {"smallest": min(by_size), "largest": max(by_size)}
            found.append(Curve(op=op, ranks=ranks, fit=fitted, inside=inside, **sizes))
    return found


def _is_plain(record: Record, grouped: bool) -> bool:
    """Say whether it is a call of all ranks with a size; one that nobody answers moves nothing to scale by."""
    params = record.case.params
    return (
        record.case.name.startswith(("collective.", "p2p."))
        and record.status == "ok"
        and record.world.size > 1
        and params.keys()
        <= {"size_bytes", "dtype", "mode", "source", "target", *(["group"] if grouped else [])}
        and (params.get("mode"), params.get("dtype")) == ("blocking", "float32")
        and _size_of(record) > 0
    )


def _size_of(record: Record) -> int:
    return size if isinstance(size := record.case.params.get("size_bytes"), int) else 0


def by_curves(curves: Sequence[Curve], *, roughly: bool = False) -> Seconds:
    """Return the rule that takes a call's time from a run's fits; ``UserError`` where no curve can stand in for it.

    ``roughly`` lets a hop of a collective stand in for a message.
    """

    def seconds(call: PlacedCall) -> float:
        if call.place.ranks == 1:
            return 0.0
        curve = curve_for(call, curves, roughly=roughly)
        if curve.op in MESSAGES:
            return curve.fit.predict(round(call.num_bytes))
        # as many bytes on a link, and the latency of as many hops
        crossing = sent_bytes(call.op, call.num_bytes, call.place.ranks) / sent_bytes(
            curve.op, 1.0, curve.ranks
        )
        hops, measured = (
            1 if op == "send" else (2 if op == "all_reduce" else 1) * (ranks - 1)
            for op, ranks in ((call.op, call.place.ranks), (curve.op, curve.ranks))
        )
        return curve.fit.predict(round(crossing)) + curve.fit.segments[0].latency_seconds * (
            hops / measured - 1
        )

    return seconds


def curve_for(call: PlacedCall, curves: Sequence[Curve], *, roughly: bool = False) -> Curve:
    """Return the operation's own curve, of as many ranks if there is one, or what stands in for it."""
    for op in (call.op, *_INSTEAD.get(call.op, ()), *(_AS_A_MESSAGE if roughly else ())):
        alike = [curve for curve in curves if curve.op == op]
        if alike:
            where = call.place.inside
            return min(
                alike,
                key=lambda one: (
                    one.inside not in (None, where),
                    one.ranks != call.place.ranks,
                    -one.ranks,
                ),
            )
    wanted = "p2p.unidirectional" if call.op == "send" else f"collective.{call.op}"
    raise UserError(
        f"the run has no fit for {call.op}: it needs three sizes of {wanted}, mode=blocking, dtype=float32"
    )


def beyond(calls: Sequence[PlacedCall], curves: Sequence[Curve]) -> tuple[str, ...]:
    """Return the calls whose size lies beyond what was measured, or whose ranks were not, for people."""
    notes = []
    for call in calls:
        curve = curve_for(call, curves)
        what = f"{call.axis}: {call.op}"
        if curve.ranks != call.place.ranks and call.op != "send":
            notes.append(
                f"{what} on {call.place.ranks} ranks by the fit of {curve.op} on {curve.ranks}"
            )
        elif curve.op != call.op and call.op != "send":
            notes.append(f"{what} by the fit of {curve.op}")
        elif not curve.smallest <= call.num_bytes <= curve.largest:
            notes.append(
                f"{what} of {call.num_bytes:,.0f} B is beyond {curve.smallest} to {curve.largest} B"
            )
    return tuple(dict.fromkeys(notes))


def positive(told: object) -> float:
    """Return a positive number of a file, 0 where there is none."""
    return float(told) if isinstance(told, int | float) and 0 < told < 1e30 else 0.0


def hardware_of_run(run: Run, base: Hardware) -> tuple[Hardware, tuple[str, ...]]:
    """Return the machine of a run as far as it tells, the rest as ``base``, and sentences that say which is which."""
    if not run.records:
        raise UserError(f"{run.path} holds no records to fit")
    world = max((record.world for record in run.records), key=lambda each: each.size)
    told: dict[str, float] = {"gpus_per_node": max(1, world.size // max(1, world.nodes))}
    peaks = [peak for record in run.records if isinstance(peak := record.details.get("peak"), dict)]
    rates_of = [positive(peak.get("flops_per_second")) for peak in peaks]
    if flops := [rate for rate in rates_of if rate]:
        told |= {"flops_per_second": max(flops), "float32_share": 1.0}
    host = (run.info.environment or {}).get("host")
    if (
        world.device == "cpu"
        and isinstance(host, dict)
        and (memory := positive(host.get("memory_bytes")))
    ):
        told["memory_bytes"] = memory / told["gpus_per_node"]
    copies = [one for one in run.records if one.case.name == "memory.copy" and one.status == "ok"]
    rates = [one.metrics["algbw"].value for one in copies if "algbw" in one.metrics]
    if known := [rate for rate in rates if rate is not None]:
        told["memory_bytes_per_second"] = median(known)
    lacking = [
        name
        for name in ("flops_per_second", "memory_bytes", "memory_bytes_per_second")
        if name not in told
    ]
    links = f"fits of {run.path}, latency scaled by hops where ranks differ; every link is taken to be alike"
    found = msgspec.structs.replace(
        base, name=run.path.name, source=f"the run {run.path}", links_from=links, **told
    )
    return found, (
        f"{', '.join(lacking)}: {base.name}'s, for the run does not tell",
    ) if lacking else ()
