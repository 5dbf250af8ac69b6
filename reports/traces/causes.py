"""What costs the traced steps most, in seconds that could be won of a step: each finding with its evidence."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median

from parbench.bench.results.formatting import format_number, format_seconds
from parbench.bench.results.spans import Span, difference, gaps, intersection, length
from parbench.reports.analysis.findings import Finding, Kind
from parbench.reports.traces.kineto import Source
from parbench.reports.traces.steps import PEER_TO_PEER, Call, Job, RankSteps, SharedCall, Step

LEAST_SHARE = 0.03
"""A finding is told from this share of the step on."""
_SLOWER_THAN_FIT, _HOST_GAP_SECONDS = 1.3, 1e-3
_RUN = "parbench run --only"
_s = format_seconds
_GATHERS = {"all_gather"}
_REDUCES = {"all_reduce", "reduce_scatter"}
Ceiling = Callable[[SharedCall], float | None]
"""Seconds that a collective takes by the fits of a run, None where none is known."""
Won = tuple[Kind, float, str, str]
"""A kind of finding, the seconds of a step that could be won, a sentence, and the next command if there is one."""


def causes_of(job: Job, ceiling: Ceiling = lambda _: None) -> tuple[Finding, ...]:
    """Return what costs at least 3 % of the step, by the time that could be won of it, the most first."""
    step = step_seconds(job)
    every = [*_late(job), *_unequal(job), *_exposed(job, ceiling), *_idle(job), *_copies(job)]
    return tuple(
        Finding(
            kind=kind,
            cost=won / step,
            sentence=sentence,
            command=command,
            evidence={"won_seconds": won},
        )
        for kind, won, sentence, command in sorted(every, key=lambda one: -one[1])
        if won >= LEAST_SHARE * step
    )


def step_seconds(job: Job) -> float:
    """Return the median over steps of the slowest rank's."""
    return median(
        max(rank.steps[step].parts.wall_seconds for rank in job.ranks) for step in range(job.steps)
    )


def _compute(rank: RankSteps) -> float:
    return rank.median(lambda parts: parts.compute_seconds)


def _idle_seconds(rank: RankSteps) -> float:
    return rank.median(lambda parts: parts.idle_seconds)


def waits_by_rank(job: Job) -> dict[int, list[float]]:
    """Return for each rank, by step, the seconds that others had nothing to do but to wait for it.

    Of the other ranks the median; none of those that came last to none.
    """
    spans: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for call in job.shared:
        if call.facts.op not in PEER_TO_PEER:
            came = call.spans[call.last][0]
            for rank, (start, _) in call.spans.items():
                spans[call.last, rank, call.step].append(
                    (start - job.offsets_ns[rank], came - job.offsets_ns[rank])
                )
    by_rank = {rank.rank: rank for rank in job.ranks}

    def waited(late: int, rank: int, step: int) -> float:
        if (found := spans.get((late, rank, step))) is None:
            return 0.0
        own = by_rank[rank].steps[step]
        return length(difference(intersection(found, [own.window]), own.busy)) / 1e9

    return {
        late: [
            median([waited(late, rank, step) for rank in by_rank if rank != late])
            for step in range(job.steps)
        ]
        for late in by_rank
    }


def _late(job: Job) -> Iterator[Won]:
    """Find the rank that others wait for: in the median step, and twice as long as for any other."""
    if len(job.ranks) < 2 or not job.shared:
        return
    waits = {rank: median(seconds) for rank, seconds in waits_by_rank(job).items()}
    (late, won), (_, second) = sorted(waits.items(), key=lambda one: -one[1])[:2]
    if won < 2 * second or won <= (job.doubt_ns or 0) / 1e9:
        return
    by_rank = {rank.rank: rank for rank in job.ranks}
    others = [rank for rank in job.ranks if rank.rank != late]
    longer = _compute(by_rank[late]) - median(_compute(rank) for rank in others)
    idler = _idle_seconds(by_rank[late]) - median(_idle_seconds(rank) for rank in others)
    share = mean(call.last == late for call in job.shared)
    told = f"rank {late} comes last to {share:.0%} of collectives; the others wait {_s(won)} a step for it"
    if longer >= won / 2:
        compared = (
            f"{_s(_compute(by_rank[late]))} against {_s(median(_compute(rank) for rank in others))}"
        )
        yield "slow rank", won, f"{told}: it computes longer, {compared}", ""
    elif idler >= won / 2:
        yield (
            "late rank",
            won,
            f"{told}: its host starts nothing for {_s(idler)} longer than the others'",
            "",
        )
    else:
        yield "late rank", won, told, ""


def _unequal(job: Job) -> Iterator[Won]:
    """Find the pipeline stage that computes longest."""
    if (
        not any(call.facts.op in PEER_TO_PEER for rank in job.ranks for call in rank.calls)
        or len(job.ranks) < 2
    ):
        return
    seconds = {rank.rank: _compute(rank) for rank in job.ranks}
    worst = max(seconds, key=lambda rank: seconds[rank])
    won = seconds[worst] - mean(seconds.values())
    stage = f"rank {worst}'s stage computes {_s(seconds[worst])} a step"
    yield (
        "uneven stages",
        won,
        f"{stage}, the mean of all is {_s(mean(seconds.values()))}: give it fewer layers",
        "",
    )


