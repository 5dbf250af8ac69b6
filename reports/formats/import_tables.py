"""What OSU, PARAM and gloo print, a row a size, as results of ours.

OSU micro-benchmarks (mvapich.cse.ohio-state.edu/benchmarks) print a time alone, the mean over iterations and ranks, and
the message of one rank: where every rank contributes such a message (allgather, alltoall, gather, scatter) S is that
many times larger; the rates follow from S and the time.

PARAM's comms.py (github.com/facebookresearch/param, train/comms/pt): its size is the whole message and its GB/s are
1e9 B/s, both as in nccl-tests. Its percentiles are not over iterations: each rank gives the mean of its own, and p50 is
the median of those means.

gloo's own benchmark (github.com/pytorch/gloo, gloo/benchmark) prints rank 0's view alone. Its "GB/s" are GiB/s
(2^30 B/s) of the size column over the mean time, and it knows no bus bandwidth. Its size is what one rank contributes:
S is larger where ranks contribute shares.
"""

import re
from dataclasses import dataclass, field, replace

from parbench.bench.plan.catalogue import OperationSpec, names_of
from parbench.bench.plan.params import Value
from parbench.bench.results.metrics import value
from parbench.bench.results.records import Check
from parbench.bench.results.stats import MIN_FOR_P99
from parbench.bench.text import UserError
from parbench.reports.formats.foreign import (
    GIGA,
    MICRO,
    NO_CASE,
    UNKNOWN,
    ImportedResult,
    ImportedRun,
    PrintedRow,
    lines,
    refuse_several,
    time_and_rates,
    world_size,
)

_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
_TITLE = re.compile(r"^\s*# OSU MPI-?(\S*) (.*?)(?: Test)?(?: v(\S+))?\s*$")
_OPERATIONS_OSU = names_of("osu")


def parse_osu(text: str, where: str, nproc: int | None) -> ImportedRun:
    """Return what OSU benchmarks printed; ``UserError`` if it is cut short, or without ``nproc``: they do not tell."""
    ranks = world_size(None, nproc, where)
    operation, version, dtype, names = None, None, "", list[str]()
    found, devices, versions, left_out = list[ImportedResult](), set[str](), dict[str, None](), dict[str, None]()
    for line, place in lines(text, where):
        bare = line.strip()
        if match := _TITLE.match(line):
            device, title, version = match.groups()
            operation, dtype, names = _OPERATIONS_OSU.get(title.lower().removesuffix(" latency")), "", []
            devices.add(device.lower() or "cpu")  # the title tells of accelerators alone
            versions |= {version: None} if version else {}
            left_out |= {} if operation else {f"OSU {title}: {NO_CASE}": None}
        elif bare.startswith("# Datatype:"):
            dtype = bare.partition(":")[2].strip(" .")
        elif bare.startswith("# Size"):
            names = [name.lower().replace(" ", "") for name in re.split(r"\s{2,}", bare.removeprefix("# "))]
        elif operation and names and bare and bare.split()[0].isdecimal():
            row = PrintedRow(bare.split(), names, ("size",), place)
            found.append(_found_osu(operation, row, ranks, dtype, version or "of unknown version"))
    return ImportedRun(
        tool="osu",
        version=", ".join(versions) or None,
        ranks=ranks,
        backend="mpi",
        device=devices.pop() if len(devices) == 1 else UNKNOWN,
        found=tuple(found),
        left_out=tuple(left_out),
    )


def _found_osu(operation: OperationSpec, row: PrintedRow, ranks: int, dtype: str, version: str) -> ImportedResult:
    latency = next((name for name in ("avglatency(us)", "latency(us)") if name in row), None)
    if latency is None:
        raise UserError(f"{row.where}: the columns {', '.join(row)} hold no latency")
    params: dict[str, Value] = {"size_bytes": row.whole("size"), "mode": "blocking"}
    notes = ["OSU prints a time alone: bandwidths are computed of size and time"]
    if operation.contributes:
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


