"""A run's collectives as nccl-tests prints them: a table an operation, a line a size, two placements a line. Pure.

The layout, the names and what ``count`` means are those of nccl-tests 2.19.6 (its src/util.cu and src/common.cu).
Times are the repetitions' merged headlines in us, bandwidths GB/s of 1e9 B/s.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DTYPES, IN_PLACE, OUT_OF_PLACE
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.records import WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.text import format_list
from parbench.reports.analysis.summary import Row, num_ranks, summarize
from parbench.reports.formats.foreign import NCCL_TESTS, operations_by_name

TOOL, VERSION = "nccl-tests", "2.19.6"
TYPES = {name: name for name in ("bfloat16", "int8", "uint8", "int32", "int64")} | {
    "float32": "float"
}
TYPES |= {
    "float16": "half",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
REDUCTIONS = {
    "sum": "sum",
    "avg": "avg",
    "min": "min",
    "max": "max",
    "product": "prod",
    "none": "none",
}
_OPERATIONS = {spec.name: spec for spec in operations_by_name(NCCL_TESTS).values()}
_PROGRAMS = {operation: program for program, operation in NCCL_TESTS.items()}
_PLACED = (OUT_OF_PLACE, IN_PLACE)
_COMPARABLE = {"pipelined": 0, "graph": 1}  # modes that time what nccl-tests does, with its -G
_LINE = (
    "dtype",
    "redop",
    "root",
    "size_bytes",
)  # what parts a table's lines, the last fastest, as in nccl-tests
_COLUMNS = (*_LINE, "mode", "placement")  # what the layout has a place for


def render_text(run: Run) -> str:
    """Return the run's collectives in the layout of nccl-tests' text, a table for each operation and mode.

    An operation that torch has in one placement alone has its numbers in the other's columns too, for readers take a
    number from each: a comment says so, and ``#wrong`` is ``N/A`` there, as where nccl-tests does not check. A
    placement that was not measured is ``N/A`` in all its four columns; a line always has 13 tokens.
    """
    tables, left_out = _group_into_tables(run)
    lines = [line for rows in tables for line in (*_render_table(run, rows), "")]
    lines += [f"# Not in any table: {sentence}" for sentence in left_out]
    return "".join(f"{line}\n" for line in lines)


def _group_into_tables(run: Run) -> tuple[list[list[Row]], list[str]]:
    """Return the rows of each operation and mode on one group, and a sentence for each case that is in no table.

    On CUDA, a mode that nccl-tests does not have is left out where a mode that it has was measured.
    """
    summary = summarize(run)
    placed, left_out = list[tuple[str, object, object, Row]](), list[str]()
    compared: dict[object, list[str]] = {}
    for row in summary.rows:
        if reason := _no_counterpart(row.case):
            left_out.append(f"{to_single_line(row.case.label)}: {reason}")
            continue
        params, where = _params(row.case), (row.case.name, row.world.size, row.world.nodes)
        mode = str(params["mode"])
        alike = (
            where,
            *((k, v) for k, v in params.items() if k not in ("mode", "size_bytes", "placement")),
        )
        series = where, mode, *((k, v) for k, v in params.items() if k not in _COLUMNS)
        placed.append((mode, alike, series, row))
        if mode in _COMPARABLE and row.world.device == "cuda" and not _why_left_out(row):
            compared.setdefault(alike, []).append(mode)
    tables: dict[object, list[Row]] = {}
    for mode, like, table, row in placed:
        if mode not in _COMPARABLE and like in compared:
            why = f"mode {format_list(sorted(set(compared[like])))} compares with nccl-tests, and is here"
            left_out.append(f"{to_single_line(row.case.label)}: {why}")
        else:
            tables.setdefault(table, []).append(row)
    left_out += [
        f"{to_single_line(case.case.label)}: skipped: {to_single_line(case.reason)}"
        for case in summary.skipped
    ]
    left_out += [
        f"{to_single_line(case.case.label)}: no record of {case.repetitions} of {case.planned} repetitions"
        for case in summary.missing
    ]
    return list(tables.values()), left_out


def _params(case: Case) -> dict[str, Any]:
    """Return a case's parameters, with what goes without saying."""
    operation = _OPERATIONS[case.name]
    redop = "sum" if operation.is_reduction else "none"
    return {
        "mode": "unknown",
        "redop": redop,
        "root": -1,
        "placement": operation.placements[0],
        **case.params,
    }


