"""Text of nccl-tests and its JSON up to version 3. Sizes and rates need no conversion."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated

import msgspec

from parbench.bench.machine.environment import select_recorded_variables
from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.plan.params import Value
from parbench.bench.results.formatting import GIGA
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list
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
from parbench.reports.formats.nccl_tests import PROGRAMS, REDOPS, TYPES

_MAX_JSON_VERSION = 3
_OPERATIONS = {program: name for name, program in PROGRAMS.items()}
_DTYPES = {nccl_type: dtype for dtype, nccl_type in TYPES.items()}
_REDOPS = {nccl_redop: redop for redop, nccl_redop in REDOPS.items()}
_CUT_SHORT = "the rest of the file: a table has no summary, so the file may be cut short"
_LINE_LABEL = re.compile(r"^\s*(?:\d+:\s|\[\d+,\d+\]<std(?:out|err)>:)")  # of srun -l and mpirun
_VERSION = re.compile(r"^# nccl-tests version (\S+)")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+Group\s+\d+\s+Pid\s+-?\d+\s+on\s+(\S+)")
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_EXPORTER = re.compile(r"^# Written by parbench (\S+): (.*)$")
_REPEATED = re.compile(r"^# (in-place|out-of-place) repeats ")
_EXPORT_FACTS = ("parbench", "mode", "backend", "device", "nodes", "world")


@dataclass(kw_only=True)
class _Header:
    """The facts that are printed before a table."""

    program: str = ""
    version: str | None = None
    mode: str = "pipelined"
    repeated_placement: str = ""
    """A placement whose numbers were not measured, in an export of parbench."""
    num_ranks: int | None = None
    hosts: list[str] = field(default_factory=list)
    export_fields: dict[str, str] = field(default_factory=dict)
    """The facts and parameters that parbench adds to its export."""
    variables: Mapping[str, str] = field(default_factory=dict)
    rate_resolution: float = 0.01 * GIGA

    @property
    def world_size(self) -> int | None:
        """The number of all ranks, which is larger than that of a group."""
        return _to_int(self.export_fields.get("world", "")) or self.num_ranks

    @property
    def method(self) -> str:
        """The method by which times were computed."""
        if self.export_fields:
            return f"exported by parbench {self.export_fields['parbench']}"
        version = self.version or "of unknown version"
        return f"mean over iterations and ranks, nccl-tests {version}"

    def read(self, line: str) -> None:
        """Add the fact that a line states, if any."""
        if match := _RANK.match(line):
            self.num_ranks = max(self.num_ranks or 0, int(match[1]) + 1)
            if match[2] not in (*self.hosts, UNKNOWN):
                self.hosts.append(match[2])
        elif match := _VERSION.match(line):
            self.version = match[1]
        elif match := _EXPORTER.match(line):
            self.export_fields = {"parbench": match[1], **_split_pairs(match[2].split())}
            self.mode = self.export_fields.get("mode", self.mode)
        elif match := _REPEATED.match(line):
            self.repeated_placement = match[1].replace("-", "_")
        elif line.startswith("# Blocking Enabled"):
            self.mode = "blocking"
        elif match := _PROGRAM.search(line):
            self.program = self.program or match[1]


def parse_nccl(text: str, source: str, nproc: int | None) -> ImportedRun:
    """Return the results of a file, text or JSON.

    Raises ``UserError`` if a row is cut short or the version of JSON is not supported.
    """
    if not text.lstrip().startswith("{"):
        return _parse_text(text, source, nproc)
    document = _decode_document(text, source)
    header = _read_document_header(document)
    results: list[ImportedResult] = []
    for row in document.results:
        results += _make_results(header, row, source, nproc)
    return _make_run([header], results, source, nproc)


def _parse_text(text: str, source: str, nproc: int | None) -> ImportedRun:
    header = _Header()
    headers: list[_Header] = []
    results: list[ImportedResult] = []
    columns: list[str] = []
    num_summaries = 0
    for number, labeled_line in enumerate(text.splitlines(), start=1):
        line = _LINE_LABEL.sub("", labeled_line)
        words = line.split()
        if _starts_header(line, bool(columns), is_complete=num_summaries == len(headers)):
            header = _Header()
            columns = []
        if "redop" in words and words[0] == "#":
            columns = words[1:]
            headers.append(header)
        elif columns and words and words[0].isdecimal():
            place = f"{source}, line {number}"
            results += _make_results(header, _parse_row(columns, words, place), place, nproc)
        elif line.startswith("# Avg bus bandwidth"):
            num_summaries += 1
        else:
            header.read(line)
    if not headers:
        raise UserError(f"{source} contains no table of nccl-tests: no line names its columns")
    omissions = [] if num_summaries == len(headers) else [_CUT_SHORT]
    return _make_run(headers, results, source, nproc, omissions)


def _starts_header(line: str, is_after_table: bool, *, is_complete: bool) -> bool:
    """Return True if a line begins the output of another program.

    Older versions begin with their parameters, or are preceded by the command line of a shell.
    """
    if line.startswith("# nccl-tests version"):
        return True
    is_command = is_complete and "concluded" not in line and _PROGRAM.search(line) is not None
    return is_after_table and (line.startswith("# nThread") or is_command)


def _parse_row(columns: Sequence[str], words: Sequence[str], place: str) -> "_Row":
    """Return a row whose columns time, algbw, busbw and #wrong occur for each placement."""
    required = ("size", "type", "redop", "root", "algbw", "busbw")
    row = parse_row(columns, words, place, required)
    placements = []
    for index, pair in enumerate(pairwise(columns)):
        if pair == ("algbw", "busbw"):
            time, algbw, busbw, *wrong = words[index - 1 : index + 3]
            has_wrong = columns[index + 2 : index + 3] == ["#wrong"]
            numbers = _Numbers(
                time=_parse_cell(time, place),
                alg_bw=_parse_cell(algbw, place),
                bus_bw=_parse_cell(busbw, place),
                nwrong=_parse_cell(wrong[0], place) if has_wrong else None,
            )
            placements.append(numbers)
    if not placements:
        raise UserError(f"{place}: the heading of this row has no algbw next to busbw")
    return _Row(
        size=parse_count(row["size"], place),
        type=row["type"],
        redop=row["redop"],
        root=row["root"],
        out_of_place=placements[0],
        in_place=placements[1] if len(placements) > 1 else None,
    )


