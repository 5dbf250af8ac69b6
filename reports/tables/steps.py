"""The section on training steps: rates, where the time goes, communication, timelines, memory."""

from collections.abc import Iterable, Iterator, Sequence

from parbench.bench.results.details import PipelineDetails
from parbench.bench.results.tables import (
    Column,
    Table,
    metric_column,
)
from parbench.reports.analysis.labels import group_by_text
from parbench.reports.analysis.steps import (
    StepRow,
    compute_exposed_share,
    get_axis_values,
    get_parts,
    get_profiled_seconds,
    list_rows_with_details,
    list_step_rows,
    sum_memory,
)
from parbench.reports.analysis.timelines import (
    measure_busy_seconds,
    summarize_calls,
)
from parbench.reports.figures.chart import Chart, list_charts, number_name
from parbench.reports.figures.steps import chart_breakdown, chart_memory
from parbench.reports.figures.timeline import chart_timeline
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import (
    QUALITY_COLUMNS,
    STEP_COLUMN,
    STEP_TIME_COLUMN,
    list_metric_columns,
)
from parbench.reports.tables.pipelines import make_pipeline_tables

MEMORY_SOURCES = ("memory_formula", "memory_counted", "memory")
"""The metrics of memory, from the analytical one to the measured one."""
_MEMORY_COLUMN = Column(
    "memory",
    kind="B",
    help="memory of all components, measured, maximum over ranks",
)
_PROFILED_COLUMN = Column(
    "profiled",
    "profiled step",
    kind="s",
    help="wall time of the profiled step, the sum of its parts",
)

_AXIS_METRICS = {
    "calls": "calls",
    "bytes_expected": "analytical bytes",
    "bytes_sent": "counted bytes",
    "bytes_ratio": "bytes ratio",
    "exposed_comm": "exposed",
}
"""The titles of columns, keyed by the metric of a mesh axis that the column shows."""
_PHASE_METRICS = {
    "phase_time": "time",
    "phase_compute": "compute",
    "phase_exposed": "exposed",
    "phase_idle": "idle",
}
"""The titles of columns, keyed by the metric of a phase that the column shows."""
_VOLUME_COLUMNS = (
    STEP_COLUMN,
    Column("axis", help="axis of the mesh, or process group"),
    Column("ranks", kind="count", help="ranks on the axis"),
    Column("formula", help="analytical bytes that rank 0 sends"),
    *(
        metric_column(f"{metric}.the axis", key=metric, title=title)
        for metric, title in _AXIS_METRICS.items()
    ),
)
_CALL_COLUMNS = (
    STEP_COLUMN,
    Column("axis", help="axis of the mesh, or process group"),
    Column("operation", help="collective, or send and receive"),
    Column("size", kind="B", help="bytes of one call, as nccl-tests counts them"),
    Column("calls", kind="count", is_result=True, help="calls in a step"),
    Column("seconds", "time", kind="s", help="time of these calls in a step"),
    Column("exposed", kind="s", help="time of these calls that no computation and no copy hides"),
)


def list_step_tables(data: RunData) -> list[Table]:
    """Return the tables of training steps, in the order of the section. Some may have no rows."""
    rows = list_step_rows(data)
    pipelines = list_rows_with_details(data, PipelineDetails)
    return [
        _make_step_table(rows),
        _make_part_table(rows),
        _make_phase_table(rows),
        _make_volume_table(rows),
        _make_call_table(data),
        _make_timeline_table(data),
        *make_pipeline_tables(pipelines),
        _make_memory_table(rows),
    ]


def _make_step_table(steps: Sequence[StepRow]) -> Table:
    """Return the table of step times, rates, communication and memory, with a row per step.

    ``steps`` has a row for each measured training step (``list_step_rows``).
    """
    rows = [
        {
            **step,
            "exposed_fraction": compute_exposed_share(step["result"]),
            "memory": sum_memory(step["result"]),
        }
        for step in steps
    ]
    columns = [
        STEP_COLUMN,
        STEP_TIME_COLUMN,
        metric_column("tokens_per_second"),
        *list_metric_columns("steps", steps),
        metric_column("exposed_fraction"),
        _MEMORY_COLUMN,
        *QUALITY_COLUMNS,
    ]
    labels = group_by_text({step["label"]: step["result"].notes for step in steps})
    return Table(
        "steps-table",
        "Training steps",
        caption="time, efficiency, communication and memory of each step",
        columns=columns,
        rows=rows,
        notes=[f"{', '.join(names)}: {note}" for note, names in labels.items()],
    )


def _make_part_table(steps: Sequence[StepRow]) -> Table:
    """Return the table of the parts of each profiled step, such as compute and idle, in seconds.

    A row is a step, with its wall time. Steps that were not profiled are left out.
    """
    rows = []
    stacks = {}
    for step in steps:
        result = step["result"]
        profiled = get_profiled_seconds(result)
        if profiled is not None:
            rows.append({**step, "profiled": profiled})
            stacks[step["label"]] = get_parts(result)
    columns = [STEP_COLUMN, _PROFILED_COLUMN, *list_metric_columns("times", rows)]
    return Table(
        "step-time",
        "Where the time goes",
        caption="parts of the profiled step on its slowest rank, communication by axis",
        columns=columns,
        rows=rows,
        terms=["parts of a step"],
        figures=lambda: list_charts(chart_breakdown(stacks)),
    )


