"""The results of another tool, with sizes and bandwidths by the convention of nccl-tests."""

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
"""The specification of each operation, keyed by its short name: ``all_reduce``."""


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
    """A result that another tool printed: the metrics of one case."""

    name: str
    """The name of the case, such as ``collective.all_reduce``."""
    params: Mapping[str, Value]
    """The parameters of the case by name, with its ``size_bytes``."""
    metrics: Mapping[str, MetricValue]
    """The metrics ``time``, ``algbw`` and ``busbw`` by name."""
    check: Check = field(default_factory=Check)
    """The tool's check of correctness. It is empty if the tool did not check."""
    group_size: int | None = None
    """The number of ranks of the group that communicated, None if it was all ranks of the job."""
    samples: Sequence[float] = ()
    """The duration of each iteration in seconds, the maximum over ranks.

    Empty if the file has only means.
    """
    iterations: int | None = None
    """The number of timed iterations, None if the file does not state it."""
    printed: Mapping[str, Any] = field(default_factory=dict)
    """The numbers of the result as the tool printed them, by column, in the units of the tool."""
    notes: Sequence[str] = ()
    """Sentences about the result, which reports show."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """The content of a file that another tool wrote: its results, and facts about the job."""

    version: str | None = None
    """The version of the tool, None if unknown."""
    num_ranks: int
    """The number of ranks of the job."""
    nodes: int | None = None
    """The number of nodes, None if unknown."""
    backend: str = UNKNOWN
    """The library that communicated, such as ``nccl`` or ``mpi``."""
    device: str = UNKNOWN
    """The device that held the messages: ``cuda``, ``cpu`` or the tool's name of it."""
    results: Sequence[ImportedResult]
    """The results in the order of the file."""
    hosts: Sequence[str] = ()
    """The names of the hosts, as far as the file states them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the job by name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Facts about GPUs and libraries: ``gpu``, ``nccl`` (its version), ``network``."""
    notes: Sequence[str] = ()
    """Sentences about content that contradicts itself or was inferred."""
    omissions: Sequence[str] = ()
    """Sentences about content that could not be imported."""


def parse_row(
    columns: Sequence[str], cells: Sequence[str], place: str, required: Sequence[str]
) -> dict[str, str]:
    """Return the cells of a line of a table, keyed by column.

    Args:
        columns: the names of the table's columns in order.
        cells: the words of the line.
        place: the location of the line, for errors: ``FILE, line N``.
        required: the columns without which the line cannot be imported.

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
    """Return the finite number in a cell. Raises ``UserError`` for other text.

    ``place`` is the location of the cell, for the error: ``FILE, line N``.
    """
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{place}: {cell!r} is not a number")
    return number


def parse_count(cell: str, place: str) -> int:
    """Return the whole number in a cell, 0 or more. Raises ``UserError`` for other text.

    ``place`` is the location of the cell, for the error: ``FILE, line N``.
    """
    if not cell.isdecimal():
        raise UserError(f"{place}: {cell!r} is not a whole number from 0 up")
    return int(cell)


def resolve_num_ranks(in_file: int | None, nproc: int | None, source: str) -> int:
    """Return the number of ranks that a file or the option ``--nproc`` states.

    Args:
        in_file: the number of ranks in the file, None if the file does not state it.
        nproc: the value of ``--nproc``, None if not given.
        source: the name of the file or the location in it, for errors.

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
    """Return the time in seconds and the bandwidths in B/s of a result, keyed by metric.

    The keys are ``time``, ``algbw`` and ``busbw``. A printed bandwidth is used if it has three
    significant digits, so if it is at least 100 times ``rate_resolution``. Otherwise the bandwidth
    is computed from size and time.

    Args:
        operation: the collective, whose factor converts algbw to busbw.
        num_ranks: the number of ranks of a group.
        size_bytes: the message size S of nccl-tests.
        seconds: the time of one operation. None or 0 if unknown.
        method: a phrase about how the tool computed the time.
        printed_rates: the printed bandwidths in B/s, keyed by metric. None without any.
        rate_resolution: the unit of the last digit of printed bandwidths in B/s.
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
