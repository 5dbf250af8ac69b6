"""Where the time of traced steps went: each rank's, each collective's, and who was waited for.

All ranks' clocks are brought together by collectives, which end on all of their ranks at about the same time.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from parbench.bench.plan.catalogue import get_busbw_factor
from parbench.bench.results.records import Timeline
from parbench.bench.results.spans import Breakdown, Span, compute_breakdown, intersection
from parbench.bench.results.step_trace import CallFacts, StepTrace, build_rank_timeline
from parbench.bench.text import UserError
from parbench.reports.traces.kineto import RankTrace, Source, files_of, read_rank

_READERS = 2
PEER_TO_PEER = {"send", "recv", "sendrecv"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call on one rank, and when on this rank's own clock."""

    facts: CallFacts
    span: Span

    @property
    def label(self) -> str:
        group = self.facts.group or (f"{self.facts.size} ranks" if self.facts.size else "")
        return f"{self.facts.op} {group}".strip()


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """A collective as its ranks saw it: from when each came to when it ended there, in ns of one clock.

    It moves while it lasts on the rank where it is shortest, for which all others wait; ``waited_ns`` is how long it
    stood behind the one before it on its group, where calls are queued.
    """

    label: str
    facts: CallFacts
    step: int
    spans: Mapping[int, Span]
    waited_ns: Mapping[int, int]

    @property
    def last(self) -> int:
        return max(self.spans, key=lambda rank: self.spans[rank][0])

    @property
    def transfer_ns(self) -> int:
        return min(
            stop - start - self.waited_ns[rank] for rank, (start, stop) in self.spans.items()
        )

    @property
    def busbw(self) -> float | None:
        """Bus bandwidth in B/s by nccl-tests' convention."""
        size, num_bytes = self.facts.size, self.facts.num_bytes
        factor = get_busbw_factor(self.facts.op, size) if size else None
        if factor is None or num_bytes is None or self.transfer_ns <= 0:
            return None
        return factor * num_bytes / self.transfer_ns * 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A rank's step: what it did within its window, and how its wall divides."""

    name: str
    window: Span
    compute: list[Span]
    copies: list[Span]
    calls: list[Call]
    phases: list[tuple[str, Span]]
    parts: Breakdown

    @property
    def busy(self) -> list[Span]:
        return [*self.compute, *self.copies]


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """A rank's steps in their order."""

    source: Source
    steps: tuple[Step, ...]

    @property
    def rank(self) -> int:
        return self.source.rank

    @property
    def calls(self) -> Iterator[Call]:
        return (call for step in self.steps for call in step.calls)

    @property
    def middle(self) -> int:
        """The step of median wall."""
        order = sorted(range(len(self.steps)), key=lambda step: self.steps[step].parts.wall_seconds)
        return order[(len(order) - 1) // 2]

    def median(self, of: Callable[[Breakdown], float]) -> float:
        """Return the median over steps of what ``of`` takes from a breakdown."""
        return median(of(step.parts) for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The traces of a job's ranks; clocks agree within ``doubt_ns``, None where nothing tells how they differ."""

    ranks: tuple[RankSteps, ...]
    shared: tuple[SharedCall, ...]
    offsets_ns: Mapping[int, int]
    doubt_ns: int | None
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len(self.ranks[0].steps)


def read_job(paths: Sequence[Path]) -> Job:
    """Read a job's files, two at a time; ``UserError`` where one is no trace, or two are of one rank."""
    files = files_of(paths)
    if len(files) == 1:
        return job_of([read_steps(files[0])])
    with ProcessPoolExecutor(max_workers=_READERS, mp_context=get_context("fork")) as readers:
        return job_of(list(readers.map(read_steps, files, range(len(files)))))


def read_steps(path: Path, place: int = 0) -> RankSteps:
    """Read a rank's file, and divide its steps."""
    return steps_of(read_rank(path, place))


def job_of(ranks: Sequence[RankSteps]) -> Job:
    """Put the ranks of a job together; ``UserError`` where two files are of one rank or no step is of all ranks."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    for one, other in pairwise(ranks):
        if one.rank == other.rank:
            both = f"{one.source.path} and {other.source.path}"
            raise UserError(
                f"{both} are both of rank {one.rank}: give one job's traces, one a rank"
            )
    ranks, left_out = _of_common_steps(ranks)
    together = list(_together(ranks))
    offsets, doubt_ns = _offsets([one.source for one in ranks], together)
    shared = tuple(_on_one_clock(one, offsets) for one in together) if offsets else ()
    notes = (*left_out, *_notes(ranks, doubt_ns))
    return Job(
        ranks=tuple(ranks), shared=shared, offsets_ns=offsets, doubt_ns=doubt_ns, notes=notes
    )


def _of_common_steps(ranks: Sequence[RankSteps]) -> tuple[list[RankSteps], list[str]]:
    """Return the ranks with the steps that all of them traced, and a note where that leaves some out."""
    names = [[step.name for step in one.steps] for one in ranks]
    common = set(names[0]).intersection(*names[1:])
    if not common:
        told = "; ".join(
            f"rank {one.rank}: {own[0]} to {own[-1]}" for one, own in zip(ranks, names, strict=True)
        )
        raise UserError(
            f"the ranks' traces have no step in common ({told}): give traces of the same steps"
        )
    left = len(set().union(*names)) - len(common)
    kept = [
        replace(one, steps=tuple(step for step in one.steps if step.name in common))
        for one in ranks
    ]
    return kept, [f"{left} steps that not all ranks traced are left out"] if left else []


def steps_of(read: RankTrace) -> RankSteps:
    """Divide each step of a rank."""
    trace, starts = read.trace, [start for _, (start, _) in read.steps]
    by_step: list[list[Call]] = [[] for _ in starts]
    for span, facts in zip(trace.comm, trace.facts or [None] * len(trace.comm), strict=True):
        place = bisect_right(starts, span[0]) - 1
        if place >= 0:
            by_step[place].append(Call(facts or CallFacts("communication"), span))
    steps = []
    for (name, window), calls in zip(read.steps, by_step, strict=True):
        compute, copies = (
            intersection(_within(spans, window), [window])
            for spans in (trace.compute, trace.copies)
        )
        spans: dict[str, list[Span]] = defaultdict(list)
        for call in calls:
            spans[call.label].append(call.span)
        step = Step(
            name=name,
            window=window,
            compute=compute,
            copies=copies,
            calls=calls,
            phases=[
                (phase, span) for phase, span in trace.phases if window[0] <= span[0] < window[1]
            ],
            parts=compute_breakdown(window, compute, spans, copies),
        )
        steps.append(step)
    return RankSteps(source=read.source, steps=tuple(steps))


def timeline_of(job: Job) -> Timeline:
    """Return the step of median wall on the first rank, of all ranks, on one clock where there is one."""
    middle = job.ranks[0].middle
    found = [(rank.rank, rank.steps[middle]) for rank in job.ranks]
    starts = [step.window[0] + job.offsets_ns.get(rank, -step.window[0]) for rank, step in found]
    ranks = []
    for (rank, step), start in zip(found, starts, strict=True):
        trace = StepTrace(
            step=step.window,
            wall_seconds=step.parts.wall_seconds,
            compute=step.compute,
            copies=step.copies,
            phases=step.phases,
        )
        comm = [(call.label, call.facts.op, call.span) for call in step.calls]
        ranks.append(build_rank_timeline(rank, trace, comm, start - min(starts)))
    clock = (
        "one host" if len({rank.source.host for rank in job.ranks}) == 1 else "ends of collectives"
    )
    return Timeline(clock=clock, uncertainty_seconds=(job.doubt_ns or 0) / 1e9, ranks=tuple(ranks))


def _within(spans: Sequence[Span], window: Span) -> Sequence[Span]:
    """Return those of disjoint spans in order that may lie in a window."""
    first = max(bisect_left(spans, (window[0], window[0])) - 1, 0)
    return spans[first : bisect_left(spans, (window[1], window[1]))]


def _together(ranks: Sequence[RankSteps]) -> Iterator[SharedCall]:
    """Yield the collectives that all their traced ranks made, on each rank's own clock.

    The ranks of a group make the same calls in the same order: the k-th of a step on one is the k-th on another.
    """
    seen: dict[tuple[int, str, object, int], dict[int, tuple[Call, int]]] = defaultdict(dict)
    for rank in ranks:
        counts: Counter[tuple[int, str, object]] = Counter()
        reached: dict[object, int] = {}
        for place, call in (
            (place, call) for place, step in enumerate(rank.steps) for call in step.calls
        ):
            facts = call.facts
            members = facts.ranks or facts.group
            if members is None or (facts.op in PEER_TO_PEER and facts.size != 2):
                continue
            key = (place, facts.op if facts.op not in PEER_TO_PEER else "p2p", members)
            start, stop = call.span
            seen[*key, counts[key]][rank.rank] = (
                call,
                max(min(reached.get(members, start), stop) - start, 0),
            )
            reached[members] = max(stop, reached.get(members, stop))
            counts[key] += 1
    traced = {one.rank for one in ranks}
    for (place, *_), calls in seen.items():
        call, _ = next(iter(calls.values()))
        if len(calls) > 1 and set(calls) == set(call.facts.ranks or traced) & traced:
            spans = {rank: one.span for rank, (one, _) in calls.items()}
            waited = {rank: behind for rank, (_, behind) in calls.items()}
            yield SharedCall(
                label=call.label, facts=call.facts, step=place, spans=spans, waited_ns=waited
            )


def _offsets(
    sources: Sequence[Source], together: Sequence[SharedCall]
) -> tuple[dict[int, int], int | None]:
    """Return what to add to each rank's clock, and how far it may be wrong; nothing where hosts share no collective."""
    host_of = {one.rank: one.host or str(one.rank) for one in sources}
    base = {one.rank: one.base_ns for one in sources}
    ends: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in together:
        at = {host_of[rank]: stop + base[rank] for rank, (_, stop) in call.spans.items()}
        for one in at:
            for other in at:
                if one != other:
                    ends[one, other].append(at[one] - at[other])
    shift, doubt = {host_of[sources[0].rank]: 0}, 0
    waiting = list(shift)
    while waiting:
        one = waiting.pop()
        for (known, other), apart in ends.items():
            if known == one and other not in shift:
                middle = round(median(apart))
                shift[other] = shift[one] + middle
                doubt = max(doubt, round(median(abs(each - middle) for each in apart)))
                waiting.append(other)
    if any(host not in shift for host in host_of.values()):
        return {}, None
    return {one.rank: one.base_ns + shift[host_of[one.rank]] for one in sources}, doubt


def _on_one_clock(call: SharedCall, offsets: Mapping[int, int]) -> SharedCall:
    spans = {
        rank: (start + offsets[rank], stop + offsets[rank])
        for rank, (start, stop) in call.spans.items()
    }
    return replace(call, spans=spans)


def _notes(ranks: Sequence[RankSteps], doubt_ns: int | None) -> Iterator[str]:
    sources = [one.source for one in ranks]
    for source in sources:
        yield from (f"rank {source.rank}: {note}" for note in source.notes)
    sizes = {one.world_size for one in sources if one.world_size}
    if sizes and max(sizes) > len(sources):
        yield f"{len(sources)} of {max(sizes)} ranks are here; who is waited for is known among these alone"
    if len({one.host for one in sources}) > 1:
        if doubt_ns is None:
            yield "no collective joins the hosts' clocks: who came late is unknown"
        else:
            yield f"hosts' clocks are brought together by the ends of collectives, within {doubt_ns / 1e3:.0f} us"
    if any(
        call.facts.ranks is None and call.facts.group is None for one in ranks for call in one.calls
    ):
        yield "some collectives do not tell their ranks: who came late to them is unknown"
