"""Imports the results that the OSU micro-benchmarks print, from version 5.

They (mvapich.cse.ohio-state.edu/benchmarks) print a time, the mean over iterations and ranks, and
the message size of one rank. If every rank contributes such a message (allgather, alltoall, gather,
scatter), the size S of nccl-tests is that size times the number of ranks. Tests of bandwidth print
MB/s of one pair of ranks, from which the time of a message follows.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from parbench.bench.plan.catalogue import OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError
from parbench.reports.formats.imported import (
    MICRO,
    OPERATIONS_BY_NAME,
    ImportedResult,
    ImportedRun,
    list_lines,
    parse_number,
    resolve_num_ranks,
)

OPERATIONS = {
    "Allreduce Latency": "all_reduce",
    "Allgather Latency": "all_gather",
    "Reduce_scatter Latency": "reduce_scatter",
    "All-to-All Personalized Exchange Latency": "all_to_all",
    "Broadcast Latency": "broadcast",
    "Reduce Latency": "reduce",
    "Gather Latency": "gather",
    "Scatter Latency": "scatter",
    "Latency": "pingpong",
    "Bandwidth": "unidirectional",
    "Bi-Directional Bandwidth": "bidirectional",
}
"""The short name of each operation, keyed by the title of its benchmark."""
_POINT_TO_POINT = ("pingpong", "unidirectional", "bidirectional")
"""The operations between two ranks."""
_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "int8"}
"""The name of each MPI data type in parbench."""
_TITLE = re.compile(r"# OSU (\w+)(?:-(\w+))? (.+?) Test\s+v(\S+)")
"""A title with the library, the device (absent for CPUs), the name and the version."""
_HEADING = re.compile(r"# Size\s+(?:Avg )?(?:Latency|Bandwidth) ?\((?:us|MB/s)\)")
"""A heading whose second column is the mean latency in us or the bandwidth in MB/s."""


@dataclass(kw_only=True)
class _OsuBenchmark:
    """The output of one OSU benchmark: the facts in its title and options, and its table."""

    title: str
    """The title without the library and the device, such as ``Allreduce Latency``."""
    backend: str
    """The library that communicated, such as ``mpi`` or ``nccl``."""
    device: str
    """The device that held the messages: ``cpu``, or the name in the title, such as ``cuda``."""
    version: str
    """The version of the OSU micro-benchmarks."""
    dtype: str = ""
    """The data type in parbench, such as ``float32``. Empty if the output does not state it."""
    has_heading: bool = False
    """True if the heading of the table was read."""
    rows: list[tuple[str, list[str]]] = field(default_factory=list)
    """The rows of the table: (``FILE, line N``, the words of the line)."""

    @property
    def operation(self) -> OperationSpec | None:
        """The equivalent operation of parbench, None if parbench has none."""
        return OPERATIONS_BY_NAME.get(OPERATIONS.get(self.title, ""))


def parse_osu(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the results and facts that the output of OSU benchmarks contains.

    Raises ``UserError`` if a row is cut short, if benchmarks used different devices, or if
    ``nproc`` is missing although a benchmark is a collective. OSU does not print the number of
    ranks.

    Args:
        text: the content of the file.
        source: the path of the file, for messages.
        nproc: the number of ranks that the user gave with ``--nproc``, None if not given.
    """
    benchmarks = _read_benchmarks(text, source)
    if not benchmarks:
        raise UserError(f"{source} contains no title of OSU 5 or newer")
    operations = [benchmark.operation for benchmark in benchmarks]
    has_collective = any(spec and spec.short_name not in _POINT_TO_POINT for spec in operations)
    num_ranks = nproc or resolve_num_ranks(None if has_collective else 2, None, source)
    results: list[ImportedResult] = []
    notes = []
    for benchmark in benchmarks:
        operation = benchmark.operation
        if operation is None:
            notes.append(f"not imported: OSU {benchmark.title} has no equivalent case")
            continue
        for place, cells in benchmark.rows:
            results.append(_make_result(benchmark, operation, cells, num_ranks, place))
    places = {(benchmark.backend, benchmark.device) for benchmark in benchmarks}
    if len(places) != 1:
        problem = "must contain benchmarks of OSU on one kind of device"
        raise UserError(f"{source} {problem}: import others from separate files")
    return ImportedRun(
        version=benchmarks[0].version,
        num_ranks=num_ranks,
        backend=benchmarks[0].backend,
        device=benchmarks[0].device,
        results=results,
        notes=notes,
    )