def _no_counterpart(case: Case) -> str | None:
    if case.name not in _OPERATIONS:
        return "no nccl-tests equivalent"
    if not isinstance(case.params.get("size_bytes"), int):
        return "it has no size"
    if "dtype" not in case.params:
        return "its type is unknown"
    dtype, placement, redop = (_params(case)[name] for name in ("dtype", "placement", "redop"))
    if dtype not in TYPES:
        return f"nccl-tests has no type {dtype}"
    if placement not in _PLACED:
        return f"nccl-tests has no placement {placement}"
    return None if redop in REDUCTIONS else f"nccl-tests has no reduction {redop}"


def _why_left_out(row: Row) -> str | None:
    if row.status != "ok":
        return f"{row.status}: {to_single_line('; '.join(row.reasons)) or 'no reason is known'}"
    return "it has no time" if row.value(row.headline) is None else None


def _render_table(run: Run, rows: Sequence[Row]) -> list[str]:
    """Return the lines of one table, with its heading and its summary."""
    case, world = rows[0].case, rows[0].world
    spec, mode = _OPERATIONS[case.name], str(_params(case)["mode"])
    program = _PROGRAMS[spec.short_name]
    blocks: dict[tuple[object, ...], dict[int, dict[str, Row]]] = {}
    for row in rows:
        if not _why_left_out(row):
            params = _params(row.case)
            block = blocks.setdefault(tuple(params[name] for name in _LINE[:-1]), {})
            block.setdefault(int(params["size_bytes"]), {})[params["placement"]] = row
    lines = [block[size] for block in blocks.values() for size in sorted(block)]
    sizes = sorted({size for block in blocks.values() for size in block})
    timed = [row for line in lines for row in line.values()]
    measured = [name for name in _PLACED if any(name in line for line in lines)]
    # torch has one placement of it, so there is nothing to measure for the other
    only = measured[0] if len(spec.placements) == len(measured) == 1 else ""
    unmeasured = (
        [] if only else [name for name in _PLACED if any(name not in line for line in lines)]
    )
    repeated = [name for name in _PLACED if only and name != only]
    wrong = sum(max(1, row.check.wrong or 0) for row in rows if row.status == "wrong")
    rates = [busbw / 1e9 for row in timed if (busbw := row.value("busbw")) is not None]
    iterations = max((row.iterations for row in timed), default=0)
    is_checked = wrong > 0 or any(row.check.passed for row in timed)
    nccl = _nccl_code(run)
    return [
        f"# nccl-tests version {VERSION} nccl-headers={nccl} nccl-library={nccl}",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus 1 minBytes {min(sizes, default=0)} maxBytes {max(sizes, default=0)} step: {step(sizes)} "
        f"warmup iters: {run.info.plan.measure.warmup} iters: {iterations} agg iters: 1 validation: {is_checked:d} "
        f"graph: {_COMPARABLE.get(mode, 0)} unalign: 0",
        f"# Written by parbench {run.info.parbench}: {_written_words(case, world, _ranks(rows))}",
        *(f"# N/A under {_hyphenated(name)}: not measured" for name in unmeasured),
        *(
            f"# {_hyphenated(name)} repeats {_hyphenated(only)}: {spec.short_name} has no other"
            for name in repeated
        ),
        "#",
        "# Using devices",
        *_device_lines(run, world, _ranks(rows)),
        "#",
        f"# {'out-of-place':>73}{'in-place':>31}{'':10}",
        f"#       size         count      type   redop    root{'     time   algbw   busbw  #wrong' * 2} ",
        f"#        (B)    (elements)                          {'     (us)  (GB/s)  (GB/s)        ' * 2} ",
        *(_render_line(line, only) for line in lines),
        *(
            f"# Left out: {to_single_line(row.case.label)}: {why}"
            for row in rows
            if (why := _why_left_out(row))
        ),
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {f'{sum(rates) / len(rates):g}' if rates else 'N/A'} ",
        "#",
        f"# Collective test concluded: {program}",
    ]


def _ranks(rows: Sequence[Row]) -> int:
    return min(map(num_ranks, rows))  # a case that failed may not know the size of its group


