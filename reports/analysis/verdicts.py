"""What is to be known of a run before any number: are results right, is all there, how noisy was it, and is it slower
than it used to be; and what did not go as planned, in words: wrong, hung, failed, skipped, and never measured.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.launch.budget import compute_costs, suggest_budget
from parbench.bench.machine.environment import (
    DISTURBANCES,
    VOLATILE,
    describe_emulation,
    format_cpus,
)
from parbench.bench.results.formatting import format_percent
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import format_duration, pluralize
from parbench.reports.analysis.summary import Row, Summary
from parbench.reports.repetitions import describe_host_disturbance

Level = Literal["good", "doubtful", "bad"]
_NOISY_SHARE = 0.1  # as many noisy cases are in a run that is quiet


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A word, how it stands, what was found in numbers, and what to do where that is not well."""

    word: str
    level: Level
    told: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.told} -> {self.remedy}" if self.remedy else self.told


def verdict_words(run: Run, summary: Summary) -> str:
    return ", ".join(one.word for one in verdicts(run, summary))


def verdicts(run: Run, summary: Summary) -> tuple[Verdict, ...]:
    """Return the verdicts on correctness, completeness and noise; the last two only where anything was measured."""
    measured = [row for row in summary.rows if row.repetitions]
    complete = _completeness(run, summary, measured)
    checked = [row for row in summary.rows if row.status == "wrong" or row.repetitions]
    return (
        *([_correctness(checked)] if checked else []),
        complete,
        *([_noise(run, measured)] if measured else []),
    )


def _correctness(rows: Sequence[Row]) -> Verdict:
    unchecked = sum(row.check.passed is None for row in rows)
    if wrong := sum(row.status == "wrong" for row in rows):
        told = f"{wrong} of {len(rows)} results differ from the reference"
        return Verdict(word="WRONG", level="bad", told=told, remedy="do not use its times")
    told = f"{len(rows) - unchecked} of {len(rows)} results equal the reference"
    word = "UNCHECKED" if unchecked == len(rows) else "CORRECT"
    return Verdict(word=word, level="doubtful" if unchecked else "good", told=told)


def _completeness(run: Run, summary: Summary, measured: Sequence[Row]) -> Verdict:
    plan = run.info.plan
    cases, budget = len(plan.cases), format_duration(plan.budget_seconds)
    broken = Counter(row.status for row in summary.rows if row.status in ("failed", "hang"))
    if broken:
        told = " and ".join(
            f"{count} {'hung' if status == 'hang' else status}" for status, count in broken.items()
        )
        told = f"{told} of {pluralize(cases, 'case')}"
        return Verdict(word="BROKEN", level="bad", told=told, remedy=f"logs in {run.path / 'logs'}")
    if summary.tally.missing:
        told = f"{summary.tally.missing} of {summary.tally.planned} measurements have no record"
        return Verdict(
            word="UNFINISHED", level="bad", told=told, remedy=f"parbench run --resume {run.path}"
        )
    skipped = [row for row in summary.rows if row.status == "skipped"]
    none = sum(all(record.is_out_of_budget for record in row.records) for row in skipped)
    if not measured:
        reasons = [one.reason for one in summary.skipped] + [
            reason for row in skipped for reason in row.reasons
        ]
        told = Counter(reasons).most_common(1)[0][0] if reasons else "the plan has no case"
        if none:
            told = f"the budget of {budget} ended before any case"
        return Verdict(
            word="NOTHING MEASURED",
            level="bad",
            told=told,
            remedy="a larger --budget" if none else "",
        )
    fewer = Counter(
        row.repetitions for row in measured if row.status == "ok" and row.repetitions < row.planned
    )
    unable = len(summary.skipped) + len(skipped) - none
    aside = f"; {pluralize(unable, 'case')} cannot run here" if unable else ""
    if not none and not fewer:
        told = f"{pluralize(len(measured), 'case')}, {pluralize(plan.repetitions, 'repetition')} each{aside}"
        return Verdict(word="COMPLETE", level="good", told=told)
    shares = {0: none, **fewer} if none else fewer
    parts = [
        f"{count} have {repetitions or 'none'} of {plan.repetitions}"
        for repetitions, count in sorted(shares.items())
    ]
    told = f"repetitions are missing: of {pluralize(cases, 'case')} {', '.join(parts)}{aside}"
    level: Level = "bad" if summary.tally.code == 4 else "doubtful"
    made = len({info.repetition for info in run.info.repetitions})
    remedy = f"parbench run --resume {run.path}; --budget {suggest_budget(plan, compute_costs(run), made)} holds all"
    return Verdict(
        word="PARTIAL", level=level, told=f"{told} (the budget was {budget})", remedy=remedy
    )


