"""Imports the results that the OSU micro-benchmarks print, of all versions.

They (mvapich.cse.ohio-state.edu/benchmarks) print a time, the mean over iterations and ranks, and
the message size of one rank. If every rank contributes such a message (allgather, alltoall, gather,
scatter), the size S of nccl-tests is that size times the number of ranks. Rates are computed. Tests
of bandwidth print MB/s of one pair of ranks, from which the time of a message follows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parbench.bench.plan.catalogue import OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError
from parbench.reports.formats.imported import (
    MICRO,
    OPERATIONS_BY_NAME,
    UNKNOWN,
    ImportedResult,
    ImportedRun,
    make_metrics,
    parse_count,
    parse_number,
    parse_row,
    resolve_num_ranks,
)
from parbench.reports.formats.log_lines import read_log_lines

OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather_v",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "alltoall": "all_to_all",
    "all-to-all personalized exchange": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "latency": "pingpong",
    "multi": "pingpong",
    "multi-pair": "pingpong",
    "bandwidth": "unidirectional",
    "multiple bandwidth / message rate": "unidirectional",
    "bi-directional bandwidth": "bidirectional",
}
"""The short name of each operation, keyed by the title of its benchmark in lower case.

The titles are without the word latency.
"""
_POINT_TO_POINT = ("pingpong", "unidirectional", "bidirectional")
"""The operations between two ranks."""
_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
"""The name of each MPI data type in parbench."""
_TITLE = re.compile(
    r"^# OSU (\w+)(?:-(\S+))? (.*?)(?: Test)?(?:\s+v(\S+)|\s+\(Version\s+(\S+)\))?$"
)
_PAIRS = re.compile(r"^# \[ *pairs: *(\d+) *\]")
_HEADING = re.compile(r"(?:(?:Avg|Min|Max|P\d+ Tail|Pure|Coll\.) )?[\w./]+ ?\([^)]*\)|\S+")
_CELL = re.compile(r"[\d.]+(?:e[+-]?\d+)?|pass|fail", re.IGNORECASE)
_LATENCIES = ("avglatency(us)", "latency(us)")
"""The columns that contain the latency, which is used as the time of an operation."""
_BANDWIDTHS = ("bandwidth(mb/s)", "mb/s")
"""The columns that contain the bandwidth of one pair of ranks."""
_MIN_CELL_SHARE = 0.5
"""A line is a row of a table if at least this fraction of its words are cells."""
_RATE_TOLERANCE = 0.01
"""The rounding error of bandwidths in MB/s and of message rates, which have two decimals."""


@dataclass(kw_only=True)
class _Benchmark:
    """The output of one OSU benchmark: the facts in its title and options, and its table."""

    title: str
    """The title without the library and the device, such as ``Allreduce Latency``."""
    device: str
    """The device that held the messages: ``cpu``, or the name in the title, such as ``cuda``."""
    version: str
    """The version of the OSU micro-benchmarks, empty if unknown."""
    backend: str
    """The library that communicated, such as ``mpi`` or ``nccl``."""
    operation: OperationSpec | None
    """The equivalent operation of parbench, None if it has none."""
    dtype: str = ""
    """The data type as OSU prints it, such as ``MPI_FLOAT``.

    Empty if the output does not state it.
    """
    num_pairs: int = 1
    """The number of pairs of ranks that communicated at once."""
    columns: list[str] = field(default_factory=list)
    """The headings of the table in order, in lower case without spaces: ``avglatency(us)``."""
    rows: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """The rows of the table: (``FILE, line N``, the cells as text keyed by column)."""

    @property
    def is_point_to_point(self) -> bool:
        """True if the operation is between two ranks.

        False for collectives and unknown benchmarks.
        """
        return self.operation is not None and self.operation.short_name in _POINT_TO_POINT

    def add_row(self, cells: Sequence[str], place: str) -> None:
        """Add a row of the table, whose words are ``cells``.

        ``place`` is its location, for errors. Raises ``UserError`` if the row does not fit the
        table, or if its size does not ascend.
        """
        if not self.columns:
            raise UserError(f"{place}: no heading names the columns of this row")
        row = parse_row(self.columns, cells, place, ("size",))
        size = parse_count(row["size"], place)
        if self.rows and size <= int(self.rows[-1][1]["size"]):
            problem = "the size does not ascend, so a title or a heading may be missing"
            raise UserError(f"{place}: {problem}")
        _check_row(row, size, place)
        self.rows.append((place, row))


def parse_osu(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the run that the output of OSU benchmarks contains.

    Raises ``UserError`` if a row is cut short, or if ``nproc`` is missing although a benchmark is a
    collective. OSU does not print the number of ranks.

    Args:
        text: the content of the file.
        source: the path of the file, for messages.
        nproc: the number of ranks, or None.
    """
    benchmarks = _read_benchmarks(text, source)
    omissions = []
    last_rows = benchmarks[-1].rows if benchmarks else []
    last_line = text.count("\n") + 1
    if last_rows and last_rows[-1][0] == f"{source}, line {last_line}":
        last_rows.pop()
        omissions.append(f"line {last_line}: it has no end, so its last number may be cut short")
    num_listed_ranks = None
    if all(benchmark.is_point_to_point for benchmark in benchmarks) and nproc is None:
        num_listed_ranks = 2 * max((benchmark.num_pairs for benchmark in benchmarks), default=1)
    num_ranks = resolve_num_ranks(num_listed_ranks, nproc, source)
    results: list[ImportedResult] = []
    for benchmark in benchmarks:
        operation = benchmark.operation
        if operation is None:
            omissions.append(f"OSU {benchmark.title}: parbench has no equivalent case")
        elif benchmark.num_pairs > 1:
            pairs = f"{benchmark.num_pairs} pairs at once"
            omissions.append(f"OSU {benchmark.title}: parbench has no case of {pairs}")
        else:
            for place, row in benchmark.rows:
                results.append(_make_result(benchmark, operation, row, num_ranks, place))
    devices = {benchmark.device for benchmark in benchmarks}
    backends = {benchmark.backend for benchmark in benchmarks}
    versions = [benchmark.version for benchmark in benchmarks if benchmark.version]
    return ImportedRun(
        version=", ".join(dict.fromkeys(versions)) or None,
        num_ranks=num_ranks,
        backend=backends.pop() if len(backends) == 1 else UNKNOWN,
        device=devices.pop() if len(devices) == 1 else UNKNOWN,
        results=results,
        omissions=list(dict.fromkeys(omissions)),
    )


