"""gloo's own benchmark (github.com/pytorch/gloo, gloo/benchmark) as results of ours.

It prints rank 0's view alone. Its "GB/s" are GiB/s (2^30 B/s) of the size column over the mean time, and it knows no
bus bandwidth. Its size is what one rank contributes: S is larger where ranks contribute shares.
"""

import re
from dataclasses import dataclass, field, replace

from bench.plan.catalogue import OperationSpec, names_of
from bench.plan.params import Value
from bench.results.metrics import value
from bench.results.records import Check
from bench.results.stats import MIN_FOR_P99
from bench.text import UserError
from reports.formats.foreign import (
    MICRO,
    NO_CASE,
    Foreign,
    Found,
    Row,
    lines,
    refuse_several,
    time_and_rates,
    world_size,
)

_METHOD = "median of rank 0's iterations, gloo's benchmark of unknown version"
_OPERATIONS = names_of("gloo")


@dataclass(kw_only=True)
class _Section:
    """One benchmark's output, filled line by line; ``seconds`` is what one of its times is worth."""

    algorithm: str
    options: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    seconds: float = MICRO
    found: list[Found] = field(default_factory=list)

    @property
    def operation(self) -> OperationSpec | None:
        return _OPERATIONS.get(self.algorithm.removeprefix("cuda_"))

    def ranks(self, nproc: int | None, where: str) -> int:
        told = self.options.get("processes", "")
        return world_size(int(told) if told.isdecimal() else None, nproc, where)


def parse_gloo(text: str, where: str, nproc: int | None) -> Foreign:
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
    return Foreign(
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
        row = Row(words, one.names, ("size", "elements", "p50", "p99", "bandwidth", "iterations"), where)
        one.found.append(_found(one, one.operation, row, one.ranks(nproc, where)))


def _found(section: _Section, operation: OperationSpec, row: Row, ranks: int) -> Found:
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
    metrics = time_and_rates(operation, ranks, size, p50 or None, _METHOD)
    rate = row.number("bandwidth") * 2**30
    if iterations >= MIN_FOR_P99:
        metrics["time_p99"] = value("time_p99", row.number("p99") * section.seconds, f"99th percentile; {_METHOD}")
    metrics["algbw_mean"] = value(
        "algbw_mean",
        rate * size / printed if printed and rate else None,
        "as printed, taken as GiB/s of the printed size, and scaled to S; mean over rank 0's iterations",
    )
    return Found(
        name=operation.name,
        params=params,
        metrics=metrics,
        check=Check(passed=True, wrong=0) if options.get("verify") == "true" else Check(),
        iterations=iterations,
        printed=dict(row),
        notes=tuple(notes),
    )