def _read_benchmarks(text: str, source: str) -> list[_OsuBenchmark]:
    """Return the benchmarks of a log with their rows, in the order of the log.

    A log contains the output of one or several OSU benchmarks. ``source`` is the path of the file,
    for errors. Raises ``UserError`` for a row whose table has no heading with a latency or
    bandwidth.
    """
    benchmarks: list[_OsuBenchmark] = []
    for place, line in list_lines(text, source):
        title = _TITLE.match(line)
        cells = line.split()
        if title:
            library, device, name, version = title.groups()
            benchmark = _OsuBenchmark(
                title=name,
                backend=library.lower(),
                device=(device or "cpu").lower(),
                version=version,
            )
            benchmarks.append(benchmark)
        elif not benchmarks:
            continue
        elif line.startswith("# Datatype:"):
            dtype = line.partition(":")[2].strip(" .")
            benchmarks[-1].dtype = _DTYPES.get(dtype, dtype)
        elif line.startswith("# Send Buffer on HOST (H) and Receive Buffer on HOST (H)"):
            benchmarks[-1].device = "cpu"
        elif _HEADING.match(line):
            benchmarks[-1].has_heading = True
        elif cells and cells[0].isdecimal() and benchmarks[-1].operation:
            if not benchmarks[-1].has_heading:
                raise UserError(f"{place}: no heading above has a latency or bandwidth per size")
            benchmarks[-1].rows.append((place, cells))
    return benchmarks


def _make_result(
    benchmark: _OsuBenchmark,
    operation: OperationSpec,
    cells: Sequence[str],
    num_ranks: int,
    place: str,
) -> ImportedResult:
    """Return the result of a row of an OSU benchmark, with the size as nccl-tests counts it.

    Args:
        benchmark: the benchmark that printed the row.
        operation: the operation of the benchmark.
        cells: the words of the row: size, latency or bandwidth, and columns that are not imported.
        num_ranks: the number of ranks of the job.
        place: the location of the row, for errors.
    """
    if len(cells) < 2:
        raise UserError(f"{place}: the row has only a size, so the file seems to be cut short")
    size_bytes = int(cells[0])
    number = parse_number(cells[1], place)
    seconds = number * MICRO
    notes = ["the time is the mean over iterations and ranks"]
    mode = "blocking"
    if operation.short_name == "pingpong":
        notes = ["the time is half a round trip, the mean over iterations"]
    elif operation.short_name in _POINT_TO_POINT:
        mode = "pipelined"
        directions = 2 if operation.short_name == "bidirectional" else 1
        seconds = directions * size_bytes / (number * 1e6) if number else 0.0
        notes = ["the time is size over bandwidth per direction, in a window of messages"]
    elif operation.sharded and not operation.is_reduction:  # Every rank contributes a message.
        size_bytes *= num_ranks
        notes.append(f"the size is {num_ranks} times OSU's, which is the message of one rank")
    params: dict[str, Value] = {"size_bytes": size_bytes, "mode": mode}
    if benchmark.dtype:
        params["dtype"] = benchmark.dtype
    check = Check()
    if cells[-1] in ("Pass", "Fail"):
        check = Check(passed=cells[-1] == "Pass")
    return ImportedResult(
        operation=operation, params=params, seconds=seconds, check=check, notes=notes
    )
