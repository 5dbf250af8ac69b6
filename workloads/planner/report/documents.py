"""The documents of ``parbench plan``, which reports print in every output format. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import msgspec

from parbench.bench.results.details import COMPONENTS
from parbench.bench.results.tables import (
    Document,
    GanttChart,
    ParetoChart,
    Plot,
    Section,
    StackedBars,
    Table,
)
from parbench.workloads.pipeline_parallel.bubbles import make_detail_rows, make_details
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from parbench.workloads.planner.candidates import (
    MAX_STAGES_PER_RANK,
    SearchRequest,
)
from parbench.workloads.planner.decision import list_questions
from parbench.workloads.planner.describe import (
    describe_batch,
    describe_bottleneck,
    describe_parameters,
    describe_settings,
    label_step,
)
from parbench.workloads.planner.dry_run import GIGA, DryRun, PlannedRank, simulate_pipeline
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.infeasible import explain_too_large
from parbench.workloads.planner.report.columns import (
    format_value,
    make_column,
    summarize_run,
)
from parbench.workloads.planner.report.equations import make_formula_table
from parbench.workloads.planner.search import (
    PREDICTION_ERROR,
    SearchResult,
    is_tie,
)

MAX_BARS = 10  # meshes in a figure
MAX_DRAWN_ROUNDS = 3
"""The most microbatches in the figure of a pipeline, relative to its number of ranks.

