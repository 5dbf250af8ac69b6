"""The gates: each series of a run against what the history tells of it; and the courses of series, shown.

Of a branch's newest run it is told since when a series is slower; of a run that is not kept, as a pull request's,
whether it is slower than the branch.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import numpy as np
from msgspec.structs import asdict

from bench.text import UserError, counted, format_table
from reports import cells
from reports.analysis.labels import operation
from reports.regression.compare import VERDICTS, WORST_FIRST, Word, counts_of, exit_code, json_text, world_words
from reports.regression.environment import Identity
from reports.regression.history import About, History, Line, Outcome, open_history, read_entry
from reports.regression.levels import Shift, StepRule, segments
from reports.regression.nights import Night, Nights, judge_nights
from reports.regression.noise_floor import Floor, told
from reports.render.markdown import escaped

_BARS = "▁▂▃▄▅▆▇█"
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
class Check:
    """All findings of a run, the worst first; ``notes`` tell of the nodes that it was judged by.

    ``kept`` says that the run is of the branch, and not only held against it.
    """

    line: Line
    rule: StepRule
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    kept: bool = True

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
    family.
    ``floors`` are those that machines were measured to need, by the fingerprints of series; they raise the rule's.
    """
    before = [one for one in history.runs(line.branch) if (one.started, one.number) <= (line.started, line.number)]
    meant = [one for one in history.annotations() if one.branch == line.branch and one.started <= line.started]
    known, tonight = history.series(), history.series(line.number)
    alike: dict[str, list[int]] = {}
    for number, series in known.items():
        alike.setdefault(series.anywhere, []).append(number)
    kin, found = {}, {}
    for number, series in tonight.items():
        kin[number] = alike[series.anywhere]
        start = max((one.started for one in meant if fnmatchcase(series.case.label, one.series)), default="")
        times = history.times(kin[number], [one for one in before if one.started >= start])[-rule.window - (not kept) :]
        measured = (floors or {}).get(series.fingerprint)
        found[number] = Finding(series=series, times=times, measured=measured)
    asked = {*map(_asked, tonight.values())}
    of_kind = [one for one in before if one.preset == line.preset and one.number != line.number]
    # the series of the last few runs of this kind, the newest first; a run without any case is of every kind
    each = (tuple(history.series(one.number).values()) for one in reversed(of_kind[-rule.window :]))
    last = list(islice((one for one in each if not asked or asked & set(map(_asked, one))), MISSED_RUNS))
    old = last[0] if last else tuple(history.series(of_kind[-1].number).values()) if of_kind else ()
    outcomes = history.outcomes(line.number)
    enough = {number: one for number, one in found.items() if len(one.times) - (not kept) >= rule.min_values}
    every = {at for one in enough.values() for at, _ in one.times} | {line}
    lines = sorted(every, key=lambda at: (at.started, at.number))
    ran = history.any_series()
    places = {at: known[ran[at.number]].place if at.number in ran else cells.UNKNOWN for at in lines}
    column = {at: i for i, at in enumerate(lines)}
    logs = np.full((len(enough), len(lines)), np.nan)
    for row, one in zip(logs, enough.values(), strict=True):
        row[[column[at] for at, _ in one.times]] = np.log([seconds for _, seconds in one.times])
    floors_of = [one.measured.floor if one.measured else 0.0 for one in enough.values()]
    rules = [replace(rule, floor=max(rule.floor, floor)) for floor in floors_of]
    families = [tonight[number].family for number in enough]
    nights = judge_nights(logs, [*places.values()], families, rules, rule, alone=not kept)
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
    runs = f"one of the {len(last)} runs before" if len(last) > 1 else "the run before"
    reason = f"{runs} that share a case with this one has it, and this one has not"
    vanished = {_asked(one): one for series in reversed(last) for one in series if _asked(one) not in asked}
    judged += [Finding(series=one, word="MISSING", reason=reason) for one in vanished.values()]
    ordered = sorted(judged, key=lambda one: (WORST_FIRST.index(one.word), one.series is not None))
    return Check(line=line, rule=rule, findings=tuple(ordered), notes=_notes(nights), kept=kept)


def answer(found: Check) -> str:
    """Return whether the gate passes, and against what; or what fails it; or that it has too few runs to speak."""
    series = [one for one in found.findings if one.series]
    bad = [one for one in found.findings if VERDICTS[one.word].code in (1, 4)]
    runs = max((len(one.times) - (not found.kept) for one in series), default=0)
    if not bad and {one.word for one in series} <= {"INSUFFICIENT"}:
        return f"Gate not armed: {runs} of {found.rule.min_values} runs of {found.line.branch}"
    against = f"{'over' if found.kept else 'against'} the last {counted(runs, 'run')} of {found.line.branch}"
    if not bad:
        undecided: tuple[Word, ...] = ("SUSPECT", "DRIFT", "AMBIGUOUS", "INSUFFICIENT")
        unsure = ", ".join(f"{found.counts[word]} {word}" for word in undecided if word in found.counts)
        return f"PASS: none of {len(series)} series is slower, {against}{f' ({unsure})' if unsure else ''}"
    words = ", ".join(f"{count} {word}" for word, count in counts_of(one.word for one in bad if one.series).items())
    named = ", ".join(_short(one) for one in bad[:3])
    others = f" and {len(bad) - 3} more" if bad[3:] else ""
    return f"FAIL: {words or 'all'} of {len(series)} series, {against}: {named}{others}"


