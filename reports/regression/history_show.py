"""The history as text: its runs, its series with their course, and what the gate says, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import msgspec

from bench.results.stats import median
from bench.text import UserError
from reports import cells
from reports.regression.compare import WORST_FIRST, world_words
from reports.regression.history import Annotation, History, Line
from reports.regression.history_entry import Identity
from reports.regression.history_gate import Check, Finding
from reports.regression.noise_floor import told
from reports.regression.statistics import Segment, StepRule, segments
from reports.render.markdown import escaped

SCHEMA_VERSION = 1
"""History of the JSON: 1 is the first."""
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 30


@dataclass(frozen=True, kw_only=True)
class Course:
    """A series with its runs in the order of time, their seconds, and the levels of these."""

    identity: Identity
    lines: tuple[Line, ...]
    seconds: tuple[float, ...]
    levels: tuple[Segment, ...]


def courses(history: History, pattern: str, branch: str | None, rule: StepRule) -> tuple[Course, ...]:
    """Return the courses of the series whose label fits a glob; ``UserError`` if none does."""
    lines = {line.number: line for line in history.runs(branch)}
    found = []
    for number, identity in history.series().items():
        if fnmatchcase(identity.case.label, pattern) or fnmatchcase(identity.case.name, pattern):
            times = [(lines[run], seconds) for run, seconds in history.times_of_series(number) if run in lines]
            times.sort(key=lambda pair: (pair[0].started, pair[0].number))
            seconds = tuple(value for _, value in times)
            levels = segments(seconds[-rule.window :], rule)
            found.append(
                Course(identity=identity, lines=tuple(line for line, _ in times), seconds=seconds, levels=levels)
            )
    shown = tuple(course for course in found if course.seconds)
    if not shown:
        raise UserError(
            f"no series of the history fits {pattern!r}: write a case's name or a glob, such as '*all_reduce*'"
        )
    return shown


def runs_text(lines: Sequence[Line], annotations: Sequence[Annotation]) -> str:
    """Return the runs as a table, the newest first, and what was annotated."""
    heads = ("run", "started", "branch", "commit", "preset", "series", "bad")
    table = [
        (
            line.id,
            line.started,
            line.branch,
            line.commit[:12] or cells.UNKNOWN,
            line.preset,
            str(line.num_series),
            str(line.num_bad),
        )
        for line in reversed(lines)
    ]
    notes = [f"meant at {one.run_id}, {one.series}: {one.note}" for one in annotations]
    return _text([f"{len(lines)} run{'s' * (len(lines) != 1)}", *(_aligned([heads, *table]) if table else []), *notes])


def courses_text(found: Sequence[Course]) -> str:
    """Return each course: its last runs as bars from the fastest to the slowest, and where its level changed."""
    lines = []
    for course in found:
        lines += [course.identity.case.label, f"    on {world_words(course.identity.world)}"]
        shown = course.seconds[-_SHOWN:]
        extremes = f"{cells.duration(min(shown))} to {cells.duration(max(shown))}"
        lines.append(f"    {bars(shown)}  {extremes}, {len(course.seconds)} runs")
        first = len(course.seconds) - course.levels[-1].stop if course.levels else 0
        for level in course.levels:
            since = course.lines[first + level.start]
            lines.append(f"    {cells.duration(level.seconds)} from {since.id} on ({level.stop - level.start} runs)")
    return _text(lines)


def courses_json(found: Sequence[Course]) -> str:
    """Return the courses as JSON; times in seconds."""
    whole = [
        {
            "fingerprint": course.identity.fingerprint,
            "case": course.identity.case,
            "world": course.identity.world,
            "around": course.identity.around,
            "runs": [line.id for line in course.lines],
            "seconds": course.seconds,
        }
        for course in found
    ]
    return _json({"schema_version": SCHEMA_VERSION, "series": whole})


def bars(values: Sequence[float]) -> str:
    """Return a bar for each value, from the smallest to the largest."""
    low, high = min(values), max(values)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in values)


def check_text(found: Check) -> str:
    """Return what the gate says: a line for each series that is not the same, the worst first, and what it means."""
    heads = ("verdict", "change", "time", "since", "series", "why")
    rows = [_cells(one) for one in _ordered(found) if one.word != "SAME"]
    return _text([_heading(found), *(_aligned([heads, *rows]) if rows else []), "", *_sentences(found)])


def check_markdown(found: Check) -> str:
    """Return the same as GitHub's Markdown."""
    heads = ("verdict", "change", "time", "since", "series", "why")
    rows = [_cells(one) for one in _ordered(found) if one.word != "SAME"]
    table = [" | ".join(heads), " | ".join(["---"] * len(heads)), *(" | ".join(map(escaped, row)) for row in rows)]
    lines = [f"## {escaped(_heading(found))}", "", *([f"| {line} |" for line in table] if rows else []), ""]
    return "\n".join([*lines, *(f"- {escaped(sentence)}" for sentence in _sentences(found)), ""])


def check_json(found: Check, *, code: int) -> str:
    """Return the same as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "run": asdict(found.line),
        "rule": asdict(found.rule),
        "exit_code": code,
        "verdicts": found.counts,
        "series": [_finding(one) for one in _ordered(found)],
    }
    return _json(whole)


def _ordered(found: Check) -> list[Finding]:
    return sorted(found.findings, key=lambda one: WORST_FIRST.index(one.word))


def _heading(found: Check) -> str:
    words = ", ".join(f"{count} {word}" for word, count in found.counts.items()) or "no series"
    return f"parbench history check of {found.line.id} on {found.line.branch}: {words}"


def _sentences(found: Check) -> list[str]:
    rule = found.rule
    return [
        f"A series counts with the newest {rule.window} runs of its fingerprint since its newest annotation, and needs"
        f" {rule.min_values}.",
        f"SLOWER: for {rule.min_side} runs at least its level has been above its fastest one by more than"
        f" {cells.percent(rule.floor)}, sure by ranks and by Student's t among all series.",
        *told([one.measured for one in found.findings if one.measured]),
        "A change that was meant: parbench history annotate RUN --series GLOB --note TEXT.",
    ]


def _cells(one: Finding) -> tuple[str, ...]:
    change = f"{100 * one.shift.change:+.1f} %" if one.shift else cells.UNKNOWN
    time = cells.duration(median(one.times[-1:])) if one.times else cells.UNKNOWN
    since = one.since.id if one.since else cells.UNKNOWN
    why = "; ".join([*([one.reason] if one.reason else []), *one.differs]) or cells.UNKNOWN
    return tuple(map(cells.visible, (one.word, change, time, since, one.case.label, why)))


def _finding(one: Finding) -> dict[str, object]:
    return {
        "case": one.case,
        "world": one.world,
        "verdict": one.word,
        "reason": one.reason,
        "change": one.shift.change if one.shift else None,
        "p_value": one.shift.p_value if one.shift else None,
        "since": one.since.id if one.since else None,
        "differs": one.differs,
        "seconds": one.times,
        "measured_floor": one.measured,
    }


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _text(lines: Sequence[str]) -> str:
    return "\n".join([*lines, ""])


def _json(whole: object) -> str:
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode() + "\n"
