"""The regression check of a run against the runs of a branch in the history.

The newest run of a branch is checked for steps: which series became slower, since when. A run that is not part of the
history, such as a pull request's, is compared with the newest level of the branch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import numpy as np

from parbench.bench.results.formatting import UNKNOWN, format_seconds
from parbench.bench.text import UserError
from parbench.reports.compare.counts import CountChange, ExactCounts, compare_counts
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.compare.thresholds import Threshold
from parbench.reports.compare.verdicts import (
    WORST_FIRST,
    VerdictName,
    combine_verdicts,
    count_verdicts,
)
from parbench.reports.history.database import History, Line, Outcome, open_history
from parbench.reports.history.entries import About, read_entry
from parbench.reports.history.levels import Judgement, Shift, StepRule, judge_series

NOT_JUDGED = Judgement()
MISSED_RUNS = (
    3  # A case is missing if one of so many runs before, which share a case with this run, has it.
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on a series, with its times in the window and the environment changes at a step."""

    series: SeriesIdentity
    word: VerdictName = "SAME"
    reason: str = ""
    times: tuple[tuple[Line, float], ...] = ()
    judgement: Judgement = NOT_JUDGED
    differs: tuple[str, ...] = ()
    measured: Threshold | None = None

    @property
    def shift(self) -> Shift | None:
        return self.judgement.shift

    @property
    def change(self) -> float | None:
        return self.shift.change if self.shift else self.judgement.rise

    @property
    def since(self) -> str | None:
        return self.times[self.shift.at][0].id if self.shift else None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The exact counts of a series compared with runs before: their number, each change and the run that began it."""

    series: SeriesIdentity
    count: int
    changes: tuple[tuple[CountChange, str], ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings of a run, the worst first; ``kept`` is true where the run is part of the branch's history."""

    line: Line
    rule: StepRule
    findings: tuple[Finding, ...]
    counted: tuple[Counts, ...] = ()
    kept: bool = True

    @property
    def counts(self) -> Mapping[VerdictName, int]:
        return count_verdicts(
            [*(one.word for one in self.findings), *(one.verdict for _, one, _ in self.changes)]
        )

    @property
    def changes(self) -> list[tuple[SeriesIdentity, CountChange, str]]:
        """Every count that differs from before, with its series and the run since which it does."""
        return [
            (one.series, change, since) for one in self.counted for change, since in one.changes
        ]

    def code(self, *, fail_on_unknown: bool = False) -> int:
        return combine_verdicts(self.counts, fail_on_unknown=fail_on_unknown)


def newest(history: History, branch: str) -> Line:
    """Return the newest run of a branch; ``UserError`` if it has none."""
    if lines := history.runs(branch):
        return lines[-1]
    branches = sorted({line.branch for line in history.runs()})
    raise UserError(
        f"the history has no run of branch {branch!r}: it has {', '.join(branches) or 'no run at all'}"
    )


def check_folder(
    file: Path,
    path: Path,
    branch: str,
    rule: StepRule,
    floors: Mapping[str, Threshold] | None = None,
) -> Check:
    """Compare the run in a folder with a branch's runs; the history file, if there is one, is not changed.

    One run cannot show that a level lasts, so every significant rise above the newest level is SLOWER.
    """
    exists = file.exists()
    with (
        open_history(file if exists else Path(":memory:"), create=not exists) as kept,
        kept.copied() as history,
    ):
        entry = read_entry(path, About(branch=branch), frozenset({"branch"}))
        history.add(entry)
        return check(history, history.line(entry.run.id), rule, floors, kept=False)


