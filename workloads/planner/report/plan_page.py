"""A dry run or a search as a document: its tables with figures, and what-if variants. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from parbench.bench.results import details
from parbench.bench.results.details import COMPONENTS
from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentColumn,
    DocumentPart,
    DocumentTable,
    GanttChart,
    ScatterPlot,
    StackedBars,
)
from parbench.workloads.pipeline_parallel.bubbles import make_detail_rows, make_details
from parbench.workloads.planner.candidates import Wanted
from parbench.workloads.planner.dry_run import GIGA, DryRun, Held, pipeline_of
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.rationale import binding_of, rationale, settings_of
from parbench.workloads.planner.report.render import (
    assumptions,
    batch_words,
    formulas_of,
    refusals_of,
)
from parbench.workloads.planner.report.what_if import what_if_table
from parbench.workloads.planner.search import Found

MOST_BARS = 10
_LEGIBLE = 320  # actions of a pipeline that are drawn, or those of two rounds of microbatches


def search_document(
    found: Found,
    wanted: Wanted,
    top: int,
    notes: Sequence[str] = (),
    *,
    explain: bool = False,
) -> Document:
    """Return the best ``top`` candidates, why the first is the best, and what was refused.

    ``notes`` are added to the assumptions. With ``explain`` the formulas of the best candidate are added.
    """
    best = found.best[0]
    num_refused = sum(found.refused.values())
    candidates = DocumentPart(
        id="candidates",
        title="Candidates",
        tables=[_candidates(found, top), *_front(found), _refused(found, wanted)],
        notes=[
            f"{found.tried} candidates, {found.too_large} too large, {num_refused} refused by a rule at global batch "
            f"{wanted.global_batch} of {wanted.step.shape.sequence} tokens.",
            *(f"{line}." for line in rationale(found)),
        ],
    )
    return _document(best, [candidates, _assumptions(best, notes, explain=explain)])


def dry_run_document(
    run: DryRun,
    seconds: Seconds | None = None,
    notes: Sequence[str] = (),
    *,
    explain: bool = False,
    problem: str = "",
) -> Document:
    """Return time, communication and memory of one step. ``problem`` says why it does not fit."""
    return _document(
        run, [_step_part(run, seconds), _assumptions(run, notes, explain=explain)], problem
    )


def with_variants(document: Document, run: DryRun, seconds: Seconds | None = None) -> Document:
    """Return the page of a plan: its document with the step of ``run`` in full and what-if variants."""
    parts = [part for part in document.parts if part.id != "step"]
    variants = DocumentPart(id="variants", title="Variants", tables=[what_if_table(run, seconds)])
    return replace(document, parts=[*parts[:-1], _step_part(run, seconds), variants, parts[-1]])


def _document(run: DryRun, parts: Sequence[DocumentPart], problem: str = "") -> Document:
    spec, usable = run.spec, run.hardware.usable_bytes
    return Document(
        name=f"plan {spec.name} on {spec.ranks} GPUs",
        heading=f"{batch_words(run)}; {settings_of(spec)}",
        parts=parts,
        tiles=[
            (f"{run.seconds:.3g} s", f"a step of {spec.tokens:,} tokens"),
            (f"{run.tokens_per_second:,.0f}", "tokens a second"),
            (f"{run.mfu:.1%}", f"MFU; bound by {binding_of(run)}"),
            (
                f"{run.fullest.memory.total / GIGA:.1f} GB",
                f"of {usable / GIGA:.1f} GB usable on the fullest rank",
            ),
        ],
        problem=problem,
    )


def _step_part(run: DryRun, seconds: Seconds | None) -> DocumentPart:
    used = run.fullest.memory.total / run.hardware.usable_bytes
    per_gpu = run.tokens_per_second / run.spec.ranks
    summary = (
        f"{run.tokens_per_second:,.0f} tokens/s, {per_gpu:,.0f} per GPU, {run.model_flops_per_second / 1e12:.4g} "
        f"TFLOP/s per GPU, MFU {run.mfu:.1%}, memory {used:.0%} of {run.hardware.usable_bytes / GIGA:.1f} GB usable"
    )
    return DocumentPart(
        id="step",
        title="The step",
        tables=[_step(run, seconds), *_axes(run), _memory(run)],
        notes=[f"{summary}; bound by {binding_of(run)}."],
    )


def _assumptions(run: DryRun, notes: Sequence[str], *, explain: bool) -> DocumentPart:
    assumed = DocumentTable(
        id="assumptions",
        title="Assumptions",
        caption="declared, not measured; --hardware FILE.toml changes them",
        columns=[DocumentColumn(title="assumed", help="a rate, a share or a source")],
        rows=[
            [assumption]
            for assumption in assumptions(run.hardware, run.spec.bytes_per_element, notes)
        ],
    )
    formulas = [_formulas(run)] if explain else []
    return DocumentPart(
        id="formulas", title="Formulas and assumptions", tables=[*formulas, assumed]
    )


def label_of(run: DryRun) -> str:
    spec = run.spec
    schedule = f" {spec.pipeline_options.schedule}" if spec.dims.size("pp") > 1 else ""
    return f"{spec.dims.label} {spec.checkpointing_label}{schedule} x{spec.microbatch}"


def _held(held: Held) -> dict[str, float]:
    return {name: getattr(held.memory, name) / GIGA for name in COMPONENTS}


def _limit(hardware: Hardware) -> tuple[float, str]:
    return hardware.usable_bytes / GIGA, f"{hardware.usable_bytes / GIGA:.1f} GB usable"


_COLUMNS = (
    DocumentColumn(title="mesh", help="axes and their ranks, outermost first"),
    DocumentColumn(title="taken with", help="what is chosen beside the mesh"),
    DocumentColumn(title="bound by", help="what most of the step is lost to, or compute"),
    DocumentColumn(title="step", help="seconds of a step", unit="s"),
    DocumentColumn(title="tokens/s", help="of all GPUs", unit="number"),
    DocumentColumn(title="MFU", help="as PaLM counts FLOPs, of the dense peak", unit="share"),
    DocumentColumn(title="memory", help="of the fullest rank", unit="GB"),
)


def _row(run: DryRun) -> list[Cell]:
    memory = run.fullest.memory.total / GIGA
    words = (run.spec.dims.label, settings_of(run.spec), binding_of(run))
    return [*words, run.seconds, run.tokens_per_second, run.mfu, memory]


def _candidates(found: Found, top: int) -> DocumentTable:
    shown = found.best[:top]
    bars = shown[:MOST_BARS]
    return DocumentTable(
        id="meshes",
        title="The fastest",
        caption="each mesh once, with as much checkpointing as it needs",
        columns=_COLUMNS,
        rows=list(map(_row, shown)),
        notes=[f"{run.spec.dims.label}: {caveat}." for run in shown for caveat in run.caveats],
        figures=[
            StackedBars(
                title="Where the step's time goes",
                caption="Of the busiest rank; checkpointing, schedule and microbatch after the mesh.",
                quantity="step",
                bars={label_of(run): run.parts for run in bars},
            ),
            StackedBars(
                title="What memory holds",
                caption="Of the fullest rank.",
                quantity="memory",
                bars={label_of(run): _held(run.fullest) for run in bars},
                limit=_limit(found.best[0].hardware),
            ),
        ],
    )


def _front(found: Found) -> list[DocumentTable]:
    """Return the table of candidates that need less memory, none where the fastest needs least."""
    if len(found.front) < 2:
        return []
    points = {
        label_of(run): (run.seconds, run.fullest.memory.total / GIGA)
        for run in (*found.best, *found.front)
    }
    table = DocumentTable(
        id="front",
        title="Less memory for more time",
        caption="each needs a tenth less memory than any that is faster",
        columns=_COLUMNS,
        rows=list(map(_row, found.front)),
        figures=[
            ScatterPlot(
                title="Time against memory",
                caption="Joined are those of the table, beside the fastest meshes.",
                x=DocumentColumn(title="step time", unit="s"),
                y=DocumentColumn(title="memory of the fullest rank", unit="GB"),
                points=points,
                front=[label_of(run) for run in found.front],
            )
        ],
    )
    return [table]


def _refused(found: Found, wanted: Wanted) -> DocumentTable:
    return DocumentTable(
        id="refused",
        title="Refused",
        caption="one of each kind, with its numbers",
        columns=[DocumentColumn(title="rule", help="what does not hold, or how much memory lacks")],
        rows=[[rule] for rule in refusals_of(found, wanted)],
    )


def _step(run: DryRun, seconds: Seconds | None) -> DocumentTable:
    figures: list[StackedBars | GanttChart] = []
    if run.spec.dims.size("pp") > 1:
        facts, microbatches = _pipeline(run, seconds), run.spec.microbatches
        told = f"{run.spec.pipeline_options.schedule}, simulated with each stage's times and the link's latency."
        if facts.microbatches < microbatches:
            told += f" Of {microbatches} microbatches {facts.microbatches} are drawn: the others repeat the middle."
        figures.append(GanttChart(title="The pipeline", caption=told, facts=facts))
    else:
        bars = {run.spec.dims.label: run.parts}
        figures.append(
            StackedBars(
                title="The step", caption="Of the busiest rank.", quantity="step", bars=bars
            )
        )
    return DocumentTable(
        id="time",
        title="Where the time of a step goes",
        caption="of the busiest rank",
        columns=[
            DocumentColumn(title="part", help="what it goes to"),
            DocumentColumn(title="time", help="of a step", unit="s"),
            DocumentColumn(title="share", help="of the step", unit="share"),
        ],
        rows=[
            [name, value, value / run.seconds]
            for name, value in (*run.parts.items(), ("step", run.seconds))
        ],
        notes=[
            *([f"Bubble: {run.bubble_method}."] if run.spec.dims.size("pp") > 1 else []),
            *map(str, run.caveats),
        ],
        figures=figures,
    )


def _pipeline(run: DryRun, seconds: Seconds | None) -> details.PipelineDetails:
    spec, ranks = run.spec, run.spec.dims.size("pp")
    legible = max(2, _LEGIBLE // (2 * ranks * ranks * spec.stages_per_rank)) * ranks
    spec = replace(spec, microbatches=min(spec.microbatches, legible))
    predicted = make_detail_rows(pipeline_of(replace(run, spec=spec), seconds))
    return msgspec.structs.replace(make_details(spec.order), predicted=predicted)


def _axes(run: DryRun) -> list[DocumentTable]:
    rows: list[list[Cell]] = [
        [
            axis.name,
            axis.where,
            axis.sent_bytes / GIGA,
            axis.seconds,
            axis.hidden_seconds,
            axis.exposed_seconds,
            axis.assumption,
        ]
        for axis in run.axes
    ]
    table = DocumentTable(
        id="axes",
        title="Communication by axis",
        caption="of a step; bytes of the rank that sends most",
        columns=[
            DocumentColumn(title="axis", help="of the mesh"),
            DocumentColumn(title="where", help="which links it takes"),
            DocumentColumn(title="sent", help="by a rank, ring-optimal", unit="GB"),
            DocumentColumn(title="takes", help="all of it", unit="s"),
            DocumentColumn(title="hidden", help="beside compute", unit="s"),
            DocumentColumn(title="adds", help="to the step", unit="s"),
            DocumentColumn(title="exposed", help="by what rule"),
        ],
        rows=rows,
    )
    return [table] if rows else []


def _memory(run: DryRun) -> DocumentTable:
    return DocumentTable(
        id="memory",
        title="Memory",
        caption="of the ranks that differ, an upper bound: the peaks of components need not meet",
        columns=[
            DocumentColumn(title="rank", help="its place in the pipeline"),
            *(
                DocumentColumn(title=name, help=f"bytes of {name}", unit="GB")
                for name in COMPONENTS
            ),
            DocumentColumn(title="total", help="all components at once", unit="GB"),
        ],
        rows=[
            [held.at.label, *_held(held).values(), held.memory.total / GIGA] for held in run.ranks
        ],
        figures=[
            StackedBars(
                title="What memory holds",
                caption="Of each kind of rank.",
                quantity="memory",
                bars={held.at.label: _held(held) for held in run.ranks},
                limit=_limit(run.hardware),
            )
        ],
    )


def _formulas(run: DryRun) -> DocumentTable:
    return DocumentTable(
        id="equations",
        title="Formulas",
        caption="each with its numbers in the same order",
        columns=[
            DocumentColumn(title="what", help="what it is"),
            DocumentColumn(title="equation", help="in symbols"),
            DocumentColumn(title="numbers", help="in the same order"),
            DocumentColumn(title="value", help="in its unit"),
            DocumentColumn(title="source", help="who found it"),
        ],
        rows=[
            [
                one.name,
                one.equation,
                one.numbers,
                f"{one.value:,.4g} {one.unit}".rstrip(),
                one.source,
            ]
            for one in formulas_of(run)
        ],
    )
