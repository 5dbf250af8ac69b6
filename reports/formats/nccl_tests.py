"""A run's collectives as nccl-tests prints them: a table an operation, a line a size, two placements a line. Pure.

The layout, the names and what ``count`` means are those of nccl-tests 2.19.6 (its src/util.cu and src/common.cu).
Times are the launches' merged headlines in us, bandwidths GB/s of 1e9 B/s.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from parbench.bench.machine.environment import recorded_variables
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DTYPES, IN_PLACE, OUT_OF_PLACE, names_of
from parbench.bench.results.records import WorldInfo
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError, listed
from parbench.reports.analysis.summary import Row, num_ranks, summarize
from parbench.reports.cells import visible

TOOL, VERSION, JSON_VERSION = "nccl-tests", "2.19.6", 3
TYPES = {name: name for name in ("bfloat16", "int8", "uint8", "int32", "int64")} | {"float32": "float"}
TYPES |= {"float16": "half", "float64": "double", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
REDUCTIONS = {"sum": "sum", "avg": "avg", "min": "min", "max": "max", "product": "prod", "none": "none"}
_OPERATIONS = {spec.name: spec for spec in names_of(TOOL).values()}
_PLACED = (OUT_OF_PLACE, IN_PLACE)
_COMPARABLE = {"pipelined": 0, "graph": 1}  # modes that time what nccl-tests does, with its -G
_LINE = ("dtype", "redop", "root", "size_bytes")  # what parts a table's lines, the last fastest, as in nccl-tests
_COLUMNS = (*_LINE, "mode", "placement")  # what the layout has a place for


def render_text(run: Run) -> str:
    """Return the run's collectives in the layout of nccl-tests' text, a table for each operation and mode.

    An operation that torch has in one placement alone has its numbers in the other's columns too, for readers take a
    number from each: a comment says so, and ``#wrong`` is ``N/A`` there, as where nccl-tests does not check. A
    placement that was not measured is ``N/A`` in all its four columns; a line always has 13 tokens.
    """
    documents, left_out = _documents(run)
    lines = [line for document in documents for line in (*_table(run.info.parbench, document), "")]
    lines += [f"# Not in any table: {sentence}" for sentence in left_out]
    return "".join(f"{line}\n" for line in lines)


def render_json(run: Run) -> bytes:
    """Return nccl-tests' JSON, one line and document a series, named by the program in ``args``; unknown is null."""
    documents, left_out = _documents(run)
    if not documents:
        reasons = f": {left_out[0]}" if left_out else ""
        raise UserError(f"{run.path} holds no collective that nccl-tests' JSON has a place for{reasons}")
    return b"".join(msgspec.json.encode(document) + b"\n" for document in documents)


