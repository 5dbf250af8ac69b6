"""nccl-tests' text, and its JSON up to version 3, as results of ours: sizes and rates are in our convention already."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from parbench.bench.machine.environment import select_recorded_variables
from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list
from parbench.reports.formats import foreign
from parbench.reports.formats.foreign import (
    GIGA,
    MICRO,
    NCCL_TESTS,
    UNKNOWN,
    ImportedResult,
    ImportedRun,
    PrintedRow,
    operations_by_name,
    world_size,
)
from parbench.reports.formats.nccl_tests import REDUCTIONS, TOOL, TYPES

_JSON_VERSION = 3
_OPERATIONS = operations_by_name(NCCL_TESTS)
_DTYPES = {theirs: ours for ours, theirs in TYPES.items()}
_REDOPS = {theirs: ours for ours, theirs in REDUCTIONS.items()}
_CUT_SHORT = "whatever followed its last line: a table has no summary at its end, so the file may be cut short"
_ADD_THE_LINE = (
    "add the line that newer nccl-tests print: '# Collective test starting: all_reduce_perf'"
)
_LABEL = re.compile(
    r"^\s*(?:\d+:\s|\[\d+,\d+\]<std(?:out|err)>:)"
)  # what srun -l and mpirun put before a line
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+Group\s+\d+\s+Pid\s+-?\d+\s+on\s+(\S+)")
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_OURS = re.compile(r"^# Written by parbench (\S+): (.*)$")
_REPEATED = re.compile(
    r"^# (in-place|out-of-place) repeats "
)  # numbers that were not measured: parbench's export
_Numbers = Mapping[str, float | None]
_TOLD = ("parbench", "mode", "backend", "device", "nodes", "world")  # of ours, what is no parameter


@dataclass(kw_only=True)
class _Head:
    """What is known of a table before its first row, on ``ranks`` of the world's; ``ours`` is what parbench added."""

    program: str = ""
    version: str | None = None
    mode: str = "pipelined"
    repeated: str = ""
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    ours: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    step: float = 0.01 * GIGA  # what the last printed decimal of a rate is worth

    @property
    def world(self) -> int | None:
        told = self.ours.get("world", "")
        return int(told) if told.isdecimal() else self.ranks

    def learn(self, line: str) -> None:
        if match := _RANK.match(line):
            self.ranks = max(self.ranks or 0, int(match[1]) + 1)
            self.hosts += () if match[2] in (*self.hosts, UNKNOWN) else (match[2],)
        elif match := re.match(r"^# nccl-tests version (\S+)", line):
            self.version = match[1]
        elif match := _OURS.match(line):
            self.ours = _pairs([f"parbench={match[1]}", *match[2].split()])
            self.mode = self.ours.get("mode", self.mode)
        elif match := _REPEATED.match(line):
            self.repeated = match[1].replace("-", "_")
        elif line.startswith("# Blocking Enabled"):
            self.mode = "blocking"
        elif not self.program and (match := _PROGRAM.search(line)):
            self.program = match[1]


def parse_nccl(text: str, where: str, nproc: int | None) -> ImportedRun:
    """Return what a file of nccl-tests holds, text or JSON; ``UserError`` if it is cut short or newer than known."""
    if not text.lstrip().startswith("{"):
        return _parse_text(text, where, nproc)
    heads, found = list[_Head](), list[ImportedResult]()
    for document, place in _documents(text, where):
        heads.append(head := _head(document))
        ranks = world_size(head.ranks, nproc, place)
        found += (
            one for result in document.results for one in _results(head, ranks, result, place)
        )
    return _run(heads, found, where, nproc)


