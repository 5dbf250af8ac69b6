"""How much of a pipeline's time is bubble: measured, by closed form, and split into what causes it."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from statistics import fmean, median
from typing import TypeVar, get_args

from bench.results.details import Action, ActionKind, Cause
from bench.text import UserError
from workloads.pipeline_parallel.actions import Result, message, result
from workloads.pipeline_parallel.schedules import Schedule, default_chunks
from workloads.pipeline_parallel.simulate import Latency, Ran, Timeline, simulate

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
    spans = [(timeline.busy(rank), timeline.span(rank)) for rank in range(timeline.ranks)]
    return max((1 - busy / span for busy, span in spans if span), default=0.0)


@dataclass(frozen=True, kw_only=True)
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
    for all F, I, W. The V's are exact at F = I = W alone. ``chunks`` 0 is the schedule's own default.
    """
    if name not in _FORMS:
        return ClosedForm(makespan_bubble_seconds=None, span_bubble_seconds=None, note=f"no closed form of {name}")
    asked = _Asked(p=ranks, m=microbatches, v=chunks or default_chunks(name), f=f, i=i, w=w)
    return _FORMS[name](asked)


def fraction_of(bubble_seconds: float, microbatches: int, f: float, i: float, w: float) -> float:
    """Return bubble / total of a rank that has ``bubble_seconds`` beside M (F+I+W) of work."""
    return bubble_seconds / (bubble_seconds + microbatches * (f + i + w))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    p: int
    m: int
    v: int
    f: float
    i: float
    w: float


def _naive(at: _Asked) -> ClosedForm:
    bubble = at.m * (at.p - 1) * (at.f + at.i + at.w)
    return ClosedForm(makespan_bubble_seconds=bubble, span_bubble_seconds=bubble, note="M(P-1)(F+B)")


def _fill_and_drain(at: _Asked) -> ClosedForm:
    hops = at.p - 1 + (at.v - 1) * max(0, at.p - at.m)
    bubble = hops * (at.f + at.i + at.w) / at.v
    hops_note = "(P-1 + (v-1)(P-M))" if at.v > 1 and at.m < at.p else "(P-1)"
    note = f"{hops_note}(F+B){'/v' if at.v > 1 else ''}"
    return ClosedForm(makespan_bubble_seconds=bubble, span_bubble_seconds=bubble, note=note)


def _zb_h1(at: _Asked) -> ClosedForm:
    if at.m < at.p:
        return _none(f"no closed form at microbatches({at.m}) < ranks({at.p}), which do not fill the pipeline")
    bubble = at.f + at.i - at.w
    return ClosedForm(
        makespan_bubble_seconds=(at.p - 1) * max(at.f, at.i, bubble) / at.v,
        span_bubble_seconds=(at.p - 1) * max(at.i, bubble) / at.v,
        note=f"(P-1)max(F, I, F+I-W){'/v' if at.v > 1 else ''}; in a rank's span without F",
    )


def _zb_h2(at: _Asked) -> ClosedForm:
    if at.m < 2 * at.p - 1:
        return _none(f"no closed form at microbatches({at.m}) < 2 ranks - 1({2 * at.p - 1}): they do not fill it")
    bubble = max(at.i - at.f, at.f + at.i - 2 * at.w)
    return ClosedForm(
        makespan_bubble_seconds=(at.p - 1) * max(at.f, bubble),
        span_bubble_seconds=(at.p - 1) * max(0.0, bubble),
        note="(P-1)max(F, I-F, F+I-2W); in a rank's span 0 in place of F",
    )


def _zb_v(at: _Asked) -> ClosedForm:
    if not (isclose(at.f, at.i) and isclose(at.i, at.w)):
        return _none("no closed form unless F = I = W")
    if at.m < 2 * at.p - 1:
        return _none(f"no closed form at microbatches({at.m}) < 2 ranks - 1({2 * at.p - 1}): they do not fill it")
    return ClosedForm(
        makespan_bubble_seconds=(at.p - 1) * at.f / 2,
        span_bubble_seconds=0.0,
        note="(P-1)F/2 at F = I = W; in a rank's span 0",
    )


def _dualpipe_v(at: _Asked) -> ClosedForm:
    """Half of (P-1)(F&B + B - 3W): that counts a forward and backward that must both be ready and leave together."""
    if not (isclose(at.f, at.i) and isclose(at.i, at.w)):
        return _none("no closed form unless F = I = W")
    bubble = (at.p - 1) * at.f / 2
    note = "(P-1)F/2 at F = I = W with forward and backward in sequence; (P-1)F where they start and end as one"
    return ClosedForm(makespan_bubble_seconds=bubble, span_bubble_seconds=bubble, note=note)


def _none(note: str) -> ClosedForm:
    return ClosedForm(makespan_bubble_seconds=None, span_bubble_seconds=None, note=note)


_FORMS: Mapping[str, Callable[[_Asked], ClosedForm]] = {
    "naive": _naive,
    "gpipe": _fill_and_drain,
    "1f1b": _fill_and_drain,
    "interleaved": _fill_and_drain,
    "looped_bfs": _fill_and_drain,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "interleaved_zb": _zb_h1,
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
}


@dataclass(frozen=True, kw_only=True)
class IdleSplit:
    """Idle seconds by cause, mean per rank; a cause that made a rank wait less than the ones before it is negative."""

    schedule: float
    imbalance: float
    p2p: float
    rest: float

    @property
    def idle(self) -> float:
        """All of it: the measured idle seconds, mean per rank."""
        return self.schedule + self.imbalance + self.p2p + self.rest


@dataclass(frozen=True, kw_only=True)
class Shade:
    """A stretch of a rank's idle time, in the timeline's own seconds, and its cause."""

    rank: int
    start: float
    stop: float
    cause: Cause


