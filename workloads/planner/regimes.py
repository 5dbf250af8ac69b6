"""Where each strategy is good, as tables with figures: bubbles, state, batch, the largest model, TP beside PP. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from parbench.bench.results.document import Cell, Column, Grid, Lines, Table
from parbench.bench.text import UserError
from parbench.workloads.costs.memory import memory_of, state_bytes
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import CHECKPOINTINGS
from parbench.workloads.pipeline_parallel.bubbles import bubble_fraction
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import Timeline, simulate_even
from parbench.workloads.planner.candidates import divisors, splits
from parbench.workloads.planner.dry_run import GIGA, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds

_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
_STAGES, _MICROBATCHES = 8, 32
_MOST_GPUS = 4096


def regimes(step: StepSpec, gpus: int, hardware: Hardware, seconds: Seconds | None = None) -> list[Table]:
    return [
        bubbles_by_batch(),
        bubbles_by_stages(),
        state_by_ranks(step, hardware),
        batch(step, gpus, hardware, seconds),
        largest(step, hardware),
        grid(step, gpus, hardware, seconds),
    ]


def _table(
    name: str,
    title: str,
    caption: str,
    first: str,
    along: str,
    level: Column,
    lines: Mapping[str, Mapping[int, float]],
    notes: Sequence[str],
    *,
    limit: tuple[float, str] | None = None,
    is_log: bool = False,
) -> Table:
    """Return a row for each line, a column for each of its places, and the lines drawn."""
    places = sorted({place for line in lines.values() for place in line})
    return Table(
        id=name,
        title=title,
        caption=caption,
        columns=[
            Column(title=first, help="a line of the figure"),
            *(
                Column(title=f"{place:,}", help=f"{level.title} at {place:,} {along}", unit=level.unit)
                for place in places
            ),
        ],
        rows=[[label, *(line.get(place) for place in places)] for label, line in lines.items()],
        notes=notes,
        figures=[
            Lines(
                title=title,
                told=f"{caption[0].upper()}{caption[1:]}.",
                along=along,
                level=level,
                lines=lines,
                limit=limit,
                is_log=is_log,
            )
        ],
    )


def bubble(schedule: str, ranks: int, microbatches: int) -> float | None:
    """Return idle over all of a step at F = I = W, None where the schedule cannot run so."""
    try:
        return bubble_fraction(simulated(schedule, ranks, microbatches))
    except UserError:
        return None


def simulated(schedule: str, ranks: int, microbatches: int) -> Timeline:
    """Return a schedule at F = I = W."""
    return simulate_even(make_schedule(schedule, ranks=ranks, microbatches=microbatches))


def _bubbles(pairs: Mapping[int, tuple[int, int]]) -> dict[str, dict[int, float]]:
    return {
        name: {place: told for place, of in pairs.items() if (told := bubble(name, *of)) is not None}
        for name in _SCHEDULES
    }


def bubbles_by_batch() -> Table:
    lines = _bubbles({m: (_STAGES, m) for m in (1, 2, 4, 8, 16, 32, 64)})
    return _table(
        "bubble-batch",
        f"Bubble on {_STAGES} ranks against microbatches",
        "share of a step, simulated at F = I = W, each schedule with its own stages a rank",
        "schedule",
        "microbatches",
        Column(title="bubble", unit="share"),
        lines,
        [
            "gpipe and looped_bfs are as 1f1b and interleaved, and hold more.",
            "With fewer microbatches than ranks 1f1b idles for half of its time or more.",
        ],
    )


def bubbles_by_stages() -> Table:
    lines = _bubbles({p: (p, _MICROBATCHES) for p in (2, 4, 8, 16)})
    return _table(
        "bubble-stages",
        f"Bubble of {_MICROBATCHES} microbatches against ranks",
        "share of a step, simulated at F = I = W",
        "schedule",
        "ranks",
        Column(title="bubble", unit="share"),
        lines,
        [],
    )


def zero_specs(step: StepSpec, ranks: int) -> dict[str, StepSpec]:
    """Return a step of data parallelism alone by what of its state is sharded."""
    sharded = step.on({"fsdp": ranks})
    return {
        "DDP": step.on({"dp": ranks}),
        "ZeRO-1": step.on({"dp": ranks}, zero1="reduce_scatter"),
        "ZeRO-2": replace(sharded, reshard=False),
        "ZeRO-3": sharded,
    }


def state_by_ranks(step: StepSpec, hardware: Hardware) -> Table:
    places = [2**i for i in range(1, 11)]
    lines: dict[str, dict[int, float]] = {}
    for ranks in places:
        for name, spec in zero_specs(step, ranks).items():
            lines.setdefault(name, {})[ranks] = memory_of(spec.positions[0]).state / GIGA
    limit = hardware.usable_bytes / GIGA
    return _table(
        "state",
        "State against ranks",
        f"parameters, gradients and optimizer of a rank of {step.name}",
        "shards",
        "ranks",
        Column(title="state", unit="GB"),
        lines,
        ["ZeRO-1 shards the optimizer, ZeRO-2 gradients too, ZeRO-3 parameters too."],
        limit=(limit, f"{limit:.1f} GB usable"),
        is_log=True,
    )


def batch(step: StepSpec, gpus: int, hardware: Hardware, seconds: Seconds | None = None) -> Table:
    """Return what a step computes and what its data parallelism sends, by the tokens of a GPU."""
    lines: dict[str, dict[int, float]] = {}
    compute: dict[int, float] = {}
    for tokens in (2**i for i in range(8, 18)):
        length = min(tokens, step.shape.sequence)
        sized = replace(step, shape=replace(step.shape, sequence=length), microbatch=tokens // length)
        specs = zero_specs(sized, gpus)
        for name in ("DDP", "ZeRO-3"):
            run = dry_run(specs[name], hardware, seconds=seconds)
            lines.setdefault(f"{name} sends", {})[tokens] = sum(axis.seconds for axis in run.axes)
        compute[tokens] = run.compute_seconds
    told = []
    for name, line in lines.items():
        least = next((tokens for tokens, sent in line.items() if sent < compute[tokens]), None)
        shorter = f"less time than it computes from {least:,} tokens a GPU on" if least else ""
        told.append(f"{name} for {shorter or 'longer than it computes at every batch'}.")
    return _table(
        "batch",
        "Communication and compute against tokens a GPU",
        f"seconds of a step of {step.name} on {gpus} GPUs, all of it, hidden or not",
        "of a step",
        "tokens a GPU",
        Column(title="time", unit="s"),
        {**lines, "compute": compute},
        ["DDP sums buckets of 25 MiB, each with its latency; ZeRO-3 gathers a layer at a time.", *told],
        is_log=True,
    )


def largest(step: StepSpec, hardware: Hardware) -> Table:
    """Return the parameters whose state a GPU's memory holds, without activations."""
    whole = state_bytes(1.0, step.widths)
    tensor = hardware.gpus_per_node
    split = tensor * 8
    lines: dict[str, dict[int, float]] = {}
    gpus = tensor
    while gpus <= _MOST_GPUS:
        each = {
            "DDP": whole.state,
            "ZeRO-1": whole.parameters + whole.gradients + whole.optimizer / gpus,
            "ZeRO-2": whole.parameters + (whole.gradients + whole.optimizer) / gpus,
            f"TP {tensor} x DDP": whole.state / tensor,
            "ZeRO-3, or TP x PP": whole.state / gpus,
        }
        if gpus >= split:  # the optimizer over what data ranks there are
            held = whole.parameters + whole.gradients + whole.optimizer * split / gpus
            each[f"TP {tensor} x PP 8 x ZeRO-1"] = held / split
        for name, held in each.items():
            lines.setdefault(name, {})[gpus] = hardware.usable_bytes / held / GIGA
        gpus *= 2
    return _table(
        "largest",
        "Largest model against GPUs, 1e9 parameters",
        f"parameters, in 1e9, whose state fits into {hardware.usable_bytes / GIGA:.1f} GB a GPU, without activations",
        "strategy",
        "GPUs",
        Column(title="parameters (1e9)", unit="number"),
        lines,
        [f"{whole.state:g} bytes a parameter: {whole.parameters:g} + {whole.gradients:g} + {whole.optimizer:g}."],
        is_log=True,
    )


