"""What the records of pipeline steps tell. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import msgspec

from parbench.bench.results import details
from parbench.bench.results.details import SimulatedSchedule
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.records import Record
from parbench.reports.analysis.frame import group_rows
from parbench.reports.analysis.labels import differences
from parbench.reports.analysis.summary import Row, Summary, readable


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline step's row with what its first telling repetition adds."""

    row: Row
    repetition: int
    facts: details.PipelineDetails

    @property
    def activation_bytes(self) -> float | None:
        return self.row.value("memory.activations")

    @property
    def as_simulated(self) -> SimulatedSchedule:
        return SimulatedSchedule(
            schedule=self.facts.schedule,
            chunks=self.facts.chunks,
            step_seconds=self.row.value(self.row.headline),
            bubble_fraction=self.row.value("bubble_fraction"),
            in_flight=self.row.value("in_flight"),
            activation_bytes=self.activation_bytes,
            measured=True,
        )


def read_pipeline(row: Row) -> Pipeline | str | None:
    """Return a row's pipeline, None if it is no pipeline step; why its facts cannot be read, if they cannot."""
    told = [
        (record.repetition, one)
        for record in row.measured
        if (one := details.read_details(record, details.PipelineDetails))
    ]
    if not told:
        return None
    repetition, facts = next(
        (one for one in told if isinstance(one[1], str) or one[1].measured), told[0]
    )
    return (
        facts if isinstance(facts, str) else Pipeline(row=row, repetition=repetition, facts=facts)
    )


pipelines: Callable[[Iterable[Row]], tuple[Pipeline, ...]] = partial(readable, read=read_pipeline)


def without_timelines(summary: Summary) -> Summary:
    """Return the summary without the timelines in its records' details, which are pictures rather than facts."""

    def thinned(record: Record) -> Record:
        told = record.details.get("pipeline")
        if not isinstance(told, Mapping):  # a custom step may have a detail of that name
            return record
        kept = {name: told[name] for name in told if name not in ("measured", "predicted", "idle")}
        return msgspec.structs.replace(record, details=record.details | {"pipeline": kept})

    rows = (replace(row, records=tuple(map(thinned, row.records))) for row in summary.rows)
    return replace(summary, rows=tuple(rows))


# what says who does what when, and what says where: the rest is the model
_OF_SCHEDULE = ("schedule", "microbatches", "chunks", "order")
_OF_STAGES = (*_OF_SCHEDULE, "split")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A schedule among others, simulated or measured."""

    label: str
    simulated: SimulatedSchedule


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Schedules for one model on as many ranks with as many microbatches, the fastest first."""

    title: str
    entries: tuple[Entry, ...]


def schedule_labels(found: Sequence[Pipeline]) -> dict[str, str]:
    """Return by case id the schedule with what tells cases apart; with ids where two look alike in tables."""
    others = differences([one.row for one in found], _OF_SCHEDULE)
    shown = {}
    for one in found:
        label, facts = to_single_line(f"{one.facts.schedule} {others[one.row.case.id]}"), one.facts
        shown[one.row.case.id] = (label, facts.ranks, facts.microbatches, facts.chunks)
    count = Counter(shown.values())
    return {
        case: f"{told[0]} ({case})" if count[told] > 1 else told[0] for case, told in shown.items()
    }


def comparisons(found: Sequence[Pipeline]) -> tuple[Comparison, ...]:
    """Return the schedules that compare, by step time, then those of unknown time."""
    models, compared = differences([one.row for one in found], _OF_STAGES), []
    ranks = attrgetter("facts.ranks", "facts.microbatches")
    for group in group_rows(found, lambda one: one.row.case, without=_OF_STAGES, by=ranks):
        labels, facts, model = schedule_labels(group), group[0].facts, models[group[0].row.case.id]
        entries = [
            Entry(label=labels[one.row.case.id], simulated=one.as_simulated) for one in group
        ]
        taken = {(one.facts.schedule, one.facts.chunks) for one in group}
        simulated = next((one.facts.comparison for one in group if one.facts.comparison), ())
        others = [one for one in simulated if (one.schedule, one.chunks) not in taken]
        entries += [Entry(label=one.schedule, simulated=one) for one in others]
        places = ((one, one.simulated.step_seconds) for one in entries)
        ordered = sorted(places, key=lambda place: (place[1] is None, place[1] or 0.0))
        title = f"{facts.ranks} ranks, {facts.microbatches} microbatches{model and f', {model}'}"
        compared.append(Comparison(title=title, entries=tuple(one for one, *_ in ordered)))
    return tuple(one for one in compared if len(one.entries) > 1)
