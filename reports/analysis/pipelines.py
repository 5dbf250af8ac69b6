"""What the records of pipeline steps tell. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bench.results import details
from bench.results.details import Simulated
from bench.results.records import Record
from reports.analysis.labels import differences
from reports.analysis.summary import Row, Summary, readable
from reports.cells import visible

_TIMELINES = ("measured", "predicted", "idle")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline step's row with what its first telling launch adds."""

    row: Row
    launch: int
    facts: details.Pipeline

    @property
    def activation_bytes(self) -> float | None:
        """The activations of the fullest rank."""
        measured = self.row.value("memory.activations")
        known = [one for one in self.facts.activation_bytes_by_rank or () if one is not None]
        return max(known, default=None) if measured is None else measured


def pipelines(rows: Iterable[Row]) -> tuple[Pipeline, ...]:
    """Return the rows that are pipeline steps and whose facts can be read."""
    return readable(rows, read_pipeline)


def read_pipeline(row: Row) -> Pipeline | str | None:
    """Return a row's pipeline, None if it is no pipeline step; why its facts cannot be read, if they cannot.

    The first launch with a measured timeline tells it, else the first that has any facts.
    """
    told = [(record, one) for record in row.measured if (one := details.read(record, details.Pipeline))]
    timed = (one for one in told if isinstance(one[1], str) or one[1].measured)
    if not told:
        return None
    record, facts = next(timed, told[0])
    return facts if isinstance(facts, str) else Pipeline(row=row, launch=record.launch, facts=facts)


def without_timelines(summary: Summary) -> Summary:
    """Return the summary without the timelines in its records' details, which are pictures rather than facts."""
    return replace(summary, rows=tuple(_without_timelines(row) for row in summary.rows))


def _without_timelines(row: Row) -> Row:
    if not any(isinstance(record.details.get("pipeline"), Mapping) for record in row.records):
        return row
    return replace(row, records=tuple(msgspec.structs.replace(one, details=_thinned(one)) for one in row.records))


def _thinned(record: Record) -> dict[str, Any]:
    pipeline = record.details.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return record.details
    return record.details | {"pipeline": {name: pipeline[name] for name in pipeline if name not in _TIMELINES}}


# what says who does what when, and what says where: the rest is the model
_OF_SCHEDULE = ("schedule", "microbatches", "chunks", "order")
_OF_STAGES = (*_OF_SCHEDULE, "split")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A schedule among others: simulated, measured, or with the reason why it cannot run."""

    label: str
    simulated: Simulated


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Schedules for one model on as many ranks with as many microbatches, the fastest first."""

    title: str
    entries: tuple[Entry, ...]


def schedule_labels(found: Sequence[Pipeline]) -> dict[str, str]:
    """Return by case id the schedule, with what else tells cases apart beyond ranks, microbatches and chunks.

    Where that leaves two alike in all that a table shows, such as orders of the user's own, their ids follow.
    """
    others = differences([one.row for one in found], _OF_SCHEDULE)
    labels = {one.row.case.id: visible(f"{one.facts.schedule} {others[one.row.case.id]}") for one in found}
    shown = Counter(_shown(one, labels[one.row.case.id]) for one in found)
    return {
        case_id: f"{label} ({case_id})" if shown[_shown(one, label)] > 1 else label
        for one, (case_id, label) in zip(found, labels.items(), strict=True)
    }


def comparisons(found: Sequence[Pipeline]) -> tuple[Comparison, ...]:
    """Return the schedules of each model, ranks and microbatches, wherever there are two to compare.

    The first step of a group gives the simulations; a measured step takes the place of its own schedule's.
    """
    groups: dict[object, list[Pipeline]] = {}
    for one in found:
        groups.setdefault(_group(one), []).append(one)
    models = differences([one.row for one in found], _OF_STAGES)
    compared = (_comparison(group, models[group[0].row.case.id]) for group in groups.values())
    return tuple(one for one in compared if len(one.entries) > 1)


def _shown(one: Pipeline, label: str) -> tuple[str, int, int, int]:
    return label, one.facts.ranks, one.facts.microbatches, one.facts.chunks


def _group(one: Pipeline) -> object:
    """Return what schedules must share to be compared: case, ranks, microbatches and the model."""
    model = {name: value for name, value in one.row.case.params.items() if name not in _OF_STAGES}
    return one.row.case.name, one.facts.ranks, one.facts.microbatches, tuple(sorted(model.items()))


def _comparison(group: Sequence[Pipeline], model: str) -> Comparison:
    labels = schedule_labels(group)
    entries = [_measured(one, labels[one.row.case.id]) for one in group]
    taken = {(one.simulated.schedule, one.simulated.chunks) for one in entries}
    simulations = next((one.facts.comparison for one in group if one.facts.comparison), ())
    entries += [
        Entry(label=simulated.schedule, simulated=simulated)
        for simulated in simulations
        if (simulated.schedule, simulated.chunks) not in taken
    ]
    facts = group[0].facts
    told = f", {model}" if model else ""
    title = f"Schedules compared: {facts.ranks} ranks, {facts.microbatches} microbatches{told}"
    return Comparison(title=title, entries=tuple(sorted(entries, key=_place)))


def _measured(one: Pipeline, label: str) -> Entry:
    simulated = Simulated(
        schedule=one.facts.schedule,
        chunks=one.facts.chunks,
        step_seconds=one.row.value(one.row.headline),
        bubble_fraction=one.row.value("bubble_fraction"),
        in_flight=one.row.value("in_flight"),
        activation_bytes=one.activation_bytes,
        measured=True,
    )
    return Entry(label=label, simulated=simulated)


def _place(entry: Entry) -> tuple[bool, bool, float]:
    """Return where an entry stands: by step time, then those whose time is unknown, then those that cannot run."""
    seconds = entry.simulated.step_seconds
    return bool(entry.simulated.why_not), seconds is None, seconds or 0.0
