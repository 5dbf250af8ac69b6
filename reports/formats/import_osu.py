"""Results that the OSU micro-benchmarks print, converted to our convention.

They (mvapich.cse.ohio-state.edu/benchmarks) print only a time, the mean over iterations and ranks, and
the message size of one rank. Where every rank contributes such a message (allgather, alltoall, gather,
scatter), S is that many times larger. The rates follow from S and the time.
"""

import re

from parbench.bench.plan.catalogue import OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError
from parbench.reports.formats.foreign import (
    MICRO,
    NO_CASE,
    OSU,
    UNKNOWN,
    ImportedResult,
    ImportedRun,
    PrintedRow,
    lines,
    operations_by_name,
    time_and_rates,
    world_size,
)

_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
_TITLE = re.compile(r"^\s*# OSU MPI-?(\S*) (.*?)(?: Test)?(?: v(\S+))?\s*$")
_OPERATIONS = operations_by_name(OSU)


def parse_osu(text: str, where: str, nproc: int | None) -> ImportedRun:
    """Return what OSU benchmarks printed; ``UserError`` if it is cut short, or without ``nproc``: they do not tell."""
    ranks = world_size(None, nproc, where)
    operation, version, dtype, names = None, None, "", list[str]()
    found, devices, versions, left_out = (
        list[ImportedResult](),
        set[str](),
        dict[str, None](),
        dict[str, None](),
    )
    for line, place in lines(text, where):
        bare = line.strip()
        if match := _TITLE.match(line):
            device, title, version = match.groups()
            operation, dtype, names = (
                _OPERATIONS.get(title.lower().removesuffix(" latency")),
                "",
                [],
            )
            devices.add(device.lower() or "cpu")  # the title tells of accelerators alone
            versions |= {version: None} if version else {}
            left_out |= {} if operation else {f"OSU {title}: {NO_CASE}": None}
        elif bare.startswith("# Datatype:"):
            dtype = bare.partition(":")[2].strip(" .")
        elif bare.startswith("# Size"):
            names = [
                name.lower().replace(" ", "")
                for name in re.split(r"\s{2,}", bare.removeprefix("# "))
            ]
        elif operation and names and bare and bare.split()[0].isdecimal():
            row = PrintedRow(bare.split(), names, ("size",), place)
            found.append(_parse_row(operation, row, ranks, dtype, version or "of unknown version"))
    return ImportedRun(
        tool="osu",
        version=", ".join(versions) or None,
        ranks=ranks,
        backend="mpi",
        device=devices.pop() if len(devices) == 1 else UNKNOWN,
        found=tuple(found),
        left_out=tuple(left_out),
    )


def _parse_row(
    operation: OperationSpec, row: PrintedRow, ranks: int, dtype: str, version: str
) -> ImportedResult:
    latency = next((name for name in ("avglatency(us)", "latency(us)") if name in row), None)
    if latency is None:
        raise UserError(f"{row.where}: the columns {', '.join(row)} hold no latency")
    params: dict[str, Value] = {"size_bytes": row.whole("size"), "mode": "blocking"}
    notes = ["OSU prints a time alone: bandwidths are computed of size and time"]
    if operation.sharded and not operation.is_reduction:  # Every rank contributes a message.
        params["size_bytes"] *= ranks
        notes.append(f"OSU's size is one rank's message: S is {ranks} times that")
    if dtype:
        params["dtype"] = _DTYPES.get(dtype, dtype)
    pair = operation.name == "p2p.pingpong"
    what = "half a round trip, mean over iterations" if pair else "mean over iterations and ranks"
    seconds, method = row.number(latency) * MICRO or None, f"{what}, OSU micro-benchmarks {version}"
    right = row["validation"].lower() == "pass" if "validation" in row else None
    return ImportedResult(
        name=operation.name,
        params=params,
        metrics=time_and_rates(operation, ranks, int(params["size_bytes"]), seconds, method),
        check=Check(passed=right, wrong=0 if right else None),  # it never counts what is wrong
        iterations=row.whole("iterations") if "iterations" in row else None,
        printed=dict(row),
        notes=tuple(notes),
    )