_METHOD_PARAM = "p50 over ranks of each rank's mean over iterations, PARAM of unknown version"
_NOTE = "PARAM's time is the median over ranks of per-rank means: it says nothing of single iterations"
_STEP = 0.001 * GIGA  # what the last printed decimal of a rate is worth
_OPERATIONS_PARAM = names_of("param")
_ROW = re.compile(r"COMMS-RES-(\S+)\s+(.*)$")
_HEADING = re.compile(r"COMMS-RES(?!-)\s+(.*size \(B\).*)$")
_NAMES = {"size(b)": "size", "latency(us):p50": "p50", "algbw(gb/s)": "algbw", "busbw(gb/s)": "busbw"}


def parse_param(text: str, where: str, nproc: int | None) -> ImportedRun:
    """Return what PARAM printed; ``UserError`` if it is cut short or nobody tells the number of ranks."""
    worlds = {int(size) for size in re.findall(r"world_size\W{1,4}(\d+)", text)}
    ranks = world_size(worlds.pop() if len(worlds) == 1 else None, nproc, where)
    hosts = tuple(dict.fromkeys(re.findall(r"\[Rank\s+\d+\] host (\S+?),", text)))
    names, found, left_out = list[str](), list[ImportedResult](), dict[str, None]()
    for line, place in lines(text, where):
        if match := _HEADING.search(line):
            names = [_NAMES.get(name, name) for name in match[1].replace(" (B)", "(B)").lower().split()]
        elif match := _ROW.search(line):
            operation = match[1].split("-")[0]
            if operation == "QUANT":
                left_out["quantised collectives: their time holds quantisation too"] = None
            elif operation not in _OPERATIONS_PARAM:
                left_out[f"{operation}: {NO_CASE}"] = None
            elif any("pair" in name for name in names):
                left_out[f"{operation} with another collective at the same time: the row is both together"] = None
            else:
                told = names[: names.index("busbw") + 1] if "busbw" in names else []
                row = PrintedRow(match[2].split(), told, ("size", "p50", "algbw", "busbw"), place)
                found.append(_found_param(match[1], row, ranks))
    return ImportedRun(
        tool="param", ranks=ranks, nodes=len(hosts) or None, found=tuple(found), hosts=hosts, left_out=tuple(left_out)
    )


def _found_param(label: str, row: PrintedRow, ranks: int) -> ImportedResult:
    name, dtype, *tag = [*label.split("-"), ""]
    params: dict[str, Value] = {"size_bytes": row.whole("size")}
    seconds, operation = row.number("p50") * MICRO or None, _OPERATIONS_PARAM[name]
    if dtype:
        params["dtype"] = dtype.removeprefix("torch.")
    if tagged := "-".join(word for word in tag if word):
        params["tag"] = tagged
    rates = row.number("algbw") * GIGA, row.number("busbw") * GIGA
    metrics = time_and_rates(operation, ranks, int(params["size_bytes"]), seconds, _METHOD_PARAM, rates, _STEP)
    return ImportedResult(name=operation.name, params=params, metrics=metrics, printed=dict(row), notes=(_NOTE,))


_METHOD_GLOO = "median of rank 0's iterations, gloo's benchmark of unknown version"
_OPERATIONS_GLOO = names_of("gloo")


@dataclass(kw_only=True)
class _Section:
    """One benchmark's output, filled line by line; ``seconds`` is what one of its times is worth."""

    algorithm: str
    options: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    seconds: float = MICRO
    found: list[ImportedResult] = field(default_factory=list)

    @property
    def operation(self) -> OperationSpec | None:
        return _OPERATIONS_GLOO.get(self.algorithm.removeprefix("cuda_"))

    def ranks(self, nproc: int | None, where: str) -> int:
        told = self.options.get("processes", "")
        return world_size(int(told) if told.isdecimal() else None, nproc, where)


