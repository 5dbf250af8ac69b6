"""gloo's own benchmark (github.com/pytorch/gloo, gloo/benchmark) as results of ours.

It prints rank 0's view alone. Its "GB/s" are GiB/s (2^30 B/s) of the size column over the mean time, and it knows no
bus bandwidth. Its size is what one rank contributes: S is larger where ranks contribute shares.
"""

import re
from dataclasses import dataclass, field, replace

from bench.plan.catalogue import names_of
from bench.plan.operation_spec import OperationSpec
from bench.plan.params import Value
from bench.results.metrics import value
from bench.results.records import Check
from bench.results.stats import MIN_FOR_P99
from bench.text import UserError, listed
from reports.formats.foreign import GIBI, Foreign, Found, fields, number, time_and_rates, whole, world_size

TOOL = "gloo"
METHOD = "median of rank 0's iterations, gloo's benchmark of unknown version"

_SCALES = {"us": 1e-6, "ns": 1e-9}
_DTYPES = {8: "uint64", 4: "float32", 2: "float16"}
_UINT64 = 8
_OPERATIONS = names_of("gloo")
_NEEDED = ("size", "elements", "p50", "p99", "bandwidth", "iterations")
_RULE = "===="


@dataclass(kw_only=True)
class _Section:
    """One benchmark's output, filled line by line."""

    algorithm: str
    options: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    scale: float = _SCALES["us"]
    found: list[Found] = field(default_factory=list)

    @property
    def operation(self) -> OperationSpec | None:
        return _OPERATIONS.get(self.algorithm.removeprefix("cuda_"))

    @property
    def processes(self) -> int | None:
        told = self.options.get("processes", "")
        return int(told) if told.isdecimal() else None


def parse_gloo(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what gloo's benchmark printed; ``UserError`` if it is cut short or nobody tells the number of ranks."""
    sections, before = list[_Section](), ""
    for at, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if before.startswith(_RULE) and len(words) == 1 and not line.startswith(_RULE):
            sections.append(_Section(algorithm=words[0].lower().removeprefix("new_")))
        elif sections and words:
            _read(sections[-1], line, f"{where}, line {at}", nproc)
        before = line if words else before
    if not sections:
        raise UserError(f"{where} holds no results of gloo's benchmark: no line names an algorithm")
    unknown = dict.fromkeys(one.algorithm for one in sections if one.operation is None)
    worlds = {world_size(one.processes, nproc, where) for one in sections}
    if len(worlds) > 1:
        raise UserError(f"{where} holds tables of {listed(sorted(worlds))} ranks: import them one by one")
    return Foreign(
        tool=TOOL,
        version=None,
        ranks=worlds.pop(),
        nodes=None,
        backend="gloo",
        device="cuda" if all(one.algorithm.startswith("cuda_") for one in sections) else "cpu",
        found=tuple(found for one in sections for found in one.found),
        left_out=tuple(f"gloo's {name}: no case of ours measures the same" for name in unknown),
    )


def _read(section: _Section, line: str, where: str, nproc: int | None) -> None:
    """Learn from a heading, take a row, or mark the last row as wrong: gloo stops at the first mismatch."""
    words = line.split()
    if line.startswith("Options:"):
        section.options = dict(re.findall(r"(\w+)=(\w+)", line))
    elif "iterations" in words:
        section.scale = _SCALES["ns" if "(ns)" in line else "us"]
        section.names = re.sub(r" \(\S+\)", "", line).split()
    elif words == ["VERIFY", "ERRORS"] and section.found:
        section.found[-1] = replace(section.found[-1], check=Check(passed=False))
    elif section.names and section.operation and words[0].isdecimal():
        ranks = world_size(section.processes, nproc, where)
        section.found.append(_found(section, fields(words, section.names, _NEEDED, where), ranks, where))


def _found(section: _Section, cells: dict[str, str], ranks: int, where: str) -> Found:
    operation = section.operation
    assert operation is not None, "unknown algorithms are left out"
    printed, elements = whole(cells["size"], where), whole(cells["elements"], where)
    itemsize = _UINT64 if operation.short_name == "all_to_all" else printed // elements if elements else 0
    size = elements * itemsize * (ranks if operation.contributes else 1)
    p50, iterations = number(cells["p50"], where) * section.scale, whole(cells["iterations"], where)
    metrics = time_and_rates(operation.short_name, ranks, size, p50 or None, method=METHOD)
    rate = number(cells["bandwidth"], where) * GIBI
    params: dict[str, Value] = {"size_bytes": size, "mode": "pipelined", "algorithm": section.algorithm}
    if itemsize in _DTYPES:
        params["dtype"] = _DTYPES[itemsize]
    if iterations >= MIN_FOR_P99:
        p99 = number(cells["p99"], where) * section.scale
        metrics["time_p99"] = value("time_p99", p99, f"99th percentile; {METHOD}")
    metrics["algbw_mean"] = value(
        "algbw_mean",
        rate * size / printed if printed and rate else None,
        "as printed, taken as GiB/s of the printed size, and scaled to S; mean over rank 0's iterations",
    )
    return Found(
        name=operation.name,
        params=params,
        metrics=metrics,
        check=Check(passed=True, wrong=0) if section.options.get("verify") == "true" else Check(),
        iterations=iterations,
        printed=dict(cells),
        notes=_notes(section, operation, ranks),
    )


def _notes(section: _Section, operation: OperationSpec, ranks: int) -> tuple[str, ...]:
    notes = ["gloo's benchmark sees rank 0 alone: other ranks may be slower"]
    if operation.short_name == "all_to_all":
        notes.append(f"gloo's alltoall sends 8-byte elements to each of {ranks} ranks, whatever its size column says")
    elif operation.contributes:
        notes.append(f"gloo's size is one rank's share: S is {ranks} times that")
    notes += [
        f"gloo ran with {name}={section.options[name]}: the row is of more than one operation or buffer"
        for name in ("inputs", "threads")
        if section.options.get(name, "1") != "1"
    ]
    return tuple(notes)
