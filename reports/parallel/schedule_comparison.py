"""Schedules of one model side by side, measured or simulated, and what tells them apart. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.results.details import Simulated
from reports.cells import visible
from reports.labels import differences
from reports.parallel.pipeline import Pipeline

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