def _split_by_axis(steps: Sequence[StepRow], axis: str, metrics: Iterable[str]) -> list[StepRow]:
    """Return a row for each step and each mesh axis, phase or memory component of its metrics.

    ``steps`` has a row per training step. ``metrics`` are names without their last part: for
    ``bytes_sent``, the metrics ``bytes_sent.dp``, ``bytes_sent.tp``, ... make rows for ``dp`` and
    ``tp``. A row has the values of the step, the name of the mesh axis, phase or component under
    the key ``axis`` (an argument, such as ``"phase"``), and the value of each metric under its name
    in ``metrics`` (None if unknown).
    """
    rows = []
    for step in steps:
        by_metric = {name: get_axis_values(step["result"], name) for name in metrics}
        for part in dict.fromkeys(part for values in by_metric.values() for part in values):
            values = {name: by_part.get(part) for name, by_part in by_metric.items()}
            rows.append({**step, axis: part, **values})
    return rows


def _make_phase_table(steps: Sequence[StepRow]) -> Table:
    """Return the table of phases, such as ``forward``, with a row for each phase of each step.

    Phases are the code ranges that a step marks with ``torch.profiler.record_function``. A row has
    the total, compute, exposed and idle seconds of the phase.
    """
    columns = [
        STEP_COLUMN,
        Column("phase", help="name of the phase, as the step marks it"),
        *(
            metric_column(f"{metric}.the phase", key=metric, title=title)
            for metric, title in _PHASE_METRICS.items()
        ),
    ]
    return Table(
        "step-phases",
        "Phases of a step",
        caption="parts on the slowest rank. A phase within another counts in both, other time in none",
        columns=columns,
        rows=_split_by_axis(steps, "phase", _PHASE_METRICS),
        terms=["phases"],
    )


def _make_volume_table(steps: Sequence[StepRow]) -> Table:
    """Return the table of bytes sent, with a row for each step and mesh axis.

    The bytes are per rank and step: analytical bytes by the formula of the step, and bytes that
    were counted at the process groups.
    """
    rows = _split_by_axis(steps, "axis", _AXIS_METRICS)
    for row in rows:
        formulas = row["result"].details.get("bytes_formula", {})
        row["formula"] = formulas.get(row["axis"])
        row["ranks"] = row["axes"].get(row["axis"], {}).get("ranks")
    return Table(
        "communication-volume",
        "Communication volume",
        caption="bytes that a rank sends in a step, and exposed time on the slowest rank",
        columns=_VOLUME_COLUMNS,
        rows=rows,
    )


def _make_call_table(data: RunData) -> Table:
    """Return the table of communication calls in profiled steps (``summarize_calls``).

    It has a row for each step, mesh axis, operation and size.
    """
    rows = [
        {"label": data.labels[step.result.case.id], **row}
        for step in data.timelines
        if step.timeline
        for row in summarize_calls(step.timeline)
    ]
    return Table(
        "step-calls",
        "Communication by operation and size",
        caption="calls of one profiled step on the rank that waits least. Times may overlap",
        columns=_CALL_COLUMNS,
        rows=rows,
    )


def _make_timeline_table(data: RunData) -> Table:
    """Return the table of busy seconds, with a row for each rank of each profiled step.

    A column is a stream of the rank, such as ``compute`` or ``comm dp``. The reasons why timelines
    cannot be read become notes.
    """
    rows = []
    notes = []
    streams: dict[str, None] = {}
    for step in data.timelines:
        label = data.labels[step.result.case.id]
        if step.timeline is None:
            notes.append(f"{label} has no timeline: {step.problem}.")
            continue
        for rank in step.timeline.ranks:
            busy_seconds = measure_busy_seconds(rank)
            streams |= dict.fromkeys(busy_seconds)
            wall = (rank.stop_us - rank.start_us) / 1e6
            rows.append({"label": label, "rank": rank.rank, "wall": wall, **busy_seconds})
    columns = [
        STEP_COLUMN,
        Column("rank", kind="count", help="rank in the world"),
        Column("wall", kind="s", help="wall time of the step on this rank"),
    ]
    columns += [
        Column(stream, kind="s", help=f"time of {stream}, overlaps counted once")
        for stream in streams
    ]
    return Table(
        "step-timelines",
        "Profiled steps by rank",
        caption="busy time in one profiled step, all events: parbench export --format chrome-trace",
        columns=columns,
        rows=rows,
        notes=notes,
        figures=lambda: _chart_timelines(data),
    )


def _chart_timelines(data: RunData) -> Iterator[Chart]:
    """Yield the Gantt chart of streams for each profiled step that can be drawn."""
    steps = [step for step in data.timelines if step.timeline]
    for number, step in enumerate(steps, start=1):
        if step.timeline:
            yield chart_timeline(
                number_name("timeline", number),
                f"Profiled step: {data.labels[step.result.case.id]}",
                f"Repetition {step.repetition + 1}.",
                step.timeline,
            )


def _make_memory_table(steps: Sequence[StepRow]) -> Table:
    """Return the table of memory per rank in bytes, with a row for each step and component.

    A component is, for example, the parameters. A row has the bytes by formula (analytical), the
    sum of the sizes of tensors (counted), and the measured bytes.
    """
    rows = _split_by_axis(steps, "component", MEMORY_SOURCES)
    columns = [
        STEP_COLUMN,
        Column("component", help="content of the memory"),
        *(metric_column(f"{source}.COMPONENT", key=source) for source in MEMORY_SOURCES),
    ]
    stacks: dict[str, dict[str, float]] = {}
    for row in rows:
        stacks.setdefault(row["label"], {})[row["component"]] = row["memory"] or 0.0
    return Table(
        "step-memory",
        "Memory by component",
        caption="analytical, counted and measured bytes",
        columns=columns,
        rows=rows,
        figures=lambda: list_charts(chart_memory(stacks)),
    )
