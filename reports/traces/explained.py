"""A job's traces as a report: what costs most, where each rank's time went, each collective, who was waited for."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_gigabytes,
    format_percent,
    format_seconds,
    make_formatter,
)
from parbench.bench.results.runs import Run, load_run
from parbench.bench.results.spans import difference, length
from parbench.bench.text import format_size, pluralize
from parbench.reports.analysis.findings import Finding
from parbench.reports.analysis.fits import fit_curves
from parbench.reports.analysis.summary import summarize
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.timeline import chart_profiled_step, choose_view, describe_timeline
from parbench.reports.report import Report, Section, Table, number, words
from parbench.reports.traces.causes import (
    LEAST_SHARE,
    Ceiling,
    causes_of,
    step_seconds,
    waits_by_rank,
)
from parbench.reports.traces.steps import (
    PEER_TO_PEER,
    Job,
    RankSteps,
    SharedCall,
    read_job,
    timeline_of,
)
from parbench.reports.verdicts import Verdict

_MOST_RANKS = 16
_MAX_BOXES = 4000
_count = make_formatter("{:.4g}")


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """Calls of one operation, group and class of sizes, of the rank whose communication is exposed least."""

    label: str
    size: str
    count: float
    seconds: float
    exposed_seconds: float
    transfer_seconds: float | None
    busbw: float | None
    beside_fit: float | None


def ceiling_of_run(run: Run) -> Ceiling:
    """Return the seconds of a collective by a run's fits of the same operation on as many ranks, one at a time."""
    curves = {}
    for curve in fit_curves(summarize(run).rows, None):
        row = curve.rows[0]
        if row.case.all_params.get("mode") == "blocking":
            curves[row.case.short_name, row.world.size] = curve.fit

    def seconds(call: SharedCall) -> float | None:
        found = curves.get((call.facts.op, call.facts.size or 0))
        return (
            None
            if found is None or call.facts.num_bytes is None
            else found.predict(call.facts.num_bytes)
        )

    return seconds


def explain_traces(paths: Sequence[Path], against: Path | None) -> Report:
    """Return the report of a job's traces; ``against`` is a run whose fits are the ceiling of its collectives."""
    ceiling = ceiling_of_run(load_run(against)) if against else None
    job = read_job(paths)
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} traces"
    return report_of_traces(job, name, *((ceiling, str(against)) if ceiling else ()))


def report_of_traces(
    job: Job, name: str, ceiling: Ceiling = lambda _: None, against: str = ""
) -> Report:
    """Return the report of a job's traces; ``against`` names the run whose fits are the ceiling."""
    causes = causes_of(job, ceiling)
    tables: list[Table[Any]] = [_ranks(job), _kinds(job, ceiling)]
    if job.shared and len(job.ranks) > 1:
        tables.append(_waits(job))
    tables.append(_what_if(job, causes))
    clean = (
        () if causes else (f"Nothing stands out: no cause costs {LEAST_SHARE:.0%} of the step.",)
    )
    notes = (*clean, *job.notes, *([f"fits: those of {against}"] if against else []))
    section = Section(
        id="traces", title="Traced steps", tables=tuple(tables), terms=(), notes=notes
    )
    step = f"{format_seconds(step_seconds(job))} a step, the median of {job.steps}"
    return Report(
        name=name,
        verdicts=(_verdict(job),),
        code=0,
        runs=(),
        sections=(section,),
        findings=causes,
        figures=lambda: _draw(job),
        heading=f"{name} · {step}",
    )


def _draw(job: Job) -> list[Chart]:
    timeline = timeline_of(job)
    words = describe_timeline(timeline, choose_view(timeline))
    caption = f"{words} What a step waits for is hatched or empty."
    chart = chart_profiled_step(
        "Profiled step", caption, timeline, is_wide=True, max_boxes=_MAX_BOXES
    )
    return [chart]


def _verdict(job: Job) -> Verdict:
    sizes = [rank.source.world_size for rank in job.ranks if rank.source.world_size]
    here, size = len(job.ranks), max(sizes, default=len(job.ranks))
    told = f"{here} of {size} ranks, {pluralize(job.steps, 'step')} each"
    if here < size or any(rank.source.notes for rank in job.ranks):
        return Verdict(
            word="PARTIAL", level="doubtful", message=f"{told}; the notes say what is missing"
        )
    return Verdict(word="COMPLETE", level="good", message=told)


def _what_if(job: Job, causes: Sequence[Finding]) -> Table[tuple[str, float]]:
    """Return the step without something: its seconds, to first order, for nothing else would change."""
    step = step_seconds(job)
    exposed = min(rank.median(lambda parts: parts.exposed_seconds) for rank in job.ranks)
    idle = min(rank.median(lambda parts: parts.idle_seconds) for rank in job.ranks)
    late = max(
        (one.cost * step for one in causes if one.kind in ("late rank", "slow rank")), default=0.0
    )
    links = sum(one.cost * step for one in causes if one.kind == "slow link")
    rows = (
        ("as it is", step),
        *([("no rank that the others wait for", step - late)] if late else []),
        *([("collectives as fast as the fits", step - links)] if links else []),
        ("all communication hidden", step - exposed),
        ("no idle time", step - idle),
    )
    return Table(
        id="what-if",
        title="What if",
        caption="a step without one thing, all else as it is",
        columns=(
            words("with", lambda row: row[0], "what would be otherwise"),
            number("step", lambda row: row[1], format_seconds, "seconds of a step"),
            number(
                "shorter by", lambda row: 1 - row[1] / step, format_percent, "share of the step"
            ),
        ),
        rows=rows,
    )


