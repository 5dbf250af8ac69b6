"""The nightly gate: each series of a run against what the history tells of it; and the courses of series, shown."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice

from msgspec.structs import asdict

from bench.text import UserError, format_table
from reports import cells
from reports.regression.compare import WORST_FIRST, Word, counts_of, exit_code, json_text, world_words
from reports.regression.environment import Identity
from reports.regression.history import History, Line, Outcome
from reports.regression.levels import Shift, StepRule, newest_shift, segments
from reports.regression.noise_floor import Floor, told
from reports.regression.statistics import discoveries_in_families
from reports.render.markdown import escaped

_BARS = "▁▂▃▄▅▆▇█"
MISSED_RUNS = 3  # a case is missing as long as one of so many before, of those that share a case with this run, has it


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the gate says of a series: its window, what was beside it before and after a step, its own floor."""

    series: Identity
    word: Word = "SAME"
    reason: str = ""
    times: tuple[tuple[Line, float], ...] = ()
    shift: Shift | None = None
    differs: tuple[str, ...] = ()
    measured: Floor | None = None

    @property
    def since(self) -> str | None:
        return self.times[self.shift.at][0].id if self.shift else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings of a run, the worst first."""

    line: Line
    rule: StepRule
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> Mapping[Word, int]:
        return counts_of(one.word for one in self.findings)

    def code(self, *, fail_on_unknown: bool = False) -> int:
        return exit_code(self.counts, fail_on_unknown=fail_on_unknown)


def newest(history: History, branch: str) -> Line:
    """Return the newest run of a branch; ``UserError`` if it has none."""
    if found := history.runs(branch):
        return found[-1]
    branches = sorted({line.branch for line in history.runs()})
    raise UserError(f"the history has no run of branch {branch!r}: it has {', '.join(branches) or 'no run at all'}")


def check(history: History, line: Line, rule: StepRule, floors: Mapping[str, Floor] | None = None) -> Check:
    """Return what the branch's runs up to ``line`` tell of it.

    A series counts from its newest annotation on. Steps are judged among all series at once, a size curve as a family.
    ``floors`` are those that machines were measured to need, by the fingerprints of series; they raise the rule's.
    """
    before = [one for one in history.runs(line.branch) if (one.started, one.number) <= (line.started, line.number)]
    meant = [one for one in history.annotations() if one.branch == line.branch and one.started <= line.started]
    found = {}
    for number, series in history.series(line.number).items():
        start = max((one.started for one in meant if fnmatchcase(series.case.label, one.series)), default="")
        times = history.times(number, [one for one in before if one.started >= start])[-rule.window :]
        measured = (floors or {}).get(series.fingerprint)
        raised = replace(rule, floor=max(rule.floor, measured.floor)) if measured else rule
        shift = newest_shift([seconds for _, seconds in times], raised)
        found[number] = Finding(series=series, times=times, shift=shift, measured=measured)
    asked = {_asked(one.series) for one in found.values()}
    alike = [one for one in before if one.preset == line.preset and one.number != line.number]
    # the series of the last few runs of this kind, the newest first; a run without any case is of every kind
    each = (tuple(history.series(one.number).values()) for one in reversed(alike[-rule.window :]))
    kin = list(islice((one for one in each if not asked or asked & set(map(_asked, one))), MISSED_RUNS))
    old = kin[0] if kin else tuple(history.series(alike[-1].number).values()) if alike else ()
    sure, outcomes = _sure(found), history.outcomes(line.number)
    judged = []
    for number, one in found.items():
        word, reason = _verdict(one, outcomes[number], number in sure, old, rule.min_values)
        around = one.times[one.shift.at - 1 : one.shift.at + 1] if one.shift else ()
        sides = [{**history.beside(number, at.number), "commit": at.commit or cells.UNKNOWN} for at, _ in around]
        judged.append(replace(one, word=word, reason=reason, differs=_changes(*sides) if sides else ()))
    last = f"one of the {len(kin)} runs before" if len(kin) > 1 else "the run before"
    reason = f"{last} that share a case with this one has it, and this one has not"
    vanished = {_asked(one): one for series in reversed(kin) for one in series if _asked(one) not in asked}
    judged += [Finding(series=one, word="MISSING", reason=reason) for one in vanished.values()]
    return Check(line=line, rule=rule, findings=tuple(sorted(judged, key=lambda one: WORST_FIRST.index(one.word))))


def render(found: Check, form: str = "table") -> str:
    """Return what the gate says, as a ``table`` or GitHub's ``markdown``: each series that is not the same, and why."""
    rows = []
    for one in [one for one in found.findings if one.word != "SAME"]:
        change = f"{100 * one.shift.change:+.1f} %" if one.shift else cells.UNKNOWN
        time = cells.duration(one.times[-1][1] if one.times else None)
        why = "; ".join(text for text in (one.reason, *one.differs) if text) or cells.UNKNOWN
        shown = (one.word, change, time, one.since or cells.UNKNOWN, one.series.case.label, why)
        rows.append([*map(cells.visible, shown)])
    words = ", ".join(f"{count} {word}" for word, count in found.counts.items()) or "no series"
    heading = f"parbench history check of {found.line.id} on {found.line.branch}: {words}"
    titles, rule = ["verdict", "change", "time", "since", "series", "why"], found.rule
    sentences = [
        f"A series counts with the newest {rule.window} runs of its fingerprint since its newest annotation, and needs"
        f" {rule.min_values}.",
        f"SLOWER: for {rule.min_side} runs at least its level has been above its fastest one by more than"
        f" {cells.percent(rule.floor)}, sure by ranks and by Student's t among all series.",
        *told([one.measured for one in found.findings if one.measured]),
        "A change that was meant: parbench history annotate RUN --series GLOB --note TEXT.",
    ]
    if form == "table":
        table = [format_table([titles, *rows])] if rows else []
        return "\n".join([heading, *table, "", *sentences, ""])
    lines = [titles, ["---"] * len(titles), *rows] if rows else []
    table = [f"| {' | '.join(map(escaped, line))} |" for line in lines]
    return "\n".join([f"## {escaped(heading)}", "", *table, "", *(f"- {escaped(one)}" for one in sentences), ""])


