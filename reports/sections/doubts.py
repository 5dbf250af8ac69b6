"""What stands out of a run though nothing failed: who is slow, late, noisy, or not as theory expects. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.launch.control_channel import LEFT_OUT
from bench.results.runs import Run
from bench.results.stats import median
from bench.text import format_duration
from reports import cells
from reports.analysis.findings import Findings
from reports.analysis.interference import Pairs, contrasts
from reports.analysis.labels import short_labels
from reports.analysis.rank_hosts import Nodes
from reports.analysis.step_parts import broken_down, calls_of, worst_ratio
from reports.analysis.summary import Row, Summary, Verdict
from reports.sections.communication_section import Grouped, grouped, late_label

_MOST_NAMED = 6
_SLOW_LINK, _SLOW_GROUP = 0.7, 0.9
_LATE_SHARE, _LATE_OF_TIME = 0.5, 0.1
_OFF_RATIO = 0.01


def doubts(found: Findings) -> tuple[str, ...]:
    """Return a sentence for each kind of thing that a reader should look at first."""
    name = _namer(found)
    sentences = (
        _named("Very noisy, the interquartile range over 40 % of the median", _very_noisy(found.shown, name)),
        *(sentence for matrix in found.matrices for sentence in _slow_links(matrix, found.nodes)),
        _named("Slower than the other groups by more than a tenth", _slow_groups(found)),
        _named("Slower beside others, by more than the interval", _slowed(found)),
        _named("One rank comes last in most iterations, for a tenth of the time or more", _late(found.shown, name)),
        _named("Sizes that the fit does not explain", _off_curve(found)),
        _named("Bytes sent are not those expected", _off_bytes(found.steps, name)),
    )
    return tuple(sentence for sentence in sentences if sentence)


def _namer(found: Findings) -> dict[str, str]:
    """Return what to call each row, by case id."""
    return {
        **{row.case.id: late_label(row) for row in found.shown if row.is_communication},
        **short_labels(found.steps),
    }


def _named(what: str, names: Iterable[str]) -> str:
    told = list(names)
    more = f" and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return f"{what}: {'; '.join(told[:_MOST_NAMED])}{more}." if told else ""


def _very_noisy(rows: Sequence[Row], name: dict[str, str]) -> list[str]:
    return [name[row.case.id] for row in rows if row.grade == "very noisy"]


def _slow_links(matrix: Pairs, nodes: Nodes | None) -> Iterable[str]:
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


def _slow_groups(found: Findings) -> Iterable[str]:
    """Hold each group against those of its kind: one across nodes has other links than one within."""
    for one in grouped(found.communication):
        for kind in dict.fromkeys(row.case.params["group"] for row in one.rows.values()):
            rows = {name: row for name, row in one.rows.items() if row.case.params["group"] == kind}
            alike = Grouped(first=one.first, rows=rows)
            rates = [rate for name, row in rows.items() if name != alike.slowest and (rate := row.value("busbw"))]
            slow = rows[alike.slowest].value("busbw") if alike.slowest else None
            if slow is not None and rates and slow < _SLOW_GROUP * median(rates):
                yield f"{alike.slowest}: {late_label(one.first)}"


def _slowed(found: Findings) -> Iterable[str]:
    for _, prefix, rows in contrasts(found.shown):
        for one in rows:
            for load, factor in one.factors.items():
                if factor.low is not None and factor.low > 1:
                    yield f"{late_label(one.base)} {prefix}{load} x {cells.significant(factor.value)}"


def _late(rows: Sequence[Row], name: dict[str, str]) -> Iterable[str]:
    for row in rows:
        arrival = next((record.arrival for record in row.measured if record.arrival), None)
        skew, seconds = row.value("skew"), row.value(row.headline)
        if arrival is None or arrival.late_rank is None or arrival.share is None or not skew or not seconds:
            continue
        if arrival.share > _LATE_SHARE and skew > _LATE_OF_TIME * seconds:
            yield f"rank {arrival.late_rank}, by {cells.duration(skew)}: {name[row.case.id]}"


def _off_curve(found: Findings) -> list[str]:
    return [
        f"{late_label(curve.rows[0])} at {cells.size(size)}, {100 * error:+.0f} %"
        for curve in found.curves
        for size, error in curve.fit.off_curve
    ]


def _off_bytes(steps: Sequence[Row], name: dict[str, str]) -> list[str]:
    worst = ((row, worst_ratio(row)) for row in steps)
    return [
        f"{name[row.case.id]} on {ratio[0]} x {ratio[1]:.3f}"
        for row, ratio in worst
        if ratio is not None and abs(ratio[1] - 1) > _OFF_RATIO
    ]


PLAIN = {0: "fine", 1: "a result is wrong", 4: "something did not run"}


def heading(run: Run, summary: Summary) -> str:
    """Return what was run, where and on what, in a line."""
    plan = run.info.plan
    ranks = f"{plan.nproc} rank{'s' * (plan.nproc != 1)}"
    nodes = sorted({row.world.nodes for row in summary.rows})
    where = f" on {'/'.join(map(str, nodes))} node{'s' * (nodes != [1])}" if nodes else ""
    took = format_duration(sum(record.seconds for record in run.records))
    parts = [
        f"preset {plan.preset}: {ranks}{where}, {plan.backend}, {plan.device}",
        f"{plan.launches} launch{'es' * (plan.launches != 1)}",
        f"host {run.info.host}",
        *_machine(run.info.environment or {}),
        f"started {run.info.started}",
        f"measuring took {took}",
    ]
    return "; ".join(parts)


def _machine(environment: Mapping[str, Any]) -> list[str]:
    """Return processor, accelerator and torch, each where it is the same for all ranks and known."""
    found = []
    for group, name, word in (("host", "cpu_model", ""), ("torch", "gpu", ""), ("torch", "version", "torch ")):
        values = environment.get(group)
        if isinstance(values, Mapping) and values.get(name):
            found.append(f"{word}{values[name]}")
    return found


def verdict_words(verdict: Verdict) -> str:
    """Return the verdict with its counts: ``fine: 42 ok, 3 skipped``."""
    parts = [f"{count} {status}" for status, count in verdict.counts.items() if status != "skipped"]
    if skipped := verdict.skipped + verdict.counts.get("skipped", 0):
        parts.append(f"{skipped} skipped")
    if verdict.missing:
        parts.append(f"{verdict.missing} of {verdict.planned} measurements without a record")
    return f"{PLAIN[verdict.code]}: {', '.join(parts) or 'nothing was planned'}"


def footnotes(run: Run, summary: Summary) -> tuple[str, ...]:
    """Return what a reader of the tables must know, each a sentence."""
    shown = [row for row in summary.rows if row.metrics]
    sentences = [*_conventions(shown), *_intervals(shown), *_steps(shown)]
    launches = run.info.plan.launches
    if launches == 1 and shown:
        sentences.append("One launch: intervals say nothing of what differs between launches; a comparison needs five.")
    sentences += _left_out(run)
    return (*sentences, *(f"Note (all cases): {note}" for note in run.info.plan.notes), *_notes(run, summary))


def _conventions(rows: list[Row]) -> list[str]:
    if not any(row.is_communication for row in rows):
        return []
    return ["Sizes and bus bandwidth follow nccl-tests; GB/s is 1e9 bytes per second; 64K is 65536 bytes."]


def _intervals(rows: list[Row]) -> list[str]:
    """Return one sentence for each way in which headline numbers were found."""
    methods = Counter(
        metric.method for row in rows if (metric := row.metrics.get(row.headline)) is not None and metric.method
    )
    # the number of iterations differs from row to row and has a column
    kinds = dict.fromkeys(re.sub(r"\d+ (?=iterations)", "", method) for method, _ in methods.most_common())
    brackets = ["[low, high] is a 95 % interval."] if kinds else []
    return [*(f"Times: {kind}." for kind in kinds), *brackets]


def _steps(rows: list[Row]) -> list[str]:
    """Return how a step's communication is predicted, and what its parts add up to, where a row speaks of them."""
    sentences = []
    if any(calls_of(row) is not None for row in rows):
        sentences.append(
            "Predicted comm: each collective of one step as long as this run's blocking fit of that operation on as "
            "many ranks says, one after another and with nothing beside it; unknown where the run has no such fit."
        )
    if broken_down(rows):
        is_pipelined = any(row.value("non_pipeline_time") is not None for row in rows)
        outside = " + non-pipeline (such as the update)" if is_pipelined else ""
        sentences.append(
            f"Where the time went: compute + exposed communication + copy + idle{outside} = the wall time of a traced "
            "step; the residual is what they leave of it, and tracing what that step takes longer than a timed one."
        )
    return sentences


def _left_out(run: Run) -> list[str]:
    """Return how many launches of how many cases the budget left out."""
    by_case = Counter(record.case.id for record in run.records if record.reason == LEFT_OUT)
    counts = Counter(by_case.values())
    parts = [
        f"{launches} of {run.info.plan.launches} launches of {cases} case{'s' * (cases != 1)}"
        for launches, cases in counts.items()
    ]
    budget = format_duration(run.info.plan.budget_seconds)
    return [f"Left out when the budget of {budget} was spent: {', '.join(parts)}."] if parts else []


def _notes(run: Run, summary: Summary) -> list[str]:
    """Return what some rows cannot claim, and how many."""
    counts = Counter(note for row in summary.rows for note in row.notes if note not in run.info.plan.notes)
    return [f"Note ({count} of {len(summary.rows)} cases): {note}" for note, count in counts.items()]
