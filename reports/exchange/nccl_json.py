"""A run as nccl-tests' JSON report, version 3, so that whatever reads that can read it."""

from typing import Any

import msgspec

from bench.machine.environment import recorded_variables
from bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from bench.results.runs import Run
from bench.text import UserError
from reports.exchange.nccl_table import (
    Line,
    Placed,
    Table,
    devices,
    nccl_code,
    step,
    tables,
    where_words,
)

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
        OUT_OF_PLACE: _placed(line.placed.get(OUT_OF_PLACE)),
        IN_PLACE: _placed(line.placed.get(IN_PLACE)),
        "actual_iterations": line.iterations,
        "experiment_name": "",
    }


def _placed(placed: Placed | None) -> dict[str, float | None] | None:
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
