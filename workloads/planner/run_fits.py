"""The links of a run: latency and bandwidth as its own collectives measured them, carried over to other rank counts.

A call on as many ranks as were measured takes what the fit says. On others the latency goes with the hops of a ring,
n - 1 and twice that for an all_reduce, and the bandwidth with the bytes that cross a link: as if more ranks came with
more of the same links. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from bench.results.records import Record
from bench.results.runs import Run
from bench.results.stats import median
from bench.text import UserError
from workloads.costs.communication_pattern import sent_bytes
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Call, Seconds

if TYPE_CHECKING:
    from bench.results.fit import Fit

# what stands in for an operation that a run did not measure: the same bytes over the same links
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_reduce": ("all_gather", "reduce_scatter"),
    "all_to_all": ("all_gather", "all_reduce"),
    "broadcast": ("all_gather", "all_reduce"),
    "send": ("unidirectional", "sendrecv", "pingpong", "bidirectional"),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An operation's fit, the ranks it was measured on, and the smallest and largest size."""

    op: str
    ranks: int
    fit: "Fit"
    smallest: int
    largest: int


def curves_of(run: Run) -> dict[tuple[str, int], Curve]:
    """Return the fits of blocking float32 calls of whole worlds, by operation and ranks; medians over launches."""
    from bench.results.fit import Point, fit  # imports numpy, which a plan from declared hardware does not need

    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    for record in run.records:
        known = _point(record)
        if known is not None:
            op, size, seconds = known
            times.setdefault((op, record.world.size), {}).setdefault(size, []).append(seconds)
    found = {}
    for (op, ranks), by_size in times.items():
        fitted = fit([Point(size_bytes=size, seconds=median(values)) for size, values in by_size.items()])
        if fitted is not None:
            found[op, ranks] = Curve(op=op, ranks=ranks, fit=fitted, smallest=min(by_size), largest=max(by_size))
    return found


def by_curves(curves: Mapping[tuple[str, int], Curve]) -> Seconds:
    """Return the rule that takes a call's time from a run's fits; ``UserError`` where no curve can stand in for it."""

    def seconds(call: Call) -> float:
        if call.place.ranks == 1:
            return 0.0
        curve = curve_for(call, curves)
        if curve.op in _INSTEAD["send"] and call.op == "send":
            return curve.fit.predict(round(call.num_bytes))
        return _scaled(call, curve)

    return seconds


def curve_for(call: Call, curves: Mapping[tuple[str, int], Curve]) -> Curve:
    """Return the operation's own curve, of as many ranks if there is one, or what stands in for it."""
    for op in (call.op, *_INSTEAD.get(call.op, ())):
        alike = [curve for (name, _), curve in curves.items() if name == op]
        if alike:
            return min(alike, key=lambda curve: (curve.ranks != call.place.ranks, -curve.ranks))
    wanted = "p2p.unidirectional" if call.op == "send" else f"collective.{call.op}"
    raise UserError(f"the run has no fit for {call.op}: it needs three sizes of {wanted}, mode=blocking, dtype=float32")


def _scaled(call: Call, curve: Curve) -> float:
    """Return the curve's time for as many bytes on a link, and its latency for as many hops."""
    crossing = sent_bytes(call.op, call.num_bytes, call.place.ranks)
    per_byte = sent_bytes(curve.op, 1.0, curve.ranks)
    line = curve.fit.predict(round(crossing / per_byte))
    latency = curve.fit.segments[0].latency_seconds
    return line + latency * (_hops(call.op, call.place.ranks) / _hops(curve.op, curve.ranks) - 1)


def _hops(op: str, ranks: int) -> int:
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


def hardware_of_run(run: Run, base: Hardware) -> tuple[Hardware, tuple[str, ...]]:
    """Return the machine of a run as far as it tells, the rest as ``base``, and sentences that say which is which."""
    worlds = [record.world for record in run.records]
    if not worlds:
        raise UserError(f"{run.path} holds no records to fit")
    world = max(worlds, key=lambda each: each.size)
    told: dict[str, float] = {"gpus_per_node": max(1, world.size // world.nodes)}  # what is found here, by field
    peaks = [peak for record in run.records if (peak := _peak(record)) is not None]
    if peaks:
        told |= {"flops_per_second": max(peaks), "float32_share": 1.0}
    memory = _host_memory(run)
    if memory is not None and world.device == "cpu":
        told["memory_bytes"] = memory / told["gpus_per_node"]
    rates = [rate for record in run.records if (rate := _copy_rate(record)) is not None]
    if rates:
        told["memory_bytes_per_second"] = median(rates)
    lacking = [name for name in ("flops_per_second", "memory_bytes", "memory_bytes_per_second") if name not in told]
    links = f"fits of {run.path}, latency scaled by hops where ranks differ; every link is taken to be alike"
    found = msgspec.structs.replace(base, name=run.path.name, source=f"the run {run.path}", links_from=links, **told)
    notes = []
    if lacking:
        notes.append(f"{', '.join(lacking)}: {base.name}'s, for the run does not tell")
    return found, tuple(notes)


def _point(record: Record) -> tuple[str, int, float] | None:
    kind, _, op = record.case.name.partition(".")
    params = record.case.params
    plain = params.keys() <= {"size_bytes", "dtype", "mode", "source", "target"}
    if kind not in ("collective", "p2p") or record.status != "ok" or not plain:
        return None
    if record.world.size < 2:  # a call that nobody answers moves nothing, so that nothing scales with it
        return None
    if params.get("mode") != "blocking" or params.get("dtype") != "float32":
        return None
    size = params.get("size_bytes")
    time = record.metrics.get("time")
    if not isinstance(size, int) or size <= 0 or time is None or not time.value:
        return None
    return op, size, time.value


def _peak(record: Record) -> float | None:
    peak = record.details.get("peak")
    value = peak.get("flops_per_second") if isinstance(peak, dict) else None
    return float(value) if value else None


def _copy_rate(record: Record) -> float | None:
    metric = record.metrics.get("algbw") if record.case.name == "memory.copy" and record.status == "ok" else None
    return metric.value if metric else None


def _host_memory(run: Run) -> float | None:
    host = (run.info.environment or {}).get("host")
    value = host.get("memory_bytes") if isinstance(host, dict) else None
    return float(value) if value else None


def beyond(calls: Sequence[Call], curves: Mapping[tuple[str, int], Curve]) -> tuple[str, ...]:
    """Return the calls whose size lies beyond what was measured, or whose ranks were not, for people."""
    notes = []
    for call in calls:
        curve = curve_for(call, curves)
        if curve.ranks != call.place.ranks and call.op != "send":
            notes.append(
                f"{call.axis}: {call.op} on {call.place.ranks} ranks by the fit of {curve.op} on {curve.ranks}"
            )
        elif curve.op != call.op and call.op != "send":
            notes.append(f"{call.axis}: {call.op} by the fit of {curve.op}")
        elif not curve.smallest <= call.num_bytes <= curve.largest:
            notes.append(
                f"{call.axis}: {call.op} of {call.num_bytes:,.0f} B is beyond {curve.smallest} to {curve.largest} B"
            )
    return tuple(dict.fromkeys(notes))
