"""A run's collectives as nccl-tests lays them out: a table a series, a line a size, two placements a line. Pure.

The layout, the names and what ``count`` means are those of nccl-tests 2.19.6 (its src/util.cu and src/common.cu).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.plan.cases import Case
from bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE, names_of
from bench.plan.operation_spec import DTYPES, OperationSpec
from bench.results.records import Check
from bench.results.runs import Run
from reports.analysis.summary import Row, num_ranks, summarize
from reports.cells import visible

VERSION = "2.19.6"
MICRO, GIGA = 1e6, 1e9

TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat16",
    "float64": "double",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
REDUCTIONS = {"sum": "sum", "avg": "avg", "min": "min", "max": "max", "product": "prod", "none": "none"}
_OPERATIONS = {spec.name: spec for spec in names_of("nccl-tests").values()}

_TOLD_BY_THE_LAYOUT = ("size_bytes", "dtype", "mode", "placement", "redop", "root")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What one placement measured: us, and GB/s of 1e9 B/s; ``wrong`` is None if nothing was checked."""

    time_us: float
    algbw: float | None
    busbw: float | None
    wrong: int | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One size of a table; a placement that was not measured is None."""

    size: int
    count: int
    placed: Mapping[str, Placed]
    iterations: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """One series: an operation, mode, type, reduction and root on one group; ``left_out`` says why rows are not lines.

    ``ranks`` are the group's, ``world`` and ``nodes`` all of the run. ``wrong`` counts wrong elements of the rows that
    are left out for that.
    """

    operation: OperationSpec
    mode: str
    type: str
    redop: str
    root: int
    ranks: int
    world: int
    nodes: int
    backend: str
    device: str
    others: str
    lines: tuple[Line, ...]
    left_out: tuple[str, ...]
    wrong: int

    @property
    def program(self) -> str:
        return self.operation.names["nccl-tests"]

    @property
    def average_busbw(self) -> float | None:
        """Return the mean bus bandwidth in GB/s over lines and placements, as nccl-tests does; None without any."""
        found = [p.busbw for line in self.lines for p in line.placed.values() if p.busbw is not None]
        return sum(found) / len(found) if found else None

    @property
    def iterations(self) -> int:
        return max((line.iterations for line in self.lines), default=0)

    @property
    def checked(self) -> bool:
        return self.wrong > 0 or any(p.wrong is not None for line in self.lines for p in line.placed.values())


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a rank ran; unknown is None."""

    rank: int
    host: str | None
    info: str | None


def tables(run: Run) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """Return a run's series in the order of its rows, and sentences about what is in none of them."""
    summary = summarize(run)
    series: dict[tuple[object, ...], list[Row]] = {}
    left_out = []
    for row in summary.rows:
        if reason := _no_counterpart(row.case):
            left_out.append(f"{_label(row.case)}: {reason}")
        else:
            series.setdefault(_key(row), []).append(row)
    left_out += [f"{_label(one.case)}: skipped: {visible(one.reason)}" for one in summary.skipped]
    left_out += [
        f"{_label(one.case)}: no record of {one.launches} of {one.planned} launches" for one in summary.missing
    ]
    return tuple(_table(rows) for rows in series.values()), tuple(left_out)


def devices(run: Run, table: Table) -> tuple[Device, ...]:
    """Return the ranks of a table, numbered within it; the host is known where there is one node."""
    environment = run.info.environment or {}
    host, torch = _group(environment, "host"), _group(environment, "torch")
    name = host.get("name") or run.info.host
    model = torch.get("gpu") if table.device == "cuda" else host.get("cpu_model")
    return tuple(
        Device(rank=rank, host=str(name) if table.nodes == 1 else None, info=str(model) if model else None)
        for rank in range(table.ranks)
    )


def nccl_code(run: Run) -> int | None:
    """Return the version of NCCL as its headers number it (2.28.9 is 22809), None if unknown."""
    found = str(_group(run.info.environment or {}, "torch").get("nccl") or "")
    parts = found.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    major, minor, patch = map(int, parts)
    return major * 10000 + minor * 100 + patch


