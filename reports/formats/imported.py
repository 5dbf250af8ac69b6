"""Results of another tool in the convention of nccl-tests: bytes, seconds, bytes per second."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parbench.bench.plan.catalogue import OPERATIONS, OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list

MICRO = 1e-6
UNKNOWN = "unknown"
OPERATIONS_BY_NAME = {spec.short_name: spec for spec in OPERATIONS}


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
    """One result, with the name and the parameters of its case."""

    name: str
    params: Mapping[str, Value]
    metrics: Mapping[str, MetricValue]
    check: Check = field(default_factory=Check)
    group_size: int | None = None
    """The number of ranks of its group, None if all ranks took part."""
    samples: Sequence[float] = ()
    """The seconds of each iteration, the maximum over the ranks."""
    iterations: int | None = None
    printed: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """The results and the facts that a file of another tool contains."""

    version: str | None = None
    """The version of the tool."""
    num_ranks: int
    nodes: int | None = None
    backend: str = UNKNOWN
    device: str = UNKNOWN
    results: Sequence[ImportedResult]
    hosts: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Facts about GPUs and libraries: ``gpu``, ``nccl`` (its version), ``network``."""
    notes: Sequence[str] = ()
    """Sentences about content that contradicts itself or was inferred."""
    omissions: Sequence[str] = ()
    """Sentences about content that could not be imported."""


def parse_row(
    columns: Sequence[str], cells: Sequence[str], place: str, required: Sequence[str]
) -> dict[str, str]:
    """Return the cells of a line, keyed by column.

    Raises ``UserError`` if a required column is absent or the line has another number of cells.
    """
    missing = [column for column in required if column not in columns]
    if missing:
        raise UserError(f"{place}: the heading of this row has no column {format_list(missing)}")
    if len(cells) < len(columns):
        counts = f"{len(cells)} of {len(columns)} values"
        raise UserError(f"{place}: {counts}, so the file seems to be cut short")
    if len(cells) > len(columns):
        counts = f"{len(cells)} values for {len(columns)} columns"
        raise UserError(f"{place}: {counts}, so values cannot be assigned to columns")
    return dict(zip(columns, cells, strict=False))


def parse_number(cell: str, place: str) -> float:
    """Return a finite number. Raises ``UserError`` for other text."""
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{place}: {cell!r} is not a number")
    return number


def parse_count(cell: str, place: str) -> int:
    """Return a whole number from 0. Raises ``UserError`` for other text."""
    if not cell.isdecimal():
        raise UserError(f"{place}: {cell!r} is not a whole number from 0 up")
    return int(cell)


def resolve_num_ranks(in_file: int | None, nproc: int | None, source: str) -> int:
    """Return the number of ranks according to the file or to ``--nproc``.

    Raises ``UserError`` if neither states it, or if they differ.
    """
    if in_file is not None and nproc is not None and in_file != nproc:
        problem = f"was measured on {in_file} ranks, and --nproc is {nproc}"
        raise UserError(f"{source} {problem}: leave --nproc out")
    num_ranks = nproc if in_file is None else in_file
    if num_ranks is None:
        problem = "does not state the number of ranks, which bandwidths depend on"
        raise UserError(f"{source} {problem}: add --nproc N")
    return num_ranks


def make_metrics(
    operation: OperationSpec,
    num_ranks: int,
    size_bytes: int,
    seconds: float | None,
    method: str,
    printed_rates: Mapping[str, float | None] | None = None,
    rate_resolution: float = 0.0,
) -> dict[str, MetricValue]:
    """Return the time and the rates of a result.

    A printed rate (B/s) counts if it has three significant digits, that is 100 times the
    resolution of the printed numbers. Otherwise it is computed from size and time.
    """
    algbw = size_bytes / seconds if seconds else None
    busbw = None
    if algbw is not None and operation.busbw:
        busbw = algbw * operation.busbw.compute(num_ranks)
    metrics = {"time": make_value("time", seconds, method)}
    for name, rate in (("algbw", algbw), ("busbw", busbw)):
        printed = (printed_rates or {}).get(name)
        if printed is not None and (rate is None or printed >= 100 * rate_resolution):
            metrics[name] = make_value(name, printed, f"as printed; {method}")
        else:
            origin = "unknown" if rate is None else "size over time"
            metrics[name] = make_value(name, rate, f"{origin}; {method}")
    return metrics