def _parse_cell(cell: str, place: str) -> float | None:
    return None if cell in ("N/A", "nan", "-nan", "inf") else parse_number(cell, place)


def _make_results(
    header: _Header, row: "_Row", place: str, nproc: int | None
) -> Iterator[ImportedResult]:
    """Yield the results of a row: out of place, and in place."""
    num_ranks = resolve_num_ranks(header.num_ranks, nproc, place)
    operation = OPERATIONS_BY_NAME.get(_OPERATIONS.get(header.program, ""))
    if operation is None:
        raise UserError(f"{place}: {_describe_unknown_program(header.program)}")
    params = _make_params(header, row, place)
    for placement, numbers, iterations in (
        (OUT_OF_PLACE, row.out_of_place, row.out_of_place_per_iter),
        (IN_PLACE, row.in_place, row.in_place_per_iter),
    ):
        printed = numbers.list_finite() if numbers else {}
        if placement == header.repeated_placement or not printed:
            continue
        for name, number in printed.items():
            if number < 0:
                raise UserError(f"{place}: {name} {number:g} at {row.size} B is negative")
        time, wrong = printed.get("time"), printed.get("#wrong")
        num_skipped = iterations.skipped_iterations if iterations else 0
        times = iterations.times_us if iterations else []
        yield ImportedResult(
            name=operation.name,
            params={**params, "placement": placement},
            group_size=None if header.world_size == header.num_ranks else header.num_ranks,
            metrics=make_metrics(
                operation,
                num_ranks,
                row.size,
                None if time is None else time * MICRO,
                header.method,
                {name: printed[name] * GIGA for name in ("algbw", "busbw") if name in printed},
                header.rate_resolution,
            ),
            check=Check() if wrong is None else Check(passed=wrong == 0, wrong=int(wrong)),
            samples=[us * MICRO for us in times[num_skipped:]],
            iterations=row.actual_iterations,
            printed=printed,
            notes=_make_notes(row, num_skipped),
        )


def _make_params(header: _Header, row: "_Row", place: str) -> dict[str, Value]:
    params: dict[str, Value] = {
        "size_bytes": row.size,
        "dtype": _DTYPES.get(row.type, row.type),
        "mode": header.mode,
    }
    if row.redop != "none":
        params["redop"] = _REDOPS.get(row.redop, row.redop)
    root = int(parse_number(row.root, place))
    if root >= 0:
        params["root"] = root
    for name, text in header.export_fields.items():
        if name not in _EXPORT_FACTS:
            params[name] = text
    return params


def _make_notes(row: "_Row", num_skipped: int) -> list[str]:
    notes = []
    if row.size == 0:
        notes.append("size 0: nccl-tests rounds the share of each rank down to 16 bytes")
    if num_skipped:
        notes.append(f"the first {num_skipped} iterations are warm-up, by --per_iter_skip")
    return notes