def render_json(found: Check, code: int) -> str:
    """Return all series as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""
    series = []
    for one in found.findings:
        named = {"case": one.series.case, "world": one.series.world, "verdict": one.word, "reason": one.reason}
        step = {"change": one.shift and one.shift.change, "p_value": one.shift and one.shift.p_value}
        since = {"since": one.since, "differs": one.differs}
        times = {"seconds": [seconds for _, seconds in one.times], "measured_floor": one.measured}
        series.append({**named, **step, **since, **times})
    told = {"exit_code": code, "verdicts": found.counts, "series": series}
    return json_text({"run": found.line, "rule": found.rule, **told})


def render_courses(history: History, pattern: str, branch: str | None, rule: StepRule, form: str = "text") -> str:
    """Return the courses of series that fit a glob: bars and levels as text, or as JSON all times in seconds."""
    lines = history.runs(branch)
    courses = [
        (one, times)
        for number, one in history.series().items()
        if fnmatchcase(one.case.label, pattern) or fnmatchcase(one.case.name, pattern)
        if (times := history.times(number, lines))
    ]
    if not courses:
        allowed = "write a case's name or a glob, such as '*all_reduce*'"
        raise UserError(f"no series of the history fits {pattern!r}: {allowed}")
    if form == "json":
        plain = []
        for one, times in courses:
            told = {"runs": [line.id for line, _ in times], "seconds": [seconds for _, seconds in times]}
            plain.append({"fingerprint": one.fingerprint, **asdict(one), **told})
        return json_text({"series": plain})
    shown = []
    for one, times in courses:
        last, window = [seconds for _, seconds in times[-30:]], times[-rule.window :]
        low, high = min(last), max(last)
        step = (high - low) / (len(_BARS) - 1) or 1.0
        bars = "".join(_BARS[round((value - low) / step)] for value in last)
        shown += [one.case.label, f"    on {world_words(one.world)}"]
        shown.append(f"    {bars}  {cells.duration(low)} to {cells.duration(high)}, {len(times)} runs")
        for level in segments([seconds for _, seconds in window], rule):
            since, count = window[level.start][0].id, level.stop - level.start
            shown.append(f"    {cells.duration(level.seconds)} from {since} on ({count} runs)")
    return "\n".join([*shown, ""])


def render_otava(history: History, branch: str | None) -> str:
    """Return Otava's CSV: ``time`` is its ``time_column``, ``commit`` and ``run`` are its ``attributes``."""
    lines = history.runs(branch)
    known = [(one, {line.id: value for line, value in history.times(n, lines)}) for n, one in history.series().items()]
    columns = [(series, times) for series, times in known if times]
    count = Counter(one.case.label for one, _ in columns)
    marks = ["" if count[one.case.label] == 1 else f" #{one.fingerprint}" for one, _ in columns]
    names = [f"{one.case.label}{mark}" for (one, _), mark in zip(columns, marks, strict=True)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["time", "commit", "run", *names])
    for line in lines:
        values = [f"{times[line.id]:.9g}" if line.id in times else "" for _, times in columns]
        writer.writerow([line.started, line.commit, line.id, *values])
    return out.getvalue()


def _asked(series: Identity) -> tuple[object, ...]:
    return (series.case.id, series.world.size, series.world.backend, series.world.device)


def _sure(found: Mapping[int, Finding]) -> set[int]:
    if not any(one.shift for one in found.values()):
        return set()
    families: dict[object, dict[int, float]] = {}
    for number, one in found.items():
        families.setdefault(one.series.family, {})[number] = one.shift.p_value if one.shift else 1.0
    fallen = discoveries_in_families([[*family.values()] for family in families.values()], q=0.05)
    pairs = zip(families.values(), fallen, strict=True)
    return {number for family, fell in pairs for number, is_sure in zip(family, fell, strict=True) if is_sure}


def _verdict(one: Finding, outcome: Outcome, sure: bool, old: Sequence[Identity], needed: int) -> tuple[Word, str]:
    status, reason = outcome
    if status in ("wrong", "failed", "hang"):
        return "WRONG" if status == "wrong" else "FAILED", reason or status
    if len(one.times) < needed:
        few = f"{len(one.times)} of the {needed} runs that are needed"
        same_case = [other for other in old if other.case.id == one.series.case.id]
        if not same_case or one.series.fingerprint in [other.fingerprint for other in same_case]:
            return "INSUFFICIENT", few
        differs = ", ".join(_changes(same_case[0].around, one.series.around))
        return "INSUFFICIENT", f"{few}; a new series: {differs or 'another world'}"
    if one.shift is None:
        return "SAME", ""
    if not sure:
        return "AMBIGUOUS", "a step that is sure alone, but not among all series"
    return ("SLOWER" if one.shift.change > 0 else "FASTER"), ""


def _changes(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    pairs = {path: (base.get(path, cells.UNKNOWN), new.get(path, cells.UNKNOWN)) for path in sorted({*base, *new})}
    return tuple(f"{path}: {one} -> {other}" for path, (one, other) in pairs.items() if one != other)
