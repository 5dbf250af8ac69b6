"""A run as nccl-tests prints it, so that whatever reads nccl-tests' text can read it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.machine.environment import recorded_variables
from bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from bench.results.runs import Run
from bench.text import UserError
from reports.formats.nccl_table import (
    VERSION,
    Device,
    Line,
    Placed,
    Table,
    devices,
    nccl_code,
    step,
    tables,
    where_words,
)

NOT_MEASURED = "N/A"


def render_text(run: Run) -> str:
    """Return the run's collectives in the layout of nccl-tests' text, a table for each series.

    Times are the launches' merged headlines in us, bandwidths GB/s of 1e9 B/s. A placement that was not measured is
    ``N/A`` in all its four columns, so that a line always has 13 tokens and no reader takes it for a number.
    """
    found, left_out = tables(run)
    lines = [line for table in found for line in (*_table(run, table), "")]
    lines += [f"# Not in any table: {sentence}" for sentence in left_out]
    return "".join(f"{line}\n" for line in lines)


def fit(value: float, width: int) -> str:
    """Return a number right-aligned in ``width`` with as many decimals, at most two, as fit, as nccl-tests does."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    if digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def _table(run: Run, table: Table) -> list[str]:
    return [
        *_opening(run, table),
        *(_device(device) for device in devices(run, table)),
        "#",
        *_headings(),
        *(_line(table, line) for line in table.lines),
        *(f"# Left out: {sentence}" for sentence in table.left_out),
        f"# {'Out of bounds values':<20} : {table.wrong} {'FAILED' if table.wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {_average(table)} ",
        "#",
        f"# Collective test concluded: {table.program}",
    ]


def _opening(run: Run, table: Table) -> list[str]:
    sizes = [line.size for line in table.lines]
    kind, distance = step(sizes)
    code = nccl_code(run) or 0
    return [
        f"# nccl-tests version {VERSION} nccl-headers={code} nccl-library={code}",
        f"# Collective test starting: {table.program}",
        f"# nThread 1 nGpus 1 minBytes {min(sizes, default=0)} maxBytes {max(sizes, default=0)} "
        f"step: {distance}({kind}) warmup iters: {run.info.plan.measure.warmup} iters: {table.iterations} "
        f"agg iters: 1 validation: {int(table.checked)} graph: 0 unalign: 0",
        f"# Written by parbench {run.info.parbench}: {' '.join(f'{k}={v}' for k, v in where_words(table).items())}"
        f"{f' {table.others}' if table.others else ''}",
        *_absent(table),
        "#",
        "# Using devices",
    ]


def _absent(table: Table) -> list[str]:
    names = {OUT_OF_PLACE: "out-of-place", IN_PLACE: "in-place"}
    absent = [text for name, text in names.items() if any(name not in line.placed for line in table.lines)]
    return [f"# {NOT_MEASURED} under {text}: not measured" for text in absent]


def _headings() -> list[str]:
    names = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    return [
        _heading(("",) * 5, None) + f"{'out-of-place':>23}{'in-place':>31}{'':10}",
        _heading(("size", "count", "type", "redop", "root"), names),
        _heading(("(B)", "(elements)", "", "", ""), units),
    ]


def _heading(first: Sequence[str], repeated: Sequence[str] | None) -> str:
    line = "# " + "  ".join(f"{word:>{width}}" for word, width in zip(first, (10, 12, 8, 6, 6), strict=True))
    if repeated is None:
        return line
    return (
        line
        + "".join(f"  {word:>{width}}" for word, width in zip((*repeated, *repeated), (7, 6, 6, 6) * 2, strict=True))
        + " "
    )


def _device(device: Device) -> str:
    # -1 is no process and no device: nobody knows them any more
    return (
        f"#  Rank {device.rank:2d} Group  0 Pid {-1:6d} on {device.host or 'unknown':>10} device {-1:2d} "
        f"[unknown] {device.info or 'unknown'}"
    )


def _line(table: Table, line: Line) -> str:
    start = f"{line.size:12d}  {line.count:12d}  {table.type:>8}  {table.redop:>6}  {table.root:6d}"
    return start + "".join(_placed(line.placed.get(name)) for name in (OUT_OF_PLACE, IN_PLACE))


