"""nccl-tests' text, and its JSON up to version 3, as results of ours: sizes and rates are in our convention already."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from bench.machine.environment import recorded_variables
from bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE, names_of
from bench.plan.operation_spec import OperationSpec
from bench.plan.params import Value
from bench.results.records import Check
from bench.text import UserError, listed
from reports.formats.foreign import (
    GIGA,
    MICRO,
    UNKNOWN,
    Foreign,
    Found,
    fields,
    number,
    time_and_rates,
    whole,
    world_size,
)
from reports.formats.nccl_table import REDUCTIONS, TYPES
from reports.formats.nccl_text import JSON_VERSION

TOOL = "nccl-tests"
MEAN = "mean over iterations and ranks"
TEXT_STEP, JSON_STEP = 0.01 * GIGA, 1e-6 * GIGA  # what the last printed decimal of a rate is worth

_OPERATIONS = names_of("nccl-tests")
_DTYPES = {theirs: ours for ours, theirs in TYPES.items()}
_REDOPS = {theirs: ours for ours, theirs in REDUCTIONS.items()}
_NO_NUMBER = ("N/A", "nan", "-nan", "inf")
_CUT_SHORT = "whatever followed its last line: a table has no summary at its end, so the file may be cut short"
_ROUNDED = "size 0: nccl-tests rounds each rank's share down to 16 bytes, and moved nothing here"
_LABEL = re.compile(r"^\s*(?:\d+:\s|\[\d+,\d+\]<std(?:out|err)>:)")  # what srun -l and mpirun put before a line
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+Group\s+\d+\s+Pid\s+-?\d+\s+on\s+(\S+)")
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_OURS = re.compile(r"^# Written by parbench (\S+): (.*)$")


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What is known of a table before its first row; ``ours`` holds what parbench added when it wrote the file.

    ``ranks`` are those of the table, which parbench may have written of a group of the ``world``'s.
    """

    program: str | None = None
    version: str | None = None
    mode: str = "pipelined"
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    ours: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operation(self) -> OperationSpec | None:
        return _OPERATIONS.get(self.program or "")

    @property
    def world(self) -> int | None:
        told = self.ours.get("world", "")
        return int(told) if told.isdecimal() else self.ranks

    @property
    def method(self) -> str:
        if "parbench" in self.ours:
            return f"as parbench {self.ours['parbench']} wrote it in the layout of {TOOL}"
        return f"{MEAN}, {TOOL} {self.version or 'of unknown version'}"


