"""The report on a job's traces: findings, the time of each rank and collective, and late ranks."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import UNKNOWN, format_seconds
from parbench.bench.results.runs import Run, load_run
from parbench.bench.results.spans import Span, difference, length
from parbench.bench.results.tables import Column, Row, Section, Table, keep_known_columns
from parbench.bench.text import format_size, pluralize
from parbench.reports.analysis.labels import AXES
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.timeline import chart_timeline
from parbench.reports.findings.finding import MIN_SHARE, describe_no_finding
from parbench.reports.findings.rules import apply_rules
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.traces.flight_dumps import explain_dumps, list_dumps
from parbench.reports.traces.job import (
    SharedCall,
    TracedJob,
    build_timeline,
    compute_waits,
    read_job,
)
from parbench.reports.traces.rank_trace import TracedRank
from parbench.reports.traces.trace_evidence import PredictSeconds, collect_evidence

MAX_RANK_ROWS = 16
"""The number of ranks that a table shows."""
RANK_COLUMNS = (
    Column("rank", kind="count", help="global rank"),
    Column("step", kind="s", help="time of a step"),
    Column("compute", kind="percent", is_result=True, help="computation"),
    Column(
        "exposed",
        kind="percent",
        is_result=True,
        help="communication that neither computation nor copies hide",
    ),
    Column(
        "copies",
        kind="percent",
        is_result=True,
        help="copies of memory that no computation hides",
    ),
    Column("idle", kind="percent", is_result=True, help="nothing runs"),
    Column(
        "overlap",
        kind="percent",
        is_result=True,
        help="hidden share of communication",
    ),
)
"""The columns of the table of step times, with one row per rank."""
CALL_COLUMNS = (
    Column("call", help="operation and process group"),
    Column("size", help="bytes by the convention of nccl-tests, in powers of two"),
    Column("reach", help="ranks within a node, or between nodes"),
    Column("calls", kind="number", number_format="{:.4g}", help="calls per step"),
    Column("seconds", "time", kind="s", help="time in calls, per step"),
    Column("exposed", kind="s", help="exposed time of calls, per step"),
    Column("transfer", kind="s", help="time of the median call"),
    Column("busbw", "busbw GB/s", kind="B/s", help="bus bandwidth of the median transfer"),
    Column("of_fit", "of the fit", kind="percent", help="time by the fit over the transfer"),
)
"""The columns of the table of communication, with a row per operation, group and size."""
WAIT_COLUMNS = (
    Column("rank", kind="count", help="global rank"),
    Column("last", kind="percent", help="share of collectives where it arrives last"),
    Column(
        "wait",
        "waited for",
        kind="s",
        help="time per step in which the others only wait for it",
    ),
)
"""The columns of the table of late ranks, with one row per rank."""


def explain_traces(paths: Sequence[Path], against: Path | None) -> Report:
    """Return the report on the traces of a job, or on dumps of torch's flight recorder.

    Args:
        paths: the trace files or dumps, or folders that contain them.
        against: the folder of a run. Collectives are compared with the latency-bandwidth models
            that are fitted to its measurements. None compares them with nothing.
    """
    dumps = list_dumps(paths)
    if dumps:
        return explain_dumps(dumps)
    job = read_job(paths)
    predict = make_predictor(load_run(against)) if against else None
    findings = apply_rules(collect_evidence(job, predict))
    tables = [_make_rank_table(job), _make_call_table(job, predict)]
    if job.shared_calls and len(job.ranks) > 1:
        tables.append(_make_wait_table(job))
    notes = list(job.notes)
    if not findings:
        notes.insert(0, describe_no_finding(MIN_SHARE))
    if against:
        notes.append(f"fits: {against}")
    name = paths[0].resolve().name if len(paths) == 1 else f"{len(paths)} traces"
    steps = pluralize(job.num_steps, "step")
    return Report(
        name=name,
        verdicts=(_judge_completeness(job),),
        code=0,
        runs=(),
        sections=(Section(id="traces", title="Profiled steps", tables=tables, notes=notes),),
        findings=findings,
        figures=lambda: [_chart_median_step(job)],
        heading=f"{name} · step time {format_seconds(job.step_seconds)} (median of {steps})",
    )


def _chart_median_step(job: TracedJob) -> Chart:
    """Return the timeline of all ranks in one step of median duration as a figure."""
    caption = "Waiting is hatched or empty."
    return chart_timeline("step", "Profiled step", caption, build_timeline(job))


def make_predictor(run: Run) -> PredictSeconds:
    """Return a function that predicts the time of a collective in seconds from a run.

    It uses the fits of the run: latency-bandwidth models, each of one operation on one number of
    ranks. Only blocking operations without special parameters are used. The function returns None
    if the run has no fit for the operation and number of ranks, or if the bytes are unknown.
    """
    fits: dict[tuple[str, int], CurveFit] = {}
    for curve in RunData(run).curves:
        first = curve.rows[0]
        params = first.case.params
        if params.get("mode") == "blocking" and params.keys() <= set(AXES):
            fits.setdefault((first.case.short_name, first.num_ranks), curve.fit)

    def predict(shared: SharedCall) -> float | None:
        """Return the predicted seconds of a collective, None if it has no fit or unknown bytes."""
        facts = shared.call.facts
        fit = fits.get((facts.op, facts.size or 0))
        if fit is None or facts.num_bytes is None:
            return None
        return fit.predict(facts.num_bytes)

    return predict


def _judge_completeness(job: TracedJob) -> ReportVerdict:
    """Return the verdict on the traces of a job: PARTIAL if ranks or events are missing.

    Otherwise it is COMPLETE.
    """
    num_ranks = len(job.ranks)
    world_size = max(rank.world_size or num_ranks for rank in job.ranks)
    message = f"{num_ranks} of {world_size} ranks, {pluralize(job.num_steps, 'step')} each"
    if num_ranks < world_size or any(rank.notes for rank in job.ranks):
        message += "; the notes list what is missing"
        return ReportVerdict(word="PARTIAL", level="doubtful", message=message)
    return ReportVerdict(word="COMPLETE", level="good", message=message)


def _make_rank_table(job: TracedJob) -> Table:
    """Return the table with the parts of the step time of each rank, the slowest rank first.

    The median over steps is shown for each part.
    """
    rows = [_make_rank_row(rank) for rank in job.ranks]
    rows.sort(key=lambda row: row["step"], reverse=True)
    num_omitted = len(rows) - MAX_RANK_ROWS
    notes = [f"{num_omitted} ranks with shorter steps are omitted"] if num_omitted > 0 else []
    return Table(
        id="ranks",
        title="Step time by rank",
        caption="Medians over steps.",
        columns=RANK_COLUMNS,
        rows=rows[:MAX_RANK_ROWS],
        notes=notes,
    )


def _make_rank_row(rank: TracedRank) -> Row:
    """Return the row of a rank, keyed by column.

    ``step`` is the step time in seconds. ``compute``, ``exposed``, ``copies`` and ``idle`` are
    fractions of the step time. These are medians over steps. ``overlap`` is the hidden fraction of
    the communication of all steps together, None without communication.
    """
    parts = [step.parts for step in rank.steps]
    hidden = sum(part.hidden_comm_seconds for part in parts)
    comm = hidden + sum(part.exposed_seconds for part in parts)
    return {
        "rank": rank.rank,
        "step": median(part.wall_seconds for part in parts),
        "compute": median(part.compute_seconds / part.wall_seconds for part in parts),
        "exposed": median(part.exposed_seconds / part.wall_seconds for part in parts),
        "copies": median(part.copy_seconds / part.wall_seconds for part in parts),
        "idle": median(part.idle_seconds / part.wall_seconds for part in parts),
        "overlap": hidden / comm if comm else None,
    }


def _make_call_table(job: TracedJob, predict: PredictSeconds | None) -> Table:
    """Return the table of one rank's communication, with a row for each operation, group and size.

    The rank is the one whose communication is exposed least, so it waits least. Rows are sorted by
    exposed time. ``predict`` gives the time of a collective by the latency-bandwidth model of a
    run, and adds the comparison with it.
    """
    shared_calls: dict[tuple[str, str], list[SharedCall]] = defaultdict(list)
    for shared in job.shared_calls:
        # A call that ends before the previous one on its group has no transfer time of its own.
        if shared.transfer_ns > 0:
            size = _round_size(shared.call.facts.num_bytes)
            shared_calls[shared.call.label, size].append(shared)
    rank = min(job.ranks, key=lambda rank: sum(step.parts.exposed_seconds for step in rank.steps))
    has_nodes = len(set(job.hosts.values())) > 1
    spans: dict[tuple[str, str, str | None], list[Span]] = defaultdict(list)
    spans_by_reach: dict[str, list[Span]] = defaultdict(list)
    for call in rank.calls:
        reach = job.find_reach(call) if has_nodes else None
        spans[call.label, _round_size(call.facts.num_bytes), reach].append(call.span)
        if reach:
            spans_by_reach[reach].append(call.span)
    busy = [span for step in rank.steps for span in step.busy]
    num_steps = len(rank.steps)
    rows: list[Row] = []
    for (label, size, reach), own_spans in spans.items():
        row: dict[str, object] = {
            "call": label,
            "size": size,
            "reach": reach,
            "calls": len(own_spans) / num_steps,
            "seconds": length(own_spans) / 1e9 / num_steps,
            "exposed": length(difference(own_spans, busy)) / 1e9 / num_steps,
        }
        rows.append(row | _summarize_transfers(shared_calls[label, size], predict))
    rows.sort(key=lambda row: (-row["exposed"], row["call"], row["size"]))
    notes = []
    for reach, own_spans in sorted(spans_by_reach.items()):
        seconds = format_seconds(length(own_spans) / 1e9 / num_steps)
        exposed = format_seconds(length(difference(own_spans, busy)) / 1e9 / num_steps)
        notes.append(f"{reach}: {seconds} of communication per step, {exposed} exposed")
    return Table(
        id="collectives",
        title="Communication of a step",
        caption="On the rank that waits least. A transfer starts when all ranks have arrived.",
        columns=keep_known_columns(CALL_COLUMNS, rows),
        rows=rows,
        notes=notes,
    )


def _summarize_transfers(
    calls: Sequence[SharedCall], predict: PredictSeconds | None
) -> dict[str, float | None]:
    """Return the median transfer time and bandwidth of calls, and the ratio to predicted times.

    The keys are ``transfer`` in seconds, ``busbw`` in B/s, and ``of_fit``, the predicted over the
    measured time. All are medians over calls. Unknown values are None. ``predict`` gives the time
    of a collective by the latency-bandwidth model of a run.
    """
    bandwidths = [shared.busbw for shared in calls if shared.busbw]
    ratios = []
    for shared in calls:
        fit_seconds = predict(shared) if predict else None
        if fit_seconds:
            ratios.append(fit_seconds / (shared.transfer_ns / 1e9))
    return {
        "transfer": median(shared.transfer_ns for shared in calls) / 1e9 if calls else None,
        "busbw": median(bandwidths) if bandwidths else None,
        "of_fit": median(ratios) if ratios else None,
    }


def _round_size(num_bytes: int | None) -> str:
    """Return a number of bytes as text, rounded down to a power of two: ``64K``.

    ``UNKNOWN`` stands for None.
    """
    if num_bytes is None:
        return UNKNOWN
    return format_size(1 << (num_bytes.bit_length() - 1)) if num_bytes else "0"


def _make_wait_table(job: TracedJob) -> Table:
    """Return the table of the seconds per step that the other ranks wait for each rank.

    The rank that is waited for longest comes first. Seconds are medians over steps.
    """
    rows: list[Row] = []
    for rank, seconds in compute_waits(job).items():
        last = fmean(shared.last_rank == rank for shared in job.shared_calls)
        rows.append({"rank": rank, "last": last, "wait": median(seconds)})
    rows.sort(key=lambda row: row["wait"], reverse=True)
    return Table(
        id="waits",
        title="Late ranks",
        caption="Ranks that arrive last at collectives, and the time that the others wait.",
        columns=WAIT_COLUMNS,
        rows=rows[:MAX_RANK_ROWS],
    )
