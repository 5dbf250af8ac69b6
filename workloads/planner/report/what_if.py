"""Variants of a predicted step with one change: a slower link, a larger batch, more GPUs. Pure."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from parbench.bench.results.document import Cell, DocumentTable, StackedBars
from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import place_step
from parbench.workloads.planner.describe import describe_bottleneck
from parbench.workloads.planner.dry_run import GIGA, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.report.columns import make_column


def list_variants(run: DryRun, seconds: Seconds | None) -> Iterator[tuple[str, DryRun | str]]:
    """Yield the step and its variants by name, or the reason why a variant is not possible."""
    spec, hardware = run.spec, run.hardware
    yield "unchanged", run
    if seconds is not None:
        slow_calls = dry_run(spec, hardware, seconds=lambda call: 2 * seconds(call))
        yield "all links half as fast", slow_calls
    else:
        for where in ("across", "inside"):
            name = f"{where}_bytes_per_second"
            slow = msgspec.structs.replace(hardware, **{name: getattr(hardware, name) / 2})
            if any(axis.where.startswith(where) for axis in run.axes):
                yield f"links {where} nodes half as fast", dry_run(spec, slow)
    efficiency = msgspec.structs.replace(hardware.efficiency, overlap={})
    exposed = msgspec.structs.replace(hardware, efficiency=efficiency)
    yield "no communication hidden", dry_run(spec, exposed, seconds=seconds)
    double_batch = replace(spec, microbatches=2 * spec.microbatches)
    yield "twice the batch", dry_run(double_batch, hardware, seconds=seconds)
    axis = "fsdp" if spec.dims.fsdp > spec.dims.dp else "dp"
    wider = place_step(spec, spec.dims.resize(**{axis: 2 * spec.dims.size(axis)}))
    wider = replace(wider, zero1=spec.zero1)
    yield "twice the GPUs and batch", _predict_valid(wider, hardware, seconds)
    try:
        yield (
            "twice the GPUs",
            _predict_valid(wider.with_batch(spec.global_batch), hardware, seconds),
        )
    except UserError as error:
        yield "twice the GPUs", str(error)


def _predict_valid(spec: StepSpec, hardware: Hardware, seconds: Seconds | None) -> DryRun | str:
    return spec.find_broken_rule() or dry_run(spec, hardware, seconds=seconds)


def what_if_table(run: DryRun, seconds: Seconds | None) -> DocumentTable:
    """Return a row for each variant, and a bar for each possible one."""
    tokens_per_gpu = run.tokens_per_second / run.spec.ranks
    rows: list[list[Cell]] = []
    bars: dict[str, dict[str, float]] = {}
    for name, variant in list_variants(run, seconds):
        if isinstance(variant, str):
            rows.append([name, *[None] * 5, f"not possible: {variant}"])
            continue
        bars[name] = variant.parts
        per_gpu = variant.tokens_per_second / variant.spec.ranks
        memory = variant.fullest.memory.total / GIGA
        suffix = "" if variant.fits else ", does not fit"
        bottleneck = describe_bottleneck(variant) + suffix
        change = per_gpu / tokens_per_gpu - 1
        rows.append([name, variant.seconds, per_gpu, change, variant.mfu, memory, bottleneck])
    return DocumentTable(
        id="what-if",
        title="What if",
        caption="one change each",
        columns=[
            make_column("change"),
            make_column("step", "s", "seconds of a step"),
            make_column("tokens/s per GPU", "number"),
            make_column("difference", "share", "of tokens/s per GPU"),
            make_column("MFU", "share", "PaLM's model FLOPs of the peak"),
            make_column("memory", "GB", "of the rank that holds most"),
            make_column("bottleneck", description="the largest loss, or compute"),
        ],
        rows=rows,
        figures=[
            StackedBars(
                title="What if", caption="The step with one change.", quantity="step", bars=bars
            )
        ],
    )