def parse_gloo(text: str, where: str, nproc: int | None) -> ImportedRun:
    """Return what gloo's benchmark printed; ``UserError`` if it is cut short or nobody tells the number of ranks."""
    sections, before = list[_Section](), ""
    for line, place in lines(text, where):
        if not (words := line.split()):
            continue
        if before.startswith("====") and len(words) == 1 and not line.startswith("===="):
            sections.append(_Section(algorithm=words[0].lower().removeprefix("new_")))
        elif sections:
            _learn(sections[-1], line, words, place, nproc)
        before = line
    if not sections:
        raise UserError(f"{where} holds no results of gloo's benchmark: no line names an algorithm")
    refuse_several(worlds := {one.ranks(nproc, where) for one in sections}, where)
    unknown = dict.fromkeys(one.algorithm for one in sections if one.operation is None)
    return ImportedRun(
        tool="gloo",
        ranks=worlds.pop(),
        backend="gloo",
        device="cuda" if all(one.algorithm.startswith("cuda_") for one in sections) else "cpu",
        found=tuple(found for one in sections for found in one.found),
        left_out=tuple(f"gloo's {name}: {NO_CASE}" for name in unknown),
    )


def _learn(one: _Section, line: str, words: list[str], where: str, nproc: int | None) -> None:
    if line.startswith("Options:"):
        one.options = dict(re.findall(r"(\w+)=(\w+)", line))
    elif "iterations" in words:
        one.seconds = 1e-9 if "(ns)" in line else MICRO
        one.names = re.sub(r" \(\S+\)", "", line).split()
    elif words == ["VERIFY", "ERRORS"] and one.found:  # gloo stops at the first mismatch
        one.found[-1] = replace(one.found[-1], check=Check(passed=False))
    elif one.names and one.operation and words[0].isdecimal():
        row = PrintedRow(words, one.names, ("size", "elements", "p50", "p99", "bandwidth", "iterations"), where)
        one.found.append(_found_gloo(one, one.operation, row, one.ranks(nproc, where)))


def _found_gloo(section: _Section, operation: OperationSpec, row: PrintedRow, ranks: int) -> ImportedResult:
    printed, elements, options = row.whole("size"), row.whole("elements"), section.options
    to_each = operation.short_name == "all_to_all"
    itemsize = 8 if to_each else printed // elements if elements else 0
    size = elements * itemsize * (ranks if operation.contributes else 1)
    params: dict[str, Value] = {"size_bytes": size, "mode": "pipelined", "algorithm": section.algorithm}
    if dtype := {8: "uint64", 4: "float32", 2: "float16"}.get(itemsize):
        params["dtype"] = dtype
    notes = ["gloo's benchmark sees rank 0 alone: other ranks may be slower"]
    if to_each:
        notes.append(f"gloo's alltoall sends 8-byte elements to each of {ranks} ranks, whatever its size column says")
    elif operation.contributes:
        notes.append(f"gloo's size is one rank's share: S is {ranks} times that")
    more = {name: options[name] for name in ("inputs", "threads") if options.get(name, "1") != "1"}
    notes += [f"gloo ran with {k}={v}: the row is of more than one operation or buffer" for k, v in more.items()]
    p50, iterations = row.number("p50") * section.seconds, row.whole("iterations")
    metrics = time_and_rates(operation, ranks, size, p50 or None, _METHOD_GLOO)
    rate = row.number("bandwidth") * 2**30
    if iterations >= MIN_FOR_P99:
        metrics["time_p99"] = value("time_p99", row.number("p99") * section.seconds, f"99th percentile; {_METHOD_GLOO}")
    metrics["algbw_mean"] = value(
        "algbw_mean",
        rate * size / printed if printed and rate else None,
        "as printed, taken as GiB/s of the printed size, and scaled to S; mean over rank 0's iterations",
    )
    return ImportedResult(
        name=operation.name,
        params=params,
        metrics=metrics,
        check=Check(passed=True, wrong=0) if options.get("verify") == "true" else Check(),
        iterations=iterations,
        printed=dict(row),
        notes=tuple(notes),
    )
