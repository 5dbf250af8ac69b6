"""Dumps of torch's flight recorder: collectives that do not finish, and the ranks missing in them.

torch writes a dump of each rank when a collective times out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), and
``torch._C._distributed_c10d._dump_nccl_trace()`` returns one, pickled or as JSON.
"""

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from parbench.bench.files import convert_read_errors, read_file
from parbench.bench.launch.flight_recorder import GroupState, find_waits, parse_groups
from parbench.bench.results.tables import Column, Row, Section, Table
from parbench.bench.text import UserError, pluralize
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.report import Report

_PICKLE_START = b"\x80"
"""The first byte of a pickle."""
_HEAD_BYTES = 4096
"""The number of bytes at the start of a file by which a dump is recognized."""
_NOW_NS = 2**63 - 1
"""A time after all records, so that no work counts as still arriving.

A dump is read after its job has ended.
"""
_COLUMNS = (
    Column("collective", help="operation and its number within the group"),
    Column("group", help="name of the process group"),
    Column("waiting", help="ranks that have enqueued it"),
    Column("missing", help="ranks that have not enqueued it"),
    Column("unknown", "no dump", help="ranks of the group without a dump"),
    Column("last", "last call of the missing", help="last collective of the first missing rank"),
)


class _Frame(msgspec.Struct):
    """A frame of the Python stack at which a collective was called."""

    filename: str = ""
    """The path of the source file."""
    line: int = 0
    """The number of the line."""


class _Call(msgspec.Struct):
    """A collective call in a dump of torch's flight recorder."""

    process_group: tuple[str, str]
    """The name and the description of the process group, such as ``("1", "mesh_dp")``."""
    collective_seq_id: int
    """The number of the collective within its process group, from 1."""
    profiling_name: str
    """The backend and the operation, such as ``nccl:all_reduce``."""
    frames: list[_Frame] = []
    """The stack of the call, the innermost frame first."""


class _GroupConfig(msgspec.Struct):
    """The configuration of a process group in a dump of torch's flight recorder."""

    ranks: str = ""
    """The global ranks of the group as text, such as ``[0, 1]``."""


class _DumpDocument(msgspec.Struct):
    """The content of a dump of torch's flight recorder, without the fields that are not used."""

    version: str
    """The version of the format of dumps."""
    pg_config: dict[str, _GroupConfig]
    """The configuration of each process group, keyed by the name of the group."""
    entries: list[_Call]
    """The recorded calls of the rank, oldest first."""


@dataclass(frozen=True, kw_only=True)
class RankDump:
    """A dump of torch's flight recorder: the last collectives of one rank on each process group."""

    rank: int
    """The global rank."""
    groups: Mapping[str, GroupState]
    """The state of each process group, keyed by name of the group.

    It has the last enqueued collective and the first collective that is not done.
    """
    group_descriptions: Mapping[str, str]
    """The description of each process group, such as ``mesh_dp``, keyed by name of the group."""
    last_call: str
    """The last collective: ``all_reduce 12 at train.py:80``, the text ``none`` without calls.

    The number counts the collectives of the process group.
    """


class _DataUnpickler(pickle.Unpickler):
    """Unpickles only dictionaries, lists, texts and numbers. Code in a pickle is never run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise ``UnpicklingError`` for every class and function that a pickle refers to.

        The method of ``pickle.Unpickler`` would import it.
        """
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def list_dumps(paths: Sequence[Path]) -> list[Path]:
    """Return the dumps of the flight recorder among the given files and in the given folders.

    Files of other kinds, such as traces of the profiler, are left out.
    """
    files: list[Path] = []
    for path in paths:
        with convert_read_errors(path):
            files += sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and _is_dump(file)]


def _is_dump(path: Path) -> bool:
    """Return True if the first bytes of a file are the start of a dump, pickled or JSON."""
    with convert_read_errors(path), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    is_document = head.lstrip().startswith(b"{") and b'"traceEvents"' not in head
    return head.startswith(_PICKLE_START) or (is_document and b'"entries"' in head)


def read_dump(path: Path) -> RankDump:
    """Read the dump of a rank, whose number is the last one in the file's name.

    Raises ``UserError`` if the file is not a dump of torch 2.4 or later, or if its name has no
    number.
    """
    with convert_read_errors(path, "is not a dump of the flight recorder"):
        content = read_file(path)
        if content.startswith(_PICKLE_START):
            content = _convert_pickle(content, path)
        try:
            document = msgspec.json.decode(content, type=_DumpDocument)
        except msgspec.DecodeError as error:
            raise UserError(f"{path} is not a dump of torch 2.4 or later: {error}") from error
    numbers = re.findall(r"\d+", path.name)
    if not numbers:
        raise UserError(f"{path}: the name of a dump ends with its rank, as in nccl_trace_rank_0")
    configured = {
        name: tuple(int(rank) for rank in re.findall(r"\d+", config.ranks))
        for name, config in document.pg_config.items()
    }
    descriptions = dict(call.process_group for call in document.entries)
    # The default group of gloo has no name in the configuration.
    ranks = {name: configured.get(name) or configured.get("", ()) for name in descriptions}
    return RankDump(
        rank=int(numbers[-1]),
        groups=parse_groups([content], ranks, 0, _NOW_NS) or {},
        group_descriptions=descriptions,
        last_call=_describe_last_call(document.entries),
    )


