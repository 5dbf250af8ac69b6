"""What is to be known of a run before any number: are results right, is all there, how noisy was it, and is it slower
than it used to be. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.launch.budget import budget_of_all
from bench.launch.control_channel import LEFT_OUT
from bench.machine.environment import DISTURBANCES, VOLATILE
from bench.results.runs import Run
from bench.results.stats import median
from bench.text import counted, format_duration
from reports import cells
from reports.analysis.launches import disturbed_words
from reports.analysis.summary import Row, Summary

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
    measured = [row for row in summary.rows if row.launches]
    complete = _completeness(run, summary, measured)
    checked = [row for row in summary.rows if row.status == "wrong" or row.launches]
    return (*([_correctness(checked)] if checked else []), complete, *([_noise(run, measured)] if measured else []))


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
        told = " and ".join(f"{count} {'hung' if status == 'hang' else status}" for status, count in broken.items())
        told = f"{told} of {counted(cases, 'case')}"
        return Verdict(word="BROKEN", level="bad", told=told, remedy=f"logs in {run.path / 'logs'}")
    if summary.tally.missing:
        told = f"{summary.tally.missing} of {summary.tally.planned} measurements have no record"
        return Verdict(word="UNFINISHED", level="bad", told=told, remedy=f"parbench run --resume {run.path}")
    skipped = [row for row in summary.rows if row.status == "skipped"]
    none = sum(set(row.reasons) == {LEFT_OUT} for row in skipped)
    if not measured:
        reasons = [one.reason for one in summary.skipped] + [reason for row in skipped for reason in row.reasons]
        told = Counter(reasons).most_common(1)[0][0] if reasons else "the plan has no case"
        if none:
            told = f"the budget of {budget} ended before any case"
        return Verdict(word="NOTHING MEASURED", level="bad", told=told, remedy="a larger --budget" if none else "")
    fewer = Counter(row.launches for row in measured if row.status == "ok" and row.launches < row.planned)
    unable = len(summary.skipped) + len(skipped) - none
    aside = f"; {counted(unable, 'case')} cannot run here" if unable else ""
    if not none and not fewer:
        told = f"{counted(len(measured), 'case')}, {plan.launches} launch{'es' * (plan.launches != 1)} each{aside}"
        return Verdict(word="COMPLETE", level="good", told=told)
    shares = {0: none, **fewer} if none else fewer
    parts = [f"{count} have {launches or 'none'} of {plan.launches}" for launches, count in sorted(shares.items())]
    told = f"launches are missing: of {counted(cases, 'case')} {', '.join(parts)}{aside}"
    level: Level = "bad" if summary.tally.code == 4 else "doubtful"
    remedy = f"parbench run --resume {run.path}; --budget {budget_of_all(run)} holds all"
    return Verdict(word="PARTIAL", level=level, told=f"{told} (the budget was {budget})", remedy=remedy)


def _noise(run: Run, rows: Sequence[Row]) -> Verdict:
    known = [row for row in rows if row.scatter is not None]
    if not known:
        most = max(row.launches for row in rows)
        told = f"{counted(most, 'launch')} cannot tell how launches differ"
        return Verdict(word="NOISE UNKNOWN", level="doubtful", told=told, remedy="--launches 5")
    noisy = [row for row in known if row.grade in ("noisy", "very noisy")]
    middle = cells.percent(median([row.scatter or 0.0 for row in known]))
    if len(noisy) <= _NOISY_SHARE * len(known):
        return Verdict(word="QUIET", level="good", told=f"launches scatter by {middle} (median of cases)")
    load = (run.info.environment or {}).get(VOLATILE)
    causes = load.get(DISTURBANCES) if isinstance(load, Mapping) else None
    causes = causes if isinstance(causes, Mapping) else {}
    why = [topic if what == "yes" else f"{topic} {what}" for topic, what in causes.items()]
    why += filter(None, [disturbed_words(run)])
    told = f"launches scatter by {middle}, by over 15 % in {len(noisy)} of {counted(len(known), 'case')}"
    told += f": {', '.join(why)}" * bool(why)
    return Verdict(word="NOISY", level="doubtful", told=told, remedy="parbench doctor")
