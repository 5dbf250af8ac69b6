"""Dumps of torch's flight recorder: collectives that do not finish, and the ranks missing in them.

torch writes a dump of each rank when a collective times out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), and
``torch._C._distributed_c10d._dump_nccl_trace()`` returns one, pickled or as JSON.
"""

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NoReturn

import msgspec

from parbench.bench.files import convert_read_errors, read_file
from parbench.bench.launch.flight_recorder import GroupState, parse_groups
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
    Column("cause", help="ranks that have not enqueued it, or the reason if all have"),
)


class _Call(msgspec.Struct):
    """A collective call in a dump of torch's flight recorder."""

    process_group: tuple[str, str]
    """The name and the description of the process group, such as ``("1", "mesh_dp")``."""


class _GroupConfig(msgspec.Struct):
    """The configuration of a process group in a dump of torch's flight recorder."""

    ranks: str = ""
    """The global ranks of the group as text, such as ``[0, 1]``."""


class _DumpDocument(msgspec.Struct):
    """The content of a dump of torch's flight recorder, without the fields that are not used."""

    pg_config: dict[str, _GroupConfig]
    """The configuration of each process group, keyed by the name of the group."""
    entries: list[_Call]
    """The recorded calls of the rank, oldest first."""


class _DataUnpickler(pickle.Unpickler):
    """Unpickles only dictionaries, lists, texts and numbers. Code in a pickle is never run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise ``UnpicklingError`` for every class and function that a pickle refers to.

        The method of ``pickle.Unpickler`` would import it.
        """
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def list_dumps(paths: Sequence[Path]) -> list[Path]:
    """Return the dumps of the flight recorder among the given files and in the given folders.

    Files of other kinds, such as traces of the profiler, are left out. A dump is recognized by the
    first bytes of the file.
    """
    files: list[Path] = []
    for path in paths:
        with convert_read_errors(path):
            files += sorted(path.iterdir()) if path.is_dir() else [path]
    dumps = []
    for path in files:
        if not path.is_file():
            continue
        with convert_read_errors(path), path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(_PICKLE_START) or (b'"entries"' in head and b"traceEvents" not in head):
            dumps.append(path)
    return dumps


def read_dump(path: Path) -> dict[str, GroupState]:
    """Return the state of each process group in the dump of a rank, keyed by the group's name.

    The name is the description of the group, such as ``mesh_dp``, and its number in torch. Raises
    ``UserError`` if the file is not a dump of torch 2.4 or later.
    """
    with convert_read_errors(path, "is not a dump of torch 2.4 or later"):
        content = read_file(path)
        if content.startswith(_PICKLE_START):
            try:
                content = json.dumps(_DataUnpickler(BytesIO(content)).load()).encode()
            except (pickle.UnpicklingError, EOFError, TypeError, IndexError) as error:
                raise ValueError(error) from error
        document = msgspec.json.decode(content, type=_DumpDocument)
        ranks = {
            name: tuple(int(rank) for rank in re.findall(r"\d+", config.ranks))
            for name, config in document.pg_config.items()
        }
        descriptions = dict(call.process_group for call in document.entries)
        # The default group of gloo has no name in the configuration.
        groups = {name: ranks.get(name) or ranks.get("", ()) for name in descriptions}
        states = parse_groups([content], groups, 0, _NOW_NS) or {}
    return {f"{descriptions[name]} ({name})": state for name, state in states.items()}


def explain_dumps(paths: Sequence[Path]) -> Report:
    """Return the report on the dumps of a job: collectives that do not finish, and missing ranks.

    Raises ``UserError`` if a file is not a dump, if its name does not end with its rank, or if two
    files are of the same rank.
    """
    dumps: dict[int, dict[str, GroupState]] = {}
    for path in paths:
        numbers = re.findall(r"\d+", path.name)
        if not numbers or int(numbers[-1]) in dumps:
            raise UserError(f"{path}: pass one dump per rank, named like nccl_trace_rank_0")
        dumps[int(numbers[-1])] = read_dump(path)
    rows = list(_list_pending(dumps))
    table = Table("pending", "Collectives that do not finish", columns=_COLUMNS, rows=rows)
    verdict = ReportVerdict("COMPLETE", "good", "no collective is pending")
    if rows:
        message = "{collective} of {group} does not finish: {cause}".format_map(rows[0])
        verdict = ReportVerdict("HANG", "bad", message)
    return Report(
        name=pluralize(len(dumps), "dump"),
        heading=f"flight recorder of {pluralize(len(dumps), 'rank')}",
        verdicts=[verdict],
        code=0,
        runs=(),
        sections=[Section("dumps", "Flight recorder", tables=[table])],
    )


def _list_pending(dumps: Mapping[int, Mapping[str, GroupState]]) -> Iterator[Row]:
    """Yield a row about each process group whose ranks wait in a collective, keyed by column.

    It is about the first collective that a rank of the group has enqueued and that is not done.
    ``dumps`` has the state of each process group by rank and then by name of the group.
    """
    for name in dict.fromkeys(name for groups in dumps.values() for name in groups):
        members = {rank: groups[name] for rank, groups in dumps.items() if name in groups}
        number = min((state.pending for state in members.values() if state.pending), default=0)
        if not number:
            continue
        callers: dict[str, list[int]] = defaultdict(list)
        for rank, state in members.items():
            if state.pending == number:
                callers[state.name.partition(":")[2]].append(rank)
        waiting = sorted(rank for ranks in callers.values() for rank in ranks)
        absent = [rank for rank in members[waiting[0]].ranks if rank not in waiting]
        missing = [
            rank
            for rank in absent
            if rank in dumps and (rank not in members or members[rank].enqueued < number)
        ]
        unknown = [rank for rank in absent if rank not in dumps]
        operations = ", ".join(callers)
        cause = "all ranks have enqueued it"
        if len(callers) > 1:
            operations = ", ".join(f"{op} by {_format_ranks(by)}" for op, by in callers.items())
            cause = "ranks call different operations"
        elif missing:
            cause = f"rank {_format_ranks(missing)} is missing"
        elif unknown:
            cause = f"rank {_format_ranks(unknown)} has no dump"
        yield {
            "collective": f"{operations}, number {number}",
            "group": name,
            "waiting": _format_ranks(waiting),
            "cause": cause,
        }


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks separated by commas."""
    return ",".join(map(str, ranks))