def _exposed(job: Job, ceiling: Ceiling) -> Iterator[Won]:
    """Find communication that nothing hides, by kind of call, on the rank that waits least for others in it."""
    exposed: dict[str, dict[int, float]] = defaultdict(dict)
    for rank in job.ranks:
        for label, by_step in _own_exposed(rank).items():
            exposed[label][rank.rank] = median(by_step)
    by_rank = {rank.rank: rank for rank in job.ranks}
    for label, seconds in exposed.items():
        who = min(seconds, key=lambda rank: seconds[rank])
        rank, won = by_rank[who], seconds[who]
        calls = [call for call in rank.steps[rank.middle].calls if call.label == label]
        if not calls or won < LEAST_SHARE * step_seconds(job):
            continue
        yield _why_exposed(job, rank, label, calls, won, ceiling)


def _own_exposed(rank: RankSteps) -> dict[str, list[float]]:
    """Return the exposed seconds of each kind of call by step; what gathers and others share is of what waits first.

    Computing goes on when parameters have come, and not when gradients have gone: what is under way beside a gathering
    would be hidden if that had come earlier.
    """
    ops = {call.label: call.facts.op for call in rank.calls}
    found: dict[str, list[float]] = {label: [] for label in ops}
    for step in rank.steps:
        gathers = [call.span for call in step.calls if call.facts.op in _GATHERS]
        for label, op in ops.items():
            mine = intersection(
                [call.span for call in step.calls if call.label == label], [step.window]
            )
            alone = difference(mine, [*step.busy, *([] if op in _GATHERS else gathers)])
            found[label].append(length(alone) / 1e9)
    return found


def _why_exposed(
    job: Job, rank: RankSteps, label: str, calls: Sequence[Call], won: float, ceiling: Ceiling
) -> Won:
    op, step = calls[0].facts.op, step_seconds(job)
    told = f"{label} is exposed {_s(won)} of {_s(step)}"
    if op in PEER_TO_PEER:
        return (
            "pipeline bubble",
            won,
            f"{told}: stages wait for their neighbours",
            f"{_RUN} pp --set schedule=1f1b,interleaved,zb_h1",
        )
    known = [
        (seconds, call) for call in job.shared if call.label == label and (seconds := ceiling(call))
    ]
    longer = median(call.transfer_ns / 1e9 / seconds for seconds, call in known) if known else 1.0
    if longer >= _SLOWER_THAN_FIT:
        sentence = f"{told}: it takes {format_number(longer)} times what this machine's fit says"
        return "slow link", won * (1 - 1 / longer), sentence, f"{_RUN} matrix"
    earlier = _could_begin_earlier(rank.steps[rank.middle], calls)
    if op in _GATHERS and earlier >= won / 2:
        sentence = f"{told}: each is issued when its result is needed, while {_s(earlier)} of computing went before"
        return (
            "no prefetch",
            min(won, earlier),
            sentence,
            f"{_RUN} fsdp --set prefetch=default,explicit",
        )
    if op in _REDUCES and len(calls) <= 2 and earlier >= won / 2:
        count = "one call" if len(calls) == 1 else f"{len(calls)} calls"
        sentence = (
            f"{told}: all gradients go in {count} at the end, when nothing is left to compute"
        )
        return "one bucket", min(won, earlier), sentence, f"{_RUN} ddp --set bucket_mb=1,25"
    hidden = _s(rank.steps[rank.middle].parts.hidden_comm_seconds)
    sentence = f"{told}, {hidden} of all communication is hidden: fewer bytes or larger microbatches would cost less"
    return "exposed communication", won, sentence, ""


def _could_begin_earlier(step: Step, calls: Sequence[Call]) -> float:
    """Return the seconds of computing before calls in which no communication was under way."""
    free = difference(step.busy, [call.span for call in step.calls])
    before, reached = 0, step.window[0]
    for call in sorted(calls, key=lambda one: one.span):
        alone = length(difference([call.span], step.busy))
        before += min(length(intersection(free, [(reached, max(call.span[0], reached))])), alone)
        reached = max(reached, call.span[1])
    return before / 1e9


def _idle(job: Job) -> Iterator[Won]:
    """Find time in which not even communication runs, on the rank that has least of it."""
    by_rank = {rank.rank: [_gaps(step, rank.source) for step in rank.steps] for rank in job.ranks}
    who = min(job.ranks, key=lambda rank: median(map(sum, by_rank[rank.rank])))
    won, step = median(map(sum, by_rank[who.rank])), step_seconds(job)
    where = "on the device" if who.source.on_device else "in any operator"
    sentence = (
        f"nothing runs {where} for {_s(won)} of {_s(step)} on every rank: the host does not keep up"
    )
    if longest := max(by_rank[who.rank][who.middle], default=0.0):
        sentence += (
            f" (longest gap {_s(longest)}): input pipeline, synchronisation or many small kernels"
        )
    yield "host-bound", won, sentence, ""


def _gaps(step: Step, source: Source) -> list[float]:
    """Return the seconds of each stretch of a step in which nothing runs; shorter ones on a host are Python's own."""
    spans = gaps([*step.busy, *(call.span for call in step.calls)], step.window)
    free = [(stop - start) / 1e9 for start, stop in spans]
    return (
        free if source.on_device else [seconds for seconds in free if seconds >= _HOST_GAP_SECONDS]
    )


def _copies(job: Job) -> Iterator[Won]:
    won = min(rank.median(lambda parts: parts.copy_seconds) for rank in job.ranks)
    taken = f"copies between host and device take {_s(won)} of {_s(step_seconds(job))} beside nothing else"
    yield "copies", won, f"{taken}: pinned memory and non_blocking=True would hide them", ""
