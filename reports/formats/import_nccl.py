"""Imports the text output of nccl-tests and rccl-tests since version 2.13."""

import re
from collections.abc import Sequence

from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.text import UserError, format_list
from parbench.reports.formats.imported import ImportedRun, list_lines, parse_number
from parbench.reports.formats.nccl_names import EXPORT_MARK
from parbench.reports.formats.nccl_table import (
    PROGRAM_NAME,
    NcclNumbers,
    NcclRank,
    NcclRow,
    NcclTable,
    convert_tables,
)

_STARTS = (
    "# nccl-tests version",
    "# rccl-tests version",
    "# Collective test starting",
    "# nThread",
)
"""The starts of lines above a table of nccl-tests. After rows, such a line begins another table."""
_VERSION = re.compile(r"# \w+-tests version (\S+)(?:.*-library=(\d+))?")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+\s+on\s+(\S+)"
    r"\s+device\s+\d+\s+\[[^]]*\]\s*(.*)"
)
_ROW = re.compile(r"\s*\d+\s+\d+\s")
_REQUIRED_COLUMNS = ("size", "type", "redop", "root", "time", "#wrong")
_PLACEMENTS = (OUT_OF_PLACE, IN_PLACE)
"""The placements in the order of the columns of nccl-tests."""
_UNKNOWN_NUMBERS = ("N/A", "nan", "-nan", "inf")


def parse_nccl(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the results and facts that a text output of nccl-tests contains.

    Raises ``UserError`` for an incomplete row, a missing column, an unknown program or an unknown
    number of ranks.

    Args:
        text: the content of the file.
        source: the path of the file, for messages.
        nproc: the number of ranks that the user gave with ``--nproc``, None if not given.
    """
    if EXPORT_MARK in text:
        raise UserError(f"{source} was exported by parbench: use the run itself")
    tables = read_tables(text, source)
    if not tables:
        raise UserError(f"{source} contains no table of nccl-tests with rows")
    return convert_tables(tables, source, nproc)


def read_tables(text: str, source: str) -> list[NcclTable]:
    """Return the tables with rows in the text output of one or several programs of nccl-tests.

    A file has several tables if it contains the output of several programs. Tables without rows are
    left out. ``source`` is the name of the file, for errors. Raises ``UserError`` for a row that
    does not fit the heading of its table.
    """
    tables = [NcclTable()]
    columns: list[str] = []
    for place, line in list_lines(text, source):
        if tables[-1].rows and line.startswith(_STARTS):
            tables.append(NcclTable())
        if line.split()[:2] == ["#", "size"]:
            columns = line.split()[1:]
        elif columns and _ROW.match(line):
            tables[-1].rows.append(_parse_row(columns, line.split(), place))
        else:
            _read_fact(line, place, tables[-1])
    return [table for table in tables if table.rows]


def _read_fact(line: str, place: str, table: NcclTable) -> None:
    """Add the fact in a line above a table to ``table``: a rank, versions, mode or program.

    Lines without such a fact are ignored. ``place`` is the location of the line for errors:
    ``FILE, line N``.
    """
    rank = _RANK.match(line)
    version = _VERSION.match(line)
    program = PROGRAM_NAME.search(line)
    if rank:
        number, group, host, gpu = rank.groups(default="0")
        if int(group) > 0:
            raise UserError(f"{place}: groups of NCCL_TESTS_SPLIT cannot be imported")
        table.ranks.append(NcclRank(int(number), host, gpu))
    elif version:
        table.version = version[1]
        code = int(version[2] or 0)
        # The headers of NCCL encode version 2.28.9 as 22809.
        table.nccl = f"{code // 10000}.{code // 100 % 100}.{code % 100}" if code else None
    elif line.startswith("# Blocking Enabled"):
        table.mode = "blocking"
    elif program:
        table.program = table.program or program[0]


def _parse_row(columns: Sequence[str], cells: Sequence[str], place: str) -> NcclRow:
    """Return the row that a line of a table contains.

    Raises ``UserError`` for a line that does not fit the columns.

    Args:
        columns: the names of the columns in the heading. ``time``, ``algbw``, ``busbw`` and
            ``#wrong`` occur twice: first for out of place, then for in place.
        cells: the words of the line, one for each column.
        place: the location of the line for errors: ``FILE, line N``.
    """
    missing = [column for column in _REQUIRED_COLUMNS if column not in columns]
    if missing:
        raise UserError(
            f"{place}: the heading of this row has no column {format_list(missing)}, which "
            "nccl-tests 2.13 or newer prints"
        )
    if len(cells) != len(columns):
        counts = f"{len(cells)} values for {len(columns)} columns"
        raise UserError(f"{place}: {counts}, so the file may be cut short")
    facts = dict(zip(columns, cells, strict=True))
    if not facts["root"].removeprefix("-").isdecimal():
        raise UserError(f"{place}: root {facts['root']!r} is not a whole number")
    starts = [index for index, column in enumerate(columns) if column == "time"]
    num_columns = len(columns) - starts[-1]
    measurements = {}
    for placement, start in zip(_PLACEMENTS, starts, strict=False):
        stop = start + num_columns
        numbers = {
            column: parse_number(cell, place)
            for column, cell in zip(columns[start:stop], cells[start:stop], strict=True)
            if cell not in _UNKNOWN_NUMBERS
        }
        if "time" in numbers:
            measurements[placement] = NcclNumbers(
                time=numbers["time"],
                num_wrong=int(numbers["#wrong"]) if "#wrong" in numbers else None,
            )
    return NcclRow(
        size=int(facts["size"]),
        type=facts["type"],
        redop=facts["redop"],
        root=int(facts["root"]),
        measurements=measurements,
    )