def check(
    history: History,
    line: Line,
    rule: StepRule,
    floors: Mapping[str, Threshold] | None = None,
    *,
    kept: bool = True,
) -> Check:
    """Check a run against the runs of its branch before it.

    A series counts from its newest annotation on. Counts are compared with the first run of these, or with the last if
    ``line`` is not kept. ``floors`` are measured thresholds by series' fingerprints, which raise the rule's.
    """
    before = [
        run
        for run in history.runs(line.branch)
        if (run.started, run.number) <= (line.started, line.number)
    ]
    annotations = [
        note
        for note in history.annotations()
        if note.branch == line.branch and note.started <= line.started
    ]
    series = history.series(line.number)
    outcomes = history.outcomes(line.number)
    window = slice(-rule.window - (not kept), None)
    previous, missing = _find_missing(history, line, before, series, rule.window)
    findings, counted = dict[int, Finding](), list[Counts]()
    for number, identity in series.items():
        start = max(
            (note.started for note in annotations if fnmatchcase(identity.case.label, note.series)),
            default="",
        )
        since = [run for run in before if run.started >= start]
        counted += _compare_counts(
            identity, history.counted(number, since[window]), line, kept=kept
        )
        measured = (floors or {}).get(identity.fingerprint)
        findings[number] = Finding(
            series=identity, times=history.times(number, since)[window], measured=measured
        )
    findings |= _judge(findings, line, rule, kept=kept)
    checked = []
    for number, finding in findings.items():
        word, reason = _verdict(finding, outcomes[number], previous, rule.min_values, kept=kept)
        differs = _environment_changes(history, number, finding)
        checked.append(replace(finding, word=word, reason=reason, differs=differs))
    ordered = sorted([*checked, *missing], key=lambda finding: WORST_FIRST.index(finding.word))
    return Check(line=line, rule=rule, findings=tuple(ordered), counted=tuple(counted), kept=kept)


def _judge(
    findings: Mapping[int, Finding], line: Line, rule: StepRule, *, kept: bool
) -> dict[int, Finding]:
    """Return the findings that have a time in this run and enough runs, with the judgement of all of them at once."""
    judged = {
        number: finding
        for number, finding in findings.items()
        if finding.times
        and finding.times[-1][0] == line
        and len(finding.times) - (not kept) >= rule.min_values
    }
    logs = [np.log([seconds for _, seconds in finding.times]) for finding in judged.values()]
    floors = [
        finding.measured.min_effect if finding.measured else 0.0 for finding in judged.values()
    ]
    rules = [replace(rule, floor=max(rule.floor, floor)) for floor in floors]
    judgements = judge_series(logs, rules, newest_is_candidate=not kept)
    return {
        number: replace(finding, judgement=judgement)
        for (number, finding), judgement in zip(judged.items(), judgements, strict=True)
    }


def _environment_changes(history: History, number: int, finding: Finding) -> tuple[str, ...]:
    """Return what changed around a step, between the last run before it and its first run."""
    shift = finding.shift
    if shift is None or not shift.at:
        return ()
    lines = [line for line, _ in finding.times[shift.at - 1 : shift.at + 1]]
    before, after = (
        {**history.beside(number, line.number), "commit": line.commit or UNKNOWN} for line in lines
    )
    return _changes(before, after)


def _find_missing(
    history: History,
    line: Line,
    before: Sequence[Line],
    series: Mapping[int, SeriesIdentity],
    window: int,
) -> tuple[tuple[SeriesIdentity, ...], list[Finding]]:
    """Return the series of the last run of this kind, and those of the last few that this one did not measure."""
    measured = {*map(_asked, series.values())}
    same_preset = [run for run in before if run.preset == line.preset and run.number != line.number]
    # The series of the last few runs of this kind, the newest first. A run without any case is of every kind.
    each = (tuple(history.series(run.number).values()) for run in reversed(same_preset[-window:]))
    last = list(
        islice(
            (run for run in each if not measured or measured & set(map(_asked, run))), MISSED_RUNS
        )
    )
    previous: tuple[SeriesIdentity, ...] = ()
    if last:
        previous = last[0]
    elif same_preset:
        previous = tuple(history.series(same_preset[-1].number).values())
    runs = f"one of the {len(last)} runs before" if len(last) > 1 else "the run before"
    reason = f"{runs} that share a case with this one has it, and this one has not"
    vanished = {
        _asked(one): one for run in reversed(last) for one in run if _asked(one) not in measured
    }
    return previous, [
        Finding(series=one, word="MISSING", reason=reason) for one in vanished.values()
    ]