def noisy_of(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows whose repetitions scatter by more than 15 %, none if they are a tenth of those that know or
    less."""
    known = [row for row in rows if row.variation is not None]
    noisy = tuple(row for row in known if row.noise in ("noisy", "very noisy"))
    return noisy if len(noisy) > _NOISY_SHARE * len(known) else ()


def _noise(run: Run, rows: Sequence[Row]) -> Verdict:
    known = [row for row in rows if row.variation is not None]
    if not known:
        most = max(row.repetitions for row in rows)
        told = f"{pluralize(most, 'repetition')} cannot tell how repetitions differ"
        return Verdict(word="NOISE UNKNOWN", level="doubtful", told=told, remedy="--repetitions 5")
    noisy = noisy_of(rows)
    middle = format_percent(median([row.variation or 0.0 for row in known]))
    if not noisy:
        return Verdict(
            word="QUIET", level="good", told=f"repetitions scatter by {middle} (median of cases)"
        )
    load = (run.info.environment or {}).get(VOLATILE) or {}
    causes = load.get(DISTURBANCES) or {}
    why = [topic if what == "yes" else f"{topic} {what}" for topic, what in causes.items()]
    why += filter(None, [describe_host_disturbance(run)])
    told = f"repetitions scatter by {middle}, by over 15 % in {len(noisy)} of {pluralize(len(known), 'case')}"
    told += f": {', '.join(why)}" * bool(why)
    return Verdict(word="NOISY", level="doubtful", told=told, remedy="parbench doctor")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case (or several missing ones), what became of it and why; ``row`` holds the evidence if there is any."""

    case: str
    status: str
    repetitions: str
    reason: str
    row: Row | None = None


def bad_rows(summary: Summary) -> tuple[Problem, ...]:
    return tuple(_bad(row) for row in summary.rows if row.status not in ("ok", "skipped"))


def not_measured(summary: Summary) -> tuple[Problem, ...]:
    """Return what was skipped by the plan or by a repetition, or is without a record: nearly all, so one line a
    name."""
    plan, reason = summary.skipped, "no record: the run ended before"
    found = [
        Problem(case=one.case.label, status="skipped", repetitions="all", reason=one.reason)
        for one in plan
    ]
    found += [_bad(row) for row in summary.rows if row.status == "skipped"]
    for name in dict.fromkeys(one.case.name for one in summary.missing):
        group = [one for one in summary.missing if one.case.name == name]
        case = group[0].case.label if len(group) == 1 else f"{name} ({len(group)} cases)"
        repetitions = f"{sum(one.repetitions for one in group)}/{sum(one.planned for one in group)}"
        found.append(
            Problem(case=case, status="not measured", repetitions=repetitions, reason=reason)
        )
    return tuple(found)


def _bad(row: Row) -> Problem:
    repetitions = f"{sum(record.status == row.status for record in row.records)}/{row.planned}"
    reason = "; ".join(row.reasons) or "no reason was recorded"
    return Problem(
        case=row.case.label, status=row.status, repetitions=repetitions, reason=reason, row=row
    )


def warnings_of(run: Run) -> tuple[str, ...]:
    """Return what of a run's records does not count: lines that are none, and a last one that was cut short."""
    try:
        with (run.path / "records.jsonl").open("rb") as file:
            file.seek(-1, os.SEEK_END)
            is_whole = file.read(1) == b"\n"
    except OSError:  # there is none, or nothing in it
        is_whole = True
    again = f"parbench run --resume {run.path} measures"
    told = "is being written, or was cut short by a kill, and does not count"
    last = f"The last line of records.jsonl {told}; {again} its case again."
    lines = pluralize(len(run.damaged), "line")
    found = f"{lines} of records.jsonl cannot be read and do not count; {again} their cases again. The first: "
    return (*([f"{found}{run.damaged[0]}."] if run.damaged else []), *(() if is_whole else (last,)))


def emulations(run: Run) -> tuple[str, ...]:
    """Return a sentence for each emulation, with the number of its records unless all are emulated."""
    total = len(run.records)
    counts = Counter(record.emulation for record in run.records if record.emulation)
    if run.info.plan.emulation:
        counts[run.info.plan.emulation] = total
    sentences = []
    for emulation, count in counts.items():
        suffix = "" if count >= total else f" ({count} of {total} records)"
        sentences.append(describe_emulation(emulation) + suffix)
    return tuple(sentences)


def other_claims(run: Run) -> tuple[str, ...]:
    return run.info.plan.notes


def told_of_runs(runs: Sequence[Run], notes: Callable[[Run], tuple[str, ...]]) -> tuple[str, ...]:
    """Return each note of several runs once, with the runs that it holds for, by their numbers from 1."""
    numbers: dict[str, list[int]] = {}
    for number, run in enumerate(runs, start=1):
        for note in notes(run):
            numbers.setdefault(note, []).append(number)
    return tuple(
        "What no run can show: " + note
        if 1 < len(runs) == len(of)
        else f"What run{'s' * (len(of) != 1)} {format_cpus(of)} cannot show: {note}"
        for note, of in numbers.items()
    )
