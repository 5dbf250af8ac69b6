"""Imports the text and JSON of nccl-tests and rccl-tests of all ages.

Columns are found by their headings.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parbench.bench.machine.environment import select_recorded_variables
from parbench.bench.text import UserError, format_list, name_first
from parbench.reports.formats.imported import (
    ImportedResult,
    ImportedRun,
    parse_count,
    parse_row,
    resolve_num_ranks,
)
from parbench.reports.formats.log_lines import read_log_lines
from parbench.reports.formats.nccl_info import read_nccl_info
from parbench.reports.formats.nccl_json import format_nccl_version, read_json
from parbench.reports.formats.nccl_rows import (
    PLACEMENTS,
    LogHeader,
    Number,
    RankLine,
    Row,
    convert_table,
    parse_printed,
)
from parbench.reports.formats.nccl_tests import REDOPS, TYPES

_CUT_SHORT = "the rest of the file: a table has no summary, so the file may be cut short"
_VERSION = re.compile(r"^# \w+-tests version (\S+)(?:.*-library=(\d+))?")
_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(-?\d+)\s+on\s+(\S+)"
    r"(?:\s+device\s+-?\d+\s+\[[^]]*\]\s*(.*))?",
    re.IGNORECASE,
)
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_LIBRARY = re.compile(r"^(?:.*NCCL INFO )?[NR]CCL version\s*:?\s*(\d+\.\d+\.\d+)")
_START = "# Collective test starting"
_EXPORTER = re.compile(r"^# Written by parbench (\S+): (.*)$")
_REPEATED = re.compile(r"^# (in-place|out-of-place) repeats ")
_AVERAGE = re.compile(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)")
_OUT_OF_BOUNDS = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)")
_MEASURED = ("time", "algbw", "busbw", "#wrong", "error")
"""The columns that a table has for each placement."""
_HEADINGS = {"size", "count", "type", "redop", "root", *_MEASURED}
"""All words that may be the heading of a column."""
_MIN_HEADINGS = 4
"""A comment with at least this many known headings is the heading of a table."""
_REQUIRED = ("size", "type")
"""The columns besides the time without which a row cannot be imported."""
_MAX_SENTENCES = 3
"""The number of notes that the imported run shows. The others are counted."""
_CELL = re.compile(r"-?[\d.]+(?:e[+-]?\d+)?|N/A|-?nan|inf", re.IGNORECASE)
_NAMES = {*TYPES.values(), *REDOPS.values()}
_MIN_CELL_SHARE = 0.6
"""A line is a row of a table if at least this fraction of its words are cells."""


class _TextReader:
    """Reads the text output of nccl-tests line by line into tables with their headers.

    ``source`` is the path of the file, for messages.
    """

    def __init__(self, source: str) -> None:
        self.headers: list[LogHeader] = []
        """The tables whose heading was read, in the order of the file."""
        self.notes: list[str] = []
        """Sentences about tables whose summary contradicts their rows."""
        self.num_summaries = 0
        """The number of tables that end with their average bus bandwidth, so they are complete."""
        self._source = source
        self._header = LogHeader()
        self._columns: list[str] = []

    def read(self, number: int, line: str) -> None:
        """Read one line of the file, from which the prefix of a launcher was removed.

        ``number`` is the number of the line for error messages, from 1.
        """
        place = f"{self._source}, line {number}"
        cells = line.split()
        average = _AVERAGE.match(line)
        wrong = _OUT_OF_BOUNDS.match(line)
        if self._starts_header(line):
            self._header = LogHeader()
            self._columns = []
        if _is_heading(cells):
            self._columns = cells[1:]
            if self._header not in self.headers:
                self.headers.append(self._header)
        elif self._columns and _is_row(cells):
            self._header.rows.append(self._parse_row(cells, place))
        elif self._columns and average:
            self.num_summaries += 1
            self._read_average(average[1])
        elif wrong:
            self._check_wrong(int(wrong[1]), place)
        else:
            self._read_fact(line, place)

    def _starts_header(self, line: str) -> bool:
        """Return True if a line begins the output of another program of nccl-tests.

        A file may contain the output of several programs. Older versions begin with their
        parameters, or are preceded by the command of a shell.
        """
        if line.startswith(("# nccl-tests version", "# rccl-tests version")):
            return True
        if not self._columns:
            return False
        is_complete = self.num_summaries >= len(self.headers)
        is_command = is_complete and "concluded" not in line and _PROGRAM.search(line) is not None
        return is_command or line.startswith(("# nThread", _START)) or bool(_RANK.match(line))

    def _read_fact(self, line: str, place: str) -> None:
        """Read a fact from a line outside a table: a rank, a version, a program or an option.

        The fact is added to the header of the next table. Other lines are ignored. ``place`` is the
        location of the line, for error messages.
        """
        header = self._header
        rank = _RANK.match(line)
        version = _VERSION.match(line)
        library = _LIBRARY.match(line)
        exporter = _EXPORTER.match(line)
        repeated = _REPEATED.match(line)
        program = _PROGRAM.search(line)
        if rank:
            number, group, pid, host, gpu = rank.groups()
            rank_line = RankLine(place, int(number), int(group or 0), pid, host, gpu or "")
            header.rank_lines.append(rank_line)
        elif version:
            header.version = version[1]
            header.nccl = format_nccl_version(int(version[2] or 0))
        elif library:
            header.nccl = header.nccl or library[1]
        elif exporter:
            pairs = [cell.split("=", 1) for cell in exporter[2].split() if "=" in cell]
            header.export_fields = {"parbench": exporter[1], **dict(pairs)}
            header.mode = header.export_fields.get("mode", header.mode)
        elif repeated:
            header.repeated_placement = repeated[1].replace("-", "_")
        elif line.startswith("# Blocking Enabled"):
            header.mode = "blocking"
        elif line.startswith("#") and {"in-place", "out-of-place"} <= set(line.split()):
            header.is_reversed = line.index("in-place") < line.index("out-of-place")
        elif program:
            header.program = header.program or program[1]

    def _read_average(self, text: str) -> None:
        """Read the average bus bandwidth below a table. Text such as ``N/A`` is ignored."""
        try:
            average = parse_printed(text)
        except ValueError:
            return
        if average is not None:
            # nccl-tests prints six digits of the average.
            half_step = max(average.half_step, 1e-5 * average.value)
            self._header.average_busbw = Number(average.value, half_step)

    def _check_wrong(self, num_wrong: int, place: str) -> None:
        """Add a note if the sum of wrong values contradicts the column ``#wrong`` of the rows.

        ``num_wrong`` is the sum that is printed below the table. It contradicts the rows if only
        one of them is 0.
        """
        counts = self._header.list_numbers("#wrong")
        known_counts = [count.value for count in counts if count is not None]
        if known_counts and bool(num_wrong) != any(known_counts):
            rows = "some rows are" if any(known_counts) else "no row is"
            self.notes.append(f"{place}: {num_wrong} values are wrong, but {rows} wrong")

    def _parse_row(self, cells: Sequence[str], place: str) -> Row:
        """Return the row of a line, whose words are ``cells``.

        ``place`` is the location of the line. Raises ``UserError`` if a required column is missing
        or a cell is not a number.
        """
        row = parse_row(self._columns, cells, place, (*_REQUIRED, "time"))
        root = row.get("root")
        if root is not None and not root.removeprefix("-").isdecimal():
            raise UserError(f"{place}: root {root!r} is not a whole number")
        count = row.get("count")
        return Row(
            place=place,
            size=parse_count(row["size"], place),
            count=None if count is None else parse_count(count, place),
            type=row["type"],
            redop=row.get("redop"),
            root=None if root is None else int(root),
            measurements=dict(self._list_measurements(cells, place)),
        )

    def _list_measurements(
        self, cells: Sequence[str], place: str
    ) -> Iterator[tuple[str, dict[str, Number]]]:
        """Yield each placement (in or out of place) of a line with its numbers, keyed by column.

        The numbers are those of ``Row.measurements``. A line with one set of columns gives one
        placement. ``place`` is the location of the line. Raises ``UserError`` if the placements
        have different columns.
        """
        measured = [
            (name, cell)
            for name, cell in zip(self._columns, cells, strict=True)
            if name in _MEASURED
        ]
        names = [name for name, _ in measured]
        half = len(names) // 2
        parts = [measured]
        if len(set(names)) < len(names):
            parts = [measured[:half], measured[half:]]
            if len(names) % 2 or names[:half] != names[half:] or len(set(names)) != half:
                headings = " ".join(names)
                raise UserError(f"{place}: placements have different columns: {headings}")
        placements = reversed(PLACEMENTS) if self._header.is_reversed else PLACEMENTS
        for placement, part in zip(placements, parts, strict=False):
            numbers = {name: _parse_number(cell, place) for name, cell in part}
            yield (
                placement,
                {name: number for name, number in numbers.items() if number is not None},
            )


def _is_heading(cells: Sequence[str]) -> bool:
    """Return True if the words of a line are the heading of a table, which names its columns.

    A heading with missing columns also counts, so that a row can name the missing one.
    """
    num_headings = len(_HEADINGS & set(cells))
    return cells[:1] == ["#"] and num_headings >= _MIN_HEADINGS


def _is_row(cells: Sequence[str]) -> bool:
    """Return True if most words of a line are cells of a table, also if the row is corrupt.

    A cell is a number, N/A, or the name of a data type or reduction.
    """
    known_cells = [cell for cell in cells if _CELL.fullmatch(cell) or cell in _NAMES]
    return len(known_cells) >= max(2, _MIN_CELL_SHARE * len(cells)) and cells[0] in known_cells


def _parse_number(cell: str, place: str) -> Number | None:
    """Return the number in a cell, None if it is N/A. Raises ``UserError`` for other text.

    ``place`` is the location of the line, for the error.
    """
    try:
        return parse_printed(cell)
    except ValueError:
        raise UserError(f"{place}: {cell!r} is not a number") from None


def parse_nccl(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the run that the output of nccl-tests contains, as text or JSON.

    Rows that contradict themselves are left out and named in the notes. Raises ``UserError`` if a
    row is cut short, if all rows contradict themselves, or if the version of JSON is not supported.

    Args:
        text: the content of the file.
        source: the path of the file, for messages.
        nproc: the number of ranks, None if the file states it.
    """
    if _is_document(text):
        return _make_run([read_json(text, source)], source, nproc)
    reader = _TextReader(source)
    for number, line in enumerate(read_log_lines(text), start=1):
        reader.read(number, line)
    headers = [header for header in reader.headers if header.rows]
    if not reader.headers:
        raise UserError(f"{source} contains no table of nccl-tests: no line names its columns")
    if not headers:
        raise UserError(f"{source} contains a table of nccl-tests without rows")
    run = _make_run(headers, source, nproc, reader.notes)
    is_complete = reader.num_summaries >= len(reader.headers)
    return replace(
        run,
        environment={**run.environment, **read_nccl_info(text)},
        omissions=[] if is_complete else [_CUT_SHORT],
    )


