"""The tables of nccl-tests, and their conversion to results."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parbench.bench.plan.catalogue import OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list
from parbench.reports.formats.imported import (
    MICRO,
    OPERATIONS_BY_NAME,
    UNKNOWN,
    ImportedResult,
    ImportedRun,
    resolve_num_ranks,
)
from parbench.reports.formats.nccl_names import PROGRAMS, REDOPS, TYPES

PROGRAM_NAME = re.compile(r"\b\w+_perf\b")
"""The name of a program of nccl-tests, such as ``all_reduce_perf``."""
_OPERATIONS = {program: OPERATIONS_BY_NAME[name] for name, program in PROGRAMS.items()}
"""The operation of each program."""
_DTYPES = {nccl_type: dtype for dtype, nccl_type in TYPES.items()}
"""The torch dtype of each type, keyed by the name in nccl-tests: ``half`` is ``float16``."""
_REDOPS = {nccl_redop: redop for redop, nccl_redop in REDOPS.items()}
"""The reduction of each redop, keyed by the name in nccl-tests: ``prod`` is ``product``."""


class NcclNumbers(NamedTuple):
    """The time and errors in a row of nccl-tests for one placement (in or out of place)."""

    time: float
    """The time of one operation in us."""
    num_wrong: int | None
    """The number of wrong elements, None if results were not checked."""


@dataclass(frozen=True, kw_only=True)
class NcclRow:
    """One line of a table of nccl-tests: the results of one message size, in and out of place."""

    size: int
    """The message size in bytes, as in the column ``size``."""
    type: str
    """The data type by its name in nccl-tests, such as ``float``."""
    redop: str
    """The reduction by its name in nccl-tests, such as ``sum``, or ``none``."""
    root: int
    """The root rank, -1 for an operation without a root."""
    measurements: Mapping[str, NcclNumbers]
    """The printed time and errors, keyed by placement (``out_of_place``, ``in_place``).

    A placement whose time was printed as N/A is left out.
    """


class NcclRank(NamedTuple):
    """A rank that nccl-tests lists above a table."""

    number: int
    """The number of the rank."""
    host: str
    """The name of the host, or ``unknown``."""
    gpu: str
    """The model of the GPU, empty if unknown."""


@dataclass(kw_only=True)
class NcclTable:
    """A table of nccl-tests: the facts that are printed above it, and its rows."""

    program: str = ""
    """The program, such as ``all_reduce_perf``. Empty if the file does not name it."""
    version: str | None = None
    """The version of nccl-tests, None if unknown."""
    nccl: str | None = None
    """The version of NCCL, such as ``2.28.9``. None if unknown."""
    mode: str = "pipelined"
    """``blocking`` for the option ``-z 1`` of nccl-tests, otherwise ``pipelined``."""
    ranks: list[NcclRank] = field(default_factory=list)
    """The listed ranks, in the order of the file. Empty if the file lists none."""
    rows: list[NcclRow] = field(default_factory=list)
    """The rows of the table in the order of the file."""


def convert_tables(tables: Sequence[NcclTable], source: str, nproc: int | None) -> ImportedRun:
    """Return the results in all tables of a file, and the facts about their job.

    Raises ``UserError`` if a program is unknown, or if the number of ranks is unknown or differs
    between tables.

    Args:
        tables: the tables, at least one.
        source: the path of the file, for messages.
        nproc: the number of ranks that the user gave with ``--nproc``, None if not given.
    """
    _check_ranks(tables, source)
    counts = {len(table.ranks) for table in tables}
    if len(counts) > 1:
        sizes = format_list(sorted(counts), "and")
        raise UserError(f"{source} has tables of {sizes} ranks: import them from separate files")
    num_ranks = resolve_num_ranks(counts.pop() or None, nproc, source)
    results: list[ImportedResult] = []
    for table in tables:
        operation = _find_operation(table, source)
        for row in table.rows:
            results += _convert_row(table, row, operation)
    first = tables[0]
    hosts = dict.fromkeys(rank.host for rank in first.ranks if rank.host != UNKNOWN)
    gpus = dict.fromkeys(rank.gpu for rank in first.ranks if rank.gpu)
    facts = {"gpu": ", ".join(gpus), "nccl": first.nccl}
    return ImportedRun(
        version=first.version,
        environment={name: value for name, value in facts.items() if value},
        num_ranks=num_ranks,
        backend="nccl",
        device="cuda",
        results=results,
        hosts=list(hosts),
    )


def _check_ranks(tables: Sequence[NcclTable], source: str) -> None:
    """Raise ``UserError`` if the tables seem to be of several jobs that ran at the same time.

    The listed ranks of a table must be 0, 1, 2 and so on, each once. Tables of equally many ranks
    must have the same hosts, and a program may have only one table of a single rank.
    """
    hosts_by_size: dict[int, list[str]] = {}
    single_rank_programs = []
    is_one_job = True
    for table in tables:
        ranks = sorted(table.ranks)
        hosts = [rank.host for rank in ranks]
        if [rank.number for rank in ranks] != list(range(len(ranks))):
            is_one_job = False
        if hosts_by_size.setdefault(len(ranks), hosts) != hosts:
            is_one_job = False
        if len(ranks) == 1:
            single_rank_programs.append(table.program)
    if not is_one_job or len(set(single_rank_programs)) < len(single_rank_programs):
        raise UserError(
            f"{source} does not list the ranks of one job, from 0 up and each once. "
            "If mpirun started several ranks, build nccl-tests with: make MPI=1"
        )


def _find_operation(table: NcclTable, source: str) -> OperationSpec:
    """Return the operation that the program of a table measures.

    Raises ``UserError`` if the file ``source`` does not name the program, or if no operation of
    parbench is equivalent.
    """
    program = table.program
    if not program:
        raise UserError(
            f"{source} does not name the program of nccl-tests. "
            "Add the line '# Collective test starting: all_reduce_perf' before the table"
        )
    if program not in _OPERATIONS:
        programs = format_list(_OPERATIONS, "and")
        raise UserError(f"{source}: {program} has no equivalent case. These have one: {programs}")
    return _OPERATIONS[program]


def _convert_row(
    table: NcclTable, row: NcclRow, operation: OperationSpec
) -> Iterator[ImportedResult]:
    """Yield a result for each placement that was measured in a row of a table."""
    params: dict[str, Value] = {
        "size_bytes": row.size,
        "dtype": _DTYPES.get(row.type, row.type),
        "mode": table.mode,
    }
    if operation.is_reduction:
        params["redop"] = _REDOPS.get(row.redop, row.redop)
    if row.root >= 0:
        params["root"] = row.root
    for placement, numbers in row.measurements.items():
        check = Check()
        if numbers.num_wrong is not None:
            check = Check(passed=numbers.num_wrong == 0, wrong=numbers.num_wrong)
        yield ImportedResult(
            operation=operation,
            params={**params, "placement": placement},
            seconds=numbers.time * MICRO,
            check=check,
        )
