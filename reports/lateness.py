"""How late each rank arrives at an operation after the first rank, from the raw samples in the run's folder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.results.records import Arrival, Record
from bench.results.runs import Run, load_rank_samples
from bench.results.stats import median
from bench.text import UserError
from reports.summary import Row

MOST_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Late:
    """A row with the seconds by which each rank arrives after the first: medians, over launches that of their medians.

    ``arrival`` is what the first launch that knows it says of the last rank; without readable samples no rank is known.
    """

    row: Row
    arrival: Arrival
    seconds_by_rank: Mapping[int, float]


def late_rows(run: Run, rows: Iterable[Row]) -> tuple[Late, ...]:
    """Return the rows with the largest skew that know who was late, in their own order."""
    known = [row for row in rows if _arrival(row) is not None and row.value("skew") is not None]
    most = sorted(known, key=lambda row: -(row.value("skew") or 0.0))[:MOST_ROWS]
    kept = {row.case.id for row in most}
    return tuple(_late(run, row) for row in known if row.case.id in kept)


def _arrival(row: Row) -> Arrival | None:
    return next((record.arrival for record in row.measured if record.arrival), None)


def _late(run: Run, row: Row) -> Late:
    arrival = _arrival(row)
    assert arrival is not None
    launches = [found for record in row.measured if (found := _read(run, record))]
    ranks = dict.fromkeys(rank for launch in launches for rank in launch)
    seconds = {rank: median([launch[rank] for launch in launches if rank in launch]) for rank in sorted(ranks)}
    return Late(row=row, arrival=arrival, seconds_by_rank=seconds)


def _read(run: Run, record: Record) -> dict[int, float]:
    """Return each rank's median lateness in one launch; nothing where no samples can be read."""
    try:
        samples = load_rank_samples(run, record)
    except UserError:
        return {}
    if "arrival_ns" not in samples:
        return {}
    late = np.median(samples["arrival_ns"] - samples["arrival_ns"].min(axis=0), axis=1) / 1e9
    return dict(zip(samples["ranks"].tolist(), late.tolist(), strict=True))
