"""How much of a pipeline's time is bubble: measured, by closed form, by cause, and in the schedules not taken. Pure."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf, isclose
from statistics import fmean, median
from typing import TypeVar

from parbench.bench.results import details
from parbench.bench.results.details import (
    IDLE_CAUSES,
    Action,
    ActionKind,
    IdleCause,
    SimulatedSchedule,
)
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel import schedules
from parbench.workloads.pipeline_parallel.pipeline_case import layers_of_stages
from parbench.workloads.pipeline_parallel.schedules import (
    Schedule,
    default_chunks,
    make_schedule,
    message,
    peak_held,
    result,
)
from parbench.workloads.pipeline_parallel.simulation import Latency, Timeline, simulate

Key = TypeVar("Key", bound=Hashable)


def bubble_fraction(timeline: Timeline) -> float:
    """Return the idle share of all ranks' time from the first start to the last stop: bubble / total."""
    total = timeline.ranks * timeline.makespan
    return timeline.idle / total if total else 0.0


def bubble_overhead(timeline: Timeline) -> float:
    """Return idle time over busy time: bubble / ideal, (P-1)/M for 1F1B."""
    busy = sum(timeline.busy(rank) for rank in range(timeline.ranks))
    return timeline.idle / busy if busy else 0.0


def bubble_fraction_span(timeline: Timeline) -> float:
    """Return the largest idle share of a rank's own span, from its first start to its last stop.

    What zero-bubble papers count: a rank that starts late and ends late, by as much, loses nothing to its next step.
    """
    return max(span_fractions(timeline), default=0.0)


def span_fractions(timeline: Timeline) -> list[float]:
    """Return by rank the idle share of its own span, 0 where it has none."""
    spans = [(timeline.busy(rank), timeline.span(rank)) for rank in range(timeline.ranks)]
    return [1 - busy / span if span else 0.0 for busy, span in spans]


@dataclass(frozen=True)
class ClosedForm:
    """Bubble by formula, in seconds on one rank, None where no formula holds; ``note`` says which one, or why none.

    ``span_bubble_seconds`` is that of the rank with the most idle time in its own span.
    """

    makespan_bubble_seconds: float | None
    span_bubble_seconds: float | None
    note: str


def closed_form(name: str, *, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float) -> ClosedForm:
    """Return the bubble of the named schedule where F, I, W are seconds of a rank's whole stage for one microbatch.

    arXiv 2104.04473 gives (P-1)(F+B) for GPipe and 1F1B and 1/v of it interleaved, at M >= P; arXiv 2401.10241, table
    2, (P-1)(F+I-W) for ZB-H1 and, in a rank's span, (P-1)(F+I-2W) for ZB-H2, where W is no longer than F and I. The
    maxima here extend these to all times, and (v-1)(P-M) more hops to M < P: derived with the simulator, which agrees
    for all F, I, W. The V's are exact at F = I = W alone; DualPipeV's is half of (P-1)(F&B + B - 3W), which counts a
    forward and backward that must both be ready and leave together. ``chunks`` 0 is the schedule's own default.
    """
    p, m = ranks, microbatches
    if why_not := _why_no_form(name, p, m, equal=isclose(f, i) and isclose(i, w)):
        return ClosedForm(None, None, why_not)
    v = chunks or default_chunks(name)
    by_chunks = "/v" if v > 1 else ""
    if name == "naive":
        return ClosedForm(m * (p - 1) * (f + i + w), m * (p - 1) * (f + i + w), "M(P-1)(F+B)")
    if name in ("zb_h1", "interleaved_zb"):
        form = f"(P-1)max(F, I, F+I-W){by_chunks}; in a rank's span without F"
        return ClosedForm((p - 1) * max(f, i, f + i - w) / v, (p - 1) * max(i, f + i - w) / v, form)
    if name == "zb_h2":
        form = "(P-1)max(F, I-F, F+I-2W); in a rank's span 0 in place of F"
        bubble = max(i - f, f + i - 2 * w)
        return ClosedForm((p - 1) * max(f, bubble), (p - 1) * max(0.0, bubble), form)
    if name == "zb_v":
        return ClosedForm((p - 1) * f / 2, 0.0, "(P-1)F/2 at F = I = W; in a rank's span 0")
    if name == "dualpipe_v":
        form = "(P-1)F/2 at F = I = W with forward and backward in sequence; (P-1)F where they start and end as one"
        return ClosedForm((p - 1) * f / 2, (p - 1) * f / 2, form)
    hops = p - 1 + (v - 1) * max(0, p - m)
    bubble = hops * (f + i + w) / v
    return ClosedForm(bubble, bubble, f"{'(P-1 + (v-1)(P-M))' if v > 1 and m < p else '(P-1)'}(F+B){by_chunks}")