More microbatches would only repeat the middle of the pipeline.
"""


def make_search_document(
    request: SearchRequest,
    result: SearchResult,
    top: int,
    notes: Sequence[str] = (),
    *,
    explain: bool = False,
) -> Document:
    """Return the document of ``parbench plan search`` for a model on a number of GPUs.

    Its tables have the questions that lead to a strategy, the ``top`` best meshes of the search,
    and the assumptions. ``notes`` are more assumptions. ``explain`` adds the equations of the best
    mesh, and its time, communication and memory.
    """
    best = result.best
    sections = [
        Section("decision", "Decision", tables=[_make_question_table(request, best.hardware)]),
        Section("candidates", "Candidates", tables=[_make_mesh_table(request, result, top)]),
        *([_step_section(best)] if explain else []),
        _make_assumption_section(best, notes, explain=explain),
    ]
    return _make_document(best, sections)


def make_dry_run_document(
    run: DryRun, notes: Sequence[str] = (), *, explain: bool = False
) -> Document:
    """Return the document of ``parbench plan mesh``: one step's time, communication and memory.

    ``notes`` are added to the assumptions. ``explain`` adds the equations of the step.
    """
    return _make_document(
        run, [_step_section(run), _make_assumption_section(run, notes, explain=explain)]
    )


def _make_document(run: DryRun, sections: Sequence[Section]) -> Document:
    """Return the document of a predicted step: a heading, key figures and ``sections``.

    The key figures are step time, tokens per second, MFU and memory. The document has a problem
    text if the step does not fit in memory.
    """
    spec, usable = run.spec, run.hardware.usable_bytes / GIGA
    memory = run.fullest.memory.total / GIGA
    return Document(
        name=f"plan {spec.name} on {spec.ranks} GPUs",
        heading=f"{spec.name}, {describe_parameters(spec)}, on {spec.ranks} GPUs "
        f"({run.hardware.name}), mesh {spec.dims.label}: {describe_batch(spec)}, "
        f"{describe_settings(spec)}",
        sections=sections,
        tiles=[
            (f"{run.seconds:.3g} s", f"a step of {spec.tokens:,} tokens"),
            (f"{run.tokens_per_second:,.0f}", "tokens per second"),
            (f"{run.mfu:.1%}", f"MFU, bottleneck {describe_bottleneck(run)}"),
            (f"{memory:.1f} GB", f"of {usable:.1f} GB usable"),
        ],
        problem="" if run.fits else explain_too_large(run),
    )


def _make_question_table(request: SearchRequest, hardware: Hardware) -> Table:
    """Return the table of the questions that lead to a strategy, with their answers.

    They are about model state, activations, the sequence, the experts of a MoE model, the global
    batch and failures, such as whether the model state fits on one GPU (see ``list_questions``).
    """
    questions = list(list_questions(request, hardware))
    equations = dict.fromkeys(question.equation.text for question in questions)
    return Table(
        "questions",
        "Decision path",
        caption="each question with the numbers of this model",
        columns=[
            make_column("question"),
            make_column("equation", description="with its numbers"),
            make_column("value", description="of the equation"),
            make_column("limit", description="yes if the value is at most this"),
            make_column("answer"),
        ],
        rows=[
            {
                "question": question.text,
                "equation": question.equation.numbers,
                "value": format_value(question.equation.value, question.unit),
                "limit": format_value(question.limit, question.unit),
                "answer": question.answer,
            }
            for question in questions
        ],
        notes=[f"Equation: {text}." for text in equations],
    )


def _make_mesh_table(request: SearchRequest, result: SearchResult, top: int) -> Table:
    """Return the table of the ``top`` best meshes of a search, best mesh first.

    A note has the limits of the search, some of which ``request`` sets.
    """
    runs = result.runs[:top]
    max_stages = request.step.pipeline_options.stages_per_rank or MAX_STAGES_PER_RANK
    schedules = f"the schedules {', '.join(SCHEDULES)}"
    if request.schedule:
        schedules = f"the schedule {request.schedule}"
    fastest = min(run.seconds for run in result.runs)
    num_ties = sum(is_tie(run, fastest) for run in result.runs)
    rows = []
    for run in runs:
        slowdown = run.seconds / fastest - 1
        rank = "tie" if is_tie(run, fastest) else f"{slowdown:.0%} slower"
        rows.append({**summarize_run(run), "rank": rank})
    return Table(
        "meshes",
        "Fastest of the meshes considered",
        caption="the best settings of each mesh, with the least recomputation that fits",
        columns=[
            make_column("mesh", description="axes and their ranks, outermost first"),
            make_column("settings", description="settings other than the mesh"),
            make_column("step_seconds", "step", "s", "seconds of a step"),
            make_column("memory_gb", "memory", "GB", "of the rank that holds most"),
            make_column(
                "mfu", "MFU", "percent", "PaLM's model FLOPs, as a share of the dense peak"
            ),
            make_column("rank", description="tie: predictions cannot separate it from the fastest"),
            make_column("bottleneck", description="the largest loss, or compute"),
        ],
        rows=rows,
        notes=[
            f"{num_ties} of {len(result.runs)} meshes that fit are ties: they are within "
            f"{PREDICTION_ERROR:.0%} of the fastest, and predictions cannot separate them. The "
            "simplest is first.",
            f"{result.num_considered:,} steps were considered, {result.num_too_large:,} are too "
            "large. Considered are tp within a node, cp with more than "
            f"{result.context_tokens:,} tokens per rank, at most {max_stages} stages per rank, and "
            f"{schedules}.",
        ],
        figures=partial(_draw_meshes, runs[:MAX_BARS], result.feasible),
    )


def _draw_meshes(runs: Sequence[DryRun], feasible: Sequence[DryRun]) -> Iterator[Plot]:
    """Yield two bar charts of the time and memory of ``runs``, and a chart of ``feasible`` steps.

    The bar charts have a bar with components for each step. The last chart has a point for each
    step that fits in memory, and the fastest step for each memory as a line.
    """
    yield StackedBars(
        title="Time of a step",
        caption="Of the rank with the most work.",
        quantity="step",
        bars={label_step(run.spec): run.parts for run in runs},
    )
    ranks = {label_step(run.spec): run.fullest for run in runs}
    yield from _draw_memory("Of the rank that holds most.", ranks, runs[0].hardware)
    yield ParetoChart(
        title="Time and memory of all steps that fit",
        caption="A point is a step. The front has the fastest step for each memory.",
        points=[
            (run.fullest.memory.total / GIGA, run.seconds, label_step(run.spec)) for run in feasible
        ],
    )


def _step_section(run: DryRun) -> Section:
    """Return the section with the time, the communication and the memory of a predicted step."""
    tables = [_make_time_table(run), *_make_axis_tables(run), _make_memory_table(run)]
    summary = (
        f"{run.tokens_per_second:,.0f} tokens/s, MFU {run.mfu:.1%}, memory {run.memory_share:.0%} of "
        f"{run.hardware.usable_bytes / GIGA:.1f} GB usable, bottleneck {describe_bottleneck(run)}."
    )
    return Section("step", "The step", tables=tables, notes=[summary])


def _make_time_table(run: DryRun) -> Table:
    """Return the table of a step's predicted seconds by component, such as compute and bubble.

    The last row is their sum, the time of the step.
    """
    notes = []
    ranks, microbatches = run.spec.dims.pp, run.spec.microbatches
    if ranks > 1:
        notes.append(f"Bubble: {run.bubble_method}.")
    if microbatches < ranks:
        notes.append(
            f"{microbatches} microbatches for {ranks} pipeline ranks: use at least {ranks} "
            f"(--set microbatches={ranks}, or a larger --global-batch)."
        )
    parts = {**run.parts, "step": run.seconds}
    return Table(
        "time",
        "Time of a step",
        caption="of the rank with the most work",
        columns=[
            make_column("part"),
            make_column("seconds", "time", "s"),
            make_column("share", kind="percent", description="of the step"),
        ],
        rows=[
            {"part": name, "seconds": part_seconds, "share": part_seconds / run.seconds}
            for name, part_seconds in parts.items()
        ],
        notes=notes,
        figures=partial(_draw_pipeline, run),
    )


def _draw_pipeline(run: DryRun) -> Iterator[Plot]:
    """Yield a timeline of the simulated pipeline of a step, nothing for a step without pipeline.

    The step is simulated with at most ``MAX_DRAWN_ROUNDS`` times as many microbatches as the
    pipeline has ranks, so that the figure stays readable.
    """
    all_microbatches = run.spec.microbatches
    microbatches = min(all_microbatches, MAX_DRAWN_ROUNDS * run.spec.dims.pp)
    spec = replace(run.spec, microbatches=microbatches)
    if spec.pipeline is None:
        return
    predicted = make_detail_rows(simulate_pipeline(replace(run, spec=spec)))
    yield GanttChart(
        title="The pipeline",
        caption=f"{spec.pipeline_options.schedule}, simulated with the times of each stage and the "
        f"latency of the link. The figure has {microbatches} of {all_microbatches} microbatches.",
        details=msgspec.structs.replace(make_details(spec.pipeline), predicted=predicted),
    )


def _make_axis_tables(run: DryRun) -> list[Table]:
    """Return a list with the table of a step's communication by mesh axis.

    The list is empty for a step without communication.
    """
    if not run.axes:
        return []
    rows = [
        {
            **asdict(axis),
            "axis": axis.name,
            "sent_gb": axis.sent_bytes / GIGA,
            "hidden_seconds": axis.hidden_seconds,
        }
        for axis in run.axes
    ]
    dims = run.spec.dims
    reduction = f"Gradients are reduced over {' x '.join(dims.shard_axes + dims.replica_axes)}."
    table = Table(
        "axes",
        "Communication by axis",
        caption="of a step, bytes of the rank that sends most",
        columns=[
            make_column("axis"),
            make_column("links"),
            make_column("sent_gb", "sent", "GB", "by a rank, ring-optimal"),
            make_column("seconds", "time", "s"),
            make_column("hidden_seconds", "hidden", "s", "during compute"),
            make_column("exposed_seconds", "exposed", "s", "what it adds to the step"),
        ],
        rows=rows,
        notes=[reduction] if dims.cp > 1 else [],
    )
    return [table]


def _make_memory_table(run: DryRun) -> Table:
    """Return the table of memory in GB by component, with one row for each representative rank.

    A representative stands for all pipeline ranks with equal work.
    """
    ranks = {rank.view.label: rank for rank in run.ranks}
    rows = [
        {
            "rank": label,
            **_sum_memory_by_component(rank),
            "total": rank.memory.total / GIGA,
        }
        for label, rank in ranks.items()
    ]
    return Table(
        "memory",
        "Memory",
        caption="of each kind of rank, an upper bound because components need not peak together",
        columns=[
            make_column("rank", description="its place in the pipeline"),
            *(make_column(name, kind="GB") for name in COMPONENTS),
            make_column("total", kind="GB", description="the sum"),
        ],
        rows=rows,
        figures=partial(_draw_memory, "Of each kind of rank.", ranks, run.hardware),
    )


def _draw_memory(
    caption: str, ranks: Mapping[str, PlannedRank], hardware: Hardware
) -> Iterator[Plot]:
    """Yield a bar chart of memory in GB by component, with a bar for each of ``ranks``.

    The keys of ``ranks`` are the labels of the bars. A line marks the usable memory of a GPU.
    """
    usable = hardware.usable_bytes / GIGA
    yield StackedBars(
        title="Memory of a rank",
        caption=caption,
        quantity="memory",
        bars={label: _sum_memory_by_component(rank) for label, rank in ranks.items()},
        limit=(usable, f"{usable:.1f} GB usable"),
    )


def _sum_memory_by_component(rank: PlannedRank) -> dict[str, float]:
    """Return the memory of a rank in GB, by component such as ``gradients``."""
    return {name: getattr(rank.memory, name) / GIGA for name in COMPONENTS}


def _make_assumption_section(run: DryRun, notes: Sequence[str], *, explain: bool) -> Section:
    """Return the section with the assumptions about hardware and ``notes``, one per row.

    ``notes`` are further assumptions. ``explain`` adds a table of the equations of the step.
    """
    tables = [make_formula_table(run)] if explain else []
    tables.append(
        Table(
            "assumptions",
            "Assumptions",
            caption="declared unless a row names measurements. --hardware FILE.toml changes them",
            columns=[make_column("assumption")],
            rows=[{"assumption": text} for text in [*list_assumptions(run.hardware), *notes]],
        )
    )
    return Section("formulas", "Formulas and assumptions", tables=tables)


def list_assumptions(hardware: Hardware) -> list[str]:
    """Return a text for each assumption about the hardware: its rates, efficiencies and source."""
    efficiency = hardware.efficiency
    inside, across = hardware.inside_bytes_per_second, hardware.across_bytes_per_second
    links = (
        f"{efficiency.links_inside:.0%} of {inside / GIGA:.4g} GB/s inside a node of "
        f"{hardware.gpus_per_node}, {efficiency.links_across:.0%} of {across / GIGA:.4g} GB/s per "
        f"GPU across nodes, {hardware.launch_seconds * 1e6:.3g} us per call, "
        f"{hardware.inside_hop_seconds * 1e6:.3g} us per hop inside a node, "
        f"{hardware.across_hop_seconds * 1e6:.3g} us per hop across nodes"
    )
    overlap = ", ".join(f"{axis} {share:.0%}" for axis, share in efficiency.overlap.items())
    return [
        f"compute: peak {hardware.flops_per_second / 1e12:.4g} TFLOP/s in bfloat16, "
        f"{hardware.float32_share:.0%} of it in float32. Large GEMMs reach {efficiency.gemm:.0%} "
        f"of the peak, attention {efficiency.attention:.0%}. The launch of a kernel takes "
        f"{hardware.kernel_seconds * 1e6:.3g} us",
        f"links: {hardware.links_from or links}",
        f"memory: {efficiency.memory_rate:.0%} of "
        f"{hardware.memory_bytes_per_second / 1e12:.4g} TB/s, {efficiency.memory:.0%} of "
        f"{hardware.memory_bytes / GIGA:.4g} GB usable",
        f"share of communication that compute can hide: {overlap or 'none'}",
        f"source of hardware figures: {hardware.source}",
    ]