def _is_document(text: str) -> bool:
    """Return True for the JSON of nccl-tests, False for a log whose lines are JSON."""
    return text.lstrip().startswith("{") and '"results"' in text


def _make_run(
    headers: Sequence[LogHeader],
    source: str,
    nproc: int | None,
    notes: Sequence[str] = (),
) -> ImportedRun:
    """Return the run with the results of all tables. Raises ``UserError`` if their ranks differ.

    Args:
        headers: the tables, at least one.
        source: the path of the file, for messages.
        nproc: the number of ranks that the user gave, or None.
        notes: sentences about the tables, to which more may be added.
    """
    results: list[ImportedResult] = []
    sentences = list(notes)
    for header in headers:
        if header.rows:
            table_results, table_notes = convert_table(header, source, nproc)
            results += table_results
            sentences += table_notes
    sizes = {header.world_size for header in headers}
    if len(sizes) > 1:
        counts = format_list(sorted(size or 0 for size in sizes), "and")
        raise UserError(f"{source} has tables of {counts} ranks: import them from separate files")
    first = headers[0]
    hosts = list(dict.fromkeys(host for header in headers for host in header.hosts))
    nodes = first.export_fields.get("nodes", "")
    return ImportedRun(
        version=first.version,
        environment=first.environment,
        num_ranks=resolve_num_ranks(first.world_size, nproc, source),
        nodes=int(nodes) if nodes.isdecimal() else len(hosts) or None,
        backend=first.export_fields.get("backend", "nccl"),
        device=first.export_fields.get("device", "cuda"),
        results=results,
        hosts=hosts,
        variables=select_recorded_variables(first.variables),
        notes=name_first(list(dict.fromkeys(sentences)), _MAX_SENTENCES),
    )
