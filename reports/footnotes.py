"""The sentences that belong to a run's tables: what was run, the verdict, conventions, and what cannot be claimed."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.launch.control_channel import LEFT_OUT
from bench.results.runs import Run
from bench.text import format_duration
from reports.breakdown import broken_down
from reports.predict import calls_of
from reports.summary import Row, Summary, Verdict

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
