"""The report of one run, in the order in which it is read: what was run, what stands out, and its sections."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bench.launch.control_channel import LEFT_OUT
from bench.results.runs import Run
from bench.results.stats import WITHIN_LAUNCH, median
from bench.text import format_duration
from reports import cells
from reports.analysis.analysis import Analysis, analyse
from reports.analysis.contrasts import Grouped, Pairs, contrasts
from reports.analysis.fits import size_of
from reports.analysis.front import front_of
from reports.analysis.labels import environment_facts, row_label, short_labels
from reports.analysis.problems import bad_rows, emulations, not_measured, other_claims, warnings_of
from reports.analysis.rank_hosts import Nodes
from reports.analysis.step_parts import broken_down, calls_of, worst_ratio
from reports.analysis.summary import Row, Summary, summarize
from reports.analysis.verdicts import Verdict
from reports.report import Report, Section
from reports.sections.attention import attention_section
from reports.sections.communication import communication_section, contrast_section, group_section
from reports.sections.experts import experts_section
from reports.sections.nodes import arrival_section, node_section, pair_section
from reports.sections.predictions import predicted_section
from reports.sections.steps import step_section

SECTIONS: tuple[Callable[[Analysis], Section | None], ...] = (
    node_section,
    communication_section,
    contrast_section,
    group_section,
    pair_section,
    step_section,
    attention_section,
    experts_section,
    arrival_section,
    predicted_section,
)
_MOST_NAMED = 6
_SLOW_LINK, _SLOW_GROUP = 0.7, 0.9
_LATE_SHARE, _LATE_OF_TIME = 0.5, 0.1
_BY_CHANCE = 0.07  # five launches of two ranks that agree are 0.0625
_OFF_RATIO = 0.01


def report_of(run: Run, *more: Verdict) -> Report:
    """Analyse a run once, and return all that is to be said of it, with verdicts from elsewhere after its own."""
    summary = summarize(run)
    found = analyse(run, summary)
    front = front_of(found, more)
    return Report(
        name=run.info.id,
        verdicts=front.verdicts,
        code=summary.tally.code,
        runs=((run, summary),),
        sections=tuple(section for make in SECTIONS if (section := make(found))),
        emulated=emulations(run),
        claims=other_claims(run),
        heading=heading(run, summary),
        front=front,
        warnings=warnings_of(run),
        problems=bad_rows(summary),
        doubts=doubts(found),
        not_measured=not_measured(summary),
        environment=tuple(environment_facts(run.info.environment or {})),
        footnotes=_footnotes(run, summary),
    )


def heading(run: Run, summary: Summary) -> str:
    plan = run.info.plan
    nodes = sorted({row.world.nodes for row in summary.rows})
    where = f" on {'/'.join(map(str, nodes))} node{'s' * (nodes != [1])}" if nodes else ""
    parts = [
        f"preset {plan.preset}: {plan.nproc} rank{'s' * (plan.nproc != 1)}{where}, {plan.backend}, {plan.device}",
        f"{plan.launches} launch{'es' * (plan.launches != 1)}",
        f"host {run.info.host}",
    ]
    # each where it is the same for all ranks and known
    for group, name, word in (("host", "cpu_model", ""), ("torch", "gpu", ""), ("torch", "version", "torch ")):
        values = (run.info.environment or {}).get(group)
        if isinstance(values, Mapping) and values.get(name):
            parts.append(f"{word}{values[name]}")
    took = format_duration(sum(record.seconds for record in run.records))
    return "; ".join([*parts, f"started {run.info.started}", f"measuring took {took}"])


def doubts(found: Analysis) -> tuple[str, ...]:
    """Return a sentence for each kind of thing that a reader should look at first, though nothing failed."""
    name = {row.case.id: row_label(row) for row in found.shown if row.is_communication} | short_labels(found.steps)
    ratios = ((name[row.case.id], worst_ratio(row)) for row in found.steps)
    sentences = (
        *(sentence for matrix in found.matrices for sentence in _slow_links(matrix, found.nodes)),
        _named("Slower than the other groups by more than a tenth", _slow_groups(found.groups)),
        _named(
            "Slower beside others, by more than the interval",
            (
                f"{row_label(one.base)} {prefix}{load} x {cells.significant(factor.value)}"
                for _, prefix, rows in contrasts(found.shown)
                for one in rows
                for load, factor in one.factors.items()
                if factor.low is not None and factor.low > 1
            ),
        ),
        _late(found.shown),
        _named(
            "Far from their fit",
            (
                f"{row_label(row)} {100 * error:+.0f} %"
                for curve in found.curves
                for size, error in curve.fit.off_curve
                for row in curve.rows
                if size_of(row) == size
            ),
        ),
        _named(
            "Bytes sent are not those expected",
            (f"{step} on {of[0]} x {of[1]:.3f}" for step, of in ratios if of and abs(of[1] - 1) > _OFF_RATIO),
        ),
        *(
            _named(
                f"Very noisy, {told}",
                (
                    name[row.case.id]
                    for row in found.shown
                    if row.grade == "very noisy" and (row.scatter is None) == is_alone
                ),
            )
            for is_alone, told in (
                (False, "launches scatter by 40 % or more"),
                (True, f"the interquartile range 40 % of the median or more {WITHIN_LAUNCH}"),
            )
        ),
    )
    return tuple(filter(None, sentences))


def _named(what: str, names: Iterable[str]) -> str:
    told = list(names)
    more = f" and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return f"{what}: {'; '.join(told[:_MOST_NAMED])}{more}." if told else ""


def _slow_links(matrix: Pairs, nodes: Nodes | None) -> Iterator[str]:
    """Hold each link against those that are as far: that nodes lie farther apart than cores is no doubt."""
    by_distance: dict[str, dict[tuple[int, int], float]] = {}
    for pair in matrix.rows:
        distance = nodes.distance(*pair) if nodes and max(pair) < len(nodes.hosts) else ""
        if rate := matrix.rate(*pair):
            by_distance.setdefault(distance, {})[pair] = rate
    for distance, rates in by_distance.items():
        middle = median(list(rates.values()))
        slow = sorted((rate, pair) for pair, rate in rates.items() if rate < _SLOW_LINK * middle)
        told = (f"rank {a} to {b} at {cells.quantity(rate, 'B/s')}" for rate, (a, b) in slow)
        where = f" ({distance})" if distance else ""
        yield _named(f"Links{where} below 70 % of the median, {cells.quantity(middle, 'B/s')}", told)


def _slow_groups(groups: Sequence[Grouped]) -> Iterator[str]:
    """Hold each group against those of its kind: one across nodes has other links than one within."""
    for one in groups:
        for kind in dict.fromkeys(row.case.params["group"] for row in one.rows.values()):
            rows = {name: row for name, row in one.rows.items() if row.case.params["group"] == kind}
            alike = Grouped(rows=rows)
            rates = [rate for name, row in rows.items() if name != alike.slowest and (rate := row.value("busbw"))]
            slow = rows[alike.slowest].value("busbw") if alike.slowest else None
            if slow is not None and rates and slow < _SLOW_GROUP * median(rates):
                yield f"{alike.slowest}: {row_label(one.first)}"


def _late(rows: Sequence[Row]) -> str:
    """Name the rank that arrives last in more launches than chance makes (binomial), none where launches disagree.

    A launch names the rank that is last, for a tenth of the time or more, in two thirds of the cases where any is.
    """
    named, skews = dict[int, list[int]](), dict[int, list[float]]()
    known = [(row, one, one.arrival) for row in rows for one in row.measured if one.arrival]
    launches, size = {one.launch for _, one, _ in known}, max((row.world.size for row, _, _ in known), default=1)
    for row, one, arrival in known:
        skew, time = ((metric and metric.value) or 0.0 for metric in map(one.metrics.get, ("skew", row.headline)))
        is_far = (arrival.share or 0.0) > _LATE_SHARE and skew > _LATE_OF_TIME * time > 0
        if arrival.late_rank is not None and is_far:
            named.setdefault(one.launch, []).append(arrival.late_rank)
            skews.setdefault(arrival.late_rank, []).append(skew)
    votes = Counter(rank for of in named.values() for rank, n in Counter(of).most_common(1) if 3 * n >= 2 * len(of))
    for rank, count in votes.most_common(1):
        others = range(count, len(launches) + 1)
        chance = sum(math.comb(len(launches), k) * (size - 1) ** (len(launches) - k) for k in others)
        if size * chance / size ** len(launches) <= _BY_CHANCE:
            least = cells.duration(median(skews[rank]))
            return f"Rank {rank} arrives last in {count} of {len(launches)} launches, by {least} (median of cases)."
    return ""


# what a study holds, for communication (True), steps (False), or both (None)
_STUDIES: tuple[tuple[bool | None, str], ...] = (
    (None, "fits_and_rows.py (intervals between launches, noise, fits)"),
    (True, "launch_coverage.py (the interval within a launch)"),
    (True, "data_coding.py (which wrong results show)"),
    (False, "explanations.py (ect and other differences)"),
    (False, "parity.py (which wrong gradients show)"),
)


def _footnotes(run: Run, summary: Summary) -> tuple[str, ...]:
    plan = run.info.plan
    shown = [row for row in summary.rows if row.metrics]
    sentences = []
    if any(row.is_communication for row in shown):
        told = "GB/s is 1e9 bytes per second; 64K is 65536 bytes"
        sentences.append(f"Sizes and bus bandwidth follow nccl-tests; {told}.")
    headlines = (row.metrics.get(row.headline) for row in shown)
    methods = Counter(metric.method for metric in headlines if metric and metric.method)
    # the number of iterations differs from row to row and has a column, that of visits is what there was time for
    kinds = dict.fromkeys(re.sub(r"\d+ (?=iterations|visits)", "", method) for method, _ in methods.most_common())
    sentences += [*(f"Times: {kind}." for kind in kinds), *(["[low, high] is a 95 % interval."] if kinds else [])]
    if any(calls_of(row) is not None for row in shown):
        sentences.append(
            "Predicted comm: each collective of one step as long as this run's blocking fit of that operation on as "
            "many ranks says, one after another and with nothing beside it; unknown where the run has no such fit."
        )
    if broken_down(shown):
        is_pipelined = any(row.value("non_pipeline_time") is not None for row in shown)
        outside = " + non-pipeline (such as the update)" if is_pipelined else ""
        sentences.append(
            f"Where the time went: compute + exposed communication + copy + idle{outside} = the wall time of a traced "
            "step; the residual is what they leave of it, and tracing what that step takes longer than a timed one. "
            "A difference, such as ect, is the mean of turns in pairs: without an interval, or with one that holds "
            "zero, it is not told from noise."
        )
    asked = {kind: any(row.is_communication == kind for row in shown) for kind in (True, False)}
    studies = [told for kind, told in _STUDIES if (any(asked.values()) if kind is None else asked[kind])]
    if studies:
        sentences.append(
            f"How these methods do under simulated noise and faults, in tests/studies: {', '.join(studies)}."
        )
    if plan.launches == 1 and shown:
        sentences.append(
            f"One launch: intervals and noise are {WITHIN_LAUNCH}, not between launches; a comparison needs five."
        )
    by_case = Counter(record.case.id for record in run.records if record.reason == LEFT_OUT)
    left_out = [
        f"{launches} of {plan.launches} launches of {cases} case{'s' * (cases != 1)}"
        for launches, cases in Counter(by_case.values()).items()
    ]
    if left_out:
        budget = format_duration(plan.budget_seconds)
        sentences.append(f"Left out when the budget of {budget} was spent: {', '.join(left_out)}.")
    sentences += [f"Note (all cases): {note}" for note in plan.notes]
    counts = Counter(note for row in summary.rows for note in row.notes if note not in plan.notes)
    return (*sentences, *(f"Note ({count} of {len(summary.rows)} cases): {note}" for note, count in counts.items()))