def split_idle(measured: Timeline, schedule: Schedule, latency: Latency) -> IdleSplit:
    """Return what the measured idle time is made of; the parts sum to it by construction.

    schedule is the idle time of a simulation in which every action takes the mean of its kind; imbalance is what the
    mean of its stage and kind adds, p2p what ``latency`` adds to that, and rest (jitter, host) what else was measured.
    """
    models = _models(measured, schedule, latency)
    by_kind, by_stage, with_links, all_of_it = (each.idle / measured.ranks for each in (*models, measured))
    return IdleSplit(
        schedule=by_kind, imbalance=by_stage - by_kind, p2p=with_links - by_stage, rest=all_of_it - with_links
    )


def shade(measured: Timeline, schedule: Schedule, latency: Latency) -> tuple[Shade, ...]:
    """Return every gap of every rank, from the first start to the last stop of all, cut into causes.

    A gap's first part is as long as the same gap by the schedule alone, then come what imbalance and links add to it,
    and the rest; so the shades of a rank fill its gaps exactly, while a cause's sum need not be that of ``split_idle``:
    a gap too short for what a model expects has no negative part.
    """
    models = _models(measured, schedule, latency)
    return tuple(
        piece
        for rank in range(measured.ranks)
        for gap, *expected in zip(*(_gaps(each, rank) for each in (measured, *models)), strict=True)
        for piece in _cut(rank, gap, [max(0.0, stop - start) for start, stop in expected])
    )


def predicted(measured: Timeline, schedule: Schedule) -> Timeline:
    """Return the schedule from 0, every action taking the measured mean of its kind, messages none."""
    _refuse_another_order(measured, schedule)
    mean_seconds = _means(measured, _kind)
    return simulate(schedule, lambda action: mean_seconds[action.kind])


def link_latency(measured: Sequence[Timeline], schedule: Schedule) -> dict[tuple[int, int], float]:
    """Return seconds from one rank to another, by (from, to), for all that exchange activations or gradients.

    The median of (consumer's start - producer's stop) over messages that the consumer's rank, idle already, waited for;
    where there is none, the least of all of them, never below 0. Ranks' clocks must agree.
    """
    waited: dict[tuple[int, int], list[float]] = {}
    others: dict[tuple[int, int], list[float]] = {}
    for timeline in measured:
        _refuse_another_order(timeline, schedule)
        for source, target, free_at in _messages(timeline, schedule):
            into = waited if source.stop > free_at else others
            into.setdefault((source.rank, target.rank), []).append(target.start - source.stop)
    links = sorted({*waited, *others})
    return {link: max(0.0, median(waited[link]) if link in waited else min(others[link])) for link in links}


def _messages(timeline: Timeline, schedule: Schedule) -> Iterator[tuple[Ran, Ran, float]]:
    """Yield producer, consumer and when the consumer's rank became free, for all messages between ranks."""
    made: dict[Result, Ran] = {result(ran.action): ran for ran in timeline.ran}
    for rank in range(timeline.ranks):
        free_at = float("-inf")
        for ran in timeline.of(rank):
            received = message(ran.action, schedule.num_stages)
            if received is not None and made[received].rank != rank:
                yield made[received], ran, free_at
            free_at = max(free_at, ran.stop)


def _models(measured: Timeline, schedule: Schedule, latency: Latency) -> tuple[Timeline, Timeline, Timeline]:
    """Return the simulations by mean times of each kind, by those of each stage and kind, and these with latency."""

    def by_stage(action: Action) -> float:
        return stage_seconds[_stage_and_kind(action)]

    stage_seconds = _means(measured, _stage_and_kind)
    return predicted(measured, schedule), simulate(schedule, by_stage), simulate(schedule, by_stage, latency)


def _kind(action: Action) -> ActionKind:
    return action.kind


def _stage_and_kind(action: Action) -> tuple[int, ActionKind]:
    return action.stage, action.kind


def _means(measured: Timeline, key: Callable[[Action], Key]) -> dict[Key, float]:
    seconds: dict[Key, list[float]] = {}
    for ran in measured.ran:
        seconds.setdefault(key(ran.action), []).append(ran.stop - ran.start)
    return {group: fmean(values) for group, values in seconds.items()}


def _gaps(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return the gap before each action of ``rank`` and the one after its last; where actions touch it is empty."""
    gaps, reached = [], timeline.first_start
    for ran in timeline.of(rank):
        gaps.append((reached, ran.start))
        reached = max(reached, ran.stop)
    return [*gaps, (reached, timeline.first_start + timeline.makespan)]


def _cut(rank: int, gap: tuple[float, float], expected: Sequence[float]) -> Iterator[Shade]:
    begin, end = gap
    start = begin
    for cause, seconds in zip(get_args(Cause), (*expected, inf), strict=True):
        stop = min(end, begin + seconds)
        if stop > start:
            yield Shade(rank=rank, start=start, stop=stop, cause=cause)
            start = stop


def _refuse_another_order(measured: Timeline, schedule: Schedule) -> None:
    """Refuse to explain a timeline by a schedule that it did not follow."""
    if measured.ranks != schedule.ranks:
        raise UserError(f"ranks of the timeline({measured.ranks}) != ranks of {schedule.name}({schedule.ranks})")
    for rank in range(schedule.ranks):
        ran, planned = [each.action for each in measured.of(rank)], schedule.actions_of(rank)
        if len(ran) != len(planned):
            raise UserError(f"rank {rank} ran actions({len(ran)}) != actions({len(planned)}) of {schedule.name}")
        for step, (found, expected) in enumerate(zip(ran, planned, strict=True)):
            if found != expected:
                raise UserError(f"rank {rank} ran {found} at step {step}, where {schedule.name} has {expected}")