def _documents(run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a document for each operation and mode on one group, and what is in none.

    On CUDA, other modes are in none where one was measured that compares with nccl-tests.
    """
    summary = summarize(run)
    placed, left_out = list[tuple[str, object, object, Row]](), list[str]()
    compared: dict[object, list[str]] = {}
    for row in summary.rows:
        if reason := _no_counterpart(row.case):
            left_out.append(f"{visible(row.case.label)}: {reason}")
            continue
        told, where = _params(row.case), (row.case.name, row.world.size, row.world.nodes)
        mode = str(told["mode"])
        alike = where, *((k, v) for k, v in told.items() if k not in ("mode", "size_bytes", "placement"))
        series = where, mode, *((k, v) for k, v in told.items() if k not in _COLUMNS)
        placed.append((mode, alike, series, row))
        if mode in _COMPARABLE and row.world.device == "cuda" and not _why_left_out(row):
            compared.setdefault(alike, []).append(mode)
    tables: dict[object, list[Row]] = {}
    for mode, like, table, row in placed:
        if mode not in _COMPARABLE and like in compared:
            why = f"mode {listed(sorted(set(compared[like])))} compares with nccl-tests, and is here"
            left_out.append(f"{visible(row.case.label)}: {why}")
        else:
            tables.setdefault(table, []).append(row)
    left_out += [f"{visible(one.case.label)}: skipped: {visible(one.reason)}" for one in summary.skipped]
    left_out += [
        f"{visible(one.case.label)}: no record of {one.launches} of {one.planned} launches" for one in summary.missing
    ]
    return [_document(run, rows) for rows in tables.values()], left_out


def _params(case: Case) -> dict[str, Any]:
    """Return a case's parameters, with what goes without saying."""
    operation = _OPERATIONS[case.name]
    redop = "sum" if operation.reduces else "none"
    return {"mode": "unknown", "redop": redop, "root": -1, "placement": operation.placements[0], **case.params}


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
        return f"{row.status}: {visible('; '.join(row.reasons)) or 'no reason is known'}"
    return "it has no time" if row.value(row.headline) is None else None


def _document(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    case, world, ranks = rows[0].case, rows[0].world, min(map(num_ranks, rows))  # what failed may not know its group's
    blocks: dict[tuple[object, ...], dict[int, dict[str, Row]]] = {}
    for row in rows:
        if not _why_left_out(row):
            told = _params(row.case)
            block = blocks.setdefault(tuple(told[name] for name in _LINE[:-1]), {})
            block.setdefault(int(told["size_bytes"]), {})[told["placement"]] = row
    lines = [(size, block[size]) for block in blocks.values() for size in sorted(block)]
    sizes = sorted({size for size, _ in lines})
    timed = [row for _, line in lines for row in line.values()]
    rates = [busbw / 1e9 for row in timed if (busbw := row.value("busbw")) is not None]
    wrong = sum(max(1, row.check.wrong or 0) for row in rows if row.status == "wrong")
    mode = str(_params(case)["mode"])
    words = [f"mode={mode}", f"backend={world.backend}", f"device={world.device}", f"nodes={world.nodes}"]
    words += [f"world={world.size}"] if world.size != ranks else []
    words += visible(" ".join(f"{k}={v}" for k, v in case.params.items() if k not in _COLUMNS)).split()
    environment = {name: group for name, group in (run.info.environment or {}).items() if isinstance(group, Mapping)}
    variables = {str(name): str(value) for name, value in (environment.get("variables") or {}).items()}
    ran = {"nthreads": 1, "ngpus": 1, "minimum_bytes": min(sizes, default=0), "maximum_bytes": max(sizes, default=0)}
    ran |= {**step(sizes), "warmup_iters": run.info.plan.measure.warmup}
    ran |= {"iterations": max((row.iterations for row in timed), default=0), "aggregated_iterations": 1}
    ran |= {"validation": int(wrong > 0 or any(row.check.passed for row in timed)), "graph": _COMPARABLE.get(mode, 0)}
    how: dict[str, Any] = {"blocking_collectives": str(mode == "blocking").lower(), "per_iter_timing": "false"}
    how |= {"per_iter_skip": 0, "parallel_init": "false"}
    nccl = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", str((environment.get("torch") or {}).get("nccl")))
    return {
        "version": JSON_VERSION,
        "start_time": _local(run.info.started),
        "args": [_OPERATIONS[case.name].names[TOOL], f"parbench={run.info.parbench}", *words],
        # looked through once more: a run's folder may have been edited
        "env": [f"{name}={value}" for name, value in recorded_variables(variables).items()],
        # as NCCL's headers number it: 2.28.9 is 22809
        "nccl_version": int(nccl[1]) * 10000 + int(nccl[2]) * 100 + int(nccl[3]) if nccl else None,
        "config": {**ran, **how, "devices": _devices(run.info.host, environment, ranks, world)},
        "results": [_result(size, line) for size, line in lines],
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": sum(rates) / len(rates) if rates else None, "okay": "unchecked"},
        "errors": [f"{visible(row.case.label)}: {reason}" for row in rows if (reason := _why_left_out(row))],
        "end_time": _local(max((record.started for record in run.records), default=run.info.started)),
    }


def _result(size: int, placed: Mapping[str, Row]) -> dict[str, Any]:
    first = next(iter(placed.values()))
    told, sharded = _params(first.case), _OPERATIONS[first.case.name].sharded
    count = size // DTYPES[told["dtype"]].itemsize // (num_ranks(first) if sharded else 1)
    words = {"type": TYPES[told["dtype"]], "redop": REDUCTIONS[told["redop"]], "root": f"{int(told['root']):6d}"}
    times = {name: _placed(placed.get(name)) for name in _PLACED}
    iterations = max(row.iterations for row in placed.values())
    return {"size": size, "count": count, **words, **times, "actual_iterations": iterations, "experiment_name": ""}


def _placed(row: Row | None) -> dict[str, float | None] | None:
    if row is None:
        return None
    seconds, algbw, busbw = (row.value(name) for name in (row.headline, "algbw", "busbw"))
    rates = {"alg_bw": None if algbw is None else algbw / 1e9, "bus_bw": None if busbw is None else busbw / 1e9}
    time, wrong = None if seconds is None else seconds * 1e6, 0.0 if row.check.passed else None
    return {"time": time, **rates, "nwrong": wrong}


def step(sizes: Sequence[int]) -> dict[str, int]:
    """Return how far one size is from the next, as a factor or in bytes; 0 bytes if neither is constant."""
    factors = {b // a if a and b % a == 0 else 0 for a, b in pairwise(sizes)}
    if len(factors) == 1 and min(factors) > 1:
        return {"step_factor": factors.pop()}
    gaps = {b - a for a, b in pairwise(sizes)}
    return {"step_bytes": gaps.pop() if len(gaps) == 1 else 0}


def _local(utc: str) -> str:
    """Return a time as nccl-tests writes one, without its zone, which is UTC."""
    return utc.partition(".")[0].replace("T", " ").removesuffix("Z")


def _devices(host_name: str, environment: Mapping[str, Any], ranks: int, world: WorldInfo) -> list[dict[str, Any]]:
    """Return the ranks of a table, numbered within it; the host is known where there is one node."""
    host, torch = environment.get("host") or {}, environment.get("torch") or {}
    name = str(host.get("name") or host_name) if world.nodes == 1 else None
    model = torch.get("gpu") if world.device == "cuda" else host.get("cpu_model")
    known = {"hostname": name, "device": None, "device_hex": None, "device_info": str(model) if model else None}
    return [{"rank": rank, "group": 0, "pid": None, **known} for rank in range(ranks)]


def _table(parbench: str, document: Mapping[str, Any]) -> list[str]:
    config, results, wrong = document["config"], document["results"], document["out_of_bounds"]["count"]
    program, _, *words = document["args"]
    code, average = document["nccl_version"] or 0, document["average_bus_bandwidth"]["bandwidth"]
    operation = names_of(TOOL)[program]
    measured = [name for name in _PLACED if any(line[name] for line in results)]
    # torch has one placement of it, so there is nothing to measure for the other
    only = measured[0] if len(operation.placements) == len(measured) == 1 else ""
    repeated = [name for name in _PLACED if only and name != only]
    unmeasured = [name for name in _PLACED if not only and any(line[name] is None for line in results)]
    [(kind, distance)] = step(sorted({line["size"] for line in results})).items()
    return [
        f"# nccl-tests version {VERSION} nccl-headers={code} nccl-library={code}",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus 1 minBytes {config['minimum_bytes']} maxBytes {config['maximum_bytes']} "
        f"step: {distance}({kind.removeprefix('step_')}) warmup iters: {config['warmup_iters']} "
        f"iters: {config['iterations']} agg iters: 1 validation: {config['validation']} "
        f"graph: {config['graph']} unalign: 0",
        f"# Written by parbench {parbench}: {' '.join(words)}",
        *(f"# N/A under {_told(name)}: not measured" for name in unmeasured),
        *(f"# {_told(name)} repeats {_told(only)}: {operation.short_name} has no other" for name in repeated),
        "#",
        "# Using devices",
        *(
            # -1 is no process and no device: nobody knows them any more
            f"#  Rank {one['rank']:2d} Group  0 Pid {-1:6d} on {one['hostname'] or 'unknown':>10} device {-1:2d} "
            f"[unknown] {one['device_info'] or 'unknown'}"
            for one in config["devices"]
        ),
        "#",
        f"# {'out-of-place':>73}{'in-place':>31}{'':10}",
        f"#       size         count      type   redop    root{'     time   algbw   busbw  #wrong' * 2} ",
        f"#        (B)    (elements)                          {'     (us)  (GB/s)  (GB/s)        ' * 2} ",
        *(
            f"{line['size']:12d}  {line['count']:12d}  {line['type']:>8}  {line['redop']:>6}  {line['root']}"
            f"{''.join(_cells(line[only] | {'nwrong': None} if name in repeated else line[name]) for name in _PLACED)}"
            for line in results
        ),
        *(f"# Left out: {sentence}" for sentence in document["errors"]),
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {'N/A' if average is None else f'{average:g}'} ",
        "#",
        f"# Collective test concluded: {program}",
    ]


def _told(placement: str) -> str:
    return placement.replace("_", "-")


def _cells(placed: Mapping[str, float | None] | None) -> str:
    if placed is None:
        return f"  {'N/A':>7}{'     N/A' * 3}"
    time, algbw, busbw = (fit(placed[name], 7 if name == "time" else 6) for name in ("time", "alg_bw", "bus_bw"))
    # nccl-tests itself is a blank short where it does not check
    wrong = "    N/A" if placed["nwrong"] is None else f"  {placed['nwrong']:6g}"
    return f"  {time}  {algbw}  {busbw}{wrong}"


def fit(value: float | None, width: int) -> str:
    """Return a number right-aligned in ``width`` with as many decimals, at most two, as fit, as nccl-tests does."""
    if value is None:
        return f"{'N/A':>{width}}"
    room = width - (len(str(int(value))) if value >= 1 else 0)
    if room < 0:
        return f"{value:{width}.{1 if width >= 7 else 0}e}"
    return f"{value:{width}.{min(2, max(0, room - 1))}f}"