def _compare_counts(
    series: SeriesIdentity, runs: Sequence[tuple[Line, ExactCounts]], line: Line, *, kept: bool
) -> list[Counts]:
    """Return the changes of a series' counts, nothing where this run or those before have none."""
    if len(runs) < 2 or runs[-1][0] != line:
        return []
    *before, (_, new) = runs
    found = compare_counts(before[0 if kept else -1][1], new)

    def find_start(path: str) -> str:
        first = line
        for earlier, facts in reversed(before if kept else ()):
            if path in [change.path for change in compare_counts(facts, new).changes]:
                break
            first = earlier
        return first.id

    changes = tuple((change, find_start(change.path)) for change in found.changes)
    return (
        [Counts(series=series, count=found.num_compared, changes=changes)]
        if found.num_compared or changes
        else []
    )


def _asked(series: SeriesIdentity) -> tuple[object, ...]:
    return (series.case.id, series.world.size, series.world.backend, series.world.device)


def _verdict(
    finding: Finding,
    outcome: Outcome,
    previous: Sequence[SeriesIdentity],
    needed: int,
    *,
    kept: bool,
) -> tuple[VerdictName, str]:
    status, reason = outcome
    if status in ("wrong", "failed", "hang"):
        return "WRONG" if status == "wrong" else "FAILED", reason or status
    series, count = finding.series, len(finding.times) - (not kept)
    if count < needed:
        few = f"{count} of the {needed} runs that are needed"
        same_case = [other for other in previous if other.case.id == series.case.id]
        if not same_case or series.fingerprint in [other.fingerprint for other in same_case]:
            return "INSUFFICIENT", few
        differs = ", ".join(_changes(same_case[0].environment, series.environment))
        return "INSUFFICIENT", f"{few}; a new series: {differs or 'another world'}"
    return _describe(finding, kept=kept)


def _describe(finding: Finding, *, kept: bool) -> tuple[VerdictName, str]:
    """Return the verdict that follows from the judgement, with a sentence that gives the numbers."""
    shift, rise, runs = finding.shift, finding.judgement.rise, len(finding.times)
    if shift:
        reach = f"{100 * shift.change:+.1f} % [{100 * shift.low:+.1f}, {100 * shift.high:+.1f}]"
        if shift.slope is not None:
            word: VerdictName = "FASTER" if shift.change < 0 else "DRIFT"
            reason = f"it drifts by {100 * math.expm1(shift.slope):+.2f} % a run, over {runs} runs {reach}"
        else:
            word = "SLOWER" if shift.change > 0 else "FASTER"
            reason = f"for {runs - shift.at} runs its level is {reach} from an earlier one's"
        if finding.judgement.is_significant:
            return word, reason
        if shift.slope is None and rise is None:
            return (
                "AMBIGUOUS",
                f"{reason}: significant for this series, but not among all series of this run",
            )
    if rise is not None:
        before = [seconds for _, seconds in finding.times[:-1]]
        span = f"{format_seconds(min(before))} to {format_seconds(max(before))}"
        reason = (
            f"this run is {100 * rise:+.1f} % from its level, beyond the variation of runs ({span})"
        )
        return "SUSPECT" if kept else "SLOWER", reason
    return "SAME", ""


def _changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    pairs = {
        path: (base.get(path, UNKNOWN), new.get(path, UNKNOWN)) for path in sorted({*base, *new})
    }
    return tuple(f"{path}: {old} -> {now}" for path, (old, now) in pairs.items() if old != now)
