"""The report on a job's traces: findings, the time of each rank and collective, and late ranks."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from parbench.bench.results.fit import CurveFit
from parbench.bench.results.formatting import format_bytes, format_percent, format_seconds
from parbench.bench.results.runs import Run, load_run
from parbench.bench.results.spans import difference, length
from parbench.bench.results.tables import Column, Row, Section, Table
from parbench.bench.text import pluralize
from parbench.reports.analysis.labels import AXES
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.figures.timeline import chart_timeline
from parbench.reports.findings.finding import MIN_SHARE
from parbench.reports.findings.rules import apply_rules
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.traces.job import (
    SharedCall,
    TracedJob,
    build_timeline,
    compute_waits,
    read_job,
)
from parbench.reports.traces.rank_trace import TracedCall
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
        "overlapped",
        kind="percent",
        is_result=True,
        help="communication during computation or copies, which hide it",
    ),
    Column(
        "wait", "waited for", kind="s", help="time per step in which the others only wait for it"
    ),
)
"""The columns of the table of step times, with one row per rank."""
CALL_COLUMNS = (
    Column("call", help="operation and process group"),
    Column("size", help="bytes by the convention of nccl-tests, a range for several sizes"),
    Column("calls", kind="number", number_format="{:.4g}", help="calls per step"),
    Column("seconds", "time", kind="s", help="time in calls, per step"),
    Column("exposed", kind="s", help="exposed time of calls, per step"),
    Column("transfer", kind="s", help="time of the median call"),
    Column("busbw", "busbw GB/s", kind="B/s", help="bus bandwidth of the median transfer"),
    Column("of_fit", "of the fit", kind="percent", help="time by the fit over the transfer"),
)
"""The columns of the table of communication, with a row per operation, group and size."""


def explain_traces(paths: Sequence[Path], against: Path | None) -> Report:
    """Return the report on the traces of a job: findings, tables and timeline of the last step.

    Args:
        paths: the trace files, or folders that contain them.
        against: the folder of a run. Collectives are compared with the latency-bandwidth models
            that are fitted to the measurements of this run. None for no comparison.
    """
    job = read_job(paths)
    predict = make_predictor(load_run(against)) if against else None
    findings = apply_rules(collect_evidence(job, predict))
    tables = [_make_rank_table(job), _make_call_table(job, predict)]
    notes = list(job.notes)
    if not findings:
        notes.insert(
            0,
            f"Nothing stands out: no cause costs {format_percent(MIN_SHARE)} of the step or more.",
        )
    if against:
        notes.append(f"Collectives are compared with the fits of {against}.")
    name = paths[0].resolve().name if len(paths) == 1 else f"{len(paths)} traces"
    steps = pluralize(job.num_steps, "step")
    num_ranks = len(job.ranks)
    world_size = max(rank.world_size or num_ranks for rank in job.ranks)
    is_complete = num_ranks == world_size
    verdict = ReportVerdict(
        word="COMPLETE" if is_complete else "PARTIAL",
        level="good" if is_complete else "doubtful",
        message=f"{num_ranks} of {world_size} ranks, {steps} each",
    )
    return Report(
        name=name,
        verdicts=(verdict,),
        code=0,
        runs=(),
        sections=(Section(id="traces", title="Profiled steps", tables=tables, notes=notes),),
        findings=findings,
        figures=lambda: [
            chart_timeline(
                "step",
                "Profiled step",
                "The last profiled step. Waiting is hatched or empty.",
                build_timeline(job),
            )
        ],
        heading=f"{name} · step time {format_seconds(job.step_seconds)} "
        f"(mean of {steps}, slowest rank)",
    )


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


def _make_rank_table(job: TracedJob) -> Table:
    """Return the table with the parts of the step time of each rank, as means over steps.

    Ranks are sorted by the time that others wait for them, then by their step time, both
    descending. The table has at most 16 ranks.
    """
    waits = compute_waits(job)
    rows: list[Row] = []
    for rank in job.ranks:
        step_seconds = rank.compute_mean(lambda parts: parts.wall_seconds)
        seconds = {
            "compute": rank.compute_mean(lambda parts: parts.compute_seconds),
            "exposed": rank.compute_mean(lambda parts: parts.exposed_seconds),
            "copies": rank.compute_mean(lambda parts: parts.copy_seconds),
            "idle": rank.compute_mean(lambda parts: parts.idle_seconds),
            "overlapped": rank.compute_mean(lambda parts: parts.hidden_comm_seconds),
        }
        rows.append(
            {
                "rank": rank.rank,
                "step": step_seconds,
                **{name: value / step_seconds for name, value in seconds.items()},
                "wait": waits.get(rank.rank),
            }
        )
    rows.sort(key=lambda row: (row["wait"] or 0.0, row["step"]), reverse=True)
    return Table(
        id="ranks",
        title="Step time by rank",
        caption=f"Means over steps, at most {MAX_RANK_ROWS} ranks. Waits are medians.",
        columns=RANK_COLUMNS,
        rows=rows[:MAX_RANK_ROWS],
    )


def _make_call_table(job: TracedJob, predict: PredictSeconds | None) -> Table:
    """Return the table of one rank's communication, with a row for each operation, group and size.

    The rank is the one whose communication is exposed least, so it waits least. Rows are sorted by
    exposed time, in descending order. ``predict`` returns the time of a collective by the
    latency-bandwidth model of a run. The table then has a column with this time over the measured
    transfer time. None for no such column.
    """
    shared_calls: dict[tuple[str, int], list[SharedCall]] = defaultdict(list)
    for shared in job.shared_calls:
        # A call that ends before the previous one on its group has no transfer time of its own.
        if shared.transfer_ns > 0:
            shared_calls[_get_kind(shared.call)].append(shared)
    rank = min(job.ranks, key=lambda rank: rank.compute_mean(lambda parts: parts.exposed_seconds))
    own_calls: dict[tuple[str, int], list[TracedCall]] = defaultdict(list)
    for call in rank.calls:
        own_calls[_get_kind(call)].append(call)
    busy = [span for step in rank.steps for span in step.busy]
    num_steps = len(rank.steps)
    rows: list[Row] = []
    for kind, same_calls in sorted(own_calls.items()):
        own_spans = [call.span for call in same_calls]
        calls = shared_calls[kind]
        bandwidths = [shared.busbw for shared in calls if shared.busbw]
        ratios = []
        for shared in calls:
            fit_seconds = predict(shared) if predict else None
            if fit_seconds:
                ratios.append(fit_seconds / (shared.transfer_ns / 1e9))
        rows.append(
            {
                "call": kind[0],
                "size": _format_sizes(same_calls),
                "calls": len(own_spans) / num_steps,
                "seconds": length(own_spans) / 1e9 / num_steps,
                "exposed": length(difference(own_spans, busy)) / 1e9 / num_steps,
                "transfer": median(shared.transfer_ns for shared in calls) / 1e9 if calls else None,
                "busbw": median(bandwidths) if bandwidths else None,
                "of_fit": median(ratios) if ratios else None,
            }
        )
    rows.sort(key=lambda row: -row["exposed"])
    return Table(
        id="collectives",
        title="Communication of a step",
        caption="On the rank that waits least. A transfer starts when all ranks have arrived.",
        columns=CALL_COLUMNS,
        rows=rows,
    )


def _get_kind(call: TracedCall) -> tuple[str, int]:
    """Return the label of a call and the bit length of its size, so that similar sizes are equal.

    The label is the operation and the process group. The bit length is -1 for an unknown size.
    """
    num_bytes = call.facts.num_bytes
    return call.label, -1 if num_bytes is None else num_bytes.bit_length()


def _format_sizes(calls: Sequence[TracedCall]) -> str:
    """Return the size of calls, or the smallest and the largest size: ``1.06 MiB to 1.50 MiB``."""
    sizes = sorted((call.facts.num_bytes for call in calls), key=lambda size: size or 0)
    return " to ".join(dict.fromkeys(map(format_bytes, (sizes[0], sizes[-1]))))
