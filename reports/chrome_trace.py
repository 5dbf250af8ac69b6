"""The timelines of a run as Chrome's trace events, for Perfetto, chrome://tracing and HolisticTraceAnalysis. Pure.

Ranks are processes and streams threads, all ranks of a step on one clock; each case begins at 0 us.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from bench.results.runs import Run
from bench.text import UserError
from reports.labels import short_labels
from reports.parallel.pipeline import Pipeline, pipelines, read_pipeline
from reports.parallel.pipeline_trace import pipeline_clock, pipeline_events, why_not
from reports.parallel.schedule_comparison import schedule_labels
from reports.step_trace import Event, for_analysis, step_events
from reports.summary import Row, summarize, unreadable
from reports.timelines import Traced, traced_steps


@dataclass(frozen=True, kw_only=True)
class Told:
    """A case that can be drawn: its events from a process id on, with a prefix to its processes' names."""

    case_id: str
    label: str
    num_processes: int
    events: Callable[[int, str], Iterator[Event]]
    clock: Event


@dataclass(frozen=True, kw_only=True)
class Traces:
    """All that a run has to draw, and by case why the rest is left out."""

    run: Run
    told: tuple[Told, ...]
    left_out: dict[str, str]


def render_trace(run: Run) -> bytes:
    """Return one JSON document with every step whose ranks share a clock, times in us.

    ``UserError`` if there is none, with the reason of the first that cannot be drawn.
    """
    traces = _traces(run)
    return _document(traces, traces.told)


def render_traces(run: Run) -> dict[str, bytes]:
    """Return a document for each case, by the name of its file; ``UserError`` as for one document."""
    traces = _traces(run)
    return {f"{one.case_id}.json": _document(traces, [one]) for one in traces.told}


def render_for_analysis(run: Run) -> dict[str, bytes]:
    """Return a document for each rank of each traced step, as HolisticTraceAnalysis wants them: a folder for each case.

    ``UserError`` if no step left a trace; pipelines, whose timelines know no streams, are not among them.
    """
    shown = [row for row in summarize(run).rows if row.metrics]
    files = {
        f"{one.row.case.id}/rank-{rank.rank}.json": msgspec.json.encode(for_analysis(rank)) + b"\n"
        for one in traced_steps(run, shown)
        if one.timeline
        for rank in one.timeline.ranks
    }
    if not files:
        raise UserError(f"{run.path} holds no traced step to export: parbench run --only 'workload.*' measures some")
    return files


def _traces(run: Run) -> Traces:
    shown = [row for row in summarize(run).rows if row.metrics]
    found, traced = pipelines(shown), traced_steps(run, shown)
    names, labels = schedule_labels(found), _labels(shown)
    told = (*_told_pipelines(found, names), *_told_steps(traced, labels))
    left_out = {names[one.row.case.id]: reason for one in found if (reason := why_not(one))}
    left_out |= {labels[one.row.case.id]: one.why_not for one in traced if one.why_not}
    if not told:
        reasons = [f"{label}: {reason}" for label, reason in left_out.items()] or unreadable(shown, read_pipeline)
        why = reasons[0] if reasons else "no case with a valid measurement left one, as training steps do"
        raise UserError(f"{run.path} holds no timeline to export: {why}")
    return Traces(run=run, told=told, left_out=left_out)


def _labels(rows: Sequence[Row]) -> dict[str, str]:
    return short_labels([row for row in rows if not row.is_communication])


def _told_pipelines(found: Sequence[Pipeline], names: dict[str, str]) -> Iterator[Told]:
    for one in found:
        if not why_not(one):
            yield Told(
                case_id=one.row.case.id,
                label=names[one.row.case.id],
                num_processes=2 * one.facts.ranks,
                events=partial(pipeline_events, one),
                clock=pipeline_clock(one),
            )


def _told_steps(traced: Sequence[Traced], labels: dict[str, str]) -> Iterator[Told]:
    for one in traced:
        if one.timeline is not None:
            clock: dict[str, Any] = {
                "method": one.timeline.clock,
                "uncertainty_seconds": one.timeline.uncertainty_seconds,
                "launch": one.launch + 1,
            }
            yield Told(
                case_id=one.row.case.id,
                label=labels[one.row.case.id],
                num_processes=len(one.timeline.ranks),
                events=partial(step_events, one.timeline),
                clock=clock,
            )


def _document(traces: Traces, told: Sequence[Told]) -> bytes:
    events: list[Event] = []
    first = 0
    for one in told:
        events += one.events(first, f"{one.label}: " if len(told) > 1 else "")
        first += one.num_processes
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": traces.run.info.id,
            "parbench": traces.run.info.parbench,
            "clocks": {one.label: one.clock for one in told},
            "left_out": traces.left_out,
        },
    }
    return msgspec.json.encode(document) + b"\n"