def grid(step: StepSpec, gpus: int, hardware: Hardware, seconds: Seconds | None = None) -> Table:
    """Return the MFU of every TP and PP ZeRO-1 on the other ranks, with the fastest checkpointing and ``ep``."""
    sizes = [2**i for i in range(gpus.bit_length()) if gpus % 2**i == 0]
    tensor = [size for size in sizes if size <= 2 * hardware.gpus_per_node]
    global_batch = 4 * gpus
    rows: dict[str, list[Cell]] = {}
    for pipeline in sizes[:6]:
        inner = [{"pp": pipeline, "tp": size} for size in tensor]
        cells = [_square(step, gpus, each, global_batch, hardware, seconds) for each in inner]
        rows[f"pp {pipeline}"] = [one.mfu if isinstance(one, DryRun) else one for one in cells]
    squares = [Column(title=f"tp {size}", help="MFU, or why there is none", unit="share") for size in tensor]
    told = f"{step.name} on {gpus} GPUs at {global_batch} sequences a step, ZeRO-1 over the other ranks"
    return Table(
        id="grid",
        title="TP beside PP: MFU",
        caption=f"MFU of {told}, with what checkpointing{' and ep' if step.moe else ''} is fastest and fits",
        columns=[Column(title="pp", help="stages of the pipeline"), *squares],
        rows=[[name, *cells] for name, cells in rows.items()],
        figures=[
            Grid(
                title="TP beside PP",
                told=f"MFU of {told}.",
                below="ranks of tensor parallelism; stages on the left",
                columns=[str(size) for size in tensor],
                rows=rows,
                level=Column(title="MFU", unit="share"),
            )
        ],
    )


def _square(
    step: StepSpec,
    gpus: int,
    inner: Mapping[str, int],
    global_batch: int,
    hardware: Hardware,
    seconds: Seconds | None,
) -> DryRun | str | None:
    """Return the fastest step of a pair that fits, or the first word of a rule that it breaks, or what it lacks."""
    data, moe = gpus // (inner["pp"] * inner["tp"]), step.moe
    if not data:
        return None
    split = splits(step.shape, moe, inner["pp"], 1, "1f1b")[0]
    spec = step.on({"dp": data, **inner}, zero1="reduce_scatter" if data > 1 else "", split=split)
    try:
        spec = spec.with_batch(global_batch)
    except UserError:
        return "batch"
    if reason := spec.refusal():
        return reason.lstrip("(").split("(")[0].split(" ")[0]
    dealt = [spec.on({**spec.mesh, "ep": ep}) for ep in divisors(math.gcd(moe.experts, data))] if moe else [spec]
    runs = (
        dry_run(replace(each, checkpointing=how), hardware, seconds=seconds, exact=False)
        for each, how in product(dealt, CHECKPOINTINGS)
        if not each.refusal()
    )
    return max((run for run in runs if run.fits), key=lambda run: run.mfu, default="too large")