def _why_no_form(name: str, p: int, m: int, *, equal: bool) -> str:
    if name not in schedules.NAMES:
        return f"no closed form of {name}"
    if name in ("zb_v", "dualpipe_v") and not equal:
        return "no closed form unless F = I = W"
    if name in ("zb_h1", "interleaved_zb") and m < p:
        return f"no closed form at microbatches({m}) < ranks({p}), which do not fill the pipeline"
    if name in ("zb_h2", "zb_v") and m < 2 * p - 1:
        return f"no closed form at microbatches({m}) < 2 ranks - 1({2 * p - 1}): they do not fill it"
    return ""


def fraction_of(bubble_seconds: float, microbatches: int, f: float, i: float, w: float) -> float:
    """Return bubble / total of a rank that has ``bubble_seconds`` beside M (F+I+W) of work."""
    return bubble_seconds / (bubble_seconds + microbatches * (f + i + w))


def facts_of(schedule: Schedule) -> details.PipelineDetails:
    return details.PipelineDetails(
        schedule=schedule.name,
        ranks=schedule.ranks,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        stages_by_rank=tuple(schedule.stages_of(rank) for rank in range(schedule.ranks)),
    )


def rows_of(timeline: Timeline) -> details.PipelineTimeline:
    """Return each rank's actions with their starts and stops in microseconds."""
    return tuple(
        tuple(details.TimedAction(str(ran.action), as_us(ran.start), as_us(ran.stop)) for ran in timeline.of(rank))
        for rank in range(timeline.ranks)
    )


def as_us(seconds: float) -> int:
    return round(seconds * 1e6)


def split_idle(measured: Timeline, schedule: Schedule, latency: Latency) -> dict[IdleCause, float]:
    """Return the measured idle seconds by cause, mean per rank; they sum to all of it by construction.

    schedule is the idle time of a simulation in which every action takes the mean of its kind; imbalance is what the
    mean of its stage and kind adds, p2p what ``latency`` adds to that, and rest (jitter, host) what else was measured.
    A cause that made a rank wait less than the ones before it is negative.
    """
    idle = [each.idle / measured.ranks for each in (*_models(measured, schedule, latency), measured)]
    return {cause: there - before for cause, before, there in zip(IDLE_CAUSES, [0.0, *idle[:-1]], idle, strict=True)}


def shade(measured: Timeline, schedule: Schedule, latency: Latency) -> list[tuple[int, float, float, IdleCause]]:
    """Return every gap of every rank, from the first start to the last stop of all, cut into causes.

    Each piece is a rank, a start and a stop in the timeline's own seconds, and why nothing runs.
    A gap's first part is as long as the same gap by the schedule alone, then come what imbalance and links add to it,
    and the rest; so the shades of a rank fill its gaps exactly, while a cause's sum need not be that of ``split_idle``:
    a gap too short for what a model expects has no negative part.
    """
    models = _models(measured, schedule, latency)
    shades: list[tuple[int, float, float, IdleCause]] = []
    for rank in range(measured.ranks):
        for (start, end), *expected in zip(*(_gaps(each, rank) for each in (measured, *models)), strict=True):
            begin = start
            for cause, (expected_start, expected_stop) in zip(IDLE_CAUSES, [*expected, (0.0, inf)], strict=True):
                stop = min(end, begin + max(0.0, expected_stop - expected_start))
                if stop > start:
                    shades.append((rank, start, stop, cause))
                    start = stop
    return shades


def predicted(measured: Timeline, schedule: Schedule) -> Timeline:
    """Return the schedule from 0, every action taking the measured mean of its kind, messages none."""
    _refuse_another_order(measured, schedule)
    mean_seconds = _means([measured], lambda action: action.kind)
    return simulate(schedule, lambda action: mean_seconds[action.kind])


