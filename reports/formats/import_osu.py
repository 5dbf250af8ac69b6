"""OSU micro-benchmarks (mvapich.cse.ohio-state.edu/benchmarks) as results of ours.

They print a time alone, the mean over iterations and ranks, and the message of one rank: where every rank contributes
such a message (allgather, alltoall, gather, scatter) S is that many times larger; the rates follow from S and the time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.plan.catalogue import names_of
from bench.plan.operation_spec import OperationSpec
from bench.plan.params import Value
from bench.results.records import Check
from bench.text import UserError
from reports.formats.foreign import MICRO, UNKNOWN, Foreign, Found, fields, number, time_and_rates, whole, world_size

TOOL = "osu"

_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
_TITLE = re.compile(r"^\s*# OSU (MPI\S*) (.*?)(?: Test)?(?: v(\S+))?\s*$")
_OPERATIONS = names_of("osu")


@dataclass(kw_only=True)
class _Section:
    """One benchmark's output, filled line by line."""

    title: str
    layer: str
    version: str | None
    datatype: str | None = None
    names: list[str] = field(default_factory=list)

    @property
    def operation(self) -> OperationSpec | None:
        return _OPERATIONS.get(self.title.lower().removesuffix(" latency"))


def parse_osu(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what OSU benchmarks printed; ``UserError`` if it is cut short, or without ``nproc``: they do not tell."""
    ranks = world_size(None, nproc, where)
    section: _Section | None = None
    sections, found, left_out = list[_Section](), list[Found](), dict[str, None]()
    for at, line in enumerate(text.splitlines(), start=1):
        if match := _TITLE.match(line):
            section = _Section(layer=match[1], title=match[2], version=match[3])
            sections.append(section)
            if section.operation is None:
                left_out[f"OSU {section.title}: no case of ours measures the same"] = None
        elif section is not None and section.operation is not None:
            found += _line(section, section.operation, line, ranks, f"{where}, line {at}")
    return Foreign(
        tool=TOOL,
        version=", ".join(dict.fromkeys(one.version for one in sections if one.version)) or None,
        ranks=ranks,
        nodes=None,
        backend="mpi",
        device=_device([one.layer for one in sections]),
        found=tuple(found),
        left_out=tuple(left_out),
    )


def _device(layers: Sequence[str]) -> str:
    """Return where the buffers lie: the title tells of accelerators alone."""
    kinds = {layer.removeprefix("MPI").removeprefix("-").lower() or "cpu" for layer in layers}
    return kinds.pop() if len(kinds) == 1 else UNKNOWN


def _line(section: _Section, operation: OperationSpec, line: str, ranks: int, where: str) -> list[Found]:
    text = line.strip()
    if text.startswith("# Datatype:"):
        section.datatype = text.partition(":")[2].strip(" .")
    elif text.startswith("# Size"):
        section.names = [name.lower().replace(" ", "") for name in re.split(r"\s{2,}", text.removeprefix("# "))]
    elif section.names and (words := text.split()) and words[0].isdecimal():
        return [_found(section, operation, fields(words, section.names, ("size",), where), ranks, where)]
    return []


def _found(section: _Section, operation: OperationSpec, cells: dict[str, str], ranks: int, where: str) -> Found:
    latency = cells.get("avglatency(us)", cells.get("latency(us)"))
    if latency is None:
        raise UserError(f"{where}: the columns {', '.join(cells)} hold no latency")
    size = whole(cells["size"], where) * (ranks if operation.contributes else 1)
    pair = operation.name == "p2p.pingpong"
    what = "half a round trip, mean over iterations" if pair else "mean over iterations and ranks"
    method = f"{what}, OSU micro-benchmarks {section.version or 'of unknown version'}"
    params: dict[str, Value] = {"size_bytes": size, "mode": "blocking"}
    if section.datatype:
        params["dtype"] = _DTYPES.get(section.datatype, section.datatype)
    seconds = number(latency, where) * MICRO or None
    return Found(
        name=operation.name,
        params=params,
        metrics=time_and_rates(operation.short_name, ranks, size, seconds, method=method),
        check=_check(cells.get("validation")),
        iterations=whole(cells["iterations"], where) if "iterations" in cells else None,
        printed=dict(cells),
        notes=_notes(operation, ranks),
    )


def _notes(operation: OperationSpec, ranks: int) -> tuple[str, ...]:
    notes = ["OSU prints a time alone: bandwidths are computed of size and time"]
    if operation.contributes:
        notes.append(f"OSU's size is one rank's message: S is {ranks} times that")
    return tuple(notes)


def _check(validation: str | None) -> Check:
    """Return the check by OSU's word; it never counts what is wrong."""
    if validation is None:
        return Check()
    return Check(passed=True, wrong=0) if validation.lower() == "pass" else Check(passed=False)
