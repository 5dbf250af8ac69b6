"""The overview of a run: where it ran, and the main numbers of its collectives and steps."""

from typing import Any

from parbench.bench.results.formatting import format_quantity, format_seconds
from parbench.bench.results.tables import is_missing
from parbench.bench.text import format_duration
from parbench.reports.analysis.labels import describe_ranks
from parbench.reports.analysis.operations import select_operations
from parbench.reports.analysis.steps import (
    StepRow,
    compute_exposed_share,
    compute_profiled_share,
    list_step_rows,
    sum_memory,
)
from parbench.reports.frames import list_rows
from parbench.reports.run_data import RunData

MAX_LATENCY_BYTES = 64 << 10
"""The largest size whose time counts as the latency of an operation."""


def describe_setup(data: RunData) -> str:
    """Return the host, hardware, ranks, preset and start of a run as one line of text.

    The line ends with the run's duration and the percentage of the duration in which cases ran.
    Unknown facts are left out. For an imported log, the facts that the log states about GPUs and
    NCCL are added.
    """
    plan, info = data.plan, data.run.info
    environment = info.environment or {}
    imported = environment.get("imported") or {}
    gpu = (environment.get("gpu") or {}).get("name")
    torch = (environment.get("torch") or {}).get("version")
    nodes = max((result.world.nodes for result in data.results), default=0)
    measuring_seconds = sum(record.seconds for record in data.run.records)
    seconds = sum(repetition.seconds for repetition in info.repetitions)
    measuring = ""
    if seconds:
        measuring = (
            f"duration {format_duration(seconds)}, "
            f"{100 * measuring_seconds / seconds:.0f} % of it measuring"
        )
    parts = [
        info.host,
        gpu or (environment.get("host") or {}).get("cpu_model"),
        describe_ranks(plan.nproc, nodes),
        f"{plan.backend}, {plan.device}",
        f"torch {torch}" if torch else "",
        f"preset {plan.preset}" if plan.preset else "",
        f"started {info.started[:16]}",
        *(f"{name} {value}" for name, value in imported.items()),
        measuring,
    ]
    return " · ".join(part for part in parts if part)


def summarize_operations(data: RunData) -> list[dict[str, Any]]:
    """Return a row for each communication operation: its case with the largest bus bandwidth.

    The operation with the largest bus bandwidth comes first. Memory copies are left out. A row is a
    dict with the values of the case (``select_operations``) and these keys:

    - ``operation``: the name, with its parameters if several rows have the same name
    - ``latency``: the seconds of the smallest size in blocking mode, unknown above 64 KiB
    - ``share``: the bus bandwidth over the bandwidth limit of the run, as a fraction
    """
    cases = select_operations(data)
    cases = cases[cases["kind"] != "memory"].sort_values("busbw", ascending=False, kind="stable")
    is_small = (cases["mode"] == "blocking") & (cases["size"].fillna(0) <= MAX_LATENCY_BYTES)
    smallest = cases[is_small].sort_values("size", kind="stable").drop_duplicates("operation")
    latencies = smallest.set_index("operation")["seconds"]
    fastest = cases.drop_duplicates("operation")
    ceiling = data.ceiling.bytes_per_second if data.ceiling else float("nan")
    names = fastest["operation"].map(lambda operation: operation.partition(" ")[0])
    return list_rows(
        fastest.assign(
            latency=fastest["operation"].map(latencies),
            share=fastest["busbw"] / ceiling,
            operation=names.where(~names.duplicated(keep=False), fastest["operation"]),
        )
    )


def summarize_steps(data: RunData) -> list[StepRow]:
    """Return a row for each measured training step, with shares of the profiled step in percent.

    A row is a dict with the values of the case (``RunData.cases``) and these keys:

    - ``compute``, ``exposed`` (communication), ``idle``: percentages of the profiled step
    - ``overlap``: the percentage of communication that compute or copies hide
    - ``memory``: the measured bytes of a rank, the sum of the maxima of components over ranks

    An unknown value is None.
    """
    rows = list_step_rows(data)
    for row in rows:
        result = row["result"]
        shares = {
            "compute": compute_profiled_share(result, result.value("compute")),
            "exposed": compute_exposed_share(result),
            "idle": compute_profiled_share(result, result.value("idle")),
            "overlap": result.value("overlap"),
        }
        for part, share in shares.items():
            row[part] = None if share is None else round(100 * share)
        row["memory"] = sum_memory(result)
    return rows


def list_tiles(data: RunData) -> list[tuple[str, str]]:
    """Return the main numbers of a run as pairs of text: the number, and the name of the quantity.

    These are the time of the first training step, its exposed, idle and overlap percentages, the
    largest bus bandwidth, and the lowest latency, as far as they were measured. An example is
    ``("12.3 GB/s", "bus bandwidth of all_reduce")``.
    """
    operations = summarize_operations(data)
    steps = summarize_steps(data)
    tiles = []
    if steps:
        step = steps[0]
        tiles.append((format_seconds(step["seconds"]), f"step of {step['label']}"))
        parts = [
            f"{part} {step[part]} %"
            for part in ("exposed", "idle", "overlap")
            if step[part] is not None
        ]
        if parts:
            tiles.append((", ".join(parts), f"in a step of {step['label']}"))
    fastest = next((row for row in operations if not is_missing(row["busbw"])), None)
    if fastest:
        bandwidth = format_quantity(fastest["busbw"], "B/s")
        tiles.append((bandwidth, f"bus bandwidth of {fastest['operation']}"))
    known = [row for row in operations if not is_missing(row["latency"])]
    if known:
        quickest = min(known, key=lambda row: row["latency"])
        tiles.append((format_seconds(quickest["latency"]), f"latency of {quickest['operation']}"))
    return tiles
