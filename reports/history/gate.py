"""The gates: each series of a run against what the history tells of it.

Of a branch's newest run it is told since when a series is slower; of a run that is not kept, as a pull request's,
whether it is slower than the branch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import numpy as np

from parbench.bench.text import UserError
from parbench.reports import cells
from parbench.reports.analysis.frame import group_by
from parbench.reports.history.database import History, Line, Outcome, open_history
from parbench.reports.history.entries import About, read_entry
from parbench.reports.history.levels import Shift, StepRule
from parbench.reports.history.nights import Night, Nights, judge_nights
from parbench.reports.regression.compare import WORST_FIRST, Word, counts_of, exit_code
from parbench.reports.regression.counted import CountChange, Facts, held
from parbench.reports.regression.environment import Identity
from parbench.reports.regression.noise_floor import Floor

QUIET = Night()
MISSED_RUNS = 3  # a case is missing as long as one of so many before, of those that share a case with this run, has it


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the gate says of a series, or of ``all_of`` together: its window, what was beside it around a step."""

    series: Identity | None
    all_of: int = 0
    word: Word = "SAME"
    reason: str = ""
    times: tuple[tuple[Line, float], ...] = ()
    night: Night = QUIET
    differs: tuple[str, ...] = ()
    measured: Floor | None = None

    @property
    def shift(self) -> Shift | None:
        return self.night.shift

    @property
    def change(self) -> float | None:
        return self.shift.change if self.shift else self.night.first

    @property
    def since(self) -> str | None:
        return self.times[self.shift.at][0].id if self.shift else None

    @property
    def label(self) -> str:
        return self.series.case.label if self.series else f"all {self.all_of} series together"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What is counted of a series, held against runs before: how many counts, each change and the run that began it."""

    series: Identity
    count: int
    changes: tuple[tuple[CountChange, str], ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings of a run, the worst first; ``notes`` tell of the nodes that it was judged by.

    ``kept`` says that the run is of the branch, and not only held against it.
    """

    line: Line
    rule: StepRule
    findings: tuple[Finding, ...]
    counted: tuple[Counts, ...] = ()
    notes: tuple[str, ...] = ()
    kept: bool = True

    @property
    def counts(self) -> Mapping[Word, int]:
        return counts_of([*(one.word for one in self.findings), *(one.word for _, one, _ in self.changes)])

    @property
    def changes(self) -> list[tuple[Identity, CountChange, str]]:
        """Every count that is other than before, with its series and the run since which it is."""
        return [(one.series, change, since) for one in self.counted for change, since in one.changes]

    def code(self, *, fail_on_unknown: bool = False) -> int:
        return exit_code(self.counts, fail_on_unknown=fail_on_unknown)


def newest(history: History, branch: str) -> Line:
    """Return the newest run of a branch; ``UserError`` if it has none."""
    if found := history.runs(branch):
        return found[-1]
    branches = sorted({line.branch for line in history.runs()})
    raise UserError(f"the history has no run of branch {branch!r}: it has {', '.join(branches) or 'no run at all'}")


def check_folder(
    file: Path, path: Path, branch: str, rule: StepRule, floors: Mapping[str, Floor] | None = None
) -> Check:
    """Return what a branch's runs tell of the run in a folder, by itself; the history, if there is one, stays as it is.

    One run cannot show that it lasts, so all that rises beyond what the branch's runs scatter is SLOWER.
    """
    exists = file.exists()
    with open_history(file if exists else Path(":memory:"), create=not exists) as kept, kept.copied() as history:
        entry = read_entry(path, About(branch=branch), frozenset({"branch"}))
        history.add(entry)
        return check(history, history.line(entry.run.id), rule, floors, kept=False)