def step(sizes: Sequence[int]) -> tuple[str, int]:
    """Return ``factor`` or ``bytes`` and how far one size is from the next; 0 bytes if neither is constant."""
    pairs = list(pairwise(sizes))
    factors = {b // a if a and b % a == 0 else 0 for a, b in pairs}
    if len(factors) == 1 and min(factors) > 1:
        return "factor", factors.pop()
    gaps = {b - a for a, b in pairs}
    return "bytes", gaps.pop() if len(gaps) == 1 else 0


def placement(case: Case) -> str:
    return str(case.params.get("placement", IN_PLACE if _OPERATIONS[case.name].in_place else OUT_OF_PLACE))


def where_words(table: Table) -> dict[str, object]:
    """Return by name what nccl-tests has no field for: how and where it ran, and the world where that is no group."""
    told = {"mode": table.mode, "backend": table.backend, "device": table.device, "nodes": table.nodes}
    return told if table.world == table.ranks else {**told, "world": table.world}


def _no_counterpart(case: Case) -> str | None:
    if case.name not in _OPERATIONS:
        return "nccl-tests measures no such thing"
    if not isinstance(case.params.get("size_bytes"), int):
        return "it has no size"
    if "dtype" not in case.params:
        return "its type is unknown"
    if case.params["dtype"] not in TYPES:
        return f"nccl-tests has no type {case.params['dtype']}"
    if placement(case) not in (OUT_OF_PLACE, IN_PLACE):
        return f"nccl-tests has no placement {placement(case)}"
    return None if _redop(case) in REDUCTIONS else f"nccl-tests has no reduction {_redop(case)}"


def _redop(case: Case) -> str:
    return str(case.params.get("redop", "sum" if _OPERATIONS[case.name].reduces else "none"))


def _root(case: Case) -> int:
    return int(case.params.get("root", -1))


def _mode(case: Case) -> str:
    return str(case.params.get("mode", "unknown"))


def _others(case: Case) -> str:
    others = (f"{name}={value}" for name, value in case.params.items() if name not in _TOLD_BY_THE_LAYOUT)
    return visible(" ".join(others))


def _key(row: Row) -> tuple[object, ...]:
    case = row.case
    told = (case.name, _mode(case), case.params["dtype"], _redop(case), _root(case), _others(case))
    return (*told, row.world.size, row.world.nodes)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    operation = _OPERATIONS[first.case.name]
    shown = [row for row in rows if not _why_left_out(row)]
    by_size: dict[int, list[Row]] = {}
    for row in shown:
        by_size.setdefault(int(row.case.params["size_bytes"]), []).append(row)
    return Table(
        operation=operation,
        mode=_mode(first.case),
        type=TYPES[str(first.case.params["dtype"])],
        redop=REDUCTIONS[_redop(first.case)],
        root=_root(first.case),
        ranks=min(map(num_ranks, rows)),  # what failed may not say the size of its group
        world=first.world.size,
        nodes=first.world.nodes,
        backend=first.world.backend,
        device=first.world.device,
        others=_others(first.case),
        lines=tuple(_line(size, by_size[size], operation) for size in sorted(by_size)),
        left_out=tuple(f"{_label(row.case)}: {reason}" for row in rows if (reason := _why_left_out(row))),
        wrong=sum(_wrong_elements(row.check) for row in rows if row.status == "wrong"),
    )


def _line(size: int, rows: Iterable[Row], operation: OperationSpec) -> Line:
    placed = {placement(row.case): row for row in rows}
    first = next(iter(placed.values()))
    itemsize = DTYPES[str(first.case.params["dtype"])].itemsize
    return Line(
        size=size,
        count=size // itemsize // (num_ranks(first) if operation.sharded else 1),
        placed={name: _placed(row) for name, row in placed.items()},
        iterations=max(row.iterations for row in placed.values()),
    )


def _placed(row: Row) -> Placed:
    seconds = _value(row, row.headline)
    assert seconds is not None, "rows without a time are left out"
    algbw, busbw = _value(row, "algbw"), _value(row, "busbw")
    return Placed(
        time_us=seconds * MICRO,
        algbw=None if algbw is None else algbw / GIGA,
        busbw=None if busbw is None else busbw / GIGA,
        wrong=0 if row.check.passed else None,
    )


def _why_left_out(row: Row) -> str | None:
    """Return why a row cannot be a line: only what ran rightly and was timed is."""
    if row.status != "ok":
        return f"{row.status}: {visible('; '.join(row.reasons)) or 'no reason is known'}"
    return "it has no time" if _value(row, row.headline) is None else None


def _wrong_elements(check: Check) -> int:
    return max(1, check.wrong or 0)


def _value(row: Row, name: str) -> float | None:
    metric = row.metrics.get(name)
    return metric.value if metric else None


def _label(case: Case) -> str:
    return visible(case.label)


def _group(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = environment.get(name)
    return group if isinstance(group, Mapping) else {}