def _describe_last_call(calls: Sequence[_Call]) -> str:
    """Return the last call of a rank as ``OPERATION NUMBER at FILE:LINE``, ``none`` without calls.

    The line is the innermost one outside torch, and is left out if the dump has no such line.
    """
    if not calls:
        return "none"
    call = calls[-1]
    frames = [frame for frame in call.frames if "/torch/" not in frame.filename]
    place = f" at {Path(frames[0].filename).name}:{frames[0].line}" if frames else ""
    return f"{call.profiling_name.partition(':')[2]} {call.collective_seq_id}{place}"


def _convert_pickle(content: bytes, path: Path) -> bytes:
    """Return the content of a pickled dump as JSON.

    Raises ``UserError`` for other content, whose ``path`` the message names.
    """
    try:
        return json.dumps(_DataUnpickler(BytesIO(content)).load()).encode()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a dump of the flight recorder: {error}") from error


def explain_dumps(paths: Sequence[Path]) -> Report:
    """Return the report on the dumps of a job: collectives that do not finish, and missing ranks.

    Raises ``UserError`` if a file is not a dump, or if two files are of the same rank.
    """
    dumps: dict[int, RankDump] = {}
    for path in paths:
        dump = read_dump(path)
        if dump.rank in dumps:
            raise UserError(f"{path}: another dump is of rank {dump.rank} too: pass one per rank")
        dumps[dump.rank] = dump
    rows = list(_list_pending(dumps))
    table = Table("pending", "Collectives that do not finish", columns=_COLUMNS, rows=rows)
    notes = _describe_culprits(dumps)
    return Report(
        name=pluralize(len(dumps), "dump"),
        heading=f"flight recorder of {pluralize(len(dumps), 'rank')}",
        verdicts=[_judge(rows[0] if rows else {})],
        code=0,
        runs=(),
        sections=[Section("dumps", "Flight recorder", tables=[table], notes=notes)],
    )


def _list_pending(dumps: Mapping[int, RankDump]) -> Iterator[Row]:
    """Yield a row about each process group whose ranks wait in a collective, keyed by column.

    It is about the first collective that a rank of the group has enqueued and that is not done. The
    columns are ``collective``, ``group``, ``waiting``, ``missing``, ``unknown`` and ``last``.
    Another key, ``is_mismatch``, is True if ranks called different operations. ``dumps`` is keyed
    by rank.
    """
    names = dict.fromkeys(name for dump in dumps.values() for name in dump.groups)
    for name in names:
        members = {rank: dump.groups[name] for rank, dump in dumps.items() if name in dump.groups}
        number = min((state.pending for state in members.values() if state.pending), default=0)
        if not number:
            continue
        waiting = [rank for rank, state in members.items() if state.pending == number]
        ranks = members[waiting[0]].ranks
        missing = [
            rank
            for rank in ranks
            if rank in dumps and (rank not in members or members[rank].enqueued < number)
        ]
        callers: dict[str, list[int]] = defaultdict(list)
        for rank in waiting:
            callers[members[rank].name.partition(":")[2]].append(rank)
        operations = list(callers)
        if len(callers) > 1:
            operations = [f"{name} by {_format_ranks(by)}" for name, by in callers.items()]
        yield {
            "collective": f"{', '.join(operations)}, number {number}",
            "group": dumps[waiting[0]].group_descriptions[name] or name,
            "waiting": _format_ranks(waiting),
            "missing": _format_ranks(missing),
            "unknown": _format_ranks([rank for rank in ranks if rank not in dumps]),
            "last": dumps[missing[0]].last_call if missing else None,
            "is_mismatch": len(callers) > 1,
        }


def _format_ranks(ranks: Sequence[int]) -> str | None:
    """Return the numbers of ranks separated by commas, None if there are none."""
    return ",".join(map(str, ranks)) or None


def _judge(row: Mapping[str, Any]) -> ReportVerdict:
    """Return the verdict on a job from a pending collective: COMPLETE, MISMATCH or HANG.

    ``row`` is the first row of ``_list_pending``. An empty row stands for a job without pending
    collectives, which is COMPLETE.
    """
    if not row:
        return ReportVerdict("COMPLETE", "good", "no collective is pending")
    place = f"{row['collective']} of {row['group']}"
    if row["is_mismatch"]:
        message = f"ranks call different operations: {place}"
        return ReportVerdict("MISMATCH", "bad", message)
    if row["missing"]:
        causes = f"rank {row['missing']} is missing"
    elif row["unknown"]:
        causes = f"rank {row['unknown']} has no dump"
    else:
        causes = "all ranks have enqueued it"
    return ReportVerdict("HANG", "bad", f"{place} does not finish: {causes}")


def _describe_culprits(dumps: Mapping[int, RankDump]) -> list[str]:
    """Return a sentence about each rank that others wait for and that waits for none itself.

    ``dumps`` is keyed by rank.
    """
    waits = find_waits({rank: dump.groups for rank, dump in dumps.items()})
    awaited_ranks = set().union(*waits.values())
    return [
        f"rank {rank} waits for no other rank, but others wait for it: examine its stack"
        for rank in sorted(awaited_ranks)
        if not waits[rank]
    ]