def _placed(placed: Placed | None) -> str:
    if placed is None:
        return f"  {NOT_MEASURED:>7}  {NOT_MEASURED:>6}  {NOT_MEASURED:>6}  {NOT_MEASURED:>6}"
    # nccl-tests itself is a blank short where it does not check
    wrong = f"    {NOT_MEASURED}" if placed.wrong is None else f"  {placed.wrong:6g}"
    return f"  {fit(placed.time_us, 7)}  {_rate(placed.algbw)}  {_rate(placed.busbw)}{wrong}"


def _rate(gigabytes: float | None) -> str:
    return f"{NOT_MEASURED:>6}" if gigabytes is None else fit(gigabytes, 6)


def _average(table: Table) -> str:
    average = table.average_busbw
    return NOT_MEASURED if average is None else f"{average:g}"


JSON_VERSION = 3


def render_json(run: Run) -> bytes:
    """Return the run's collectives as nccl-tests' JSON: one document a line, one line for each series.

    A document of nccl-tests holds one operation and does not name it, except by the program in ``args``; a run of one
    series is one document. Times are us, bandwidths GB/s of 1e9 B/s; what is unknown or was not measured is null.
    """
    found, left_out = tables(run)
    if not found:
        reasons = f": {left_out[0]}" if left_out else ""
        raise UserError(f"{run.path} holds no collective that nccl-tests' JSON has a place for{reasons}")
    return b"".join(msgspec.json.encode(_document(run, table)) + b"\n" for table in found)


def _document(run: Run, table: Table) -> dict[str, Any]:
    average = table.average_busbw
    return {
        "version": JSON_VERSION,
        "start_time": _local(run.info.started),
        "args": [table.program, *_words(run, table)],
        "env": _variables(run),
        "nccl_version": nccl_code(run),
        "config": _config(run, table),
        "results": [_result(table, line) for line in table.lines],
        "out_of_bounds": {"count": table.wrong, "okay": _word(not table.wrong)},
        "average_bus_bandwidth": {"bandwidth": average, "okay": "unchecked"},
        "errors": list(table.left_out),
        "end_time": _local(max((record.started for record in run.records), default=run.info.started)),
    }


def _words(run: Run, table: Table) -> list[str]:
    told = where_words(table)
    return [f"parbench={run.info.parbench}", *(f"{k}={v}" for k, v in told.items()), *table.others.split()]


def _config(run: Run, table: Table) -> dict[str, Any]:
    sizes = [line.size for line in table.lines]
    kind, distance = step(sizes)
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": min(sizes, default=0),
        "maximum_bytes": max(sizes, default=0),
        f"step_{kind}": distance,
        "warmup_iters": run.info.plan.measure.warmup,
        "iterations": table.iterations,
        "aggregated_iterations": 1,
        "validation": int(table.checked),
        "graph": 0,
        "blocking_collectives": _word(table.mode == "blocking"),
        "per_iter_timing": _word(False),
        "per_iter_skip": 0,
        "parallel_init": _word(False),
        "devices": [
            {
                "rank": device.rank,
                "group": 0,
                "pid": None,
                "hostname": device.host,
                "device": None,
                "device_hex": None,
                "device_info": device.info,
            }
            for device in devices(run, table)
        ],
    }


def _result(table: Table, line: Line) -> dict[str, Any]:
    return {
        "size": line.size,
        "count": line.count,
        "type": table.type,
        "redop": table.redop,
        "root": f"{table.root:6d}",
        OUT_OF_PLACE: _placed_json(line.placed.get(OUT_OF_PLACE)),
        IN_PLACE: _placed_json(line.placed.get(IN_PLACE)),
        "actual_iterations": line.iterations,
        "experiment_name": "",
    }


def _placed_json(placed: Placed | None) -> dict[str, float | None] | None:
    """Return a placement's numbers, null where it was not measured, as nccl-tests writes for what it leaves out."""
    if placed is None:
        return None
    wrong = None if placed.wrong is None else float(placed.wrong)
    return {"time": placed.time_us, "alg_bw": placed.algbw, "bus_bw": placed.busbw, "nwrong": wrong}


def _variables(run: Run) -> list[str]:
    """Return the recorded variables, looked through once more: a run's folder may have been edited."""
    group = (run.info.environment or {}).get("variables")
    found = {str(name): str(value) for name, value in group.items()} if isinstance(group, dict) else {}
    return [f"{name}={value}" for name, value in recorded_variables(found).items()]


def _local(utc: str) -> str:
    """Return a time as nccl-tests writes one, without its zone, which is UTC."""
    return utc.partition(".")[0].replace("T", " ").removesuffix("Z")


def _word(value: bool) -> str:
    return "true" if value else "false"
