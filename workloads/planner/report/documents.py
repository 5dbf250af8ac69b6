"""The documents of ``parbench plan``: each table once, which reports print in every form. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from parbench.bench.results.details import COMPONENTS, PipelineDetails
from parbench.bench.results.document import (
    Cell,
    Document,
    DocumentPart,
    DocumentTable,
    Figure,
    GanttChart,
    ScatterPlot,
    StackedBars,
)
from parbench.workloads.pipeline_parallel.bubbles import make_detail_rows, make_details
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.candidates import (
    CONTEXT_TOKENS,
    CP_METHODS,
    MAX_STAGES_PER_RANK,
    MAX_TOKENS,
    MIN_TOKENS,
    SearchRequest,
)
from parbench.workloads.planner.decision import Question, RuleOfThumb
from parbench.workloads.planner.describe import (
    describe_batch,
    describe_bottleneck,
    describe_parameters,
    describe_settings,
    label_step,
)
from parbench.workloads.planner.dry_run import GIGA, DryRun, PlannedRank, pipeline_of
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.link_time import Seconds
from parbench.workloads.planner.report.columns import make_column
from parbench.workloads.planner.report.equations import list_formulas
from parbench.workloads.planner.report.what_if import what_if_table
from parbench.workloads.planner.search import (
    PREDICTION_ERROR,
    SearchResult,
    find_pareto_front,
    is_tie,
)

MAX_BARS = 10
MAX_DRAWN_ACTIONS = 320
STEP_COLUMN = make_column("step", "s", "seconds of a step")
MFU_COLUMN = make_column("MFU", "share", "PaLM's model FLOPs, as a share of the dense peak")
MEMORY_COLUMN = make_column("memory", "GB", "of the rank that holds most")
MESH_COLUMNS = (
    make_column("mesh", description="axes and their ranks, outermost first"),
    make_column("settings", description="the settings besides the mesh"),
)


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """A search, and what a reader compares it with."""

    request: SearchRequest
    result: SearchResult
    rule: RuleOfThumb
    questions: Sequence[Question]


def search_document(
    answer: SearchAnswer, top: int, notes: Sequence[str] = (), *, explain: bool = False
) -> Document:
    """Return the decision path, the rule of thumb next to the search, and the first meshes.

    ``notes`` are added to the assumptions. ``explain`` adds the equations of the first mesh.
    """
    best = answer.result.best
    decision = DocumentPart(
        id="decision",
        title="Decision",
        tables=[_question_table(answer.questions), _rule_table(answer.rule, best)],
    )
    candidates = DocumentPart(
        id="candidates",
        title="Candidates",
        tables=[
            _mesh_table(answer.result, top),
            _space_table(answer.request, best.hardware),
        ],
    )
    parts = [decision, candidates, _assumption_part(best, notes, explain=explain)]
    return _make_document(best, parts)


def dry_run_document(
    run: DryRun,
    seconds: Seconds | None = None,
    notes: Sequence[str] = (),
    *,
    explain: bool = False,
    problem: str = "",
) -> Document:
    """Return the time, communication and memory of a step. ``problem`` is why it does not fit."""
    parts = [_step_part(run, seconds), _assumption_part(run, notes, explain=explain)]
    return _make_document(run, parts, problem)


def add_details(document: Document, run: DryRun, seconds: Seconds | None = None) -> Document:
    """Return the document with the step of ``run`` in full and its variants, for a page."""
    parts = [part for part in document.parts if part.id != "step"]
    variants = DocumentPart(id="variants", title="Variants", tables=[what_if_table(run, seconds)])
    return replace(document, parts=[*parts[:-1], _step_part(run, seconds), variants, parts[-1]])


def _make_document(run: DryRun, parts: Sequence[DocumentPart], problem: str = "") -> Document:
    spec, usable = run.spec, run.hardware.usable_bytes / GIGA
    memory = run.fullest.memory.total / GIGA
    return Document(
        name=f"plan {spec.name} on {spec.ranks} GPUs",
        heading=f"{spec.name}, {describe_parameters(spec)}, on {spec.ranks} GPUs "
        f"({run.hardware.name}), mesh {spec.dims.label}: {describe_batch(spec)}, "
        f"{describe_settings(spec)}",
        parts=parts,
        tiles=[
            (f"{run.seconds:.3g} s", f"a step of {spec.tokens:,} tokens"),
            (f"{run.tokens_per_second:,.0f}", "tokens per second"),
            (f"{run.mfu:.1%}", f"MFU, bottleneck {describe_bottleneck(run)}"),
            (f"{memory:.1f} GB", f"of {usable:.1f} GB usable"),
        ],
        problem=problem,
    )


def _question_table(questions: Sequence[Question]) -> DocumentTable:
    rows: list[Sequence[Cell]] = []
    for question in questions:
        value = _format_value(question.equation.value, question.unit)
        limit = _format_value(question.limit, question.unit)
        rows.append([question.text, question.equation.numbers, value, limit, question.answer])
    equations = dict.fromkeys(question.equation.text for question in questions)
    return DocumentTable(
        id="questions",
        title="Decision path",
        caption="each question with the numbers of this model",
        columns=[
            make_column("question"),
            make_column("equation", description="with its numbers"),
            make_column("value", description="of the equation"),
            make_column("limit", description="yes if the value is at most this"),
            make_column("answer"),
        ],
        rows=rows,
        notes=[f"Equation: {text}." for text in equations],
    )


def _format_value(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _rule_table(rule: RuleOfThumb, best: DryRun) -> DocumentTable:
    """Return the mesh of practice next to the first mesh of the search."""
    rows: list[list[Cell]] = [["search", *_mesh_cells(best), 0.0]]
    note = f"No mesh of the rule fits the memory and the batch: {rule.text}."
    if rule.run is not None:
        difference = rule.run.seconds / best.seconds - 1
        rows.append([f"rule of thumb, {rule.text}", *_mesh_cells(rule.run), difference])
        relation = "within" if abs(difference) <= PREDICTION_ERROR else "beyond"
        note = (
            f"The difference of {difference:+.1%} is {relation} the error of a prediction, "
            f"{PREDICTION_ERROR:.0%}."
        )
    return DocumentTable(
        id="rule",
        title="Rule of thumb and search",
        caption="predicted for both",
        columns=[
            make_column("from"),
            *MESH_COLUMNS,
            STEP_COLUMN,
            MEMORY_COLUMN,
            make_column("difference", "share", "of the step to the search"),
        ],
        rows=rows,
        notes=[note],
    )


def _mesh_cells(run: DryRun) -> list[Cell]:
    spec = run.spec
    memory = run.fullest.memory.total / GIGA
    return [spec.dims.label, describe_settings(spec), run.seconds, memory]


def _mesh_table(result: SearchResult, top: int) -> DocumentTable:
    shown = result.runs[:top]
    fastest = min(run.seconds for run in result.runs)
    num_ties = sum(is_tie(run, fastest) for run in result.runs)
    bars = shown[:MAX_BARS]
    rows: list[Sequence[Cell]] = []
    for run in shown:
        slowdown = run.seconds / fastest - 1
        rank = "tie" if is_tie(run, fastest) else "slower"
        cells = [*_mesh_cells(run), run.tokens_per_second, run.mfu]
        rows.append([*cells, slowdown, rank, describe_bottleneck(run)])
    return DocumentTable(
        id="meshes",
        title="Fastest of the meshes considered",
        caption="the best settings of each mesh, with the least recomputation that fits",
        columns=[
            *MESH_COLUMNS,
            STEP_COLUMN,
            MEMORY_COLUMN,
            make_column("tokens/s", "number", "of all GPUs"),
            MFU_COLUMN,
            make_column("to fastest", "share", "longer than the fastest step"),
            make_column("rank", description="tie: within the error of a prediction"),
            make_column("bottleneck", description="the largest loss, or compute"),
        ],
        rows=rows,
        notes=[
            f"{num_ties} of {len(result.runs)} meshes that fit are ties: they are within "
            f"{PREDICTION_ERROR:.0%} of the fastest, the error of a prediction. The simplest is "
            "first.",
            f"{result.num_considered:,} steps were considered, {result.num_too_large:,} are too "
            "large.",
            *(f"{run.spec.dims.label}: {caveat}." for run in shown for caveat in run.caveats),
        ],
        figures=[
            StackedBars(
                title="Time of a step",
                caption="Of the rank with the most work.",
                quantity="step",
                bars={label_step(run.spec): run.parts for run in bars},
            ),
            StackedBars(
                title="Memory of a rank",
                caption="Of the rank that holds most.",
                quantity="memory",
                bars={label_step(run.spec): _memory_by_component(run.fullest) for run in bars},
                limit=_memory_limit(shown[0].hardware),
            ),
            *_draw_memory_against_time(result),
        ],
    )


def _draw_memory_against_time(result: SearchResult) -> list[Figure]:
    """Return the figure of the meshes that need less memory, none if the fastest needs the least."""
    front = find_pareto_front(result.runs)
    if len(front) < 2:
        return []
    points = {
        label_step(run.spec): (run.seconds, run.fullest.memory.total / GIGA)
        for run in [*result.runs[:MAX_BARS], *front]
    }
    figure = ScatterPlot(
        title="Time and memory",
        caption="The line joins meshes that need a tenth less memory than all faster ones.",
        x=make_column("step time", "s"),
        y=make_column("memory of a rank", "GB"),
        points=points,
        front=[label_step(run.spec) for run in front],
    )
    return [figure]


def _space_table(request: SearchRequest, hardware: Hardware) -> DocumentTable:
    rules = {
        "tp": f"divisors of the {hardware.gpus_per_node} GPUs of a node and of the heads",
        "cp": f"powers of two that leave each rank more than {CONTEXT_TOKENS:,} tokens, or "
        f"{MIN_TOKENS:,} if nothing else fits. Methods: {', '.join(CP_METHODS)}",
        "pp": "powers of two and divisors of the layers, with at least as many microbatches. "
        f"Schedules: {', '.join(SCHEDULES)}, at most {MAX_STAGES_PER_RANK} stages per rank, "
        "omitted if a simpler one fits with the same bubble",
        "dp, fsdp": "all replicas, all shards, or replicas of shards of 1, 8 or 64 nodes",
        "ep": "1 rank, a node, or 2, 4 or 8 nodes",
        "microbatch": f"{MIN_TOKENS:,} to {MAX_TOKENS:,} tokens per rank, or one sequence",
        "checkpointing": f"the first of {', '.join(request.checkpointings)} that fits",
    }
    return DocumentTable(
        id="space",
        title="Search space",
        caption="the meshes considered",
        columns=[make_column("axis"), make_column("sizes and settings")],
        rows=[list(rule) for rule in rules.items()],
    )


def _step_part(run: DryRun, seconds: Seconds | None) -> DocumentPart:
    used = run.fullest.memory.total / run.hardware.usable_bytes
    per_gpu = run.tokens_per_second / run.spec.ranks
    summary = (
        f"{run.tokens_per_second:,.0f} tokens/s, {per_gpu:,.0f} per GPU, "
        f"{run.model_flops_per_second / 1e12:.4g} TFLOP/s per GPU, MFU {run.mfu:.1%}, "
        f"memory {used:.0%} of {run.hardware.usable_bytes / GIGA:.1f} GB usable, "
        f"bottleneck {describe_bottleneck(run)}."
    )
    tables = [_time_table(run, seconds), *_axis_tables(run), _memory_table(run)]
    return DocumentPart(id="step", title="The step", tables=tables, notes=[summary])


def _time_table(run: DryRun, seconds: Seconds | None) -> DocumentTable:
    bubble = [f"Bubble: {run.bubble_method}."] if run.spec.dims.pp > 1 else []
    parts = {**run.parts, "step": run.seconds}
    return DocumentTable(
        id="time",
        title="Time of a step",
        caption="of the rank with the most work",
        columns=[
            make_column("part"),
            make_column("time", "s"),
            make_column("share", "share", "of the step"),
        ],
        rows=[[name, value, value / run.seconds] for name, value in parts.items()],
        notes=[*bubble, *run.caveats],
        figures=[_draw_pipeline(run, seconds) if run.spec.dims.pp > 1 else _draw_step(run)],
    )


def _draw_step(run: DryRun) -> Figure:
    return StackedBars(
        title="The step",
        caption="Of the rank with the most work.",
        quantity="step",
        bars={run.spec.dims.label: run.parts},
    )


def _draw_pipeline(run: DryRun, seconds: Seconds | None) -> Figure:
    details = _simulate_details(run, seconds)
    caption = (
        f"{run.spec.pipeline_options.schedule}, simulated with the times of each stage and the "
        "latency of the link."
    )
    if details.microbatches < run.spec.microbatches:
        caption += (
            f" The figure has {details.microbatches} of {run.spec.microbatches} microbatches. The "
            "others repeat the middle."
        )
    return GanttChart(title="The pipeline", caption=caption, facts=details)


def _simulate_details(run: DryRun, seconds: Seconds | None) -> PipelineDetails:
    """Return the predicted actions of as many microbatches as are legible."""
    spec, ranks = run.spec, run.spec.dims.pp
    rounds = max(2, MAX_DRAWN_ACTIONS // (2 * ranks * ranks * spec.stages_per_rank))
    spec = replace(spec, microbatches=min(spec.microbatches, rounds * ranks))
    predicted = make_detail_rows(pipeline_of(replace(run, spec=spec), seconds))
    return msgspec.structs.replace(make_details(spec.order), predicted=predicted)


def _axis_tables(run: DryRun) -> list[DocumentTable]:
    rows: list[Sequence[Cell]] = []
    for axis in run.axes:
        times = [axis.seconds, axis.hidden_seconds, axis.exposed_seconds]
        rows.append([axis.name, axis.where, axis.sent_bytes / GIGA, *times, axis.assumption])
    table = DocumentTable(
        id="axes",
        title="Communication by axis",
        caption="of a step, bytes of the rank that sends most",
        columns=[
            make_column("axis"),
            make_column("links"),
            make_column("sent", "GB", "by a rank, ring-optimal"),
            make_column("time", "s"),
            make_column("hidden", "s", "during compute"),
            make_column("exposed", "s", "what it adds to the step"),
            make_column("rule", description="by which the exposed time is found"),
        ],
        rows=rows,
    )
    return [table] if rows else []


def _memory_table(run: DryRun) -> DocumentTable:
    rows: list[Sequence[Cell]] = []
    for rank in run.ranks:
        rows.append(
            [rank.view.label, *_memory_by_component(rank).values(), rank.memory.total / GIGA]
        )
    return DocumentTable(
        id="memory",
        title="Memory",
        caption="of each kind of rank, an upper bound because components need not peak together",
        columns=[
            make_column("rank", description="its place in the pipeline"),
            *(make_column(name, "GB") for name in COMPONENTS),
            make_column("total", "GB", "the sum"),
        ],
        rows=rows,
        figures=[
            StackedBars(
                title="Memory of a rank",
                caption="Of each kind of rank.",
                quantity="memory",
                bars={rank.view.label: _memory_by_component(rank) for rank in run.ranks},
                limit=_memory_limit(run.hardware),
            )
        ],
    )


def _memory_by_component(rank: PlannedRank) -> dict[str, float]:
    return {name: getattr(rank.memory, name) / GIGA for name in COMPONENTS}


def _memory_limit(hardware: Hardware) -> tuple[float, str]:
    usable = hardware.usable_bytes / GIGA
    return usable, f"{usable:.1f} GB usable"


def _assumption_part(run: DryRun, notes: Sequence[str], *, explain: bool) -> DocumentPart:
    tables = [_formula_table(run)] if explain else []
    tables.append(
        DocumentTable(
            id="assumptions",
            title="Assumptions",
            caption="declared, not measured. --hardware FILE.toml changes them",
            columns=[make_column("assumption")],
            rows=[[text] for text in [*list_assumptions(run.hardware), *notes]],
        )
    )
    return DocumentPart(id="formulas", title="Formulas and assumptions", tables=tables)


def _formula_table(run: DryRun) -> DocumentTable:
    rows: list[Sequence[Cell]] = []
    for formula in list_formulas(run):
        equation = formula.equation
        value = _format_value(equation.value, formula.unit)
        rows.append([formula.name, equation.text, equation.numbers, value, formula.source])
    return DocumentTable(
        id="equations",
        title="Formulas",
        caption="each with its numbers in the same order",
        columns=[
            make_column("quantity"),
            make_column("equation"),
            make_column("numbers"),
            make_column("value"),
            make_column("source"),
        ],
        rows=rows,
    )


def list_assumptions(hardware: Hardware) -> list[str]:
    """Return the rates and shares of the hardware, and their source."""
    efficiency = hardware.efficiency
    inside, across = hardware.inside_bytes_per_second, hardware.across_bytes_per_second
    links = (
        f"{efficiency.links_inside:.0%} of {inside / GIGA:.4g} GB/s inside a node of "
        f"{hardware.gpus_per_node}, {efficiency.links_across:.0%} of {across / GIGA:.4g} GB/s per "
        f"GPU across nodes, {hardware.launch_seconds * 1e6:.3g} us per call, "
        f"{hardware.inside_hop_seconds * 1e6:.3g} and {hardware.across_hop_seconds * 1e6:.3g} us "
        "per hop"
    )
    overlap = ", ".join(f"{axis} {share:.0%}" for axis, share in efficiency.overlap.items())
    return [
        f"large GEMMs: {efficiency.gemm:.0%}, attention: {efficiency.attention:.0%} of "
        f"{hardware.flops_per_second / 1e12:.4g} TFLOP/s in bfloat16, of which float32 has "
        f"{hardware.float32_share:.0%}, {hardware.kernel_seconds * 1e6:.3g} us per kernel",
        f"links: {hardware.links_from or links}",
        f"memory: {efficiency.memory_rate:.0%} of "
        f"{hardware.memory_bytes_per_second / 1e12:.4g} TB/s, {efficiency.memory:.0%} of "
        f"{hardware.memory_bytes / GIGA:.4g} GB usable",
        f"share of communication that compute can hide: {overlap or 'none'}",
        f"hardware: {hardware.source}",
    ]
