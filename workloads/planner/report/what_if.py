"""Variants of a predicted step with one change: slower links, a larger batch, more GPUs. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from parbench.bench.results.plots import Plot, StackedBars
from parbench.bench.results.tables import Table
from parbench.workloads.planner.candidates import place_step
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.report.columns import (
    BOTTLENECK,
    MEMORY,
    MFU,
    STEP,
    make_column,
    summarize_run,
)


def list_variants(run: DryRun) -> Iterator[tuple[str, DryRun]]:
    """Yield the step and its possible variants by name. Measured links are not changed."""
    spec, hardware, seconds = run.spec, run.hardware, run.measured_seconds
    yield "unchanged", run
    if seconds is None:
        for where in ("across", "inside"):
            field = f"{where}_bytes_per_second"
            slow = msgspec.structs.replace(hardware, **{field: getattr(hardware, field) / 2})
            if any(axis.links.startswith(where) for axis in run.axes):
                yield f"links {where} nodes half as fast", dry_run(spec, slow)
    efficiency = msgspec.structs.replace(hardware.efficiency, overlap={})
    exposed = msgspec.structs.replace(hardware, efficiency=efficiency)
    yield "no communication hidden", dry_run(spec, exposed, seconds=seconds)
    axis_name = "fsdp" if spec.dims.fsdp > spec.dims.dp else "dp"
    dims = spec.dims.resize(**{axis_name: 2 * spec.dims.size(axis_name)})
    wide = replace(place_step(spec, dims), zero1=spec.zero1)
    changes = {
        "twice the batch": replace(spec, microbatches=2 * spec.microbatches),
        "twice the GPUs and batch": wide,
    }
    if spec.microbatches % 2 == 0:
        changes["twice the GPUs"] = replace(wide, microbatches=spec.microbatches // 2)
    for name, changed in changes.items():
        if changed.find_broken_rule() is None:
            yield name, dry_run(changed, hardware, seconds=seconds)


def what_if_table(run: DryRun) -> Table:
    """Return a row and a bar for each variant."""
    variants = dict(list_variants(run))
    tokens_per_gpu = run.tokens_per_second / run.spec.ranks
    rows = []
    for name, variant in variants.items():
        per_gpu = variant.tokens_per_second / variant.spec.ranks
        row = {
            **summarize_run(variant),
            "change": name,
            "tokens_per_second_per_gpu": per_gpu,
            "difference": per_gpu / tokens_per_gpu - 1,
        }
        if not variant.fits:
            row["bottleneck"] += ", does not fit"
        rows.append(row)
    return Table(
        "what-if",
        "What if",
        caption="one change each",
        columns=[
            make_column("change"),
            STEP,
            make_column("tokens_per_second_per_gpu", "tokens/s per GPU", "number"),
            make_column("difference", kind="percent", description="of tokens/s per GPU"),
            MFU,
            MEMORY,
            BOTTLENECK,
        ],
        rows=rows,
        figures=partial(_draw_variants, variants),
    )


def _draw_variants(variants: Mapping[str, DryRun]) -> Iterator[Plot]:
    yield StackedBars(
        title="What if",
        caption="The step with one change.",
        quantity="step",
        bars={name: variant.parts for name, variant in variants.items()},
    )