def _read_benchmarks(text: str, source: str) -> list[_Benchmark]:
    """Return the benchmarks of a log with their rows, in the order of the log.

    ``source`` is the path of the file, for errors. Raises ``UserError`` for a table without a
    title.
    """
    benchmarks: list[_Benchmark] = []
    for number, raw_line in enumerate(read_log_lines(text), start=1):
        place = f"{source}, line {number}"
        line = raw_line.strip()
        title = _TITLE.match(line)
        if title:
            benchmarks.append(_read_title(title))
        elif not benchmarks:
            if line.startswith("# Size"):
                raise UserError(f"{place}: no title of OSU precedes this heading")
        else:
            _read_line(benchmarks[-1], line, place)
    return benchmarks


def _read_title(title: re.Match[str]) -> _Benchmark:
    """Return a benchmark without rows from the parts of its title, a match of ``_TITLE``."""
    library, device, name, version, old_version = title.groups()
    key = name.lower().removesuffix(" latency")
    return _Benchmark(
        title=name,
        backend=library.lower(),
        device=(device or "cpu").lower(),  # Only accelerators are in the title.
        version=version or old_version or "",
        operation=OPERATIONS_BY_NAME.get(OPERATIONS.get(key, "")),
    )


def _read_line(benchmark: _Benchmark, line: str, place: str) -> None:
    """Read a line below the title of a benchmark into it: an option, a heading or a row.

    Other lines are ignored. ``place`` is the location of the line, for errors.
    """
    cells = line.split()
    pairs = _PAIRS.match(line)
    if pairs:
        benchmark.num_pairs = int(pairs[1])
    elif line.startswith("# Datatype:"):
        benchmark.dtype = line.partition(":")[2].strip(" .")
    elif line.startswith("# Send Buffer on HOST (H) and Receive Buffer on HOST (H)"):
        benchmark.device = "cpu"
    elif line.startswith("# Size"):
        if benchmark.columns:
            raise UserError(f"{place}: no title of OSU precedes this heading")
        headings = _HEADING.findall(line.removeprefix("# "))
        benchmark.columns = [heading.lower().replace(" ", "") for heading in headings]
    elif benchmark.operation and _is_row(cells):
        benchmark.add_row(cells, place)


def _is_row(cells: Sequence[str]) -> bool:
    """Return True if the first word and enough other words of a line are cells of a table.

    A cell is a number, ``pass`` or ``fail``.
    """
    known_cells = [cell for cell in cells if _CELL.fullmatch(cell)]
    return cells[:1] == known_cells[:1] and len(known_cells) >= max(1, _MIN_CELL_SHARE * len(cells))