def parse_nccl(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what a file of nccl-tests holds, text or JSON; ``UserError`` if it is cut short or newer than known."""
    return _parse_json(text, where, nproc) if text.lstrip().startswith("{") else _parse_text(text, where, nproc)


def _foreign(heads: list[_Head], found: list[Found], where: str, nproc: int | None, variables: list[str]) -> Foreign:
    """Put the tables of a file together; they must have run on one world, as a run of ours does."""
    worlds = {head.world for head in heads}
    if len(worlds) > 1:
        raise UserError(f"{where} holds tables of {listed(sorted(map(str, worlds)))} ranks: import them one by one")
    first = heads[0]
    hosts = tuple(dict.fromkeys(host for head in heads for host in head.hosts))
    ours = first.ours
    nodes = ours.get("nodes", "")
    return Foreign(
        tool=TOOL,
        version=first.version,
        ranks=world_size(first.world, nproc, where),
        nodes=int(nodes) if nodes.isdecimal() else len(hosts) or None,
        backend=ours.get("backend", "nccl"),
        device=ours.get("device", "cuda"),
        found=tuple(found),
        hosts=hosts,
        variables=recorded_variables(dict(word.split("=", 1) for word in variables if "=" in word)),
        details={**first.details, **({"written_by": f"parbench {ours['parbench']}"} if "parbench" in ours else {})},
    )


def _params(head: _Head, size: int, row: Mapping[str, str], placed: str, where: str) -> dict[str, Value]:
    dtype, root = row["type"], int(number(row["root"], where))
    params: dict[str, Value] = {"size_bytes": size, "dtype": _DTYPES.get(dtype, dtype), "mode": head.mode}
    params["placement"] = placed
    redop = _REDOPS.get(row["redop"], row["redop"])
    if redop != "none":
        params["redop"] = redop
    if root >= 0:
        params["root"] = root
    told = ("parbench", "mode", "backend", "device", "nodes", "world")
    return params | {name: value for name, value in head.ours.items() if name not in told}


def _found(
    head: _Head, ranks: int, params: dict[str, Value], numbers: Mapping[str, float | None], step: float, where: str
) -> Found:
    """Return a placement's result; ``numbers`` are us, GB/s and the count of wrong elements."""
    operation = head.operation
    if operation is None:
        raise UserError(_unnamed(head.program, where))
    size, time, wrong = int(params["size_bytes"]), numbers["time"], numbers.get("#wrong")
    algbw, busbw = numbers["algbw"], numbers["busbw"]
    if negative := [f"{name} {value:g}" for name, value in numbers.items() if value is not None and value < 0]:
        raise UserError(f"{where}: {negative[0]} at {size} B is negative, and {TOOL} prints numbers from 0 up")
    return Found(
        name=operation.name,
        params=params,
        group_ranks=None if head.world == head.ranks else head.ranks,
        metrics=time_and_rates(
            operation.short_name,
            ranks,
            size,
            None if time is None else time * MICRO,
            method=head.method,
            algbw=None if algbw is None else algbw * GIGA,
            busbw=None if busbw is None else busbw * GIGA,
            last_decimal=step,
        ),
        check=Check() if wrong is None else Check(passed=wrong == 0, wrong=int(wrong)),
        printed=dict(numbers),
        notes=(_ROUNDED,) if size == 0 else (),
    )


def _unnamed(program: str | None, where: str) -> str:
    if program:
        return f"{where}: {program} is not known; known are {listed(_OPERATIONS)}"
    return (
        f"{where} does not say which operation it measured; add the line that newer nccl-tests print: "
        f"'# Collective test starting: all_reduce_perf'"
    )


# --- text ---


def _parse_text(text: str, where: str, nproc: int | None) -> Foreign:
    """Read line after line: a head, the names of its columns, its rows, its summary, again and again."""
    head, heads, found, summaries = _Head(), list[_Head](), list[Found](), 0
    names: list[str] = []
    for at, line in enumerate(text.splitlines(), start=1):
        bare = _LABEL.sub("", line)
        words = bare.split()
        if _opens(bare, begun=bool(names), ended=len(heads) == summaries):
            head, names = _Head(), []
        if "redop" in words and words[0] == "#":
            names = words[1:]
            heads.append(head)
        elif names and words and words[0].isdecimal():
            found += _row(head, names, words, f"{where}, line {at}", nproc)
        elif bare.startswith("# Avg bus bandwidth"):
            summaries += 1
        else:
            head = _learn(head, bare)
    if not heads:
        raise UserError(f"{where} holds no table of {TOOL}: no line names its columns")
    foreign = _foreign(heads, found, where, nproc, [])
    return foreign if summaries == len(heads) else replace(foreign, left_out=(_CUT_SHORT,))


def _opens(line: str, *, begun: bool, ended: bool) -> bool:
    """Say whether a line begins a new table; older versions begin with their parameters, or a shell's command line."""
    if line.startswith("# nccl-tests version"):
        return True
    if line.startswith("# nThread"):
        return begun
    return begun and ended and _PROGRAM.search(line) is not None and "concluded" not in line


def _learn(head: _Head, line: str) -> _Head:
    if match := _RANK.match(line):
        ranks, host = max(head.ranks or 0, int(match[1]) + 1), match[2]
        hosts = head.hosts if host in (*head.hosts, UNKNOWN) else (*head.hosts, host)
        return replace(head, ranks=ranks, hosts=hosts)
    if match := re.match(r"^# nccl-tests version (\S+)", line):
        return replace(head, version=match[1])
    if match := _OURS.match(line):
        ours = {"parbench": match[1]} | dict(word.split("=", 1) for word in match[2].split() if "=" in word)
        return replace(head, ours=ours, mode=ours.get("mode", head.mode))
    if line.startswith("# Blocking Enabled"):
        return replace(head, mode="blocking")
    if (match := _PROGRAM.search(line)) and head.program is None:
        return replace(head, program=match[1])
    return head


def _row(head: _Head, names: list[str], words: list[str], where: str, nproc: int | None) -> Iterator[Found]:
    """Yield a row's placements; a column that occurs twice is out of place first."""
    row = fields(words, names, ("size", "type", "redop", "root", "algbw", "busbw"), where)
    ranks = world_size(head.ranks, nproc, where)
    starts = [at - 1 for at in range(1, len(names) - 1) if names[at : at + 2] == ["algbw", "busbw"]]
    if not starts:
        raise UserError(f"{where}: the heading before this row names no algbw with busbw beside it")
    for placed, start in zip((OUT_OF_PLACE, IN_PLACE), starts, strict=False):
        cells = dict(zip(("time", *names[start + 1 : start + 4]), words[start : start + 4], strict=False))
        if all(cell == "N/A" for cell in cells.values()):
            continue
        numbers = {name: None if cell in _NO_NUMBER else number(cell, where) for name, cell in cells.items()}
        params = _params(head, whole(row["size"], where), row, placed, where)
        yield _found(head, ranks, params, numbers, TEXT_STEP, where)


# --- JSON ---


_Count = Annotated[int, msgspec.Meta(ge=0)]
_FromZero = Annotated[float, msgspec.Meta(ge=0)]


class _Placed(msgspec.Struct, frozen=True):
    time: float | str | None = None
    cpu_time: float | str | None = None
    alg_bw: float | str | None = None
    bus_bw: float | str | None = None
    nwrong: float | str | None = None


class _PerIteration(msgspec.Struct, frozen=True):
    times_us: list[_FromZero] = []
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


def _parse_json(text: str, where: str, nproc: int | None) -> Foreign:
    heads, found, variables = [], list[Found](), list[str]()
    for spot, value in _documents(text, where):
        document = _convert(value, spot)
        head = _head(document, spot)
        ranks = world_size(head.ranks, nproc, spot)
        heads.append(head)
        variables += document.env
        for result in document.results:
            found += _results(head, ranks, result, spot)
    return _foreign(heads, found, where, nproc, variables)


def _documents(text: str, where: str) -> Iterator[tuple[str, Any]]:
    decoder, at = json.JSONDecoder(), _next(text, 0)
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}, line {error.lineno}: this is no whole JSON ({error.msg}), so the file seems to be cut short"
            ) from error
        yield f"{where}, line {text.count(chr(10), 0, at) + 1}", value
        at = _next(text, end)


