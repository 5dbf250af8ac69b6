"""What the records of pipeline steps tell. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bench.results import details
from bench.results.records import Record
from reports.summary import Row, Summary, readable

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
