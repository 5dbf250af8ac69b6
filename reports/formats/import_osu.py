"""Results that the OSU micro-benchmarks print.

They (mvapich.cse.ohio-state.edu/benchmarks) print a time, the mean over iterations and ranks, and
the message size of one rank. If every rank contributes such a message (allgather, alltoall, gather,
scatter), the size S of nccl-tests is that size times the number of ranks. Rates are computed.
"""

import re

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
}
"""The operations by the titles of the benchmarks."""
_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
_TITLE = re.compile(r"^# OSU MPI-?(\S*) (.*?)(?: Test)?(?: v(\S+))?$")


def parse_osu(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the results of a file.

    Raises ``UserError`` if it is cut short, or without ``nproc``, which OSU does not print.
    """
    num_ranks = resolve_num_ranks(None, nproc, source)
    operation: OperationSpec | None = None
    version = dtype = ""
    columns: list[str] = []
    results: list[ImportedResult] = []
    devices: set[str] = set()
    versions: list[str] = []
    omissions: list[str] = []
    for number, raw_line in enumerate(text.splitlines(), start=1):
        line = raw_line.strip()
        title = _TITLE.match(line)
        if title:
            name = title[2].lower().removesuffix(" latency")
            operation = OPERATIONS_BY_NAME.get(OPERATIONS.get(name, ""))
            if operation is None:
                omissions.append(f"OSU {title[2]}: parbench has no equivalent case")
            devices.add(title[1].lower() or "cpu")  # Only accelerators are in the title.
            version = title[3] or ""
            versions.append(version)
            dtype = ""
            columns = []
        elif line.startswith("# Datatype:"):
            dtype = line.partition(":")[2].strip(" .")
        elif line.startswith("# Size"):
            headings = re.split(r"\s{2,}", line.removeprefix("# "))
            columns = [heading.lower().replace(" ", "") for heading in headings]
        elif operation and columns and line[:1].isdecimal():
            place = f"{source}, line {number}"
            row = parse_row(columns, line.split(), place, ("size",))
            method = f"OSU micro-benchmarks {version or 'of unknown version'}"
            results.append(_make_result(operation, row, num_ranks, dtype, method, place))
    return ImportedRun(
        version=", ".join(dict.fromkeys(filter(None, versions))) or None,
        num_ranks=num_ranks,
        backend="mpi",
        device=devices.pop() if len(devices) == 1 else UNKNOWN,
        results=results,
        omissions=list(dict.fromkeys(omissions)),
    )


def _make_result(
    operation: OperationSpec,
    row: dict[str, str],
    num_ranks: int,
    dtype: str,
    method: str,
    place: str,
) -> ImportedResult:
    latency = row.get("avglatency(us)", row.get("latency(us)"))
    if latency is None:
        raise UserError(f"{place}: none of the columns {', '.join(row)} is a latency")
    size_bytes = parse_count(row["size"], place)
    notes = ["OSU prints only a time: bandwidths are computed from size and time"]
    if operation.sharded and not operation.is_reduction:  # Every rank contributes a message.
        size_bytes *= num_ranks
        notes.append(f"OSU's size is the message of one rank: S is {num_ranks} times that")
    params: dict[str, Value] = {"size_bytes": size_bytes, "mode": "blocking"}
    if dtype:
        params["dtype"] = _DTYPES.get(dtype, dtype)
    scope = "mean over iterations and ranks"
    if operation.short_name == "pingpong":
        scope = "half a round trip, mean over iterations"
    seconds = parse_number(latency, place) * MICRO or None
    check = Check()
    if "validation" in row:
        passed = row["validation"].lower() == "pass"
        check = Check(passed=passed, wrong=0 if passed else None)  # OSU counts no wrong elements.
    iterations = row.get("iterations")
    return ImportedResult(
        name=operation.name,
        params=params,
        metrics=make_metrics(operation, num_ranks, size_bytes, seconds, f"{scope}, {method}"),
        check=check,
        iterations=None if iterations is None else parse_count(iterations, place),
        printed=row,
        notes=notes,
    )
