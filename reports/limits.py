"""Whether a run keeps budgets: each that it does not keep is a sentence, and what is unknown is never kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.formatting import (
    format_difference,
    format_measurement,
    format_percent,
    make_formatter,
)
from parbench.bench.results.limits import MetricLimit, read_limits, resolve_metric
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.results.runs import Run, load_run, require_complete
from parbench.bench.text import pluralize
from parbench.reports.analysis.fits import COPY, Ceiling, ceiling_of
from parbench.reports.analysis.steps import exposed_seconds, share_of_traced
from parbench.reports.analysis.summary import Row, summarize

Standing = Literal["OVER", "NOT RUN", "UNKNOWN", "KEPT"]
CODES: Mapping[Standing, ExitCode] = {
    "OVER": ExitCode.BAD,
    "NOT RUN": ExitCode.DID_NOT_RUN,
    "UNKNOWN": ExitCode.UNDECIDED,
    "KEPT": ExitCode.OK,
}
"""The standings of a budget from the worst, with their exit codes."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How a budget stands over all cases that it fits, and the sentence that says so."""

    budget: MetricLimit
    word: Standing
    told: str


def judge_run(path: Path, file: Path, code: int) -> int:
    """Print on standard error how a run's folder keeps a file's budgets; return the worst code, ``code`` among them."""
    run = require_complete(load_run(path))
    found = judge(run, read_limits(file, run.info.plan.cases, run.info.plan.skipped))
    for sentence in sentences(found):
        click.echo(sentence, err=True)
    return exit_code(found, code)


def judge(run: Run, budgets: Sequence[MetricLimit]) -> tuple[Judged, ...]:
    """Return how a run keeps each budget, over all its cases that fit."""
    rows = {row.case.id: row for row in summarize(run).rows}
    ceiling = ceiling_of(run, [*rows.values()])
    known = {case_id: _known(row, ceiling) for case_id, row in rows.items()}
    cases = {case.id: case for case in (*run.info.plan.cases, *(row.case for row in rows.values()))}
    found = []
    for one in budgets:
        fitting = [case for case in cases.values() if one.applies_to(case)]
        each = [
            _of_case(one, case.label, rows.get(case.id), known.get(case.id, {})) for case in fitting
        ]
        found.append(_together(one, [standing for standings in each for standing in standings]))
    return tuple(found)


def exit_code(found: Sequence[Judged], code: int = 0) -> int:
    """Return the exit code of the budgets and of what else was found, which is ``code``."""
    return combine_exit_codes([code, *(CODES[one.word] for one in found)])


def sentences(found: Sequence[Judged]) -> tuple[str, ...]:
    """Return a sentence for each budget that is not kept, or one that says that all are."""
    bad = tuple(one.told for one in found if one.word != "KEPT")
    return bad or (
        (f"Budgets: {'it is' if len(found) == 1 else f'all {len(found)} are'} kept.",)
        if found
        else ()
    )


@dataclass(frozen=True, kw_only=True)
class _Standing:
    word: Standing
    case: str
    told: str
    distance: float = 0.0


def _of_case(
    budget: MetricLimit, label: str, row: Row | None, known: Mapping[str, MetricValue]
) -> list[_Standing]:
    if row is None or not row.repetitions or not row.metrics:
        why = "; ".join(row.reasons) or row.status if row else "it has no record"
        return [_Standing(word="NOT RUN", case=label, told=f"did not run: {why}")]
    names = (
        [budget.metric]
        if budget.metric in known
        else [n for n in known if n.startswith(f"{budget.metric}.")]
    )
    if not names:
        return [_Standing(word="UNKNOWN", case=label, told="is not known of it")]
    found = []
    for name in names:
        of = "" if name == budget.metric else f" on {name.removeprefix(budget.metric + '.')}"
        metric = known[name]
        if metric.value is None:
            why = f" ({metric.method})" if metric.method else ""
            found.append(_Standing(word="UNKNOWN", case=label, told=f"is unknown{of}{why}"))
            continue
        word: Standing = "KEPT" if budget.is_met(metric.value) else "OVER"
        distance = abs(metric.value - budget.number)
        found.append(
            _Standing(
                word=word, case=label, told=f"is {_shown(name, metric)}{of}", distance=distance
            )
        )
    return found


def _together(budget: MetricLimit, each: Sequence[_Standing]) -> Judged:
    """Return the worst of all cases; of several as bad the one that is farthest from what it has to be."""
    first = min(each, key=lambda one: ([*CODES].index(one.word), -one.distance))
    alike = {one.case for one in each if one.word == first.word}
    of = len({one.case for one in each})
    count = f"; so do {pluralize(len(alike), 'case')} of {of}" if len(alike) > 1 else ""
    word = first.word
    cannot = ", which cannot be told" if word in ("UNKNOWN", "NOT RUN") else ""
    told = f"Budget: {budget.metric} of {first.case} has to be {budget.text}{cannot}: it {first.told}{count}."
    return Judged(budget=budget, word=word, told=told)


def _shown(name: str, metric: MetricValue) -> str:
    declared_as = resolve_metric(name)
    if metric.unit or declared_as is None:
        return format_measurement(metric)
    return format_difference(
        metric,
        make_formatter(declared_as.number_format) if declared_as.number_format else format_percent,
    )


def _known(row: Row, ceiling: Ceiling | None) -> dict[str, MetricValue]:
    """Return a row's metrics, and those that only a whole run tells."""
    exposed = share_of_traced(row, exposed_seconds(row))
    bus, of_copy = row.value("busbw"), ceiling is not None and ceiling.name == COPY
    found = {
        "exposed_fraction": exposed,
        "busbw_of_copy": bus / ceiling.bytes_per_second
        if bus is not None and ceiling and of_copy
        else None,
    }
    return {
        **row.metrics,
        **{name: make_value(name, number) for name, number in found.items() if number is not None},
    }