def _nccl_code(run: Run) -> int:
    """Return the version of NCCL as its headers number it, 2.28.9 as 22809; 0 where it is unknown."""
    version = _environment_group(run, "torch").get("nccl")
    nccl = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", str(version))
    return int(nccl[1]) * 10000 + int(nccl[2]) * 100 + int(nccl[3]) if nccl else 0


def _environment_group(run: Run, name: str) -> Mapping[str, Any]:
    group = (run.info.environment or {}).get(name)
    return group if isinstance(group, Mapping) else {}


def _written_words(case: Case, world: WorldInfo, ranks: int) -> str:
    """Return the facts that the layout has no column for, as ``name=value`` words that the importer reads."""
    words = [f"mode={_params(case)['mode']}", f"backend={world.backend}", f"device={world.device}"]
    words.append(f"nodes={world.nodes}")
    if world.size != ranks:
        words.append(f"world={world.size}")
    words += to_single_line(
        " ".join(f"{k}={v}" for k, v in case.params.items() if k not in _COLUMNS)
    ).split()
    return " ".join(words)


def _device_lines(run: Run, world: WorldInfo, ranks: int) -> Iterator[str]:
    """Yield a line for each rank of a table; the host is known only on one node, processes and devices never are."""
    host = _environment_group(run, "host")
    name = str(host.get("name") or run.info.host) if world.nodes == 1 else "unknown"
    model = (
        _environment_group(run, "torch").get("gpu")
        if world.device == "cuda"
        else host.get("cpu_model")
    )
    for rank in range(ranks):
        yield f"#  Rank {rank:2d} Group  0 Pid {-1:6d} on {name:>10} device {-1:2d} [unknown] {model or 'unknown'}"


def _render_line(placed: Mapping[str, Row], only: str) -> str:
    """Return one size; ``only`` is the placement whose numbers also stand in the other's columns, or empty."""
    row = next(iter(placed.values()))
    params, sharded = _params(row.case), _OPERATIONS[row.case.name].sharded
    size = int(params["size_bytes"])
    count = size // DTYPES[params["dtype"]].itemsize // (num_ranks(row) if sharded else 1)
    text = f"{size:12d}  {count:12d}  {TYPES[params['dtype']]:>8}  {REDUCTIONS[params['redop']]:>6}"
    text += f"  {int(params['root']):6d}"
    for name in _PLACED:
        is_repeated = bool(only) and name != only
        text += _cells(placed.get(only if is_repeated else name), is_repeated=is_repeated)
    return text


def step(sizes: Sequence[int]) -> str:
    """Return the distance from each size to the next, as a factor or in bytes; 0 bytes if neither is constant."""
    factors = {b // a if a and b % a == 0 else 0 for a, b in pairwise(sizes)}
    if len(factors) == 1 and min(factors) > 1:
        return f"{factors.pop()}(factor)"
    gaps = {b - a for a, b in pairwise(sizes)}
    return f"{gaps.pop() if len(gaps) == 1 else 0}(bytes)"


def _hyphenated(placement: str) -> str:
    return placement.replace("_", "-")


def _cells(row: Row | None, *, is_repeated: bool) -> str:
    if row is None:
        return f"  {'N/A':>7}{'     N/A' * 3}"
    time = fit(_scaled(row, row.headline, 1e6), 7)
    algbw, busbw = (fit(_scaled(row, name, 1e-9), 6) for name in ("algbw", "busbw"))
    # nccl-tests itself is a blank short where it does not check
    wrong = "       0" if row.check.passed and not is_repeated else "    N/A"
    return f"  {time}  {algbw}  {busbw}{wrong}"


def _scaled(row: Row, name: str, factor: float) -> float | None:
    value = row.value(name)
    return None if value is None else value * factor


def fit(value: float | None, width: int) -> str:
    """Return a number right-aligned in ``width`` with as many decimals, at most two, as fit, as nccl-tests does."""
    if value is None:
        return f"{'N/A':>{width}}"
    room = width - (len(str(int(value))) if value >= 1 else 0)
    if room < 0:
        return f"{value:{width}.{1 if width >= 7 else 0}e}"
    return f"{value:{width}.{min(2, max(0, room - 1))}f}"