def _ranks(job: Job) -> Table[RankSteps]:
    def share(part: Callable[[Any], float]) -> Callable[[RankSteps], float]:
        return lambda rank: rank.median(lambda parts: part(parts) / parts.wall_seconds)

    def overlap(rank: RankSteps) -> float | None:
        hidden = sum(step.parts.hidden_comm_seconds for step in rank.steps)
        comm = hidden + sum(step.parts.exposed_seconds for step in rank.steps)
        return hidden / comm if comm else None

    shown = sorted(job.ranks, key=lambda rank: -rank.median(lambda parts: parts.wall_seconds))[
        :_MOST_RANKS
    ]
    left, exposed_help = (
        len(job.ranks) - len(shown),
        "communication beside which nothing is computed",
    )
    return Table(
        id="ranks",
        title="Where the time of a step goes",
        caption="medians over steps, by rank",
        columns=(
            number("rank", lambda one: one.rank, _count, "global rank"),
            number(
                "step",
                lambda one: one.median(lambda parts: parts.wall_seconds),
                format_seconds,
                "wall of a step",
            ),
            number("compute", share(lambda p: p.compute_seconds), format_percent, "arithmetic"),
            number("exposed", share(lambda p: p.exposed_seconds), format_percent, exposed_help),
            number(
                "copies",
                share(lambda p: p.copy_seconds),
                format_percent,
                "copies of memory beside no computing",
            ),
            number("idle", share(lambda p: p.idle_seconds), format_percent, "nothing runs"),
            number("overlap", overlap, format_percent, "hidden communication over all of it"),
        ),
        rows=tuple(shown),
        notes=(f"{left} more ranks are shorter.",) if left else (),
    )


def _kinds(job: Job, ceiling: Ceiling) -> Table[CallKind]:
    return Table(
        id="collectives",
        title="Communication of a step",
        caption="on the rank that waits least; transfer is from when all ranks have come",
        columns=(
            words("call", lambda one: one.label, "operation and process group"),
            words("size", lambda one: one.size, "bytes by nccl-tests' convention"),
            number("calls", lambda one: one.count, _count, "calls of a step"),
            number("time", lambda one: one.seconds, format_seconds, "time in them, of a step"),
            number(
                "exposed",
                lambda one: one.exposed_seconds,
                format_seconds,
                "time in them that nothing hides",
            ),
            number(
                "transfer",
                lambda one: one.transfer_seconds,
                format_seconds,
                "of one call, the median",
            ),
            number(
                "busbw",
                lambda one: one.busbw,
                format_gigabytes,
                "bus bandwidth of the median transfer, GB/s",
            ),
            number(
                "of the fit",
                lambda one: one.beside_fit,
                format_percent,
                "the fit's time over the transfer's",
            ),
        ),
        rows=_kinds_of(job, ceiling),
    )


def _kinds_of(job: Job, ceiling: Ceiling) -> tuple[CallKind, ...]:
    shared: dict[tuple[str, str], list[SharedCall]] = defaultdict(list)
    for one in job.shared:
        if one.facts.op not in PEER_TO_PEER:
            shared[one.label, _class_of(one.facts.num_bytes)].append(one)
    rank = min(job.ranks, key=lambda one: sum(step.parts.exposed_seconds for step in one.steps))
    found, busy = [], [span for step in rank.steps for span in step.busy]
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for call in rank.calls:
        spans[call.label, _class_of(call.facts.num_bytes)].append(call.span)
    for (label, size), mine in sorted(spans.items()):
        # what ended no later than the one before it has no time of its own
        same = [one for one in shared.get((label, size), []) if one.transfer_ns > 0]
        fits = [seconds / (one.transfer_ns / 1e9) for one in same if (seconds := ceiling(one))]
        rates = [rate for one in same if (rate := one.busbw)]
        steps = len(rank.steps)
        found.append(
            CallKind(
                label=label,
                size=size,
                count=len(mine) / steps,
                seconds=length(mine) / 1e9 / steps,
                exposed_seconds=length(difference(mine, busy)) / 1e9 / steps,
                transfer_seconds=median([one.transfer_ns for one in same]) / 1e9 if same else None,
                busbw=median(rates) if rates else None,
                beside_fit=median(fits) if fits else None,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.exposed_seconds))


def _class_of(num_bytes: int | None) -> str:
    """Return a size, of large ones the power of two below."""
    if num_bytes is None:
        return UNKNOWN
    return (
        format_size(num_bytes)
        if num_bytes < 1024
        else format_size(1 << (num_bytes.bit_length() - 1))
    )


def _waits(job: Job) -> Table[tuple[int, float, float]]:
    waits = waits_by_rank(job)
    last = [one.last for one in job.shared if one.facts.op not in PEER_TO_PEER]
    rows = [
        (rank, last.count(rank) / max(len(last), 1), median(seconds))
        for rank, seconds in waits.items()
    ]
    rows.sort(key=lambda row: -row[2])
    return Table(
        id="waits",
        title="Who is waited for",
        caption="ranks that come last to collectives, and what the others wait for them with nothing else to do",
        columns=(
            number("rank", lambda row: row[0], _count, "global rank"),
            number(
                "last",
                lambda row: row[1],
                format_percent,
                "share of collectives that it comes last to",
            ),
            number(
                "waited for",
                lambda row: row[2],
                format_seconds,
                "of a step, the median rank and step",
            ),
        ),
        rows=tuple(rows[:_MOST_RANKS]),
    )