def _pairs(words: Iterable[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def _run(
    heads: list[_Head], found: list[ImportedResult], where: str, nproc: int | None, *left_out: str
) -> ImportedRun:
    foreign.refuse_several({head.world for head in heads}, where)
    first = heads[0]
    hosts, nodes = (
        tuple(dict.fromkeys(host for head in heads for host in head.hosts)),
        first.ours.get("nodes", ""),
    )
    written = {"written_by": f"parbench {first.ours['parbench']}"} if first.ours else {}
    return ImportedRun(
        tool=TOOL,
        version=first.version,
        ranks=world_size(first.world, nproc, where),
        nodes=int(nodes) if nodes.isdecimal() else len(hosts) or None,
        backend=first.ours.get("backend", "nccl"),
        device=first.ours.get("device", "cuda"),
        found=tuple(found),
        hosts=hosts,
        variables=select_recorded_variables(
            {k: v for head in heads for k, v in head.variables.items()}
        ),
        details={**first.details, **written},
        left_out=left_out,
    )


def _found(
    head: _Head,
    ranks: int,
    size: int,
    placed: str,
    words: Mapping[str, str],
    numbers: _Numbers,
    where: str,
) -> ImportedResult:
    """Return a placement's result; ``words`` have type, redop and root, ``numbers`` us, GB/s and the wrong elements."""
    root, redop, dtype = int(foreign.number(words["root"], where)), words["redop"], words["type"]
    if (operation := _OPERATIONS.get(head.program)) is None:
        known = f": {head.program} is not known; known are {format_list(_OPERATIONS)}"
        unnamed = f" does not say which operation it measured; {_ADD_THE_LINE}"
        raise UserError(f"{where}{known if head.program else unnamed}")
    if negative := [
        f"{name} {value:g}" for name, value in numbers.items() if value is not None and value < 0
    ]:
        raise UserError(
            f"{where}: {negative[0]} at {size} B is negative, and {TOOL} prints numbers from 0 up"
        )
    params: dict[str, Value] = {
        "size_bytes": size,
        "dtype": _DTYPES.get(dtype, dtype),
        "mode": head.mode,
    }
    params |= {"placement": placed} | (
        {"redop": _REDOPS.get(redop, redop)} if redop != "none" else {}
    )
    params |= ({"root": root} if root >= 0 else {}) | {
        k: v for k, v in head.ours.items() if k not in _TOLD
    }
    seconds, algbw, busbw = (
        None if (printed := numbers[name]) is None else printed * scale
        for name, scale in (("time", MICRO), ("algbw", GIGA), ("busbw", GIGA))
    )
    method = f"mean over iterations and ranks, {TOOL} {head.version or 'of unknown version'}"
    if head.ours:
        method = f"as parbench {head.ours['parbench']} wrote it in the layout of {TOOL}"
    wrong = numbers.get("#wrong")
    return ImportedResult(
        name=operation.name,
        params=params,
        group_ranks=None if head.world == head.ranks else head.ranks,
        metrics=foreign.time_and_rates(
            operation, ranks, size, seconds, method, (algbw, busbw), head.step
        ),
        check=Check() if wrong is None else Check(passed=wrong == 0, wrong=int(wrong)),
        printed=dict(numbers),
        notes=(
            "size 0: nccl-tests rounds each rank's share down to 16 bytes, and moved nothing here",
        )
        * (size == 0),
    )


def _parse_text(text: str, where: str, nproc: int | None) -> ImportedRun:
    head, heads, found, names, summaries = (
        _Head(),
        list[_Head](),
        list[ImportedResult](),
        list[str](),
        0,
    )
    for line, place in foreign.lines(text, where):
        bare = _LABEL.sub("", line)
        words = bare.split()
        # older versions begin with their parameters, or a shell's command line
        command = len(heads) == summaries and _PROGRAM.search(bare) and "concluded" not in bare
        if bare.startswith("# nccl-tests version") or (
            names and (bare.startswith("# nThread") or command)
        ):
            head, names = _Head(), []
        if "redop" in words and words[0] == "#":
            names = words[1:]
            heads.append(replace(head))
        elif names and words and words[0].isdecimal():
            found += _row(head, names, words, place, nproc)
        elif bare.startswith("# Avg bus bandwidth"):
            summaries += 1
        else:
            head.learn(bare)
    if not heads:
        raise UserError(f"{where} holds no table of {TOOL}: no line names its columns")
    return _run(heads, found, where, nproc, *(() if summaries == len(heads) else (_CUT_SHORT,)))


def _row(
    head: _Head, names: list[str], words: list[str], where: str, nproc: int | None
) -> Iterator[ImportedResult]:
    """Yield a row's placements; a column that occurs twice is out of place first."""
    row = PrintedRow(words, names, ("size", "type", "redop", "root", "algbw", "busbw"), where)
    ranks = world_size(head.ranks, nproc, where)
    starts = [at - 1 for at in range(1, len(names) - 1) if names[at : at + 2] == ["algbw", "busbw"]]
    if not starts:
        raise UserError(f"{where}: the heading before this row names no algbw with busbw beside it")
    for placed, start in zip((OUT_OF_PLACE, IN_PLACE), starts, strict=False):
        cells = dict(
            zip(("time", *names[start + 1 : start + 4]), words[start : start + 4], strict=False)
        )
        if placed != head.repeated and any(cell != "N/A" for cell in cells.values()):
            known = {
                name: cell
                for name, cell in cells.items()
                if cell not in ("N/A", "nan", "-nan", "inf")
            }
            numbers = {
                name: foreign.number(known[name], where) if name in known else None
                for name in cells
            }
            yield _found(head, ranks, row.whole("size"), placed, row, numbers, where)


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = float | str | None


class _Placed(msgspec.Struct, frozen=True):
    time: _Number = None
    cpu_time: _Number = None
    alg_bw: _Number = None
    bus_bw: _Number = None
    nwrong: _Number = None


class _PerIteration(msgspec.Struct, frozen=True):
    times_us: list[Annotated[float, msgspec.Meta(ge=0)]] = []
    skipped_iterations: _Count = 0


class _Result(msgspec.Struct, frozen=True):
    size: _Count
    type: str
    redop: str
    root: str
    out_of_place: _Placed | None = None
    in_place: _Placed | None = None
    out_of_place_per_iter: _PerIteration | None = None
    in_place_per_iter: _PerIteration | None = None
    actual_iterations: _Count | None = None


class _Device(msgspec.Struct, frozen=True):
    hostname: str | None = None


class _Config(msgspec.Struct, frozen=True):
    devices: list[_Device] = []
    nthreads: int = 1
    ngpus: int = 1
    blocking_collectives: str = "false"


class _Document(msgspec.Struct, frozen=True):
    version: int
    config: _Config
    results: list[_Result]
    args: list[str] = []
    env: list[str] = []
    nccl_version: int | None = None
    start_time: str | None = None


def _documents(text: str, where: str) -> Iterator[tuple[_Document, str]]:
    """Yield one document after another, each with its place, after a look at its version: fields may have moved."""
    visible, end = re.compile(r"\S"), 0
    while begin := visible.search(text, end):
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            why = f"this is no whole JSON ({error.msg}), so the file seems to be cut short"
            raise UserError(f"{where}, line {error.lineno}: {why}") from error
        place = f"{where}, line {text.count(chr(10), 0, begin.start()) + 1}"
        version = value.get("version") if isinstance(value, dict) else None
        if isinstance(version, int) and version > _JSON_VERSION:
            newer = f"is newer than {_JSON_VERSION}, the newest we read"
            raise UserError(f"{place}: JSON version {version} of {TOOL} {newer}")
        try:
            yield msgspec.convert(value, _Document), place
        except msgspec.ValidationError as error:
            raise UserError(f"{place} is not what {TOOL} writes: {error}") from error


def _head(document: _Document) -> _Head:
    program, config = next(iter(document.args), ""), document.config
    return _Head(
        program=PurePath(program).name,
        version=f"JSON version {document.version}",
        mode="blocking" if config.blocking_collectives == "true" else "pipelined",
        # nccl-tests lists one device a process, however many GPUs and threads that has
        ranks=len(config.devices) * config.nthreads * config.ngpus or None,
        hosts=tuple(device.hostname for device in config.devices if device.hostname),
        details={"start_time": document.start_time, "nccl_version": document.nccl_version},
        variables=_pairs(document.env),
        step=1e-6 * GIGA,
    )


def _results(head: _Head, ranks: int, result: _Result, where: str) -> Iterator[ImportedResult]:
    words = {"type": result.type, "redop": result.redop, "root": result.root}
    out_of_place = OUT_OF_PLACE, result.out_of_place, result.out_of_place_per_iter
    for name, placed, timed in (
        out_of_place,
        (IN_PLACE, result.in_place, result.in_place_per_iter),
    ):
        if placed is None:
            continue
        time = placed.cpu_time if placed.time is None else placed.time
        told = {
            "time": time,
            "algbw": placed.alg_bw,
            "busbw": placed.bus_bw,
            "#wrong": placed.nwrong,
        }
        # nccl-tests writes the text nan where it has no number
        numbers = {
            k: v if isinstance(v, int | float) and math.isfinite(v) else None
            for k, v in told.items()
        }
        found = _found(head, ranks, result.size, name, words, numbers, where)
        skipped = timed.skipped_iterations if timed else 0
        warm_up = (
            (f"the first {skipped} iterations are warm-up, by --per_iter_skip",) if skipped else ()
        )
        yield replace(
            found,
            iterations=result.actual_iterations,
            samples=tuple(us * MICRO for us in timed.times_us[skipped:]) if timed else (),
            notes=(*found.notes, *warm_up),
        )