def _next(text: str, at: int) -> int:
    found = re.compile(r"\S").search(text, at)
    return found.start() if found else len(text)


def _convert(value: Any, where: str) -> _Document:
    """Return the document after a look at its version: the fields of a newer one may differ."""
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > JSON_VERSION:
        raise UserError(f"{where}: JSON version {version} of {TOOL} is newer than {JSON_VERSION}, the newest we read")
    try:
        return msgspec.convert(value, _Document)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is not what {TOOL} writes: {error}") from error


def _head(document: _Document, where: str) -> _Head:
    program, *words = [*document.args, ""]
    ours = dict(word.split("=", 1) for word in words if "=" in word)
    ours = ours if "parbench" in ours else {}
    config = document.config
    # nccl-tests lists one device a process, however many GPUs and threads that has
    ranks = len(config.devices) * config.nthreads * config.ngpus
    hosts = dict.fromkeys(device.hostname for device in config.devices if device.hostname)
    mode = "blocking" if config.blocking_collectives == "true" else "pipelined"
    return _Head(
        program=PurePath(program).name or None,
        version=f"JSON version {document.version}",
        mode=ours.get("mode", mode),
        ranks=ranks or None,
        hosts=tuple(hosts),
        ours=ours,
        details={"start_time": document.start_time, "nccl_version": document.nccl_version},
    )


def _results(head: _Head, ranks: int, result: _Result, where: str) -> Iterator[Found]:
    row = {"type": result.type, "redop": result.redop, "root": result.root}
    pairs = ((OUT_OF_PLACE, result.out_of_place, result.out_of_place_per_iter),)
    for name, placed, per_iteration in (*pairs, (IN_PLACE, result.in_place, result.in_place_per_iter)):
        if placed is None:
            continue
        numbers = {
            "time": _finite(placed.time if placed.time is not None else placed.cpu_time),
            "algbw": _finite(placed.alg_bw),
            "busbw": _finite(placed.bus_bw),
            "#wrong": _finite(placed.nwrong),
        }
        params = _params(head, result.size, row, name, where)
        one = _found(head, ranks, params, numbers, JSON_STEP if not head.ours else 0.0, where)
        yield _with_samples(replace(one, iterations=result.actual_iterations), per_iteration)


def _with_samples(one: Found, per_iteration: _PerIteration | None) -> Found:
    """Return the result with its iterations, but for those that nccl-tests itself was told to pass over."""
    if per_iteration is None:
        return one
    skipped = per_iteration.skipped_iterations
    samples = tuple(time * MICRO for time in per_iteration.times_us[skipped:])
    notes = (*one.notes, f"the first {skipped} iterations are warm-up, by --per_iter_skip") if skipped else one.notes
    return replace(one, samples=samples, notes=notes)


def _finite(value: float | str | None) -> float | None:
    """Return a number, None for the text ``nan`` that nccl-tests writes where it has none."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
