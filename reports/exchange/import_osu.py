"""OSU micro-benchmarks (mvapich.cse.ohio-state.edu/benchmarks) as results of ours.

They print a time alone, the mean over iterations and ranks, and the message of one rank: where every rank contributes
such a message (allgather, alltoall, gather, scatter) S is that many times larger; the rates follow from S and the time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.plan.params import Value
from bench.results.records import Check
from bench.text import UserError
from reports.exchange.foreign import MICRO, UNKNOWN, Foreign, Found, fields, number, time_and_rates, whole, world_size

TOOL = "osu"

_DTYPES = {"MPI_FLOAT": "float32", "MPI_DOUBLE": "float64", "MPI_INT": "int32", "MPI_CHAR": "char"}
_TITLE = re.compile(r"^\s*# OSU (MPI\S*) (.*?)(?: Test)?(?: v(\S+))?\s*$")


@dataclass(frozen=True, kw_only=True)
class _Benchmark:
    """Our case for an OSU benchmark; ``per_rank``: its size is one rank's share of S."""

    case: str
    per_rank: bool = False


_BENCHMARKS = {
    "allreduce latency": _Benchmark(case="collective.all_reduce"),
    "allgather latency": _Benchmark(case="collective.all_gather", per_rank=True),
    "all-to-all personalized exchange latency": _Benchmark(case="collective.all_to_all", per_rank=True),
    "alltoall latency": _Benchmark(case="collective.all_to_all", per_rank=True),
    "reduce_scatter latency": _Benchmark(case="collective.reduce_scatter"),
    "reduce_scatter_block latency": _Benchmark(case="collective.reduce_scatter"),
    "broadcast latency": _Benchmark(case="collective.broadcast"),
    "reduce latency": _Benchmark(case="collective.reduce"),
    "gather latency": _Benchmark(case="collective.gather", per_rank=True),
    "scatter latency": _Benchmark(case="collective.scatter", per_rank=True),
    "latency": _Benchmark(case="p2p.pingpong"),
}


@dataclass(kw_only=True)
class _Section:
    """One benchmark's output, filled line by line."""

    title: str
    layer: str
    version: str | None
    datatype: str | None = None
    names: list[str] = field(default_factory=list)


def parse_osu(text: str, where: str, nproc: int | None) -> Foreign:
    """Return what OSU benchmarks printed; ``UserError`` if it is cut short, or without ``nproc``: they do not tell."""
    ranks = world_size(None, nproc, where)
    section: _Section | None = None
    sections, found, left_out = list[_Section](), list[Found](), dict[str, None]()
    for at, line in enumerate(text.splitlines(), start=1):
        if match := _TITLE.match(line):
            section = _Section(layer=match[1], title=match[2], version=match[3])
            sections.append(section)
            if section.title.lower() not in _BENCHMARKS:
                left_out[f"OSU {section.title}: no case of ours measures the same"] = None
        elif section is not None and section.title.lower() in _BENCHMARKS:
            found += _line(section, line, ranks, f"{where}, line {at}")
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


def _line(section: _Section, line: str, ranks: int, where: str) -> list[Found]:
    """Learn from a heading, or return the result of a row."""
    text = line.strip()
    if text.startswith("# Datatype:"):
        section.datatype = text.partition(":")[2].strip(" .")
    elif text.startswith("# Size"):
        section.names = [name.lower().replace(" ", "") for name in re.split(r"\s{2,}", text.removeprefix("# "))]
    elif section.names and (words := text.split()) and words[0].isdecimal():
        return [_found(section, fields(words, section.names, ("size",), where), ranks, where)]
    return []


def _found(section: _Section, cells: dict[str, str], ranks: int, where: str) -> Found:
    benchmark = _BENCHMARKS[section.title.lower()]
    latency = cells.get("avglatency(us)", cells.get("latency(us)"))
    if latency is None:
        raise UserError(f"{where}: the columns {', '.join(cells)} hold no latency")
    size = whole(cells["size"], where) * (ranks if benchmark.per_rank else 1)
    pingpong = benchmark.case == "p2p.pingpong"
    what = "half a round trip, mean over iterations" if pingpong else "mean over iterations and ranks"
    method = f"{what}, OSU micro-benchmarks {section.version or 'of unknown version'}"
    params: dict[str, Value] = {"size_bytes": size, "mode": "blocking"}
    if section.datatype:
        params["dtype"] = _DTYPES.get(section.datatype, section.datatype)
    times = time_and_rates(
        benchmark.case.partition(".")[2], ranks, size, number(latency, where) * MICRO or None, method=method
    )
    return Found(
        name=benchmark.case,
        params=params,
        metrics=times,
        check=_check(cells.get("validation")),
        iterations=whole(cells["iterations"], where) if "iterations" in cells else None,
        printed=dict(cells),
        notes=_notes(benchmark, ranks),
    )


def _notes(benchmark: _Benchmark, ranks: int) -> tuple[str, ...]:
    notes = ["OSU prints a time alone: bandwidths are computed of size and time"]
    if benchmark.per_rank:
        notes.append(f"OSU's size is one rank's message: S is {ranks} times that")
    return tuple(notes)


def _check(validation: str | None) -> Check:
    """Return the check by OSU's word; it never counts what is wrong."""
    if validation is None:
        return Check()
    return Check(passed=True, wrong=0) if validation.lower() == "pass" else Check(passed=False)