def _short(one: Finding) -> str:
    change = f" {100 * one.change:+.1f} %" if one.change is not None else ""
    if one.series is None:
        return f"{one.label}{change}"
    size = one.series.case.params.get("size_bytes")
    return f"{operation(one.series.case)}{'' if size is None else f' {cells.size(size)}'}{change}"


def render(found: Check, form: str = "table") -> str:
    """Return what the gate says, as a ``table`` or GitHub's ``markdown``: the answer, then what is not the same."""
    groups: dict[object, list[Finding]] = {}
    for one in found.findings:
        if one.word != "SAME":
            groups.setdefault((one.word, one.reason) if one.word == "INSUFFICIENT" else id(one), []).append(one)
    rows = []
    for one, *others in groups.values():
        change = f"{100 * one.change:+.1f} %" if one.change is not None else cells.UNKNOWN
        time = cells.duration(one.times[-1][1] if one.times and one.series and not others else None)
        why = "; ".join(text for text in (one.reason, *one.differs) if text) or cells.UNKNOWN
        label = f"{len(others) + 1} series" if others else one.label
        rows.append([*map(cells.visible, (one.word, change, time, one.since or cells.UNKNOWN, label, why))])
    told_by = ["verdict", "change", "time", "since", "series", "why"]
    columns = zip(told_by, *rows, strict=True)
    titles, *rows = map(list, zip(*(one for one in columns if {*one[1:]} != {cells.UNKNOWN}), strict=True))
    words = ", ".join(f"{count} {word}" for word, count in found.counts.items()) or "no series"
    rule, branch, floor = found.rule, found.line.branch, f"{100 * found.rule.floor:g} %"
    compared = {one.word for one in found.findings} - {"INSUFFICIENT", "MISSING"}
    slower, meant = (
        f"SLOWER: for {rule.min_side} runs or more its level has been more than {floor} above its fastest one, sure by "
        "ranks and by Student's t among all series",
        "If a change was intended: parbench history annotate RUN --series GLOB --note TEXT.",
    )
    if not found.kept:
        slower = (
            f"SLOWER: above the newest level of these runs and above the newest of them, by more than {floor} and by "
            "more than they scatter (Student's t at 1 % among all series)"
        )
        meant = f"A change that is meant: once it is in {branch}, {meant.partition(': ')[2]}"
    sentences = [
        f"{found.line.id} {'of' if found.kept else 'against'} {branch}: {words}.",
        *([] if compared else [f"Runs of {branch} arm it: parbench history add RUN --branch {branch}."]),
        *([f"{slower}; how often that is right: tests/studies/history_study.py."] if compared else []),
        *(f"{word}: {VERDICTS[word].meaning}." for word in ("SUSPECT", "DRIFT") if word in found.counts),
        *found.notes,
        *told([one.measured for one in found.findings if one.measured]),
        f"A series needs {rule.min_values} runs of {branch} in the same surroundings since its newest annotation; the "
        f"newest {rule.window} count.",
        *([meant] if compared else []),
    ]
    if form == "table":
        table = [format_table([titles, *rows])] if rows else []
        return "\n".join([answer(found), *table, "", *sentences, ""])
    lines = [titles, ["---"] * len(titles), *rows] if rows else []
    table = [f"| {' | '.join(map(escaped, line))} |" for line in lines]
    return "\n".join([f"## {escaped(answer(found))}", "", *table, "", *(f"- {escaped(one)}" for one in sentences), ""])


def render_json(found: Check, code: int) -> str:
    """Return all series as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""
    series, together = list[dict[str, object]](), list[dict[str, object]]()
    for one in found.findings:
        said = {"verdict": one.word, "reason": one.reason, "since": one.since, "differs": one.differs}
        names = ("low", "high", "slope", "p_value")
        step = {"change": one.change, **{name: one.shift and getattr(one.shift, name) for name in names}}
        if one.series is None:
            together.append({**said, **step})
            continue
        named = {"case": one.series.case, "world": one.series.world}
        times = {"seconds": [seconds for _, seconds in one.times], "measured_floor": one.measured}
        series.append({**named, **said, **step, **times})
    told = {"exit_code": code, "verdicts": found.counts, "together": together, "notes": found.notes, "series": series}
    return json_text({"run": found.line, "kept": found.kept, "answer": answer(found), "rule": found.rule, **told})


def render_courses(history: History, pattern: str, branch: str | None, rule: StepRule, form: str = "text") -> str:
    """Return the courses of series that fit a glob: bars and levels as text, or as JSON all times in seconds."""
    lines = history.runs(branch)
    courses = [
        (one, times)
        for number, one in history.series().items()
        if fnmatchcase(one.case.label, pattern) or fnmatchcase(one.case.name, pattern)
        if (times := history.times([number], lines))
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
    known = [
        (one, {line.id: value for line, value in history.times([n], lines)}) for n, one in history.series().items()
    ]
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