def check(
    history: History, line: Line, rule: StepRule, floors: Mapping[str, Floor] | None = None, *, kept: bool = True
) -> Check:
    """Return what the branch's runs up to ``line`` tell of it.

    A series counts from its newest annotation on, whichever hosts it ran on. All are judged at once, a size curve as a
    family. What is counted is held against the first run of these, or the last if ``line`` is not kept.
    ``floors`` are those that machines were measured to need, by the fingerprints of series; they raise the rule's.
    """
    before = [one for one in history.runs(line.branch) if (one.started, one.number) <= (line.started, line.number)]
    meant = [one for one in history.annotations() if one.branch == line.branch and one.started <= line.started]
    known, tonight = history.series(), history.series(line.number)
    alike = group_by(known, lambda number: known[number].anywhere)
    kin, found, counted_of, window = {}, {}, list[Counts](), slice(-rule.window - (not kept), None)
    for number, series in tonight.items():
        kin[number] = alike[series.anywhere]
        start = max((one.started for one in meant if fnmatchcase(series.case.label, one.series)), default="")
        since = [one for one in before if one.started >= start]
        times = history.times(kin[number], since)[window]
        counted_of += _counted(series, history.counted(kin[number], since[window]), line, kept=kept)
        measured = (floors or {}).get(series.fingerprint)
        found[number] = Finding(series=series, times=times, measured=measured)
    old, missing = _missing(history, line, before, tonight, rule.window)
    outcomes = history.outcomes(line.number)
    enough = {number: one for number, one in found.items() if len(one.times) - (not kept) >= rule.min_values}
    every = {at for one in enough.values() for at, _ in one.times} | {line}
    lines = sorted(every, key=lambda at: (at.started, at.number))
    ran = history.any_series()
    places = {at: known[ran[at.number]].place if at.number in ran else cells.UNKNOWN for at in lines}
    nights = _nights([*enough.values()], places, rule, kept=kept)
    found |= {number: replace(enough[number], night=night) for number, night in zip(enough, nights.each, strict=True)}
    judged = []
    for number, one in found.items():
        word, reason = _verdict(one, outcomes[number], old, rule.min_values, places, kept=kept)
        around = one.times[one.shift.at - 1 : one.shift.at + 1] if one.shift and one.shift.at else ()
        sides = [
            {**history.beside(kin[number], at.number), "commit": at.commit or cells.UNKNOWN, "host.name": places[at]}
            for at, _ in around
        ]
        judged.append(replace(one, word=word, reason=reason, differs=_changes(*sides) if sides else ()))
    if nights.shared:
        times = tuple((at, math.nan) for at in lines)
        together = Finding(series=None, all_of=len(enough), times=times, night=nights.shared)
        word, reason = _told(together, places, kept=kept)
        judged += [replace(together, word=word, reason=reason)] if word != "SAME" else []
    ordered = sorted([*judged, *missing], key=lambda one: (WORST_FIRST.index(one.word), one.series is not None))
    return Check(
        line=line, rule=rule, findings=tuple(ordered), counted=tuple(counted_of), notes=_notes(nights), kept=kept
    )


def _missing(
    history: History, line: Line, before: Sequence[Line], tonight: Mapping[int, Identity], window: int
) -> tuple[tuple[Identity, ...], list[Finding]]:
    """Return the series of the last run of this kind, and those of the last few that this one did not measure."""
    asked = {*map(_asked, tonight.values())}
    of_kind = [one for one in before if one.preset == line.preset and one.number != line.number]
    # the series of the last few runs of this kind, the newest first; a run without any case is of every kind
    each = (tuple(history.series(one.number).values()) for one in reversed(of_kind[-window:]))
    last = list(islice((one for one in each if not asked or asked & set(map(_asked, one))), MISSED_RUNS))
    old = last[0] if last else tuple(history.series(of_kind[-1].number).values()) if of_kind else ()
    runs = f"one of the {len(last)} runs before" if len(last) > 1 else "the run before"
    reason = f"{runs} that share a case with this one has it, and this one has not"
    vanished = {_asked(one): one for series in reversed(last) for one in series if _asked(one) not in asked}
    return old, [Finding(series=one, word="MISSING", reason=reason) for one in vanished.values()]


def _nights(enough: Sequence[Finding], places: Mapping[Line, str], rule: StepRule, *, kept: bool) -> Nights:
    """Judge all series at once over the runs of ``places``, in their order."""
    column = {at: i for i, at in enumerate(places)}
    logs = np.full((len(enough), len(places)), np.nan)
    for row, one in zip(logs, enough, strict=True):
        row[[column[at] for at, _ in one.times]] = np.log([seconds for _, seconds in one.times])
    floors = [one.measured.floor if one.measured else 0.0 for one in enough]
    rules = [replace(rule, floor=max(rule.floor, floor)) for floor in floors]
    families = [one.series.family if one.series else "" for one in enough]
    return judge_nights(logs, [*places.values()], families, rules, rule, alone=not kept)


