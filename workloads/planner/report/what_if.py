"""A step with one thing otherwise: a slower link, a larger batch, more GPUs. Pure."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from parbench.bench.results.document import Cell, DocumentColumn, DocumentTable, StackedBars
from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import place_step
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import OVERLAP, Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.rationale import binding_of


def what_if(run: DryRun, seconds: Seconds | None = None) -> Iterator[tuple[str, DryRun | str]]:
    """Yield the step as it is and with one thing otherwise, or why it cannot be so."""
    spec, hardware, exact = run.spec, run.hardware, run.bubble_method.startswith("simulated")

    def priced(
        other: Hardware = hardware, step: StepSpec = spec, rule: Seconds | None = seconds
    ) -> DryRun:
        return dry_run(step, other, seconds=rule, exact=exact)

    def slower(name: str) -> Hardware:
        return msgspec.structs.replace(hardware, **{name: getattr(hardware, name) / 2})

    def hiding(overlap: dict[str, float]) -> Hardware:
        efficiency = msgspec.structs.replace(hardware.efficiency, overlap=overlap)
        return msgspec.structs.replace(hardware, efficiency=efficiency)

    yield "as it is", run
    if seconds is not None:
        yield "all links half as fast", priced(rule=lambda call: 2 * seconds(call))
    else:
        if any(axis.where.startswith("across") for axis in run.axes):
            yield "links across nodes half as fast", priced(slower("across_bytes_per_second"))
        yield "links inside a node half as fast", priced(slower("inside_bytes_per_second"))
    yield "no communication hidden", priced(hiding({}))
    overlap = hardware.efficiency.overlap
    if spec.dims.size("ep") > 1 and "ep" not in overlap:
        yield (
            "tokens sent beside other microbatches' compute",
            priced(hiding(overlap | {"ep": OVERLAP["edp"]})),
        )
    yield "twice the batch", priced(step=replace(spec, microbatches=2 * spec.microbatches))
    axis = "fsdp" if spec.dims.size("fsdp") > spec.dims.size("dp") else "dp"
    wider = place_step(spec, spec.dims.resize(**{axis: 2 * spec.dims.size(axis)}))
    yield "twice the GPUs and batch", wider.find_broken_rule() or priced(step=wider)
    try:
        same = wider.with_batch(spec.global_batch)
    except UserError as error:
        yield "twice the GPUs", str(error)
    else:
        yield "twice the GPUs", same.find_broken_rule() or priced(step=same)


def what_if_table(run: DryRun, seconds: Seconds | None) -> DocumentTable:
    told = dict(what_if(run, seconds))
    a_gpu = run.tokens_per_second / run.spec.ranks
    rows: list[list[Cell]] = []
    for name, other in told.items():
        if isinstance(other, str):
            rows.append([name, *[None] * 5, f"cannot be: {other}"])
            continue
        of_each = other.tokens_per_second / other.spec.ranks
        memory = other.fullest.memory.total / 1e9
        fits = "" if other.fits else "does not fit"
        bound = "; ".join(filter(None, (binding_of(other), fits)))
        rows.append([name, other.seconds, of_each, of_each / a_gpu - 1, other.mfu, memory, bound])
    return DocumentTable(
        id="what-if",
        title="What if",
        caption="one thing otherwise, all else as it is",
        columns=[
            DocumentColumn(title="with", help="what would be otherwise"),
            DocumentColumn(title="step", help="seconds of a step", unit="s"),
            DocumentColumn(title="tokens/s a GPU", help="of each GPU", unit="number"),
            DocumentColumn(title="change", help="of tokens/s a GPU", unit="share"),
            DocumentColumn(
                title="MFU", help="as PaLM counts FLOPs, of the dense peak", unit="share"
            ),
            DocumentColumn(title="memory", help="of the fullest rank", unit="GB"),
            DocumentColumn(title="bound by", help="what most of the step is lost to, or compute"),
        ],
        rows=rows,
        figures=[
            StackedBars(
                title="What if",
                caption="The step with one thing otherwise.",
                quantity="step",
                bars={
                    name: other.parts for name, other in told.items() if not isinstance(other, str)
                },
            )
        ],
    )