def _describe_unknown_program(program: str) -> str:
    if program:
        programs = format_list(PROGRAMS.values(), "and")
        return f"{program} has no equivalent case; the programs with one are {programs}"
    hint = "add the line '# Collective test starting: all_reduce_perf' of newer versions"
    return f"the file does not name the program of nccl-tests; {hint}"


def _make_run(
    headers: Sequence[_Header],
    results: Sequence[ImportedResult],
    source: str,
    nproc: int | None,
    omissions: Sequence[str] = (),
) -> ImportedRun:
    sizes = {header.world_size for header in headers}
    if len(sizes) > 1:
        counts = format_list(sorted(size or 0 for size in sizes), "and")
        raise UserError(f"{source} has tables of {counts} ranks: import them from separate files")
    first = headers[0]
    hosts = list(dict.fromkeys(host for header in headers for host in header.hosts))
    return ImportedRun(
        version=first.version,
        num_ranks=resolve_num_ranks(first.world_size, nproc, source),
        nodes=_to_int(first.export_fields.get("nodes", "")) or len(hosts) or None,
        backend=first.export_fields.get("backend", "nccl"),
        device=first.export_fields.get("device", "cuda"),
        results=results,
        hosts=hosts,
        variables=select_recorded_variables(first.variables),
        omissions=omissions,
    )


def _split_pairs(words: Iterable[str]) -> dict[str, str]:
    """Return the values of ``name=value`` words by name."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def _to_int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


# --- JSON ---

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Number = float | str | None  # nccl-tests writes the text nan for an unknown number.


class _Numbers(msgspec.Struct, frozen=True):
    """The numbers of a placement, in us and GB/s."""

    time: _Number = None
    cpu_time: _Number = None
    alg_bw: _Number = None
    bus_bw: _Number = None
    nwrong: _Number = None

    def list_finite(self) -> dict[str, float]:
        """Return the known numbers by their columns in text."""
        numbers = {
            "time": self.cpu_time if self.time is None else self.time,
            "algbw": self.alg_bw,
            "busbw": self.bus_bw,
            "#wrong": self.nwrong,
        }
        return {
            name: number
            for name, number in numbers.items()
            if isinstance(number, int | float) and math.isfinite(number)
        }


class _Iterations(msgspec.Struct, frozen=True):
    times_us: list[_Seconds] = []
    skipped_iterations: _Count = 0


class _Row(msgspec.Struct, frozen=True):
    """The results of one message size."""

    size: _Count
    type: str
    redop: str
    root: str
    out_of_place: _Numbers | None = None
    in_place: _Numbers | None = None
    out_of_place_per_iter: _Iterations | None = None
    in_place_per_iter: _Iterations | None = None
    actual_iterations: _Count | None = None


class _Device(msgspec.Struct, frozen=True):
    hostname: str | None = None


class _Config(msgspec.Struct, frozen=True):
    """The options and the processes of nccl-tests."""

    devices: list[_Device] = []
    nthreads: int = 1
    ngpus: int = 1
    blocking_collectives: str = "false"


class _Document(msgspec.Struct, frozen=True):
    version: int
    config: _Config
    results: list[_Row]
    args: list[str] = []
    env: list[str] = []


def _decode_document(text: str, source: str) -> _Document:
    """Return the document after a check of its version, because fields may have moved."""
    try:
        content = json.loads(text)
        version = content.get("version")
        if isinstance(version, int) and version > _MAX_JSON_VERSION:
            supported = f"versions up to {_MAX_JSON_VERSION} are supported"
            raise UserError(f"{source}: JSON version {version} of nccl-tests; {supported}")
        return msgspec.convert(content, _Document)
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, so the file seems to be cut short"
        raise UserError(f"{source}, line {error.lineno}: {problem}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{source} is not what nccl-tests writes: {error}") from error


def _read_document_header(document: _Document) -> _Header:
    config = document.config
    hosts = dict.fromkeys(device.hostname for device in config.devices if device.hostname)
    return _Header(
        program=PurePath(document.args[0]).name if document.args else "",
        version=f"JSON version {document.version}",
        mode="blocking" if config.blocking_collectives == "true" else "pipelined",
        # A process lists one device, with any number of GPUs and threads.
        num_ranks=len(config.devices) * config.nthreads * config.ngpus or None,
        hosts=list(hosts),
        variables=_split_pairs(document.env),
        rate_resolution=1e-6 * GIGA,
    )