def _counted(series: Identity, told: Sequence[tuple[Line, Facts]], line: Line, *, kept: bool) -> list[Counts]:
    """Return what changed of a series' counts, nothing where this run or those before kept none."""
    if len(told) < 2 or told[-1][0] != line:
        return []
    *before, (_, new) = told
    found = held(before[0 if kept else -1][1], new)

    def since(path: str) -> str:
        first = line
        for earlier, facts in reversed(before if kept else ()):
            if path in [change.path for change in held(facts, new).changes]:
                break
            first = earlier
        return first.id

    changes = tuple((change, since(change.path)) for change in found.changes)
    return [Counts(series=series, count=found.count, changes=changes)] if found.count or changes else []


def _asked(series: Identity) -> tuple[object, ...]:
    return (series.case.id, series.world.size, series.world.backend, series.world.device)


def _verdict(
    one: Finding, outcome: Outcome, old: Sequence[Identity], needed: int, places: Mapping[Line, str], *, kept: bool
) -> tuple[Word, str]:
    (status, reason), series = outcome, one.series
    if status in ("wrong", "failed", "hang"):
        return "WRONG" if status == "wrong" else "FAILED", reason or status
    if series and (count := len(one.times) - (not kept)) < needed:
        few = f"{count} of the {needed} runs that are needed"
        same_case = [other for other in old if other.case.id == series.case.id]
        if not same_case or series.anywhere in [other.anywhere for other in same_case]:
            return "INSUFFICIENT", few
        differs = ", ".join(_changes(same_case[0].around, series.around))
        return "INSUFFICIENT", f"{few}; a new series: {differs or 'another world'}"
    return _told(one, places, kept=kept)


def _told(one: Finding, places: Mapping[Line, str], *, kept: bool) -> tuple[Word, str]:
    """Return the verdict on tonight with a sentence that says what was seen, and where if not all runs were there."""
    night, runs = one.night, len(one.times)

    def where(lines: Sequence[Line]) -> str:
        hosts = ", ".join(sorted({places[line] for line in lines}))
        return f" on {hosts}" if len({*places.values()}) > 1 else ""

    if night.shift:
        reach = f"{100 * night.shift.change:+.1f} % [{100 * night.shift.low:+.1f}, {100 * night.shift.high:+.1f}]"
        if night.shift.slope is not None:
            word: Word = "FASTER" if night.shift.change < 0 else "DRIFT"
            told = f"it drifts by {100 * math.expm1(night.shift.slope):+.2f} % a run, over {runs} runs {reach}"
        else:
            word = "SLOWER" if night.shift.change > 0 else "FASTER"
            since = [line for line, _ in one.times[night.shift.at :]]
            told = f"for {len(since)} runs{where(since)} its level is {reach} from an earlier one's"
        if night.sure:
            return word, told
        if night.moved:
            return "AMBIGUOUS", f"{told}, and no host of the runs before is among those since"
        if night.shift.slope is None and not night.first:
            return "AMBIGUOUS", f"{told}: a step that is sure alone, but not among all that is looked at"
    if night.first:
        here = where([one.times[-1][0]])
        before = [seconds for _, seconds in one.times[:-1] if seconds > 0]
        told = f"this run{here} is {100 * night.first:+.1f} % from its level, beyond what runs scatter"
        told += f" ({cells.duration(min(before))} to {cells.duration(max(before))})" if before else ""
        if night.moved:
            return "AMBIGUOUS", f"{told}, and no run before was on its host"
        return "SUSPECT" if kept else "SLOWER", told
    return "SAME", ""


def _notes(nights: Nights) -> tuple[str, ...]:
    kinds = sorted({*nights.above.values()})
    if len(kinds) < 2:
        return ()
    names = {kind: ", ".join(sorted(place for place, above in nights.above.items() if above == kind)) for kind in kinds}
    slower = [f"{100 * math.expm1(kind - kinds[0]):+.1f} % on {names[kind]}" for kind in kinds[1:]]
    told = f"Hosts are of {len(kinds)} kinds, each judged by its own level"
    return (f"{told}: {'; '.join(slower)}, against {names[kinds[0]]}.",)


def _changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    pairs = {path: (base.get(path, cells.UNKNOWN), new.get(path, cells.UNKNOWN)) for path in sorted({*base, *new})}
    return tuple(f"{path}: {one} -> {other}" for path, (one, other) in pairs.items() if one != other)