def _check_row(row: Mapping[str, str], size: int, place: str) -> None:
    """Raise ``UserError`` if the numbers of a row contradict each other.

    The mean latency must lie between minimum and maximum, and the bandwidth must be the message
    rate times the size.

    Args:
        row: the cells keyed by column.
        size: the message size in bytes.
        place: the location of the row.
    """
    low, mean, high = (row.get(f"{part}latency(us)") for part in ("min", "avg", "max"))
    if low and mean and high:
        numbers = [parse_number(cell, place) for cell in (low, mean, high)]
        if numbers != sorted(numbers):
            latencies = f"minimum {low}, mean {mean} and maximum {high} us"
            raise UserError(f"{place}: {latencies} contradict each other")
    if "mb/s" in row and "messages/s" in row:
        rate = parse_number(row["mb/s"], place) * 1e6
        rate_of_messages = parse_number(row["messages/s"], place) * size
        tolerance = _RATE_TOLERANCE * 1e6 + _RATE_TOLERANCE * size + 1e-4 * rate
        if abs(rate - rate_of_messages) > tolerance:
            raise UserError(
                f"{place}: {row['mb/s']} MB/s contradict {row['messages/s']} messages/s of {size} B"
            )


def _find_seconds(
    operation: OperationSpec, row: Mapping[str, str], size_bytes: int, place: str
) -> float | None:
    """Return the time of one message or operation in seconds, None if the row has 0.

    It is the printed latency. For a test of bandwidth it is size over bandwidth.

    Args:
        operation: the operation of the benchmark.
        row: the cells keyed by column.
        size_bytes: the message size of the row.
        place: the location of the row, for errors.

    Raises ``UserError`` if no column has a latency or a bandwidth.
    """
    latency = next((row[name] for name in _LATENCIES if name in row), None)
    rate = next((row[name] for name in _BANDWIDTHS if name in row), None)
    if operation.short_name in ("unidirectional", "bidirectional"):
        if rate is None:
            raise UserError(f"{place}: none of the columns {', '.join(row)} is a bandwidth")
        bytes_per_second = parse_number(rate, place) * 1e6
        directions = 2 if operation.short_name == "bidirectional" else 1
        return directions * size_bytes / bytes_per_second if bytes_per_second else None
    if latency is None:
        raise UserError(f"{place}: none of the columns {', '.join(row)} is a latency")
    return parse_number(latency, place) * MICRO or None


def _make_result(
    benchmark: _Benchmark,
    operation: OperationSpec,
    row: dict[str, str],
    num_ranks: int,
    place: str,
) -> ImportedResult:
    """Return the result of a row, with the size by the convention of nccl-tests and its bandwidths.

    Args:
        benchmark: the benchmark that printed the row.
        operation: the operation of the benchmark.
        row: the cells keyed by column.
        num_ranks: the number of ranks of the job.
        place: the location of the row, for errors.
    """
    size_bytes = parse_count(row["size"], place)
    seconds = _find_seconds(operation, row, size_bytes, place)
    notes = ["OSU prints only a time: bandwidths are computed from size and time"]
    mode = "blocking"
    scope = "mean over iterations and ranks"
    if operation.short_name == "pingpong":
        scope = "half a round trip, mean over iterations"
    elif benchmark.is_point_to_point:
        mode = "pipelined"
        scope = "size over the bandwidth of a window of messages"
        notes = ["OSU prints only a bandwidth: the time is size over bandwidth"]
        if operation.short_name == "bidirectional":
            notes.append("OSU's bandwidth is the sum of both directions: half of it is algbw")
    elif operation.sharded and not operation.is_reduction:  # Every rank contributes a message.
        size_bytes *= num_ranks
        notes.append(f"OSU's size is the message of one rank: S is {num_ranks} times that")
    params: dict[str, Value] = {"size_bytes": size_bytes, "mode": mode}
    if benchmark.dtype:
        params["dtype"] = _DTYPES.get(benchmark.dtype, benchmark.dtype)
    check = Check()
    if "validation" in row:
        passed = row["validation"].lower() == "pass"
        check = Check(passed=passed, wrong=0 if passed else None)  # OSU counts no wrong elements.
    iterations = row.get("iterations")
    method = f"{scope}, OSU micro-benchmarks {benchmark.version or 'of unknown version'}"
    return ImportedResult(
        name=operation.name,
        params=params,
        metrics=make_metrics(operation, num_ranks, size_bytes, seconds, method),
        check=check,
        iterations=None if iterations is None else parse_count(iterations, place),
        printed=row,
        notes=notes,
    )