def link_latency(measured: Sequence[Timeline], schedule: Schedule) -> dict[tuple[int, int], float]:
    """Return seconds from one rank to another, by (from, to), for all that exchange activations or gradients.

    The median of (consumer's start - producer's stop) over messages that the consumer's rank, idle already, waited for;
    where there is none, the least of all of them, never below 0. Ranks' clocks must agree.
    """
    gaps: defaultdict[tuple[int, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for timeline in measured:
        _refuse_another_order(timeline, schedule)
        made = {result(ran.action): ran for ran in timeline.ran}
        for rank in range(timeline.ranks):
            free_at = -inf
            for ran in timeline.of(rank):
                received = message(ran.action, schedule.num_stages)
                if received is not None and (source := made[received]).rank != rank:
                    waited, others = gaps[source.rank, rank]
                    (waited if source.stop > free_at else others).append(ran.start - source.stop)
                free_at = max(free_at, ran.stop)
    return {link: max(0.0, median(seen) if seen else min(others)) for link, (seen, others) in sorted(gaps.items())}


def _models(measured: Timeline, schedule: Schedule, latency: Latency) -> tuple[Timeline, Timeline, Timeline]:
    """Return the simulations by mean times of each kind, by those of each stage and kind, and these with latency."""
    by_kind = predicted(measured, schedule)
    means = _means([measured], lambda action: (action.stage, action.kind))
    seconds = {ran.action: means[ran.action.stage, ran.action.kind] for ran in measured.ran}.__getitem__
    return by_kind, simulate(schedule, seconds), simulate(schedule, seconds, latency)


def _means(timelines: Sequence[Timeline], key: Callable[[Action], Key]) -> dict[Key, float]:
    seconds: dict[Key, list[float]] = {}
    for ran in (ran for timeline in timelines for ran in timeline.ran):
        seconds.setdefault(key(ran.action), []).append(ran.stop - ran.start)
    return {group: fmean(values) for group, values in seconds.items()}


def _gaps(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return the gap before each action of ``rank`` and the one after its last; where actions touch it is empty."""
    gaps, reached = [], timeline.first_start
    for ran in timeline.of(rank):
        gaps.append((reached, ran.start))
        reached = max(reached, ran.stop)
    return [*gaps, (reached, timeline.first_start + timeline.makespan)]


def _refuse_another_order(measured: Timeline, schedule: Schedule) -> None:
    if measured.ranks != schedule.ranks:
        raise UserError(f"ranks of the timeline({measured.ranks}) != ranks of {schedule.name}({schedule.ranks})")
    for rank in range(schedule.ranks):
        ran, planned = [each.action for each in measured.of(rank)], schedule.actions_of(rank)
        if len(ran) != len(planned):
            raise UserError(f"rank {rank} ran actions({len(ran)}) != actions({len(planned)}) of {schedule.name}")
        for step, (found, expected) in enumerate(zip(ran, planned, strict=True)):
            if found != expected:
                raise UserError(f"rank {rank} ran {found} at step {step}, where {schedule.name} has {expected}")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Mean seconds of one rank's whole share of one microbatch: forward, input gradient, weight gradient.

    Where the two gradients were not told apart (``assumed_halves``), each is taken for half of them.
    """

    f: float
    i: float
    w: float
    assumed_halves: bool = False


def shares_of(timelines: Sequence[Timeline], chunks: int) -> Shares:
    means = {kind: chunks * seconds for kind, seconds in _means(timelines, lambda action: action.kind).items()}
    if "I" in means and "W" in means:
        return Shares(f=means["F"], i=means["I"], w=means["W"])
    return Shares(f=means["F"], i=means["B"] / 2, w=means["B"] / 2, assumed_halves=True)


def compare(
    schedule: Schedule, shares: Shares, *, layers: int, layer_bytes: float, latency: float, outside: float
) -> tuple[SimulatedSchedule, ...]:
    """Return what could run in place of ``schedule``, each with its default chunks, the fastest first.

    A message takes ``latency`` seconds, what is around the pipeline ``outside`` seconds; ``layer_bytes`` are a layer's
    activations. Those that cannot run come last.
    """
    ranks, microbatches = schedule.ranks, schedule.microbatches

    def line(name: str) -> SimulatedSchedule:
        chunks = default_chunks(name)
        try:
            other = make_schedule(name, ranks=ranks, microbatches=microbatches)
            counts = layers_of_stages(layers, other.num_stages)
        except UserError as error:
            return SimulatedSchedule(schedule=name, chunks=chunks, measured=False, why_not=str(error))
        of_rank: dict[ActionKind, float] = {"F": shares.f, "I": shares.i, "W": shares.w, "B": shares.i + shares.w}
        timeline = simulate(other, lambda action: of_rank[action.kind] / chunks, lambda *link: latency)
        held = max(peak_held(other, rank, lambda stage: 1) for rank in range(ranks))
        return SimulatedSchedule(
            schedule=name,
            chunks=chunks,
            measured=False,
            step_seconds=timeline.makespan + outside,
            bubble_fraction=bubble_fraction(timeline),
            in_flight=held / chunks,
            activation_bytes=layer_bytes * held * counts[0],
        )

    lines = map(line, schedules.NAMES)
    return tuple(sorted(lines, key=lambda one: inf if one.step_seconds is None else one.step_seconds))
