"""The check of a run as a table, Markdown or JSON, and the courses of series as bars, JSON or CSV."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec.structs import asdict

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_case_size,
    format_seconds,
    to_single_line,
)
from parbench.bench.text import UserError, format_table, pluralize
from parbench.reports.analysis.labels import operation
from parbench.reports.compare.environment import SeriesIdentity
from parbench.reports.compare.pool import describe_world
from parbench.reports.compare.thresholds import describe_thresholds
from parbench.reports.compare.verdicts import VERDICTS, VerdictName, count_verdicts, encode_report
from parbench.reports.history.database import History, Line
from parbench.reports.history.gate import Check, Finding
from parbench.reports.history.levels import FALSE_DISCOVERY_RATE, StepRule, segments
from parbench.reports.render.markdown import escaped

RATE = f"{100 * FALSE_DISCOVERY_RATE:g} %"
_BARS = "▁▂▃▄▅▆▇█"


def answer(found: Check) -> str:
    """Return the first line: whether the check passes or fails, against which runs, or that there are too few."""
    series = found.findings
    bad = [one for one in found.findings if VERDICTS[one.word].exit_code in (1, 4)]
    changed = [
        f"{operation(one.case)} {change.message}"
        for one, change, _ in found.changes
        if change.fails
    ]
    runs = max((len(one.times) - (not found.kept) for one in series), default=0)
    if not bad and not changed and {one.word for one in series} <= {"INSUFFICIENT"}:
        counts = f"; {count_words(found)}" if found.counted else ""
        return f"Not enough history: {runs} of {found.rule.min_values} runs of {found.line.branch}{counts}"
    against = f"{'over' if found.kept else 'against'} the last {pluralize(runs, 'run')} of {found.line.branch}"
    if not bad and not changed:
        undecided: tuple[VerdictName, ...] = ("SUSPECT", "DRIFT", "AMBIGUOUS", "INSUFFICIENT")
        unsure = ", ".join(
            f"{found.counts[word]} {word}" for word in undecided if word in found.counts
        )
        return f"PASS: none of {len(series)} series is slower, {against}{f' ({unsure})' if unsure else ''}"
    failed = [
        *(one.word for one in bad),
        *(one.verdict for _, one, _ in found.changes if one.fails),
    ]
    words = ", ".join(f"{count} {word}" for word, count in count_verdicts(failed).items())
    every = [*changed, *map(_short, bad)]
    others = f" and {len(every) - 3} more" if every[3:] else ""
    return (
        f"FAIL: {words or 'all'} of {len(series)} series, {against}: {', '.join(every[:3])}{others}"
    )


def count_words(found: Check) -> str:
    every = f"{sum(one.count for one in found.counted)} counts in {len(found.counted)} series"
    return f"{len(found.changes) or 'none'} of {every} changed"


def _short(one: Finding) -> str:
    change = f" {100 * one.change:+.1f} %" if one.change is not None else ""
    size = one.series.case.params.get("size_bytes")
    return f"{operation(one.series.case)}{'' if size is None else f' {format_case_size(size)}'}{change}"


def render(found: Check, form: str = "table") -> str:
    """Render the check as a ``table`` or GitHub's ``markdown``: the answer, then every series that is not SAME."""
    groups: dict[object, list[Finding]] = {}
    for one in found.findings:
        if one.word != "SAME":
            groups.setdefault(
                (one.word, one.reason) if one.word == "INSUFFICIENT" else id(one), []
            ).append(one)
    rows = [
        [
            *map(
                to_single_line,
                (change.verdict, UNKNOWN, UNKNOWN, since, series.case.label, change.message),
            )
        ]
        for series, change, since in found.changes
    ]
    for one, *others in groups.values():
        change = f"{100 * one.change:+.1f} %" if one.change is not None else UNKNOWN
        time = format_seconds(one.times[-1][1] if one.times and not others else None)
        why = "; ".join(text for text in (one.reason, *one.differs) if text) or UNKNOWN
        label = f"{len(others) + 1} series" if others else one.series.case.label
        rows.append(
            [*map(to_single_line, (one.word, change, time, one.since or UNKNOWN, label, why))]
        )
    told_by = ["verdict", "change", "time", "since", "series", "why"]
    columns = zip(told_by, *rows, strict=True)
    titles, *rows = map(
        list, zip(*(one for one in columns if {*one[1:]} != {UNKNOWN}), strict=True)
    )
    words = ", ".join(f"{count} {word}" for word, count in found.counts.items()) or "no series"
    rule, branch, floor = found.rule, found.line.branch, f"{100 * found.rule.floor:g} %"
    compared = {one.word for one in found.findings} - {"INSUFFICIENT", "MISSING"}
    if found.kept:
        slower = (
            f"SLOWER: for {rule.min_side} runs or more its level has been more than {floor} above its fastest one, "
            f"significant by ranks and by Student's t ({RATE} of such findings may be false)"
        )
        intended = "If a change is intended, annotate its run:"
    else:
        slower = (
            f"SLOWER: above the newest level of these runs and above the newest of them, by more than {floor} and "
            f"significant by Student's t ({RATE} of such findings may be false)"
        )
        intended = f"If the change is intended, annotate its run after it is merged into {branch}:"
    intended = f"{intended} parbench history annotate RUN --series GLOB --note TEXT"
    sentences = [
        f"{found.line.id} {'of' if found.kept else 'against'} {branch}: {words}.",
        *(
            []
            if compared
            else [f"Add runs of {branch}: parbench history add RUN --branch {branch}"]
        ),
        *([f"{slower}."] if compared else []),
        *(
            f"{word}: {VERDICTS[word].meaning}"
            for word in ("CHANGED", "SUSPECT", "DRIFT")
            if word in found.counts
        ),
        *([f"What is counted has no floor: {count_words(found)}."] if found.counted else []),
        *describe_thresholds([one.measured for one in found.findings if one.measured]),
        f"A series needs {rule.min_values} runs of {branch} on the same hosts in the same environment since its newest "
        f"annotation; the newest {rule.window} count.",
        *([intended] if compared or found.changes else []),
    ]
    if form == "table":
        table = [format_table([titles, *rows])] if rows else []
        return "\n".join([answer(found), *table, "", *sentences, ""])
    lines = [titles, ["---"] * len(titles), *rows] if rows else []
    table = [f"| {' | '.join(map(escaped, line))} |" for line in lines]
    return "\n".join(
        [
            f"## {escaped(answer(found))}",
            "",
            *table,
            "",
            *(f"- {escaped(one)}" for one in sentences),
            "",
        ]
    )


def render_json(found: Check, code: int) -> str:
    """Return all series as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""
    series = list[dict[str, object]]()
    for one in found.findings:
        said = {
            "verdict": one.word,
            "reason": one.reason,
            "since": one.since,
            "differs": one.differs,
        }
        names = ("low", "high", "slope", "p_value")
        step = {
            "change": one.change,
            **{name: one.shift and getattr(one.shift, name) for name in names},
        }
        named = {"case": one.series.case, "world": one.series.world}
        times = {"seconds": [seconds for _, seconds in one.times], "measured_floor": one.measured}
        series.append({**named, **said, **step, **times})
    changes = [
        {"case": one.case, "world": one.world, "since": since, **vars(change)}
        for one, change, since in found.changes
    ]
    held_count = {
        "held": sum(one.count for one in found.counted),
        "series": len(found.counted),
        "changes": changes,
    }
    told = {"exit_code": code, "verdicts": found.counts, "counts": held_count}
    told["series"] = series
    return encode_report(
        {"run": found.line, "kept": found.kept, "answer": answer(found), "rule": found.rule, **told}
    )


Courses = list[tuple[SeriesIdentity, tuple[tuple[Line, float], ...]]]
"""Series with their seconds by run."""


def find_courses(history: History, pattern: str, lines: Sequence[Line]) -> Courses:
    """Return the series whose label or name fits a glob; ``UserError`` if there is none."""
    courses = []
    for number, series in history.series().items():
        names = (series.case.label, series.case.name)
        times = history.times(number, lines)
        if times and any(fnmatchcase(name, pattern) for name in names):
            courses.append((series, times))
    if not courses:
        allowed = "write a case's name or a glob, such as '*all_reduce*'"
        raise UserError(f"no series of the history fits {pattern!r}: {allowed}")
    return courses


def draw_courses(courses: Courses, lines: Sequence[Line], rule: StepRule, file: Path) -> None:
    """Draw the seconds of each series over the runs, with the levels of its newest runs."""
    from parbench.reports.figures.changes import HistorySeries, chart_history
    from parbench.reports.figures.svg import save_chart

    places = {line.number: place for place, line in enumerate(lines)}
    series = []
    for one, times in courses:
        seconds_by_place = {places[line.number]: seconds for line, seconds in times}
        window = list(seconds_by_place)[-rule.window :]
        levels = [
            (window[level.start], window[level.stop - 1], level.seconds)
            for level in segments([seconds_by_place[place] for place in window], rule)
        ]
        label = f"{one.case.label}, {describe_world(one.world)}"
        series.append(HistorySeries(label=label, seconds_by_place=seconds_by_place, levels=levels))
    runs = [line.commit[:8] or line.started[:10] for line in lines]
    save_chart(chart_history(runs, series), file)


def render_courses(courses: Courses, rule: StepRule, form: str = "text") -> str:
    """Return the courses of series: bars and levels as text, or as JSON all times in seconds."""
    if form == "json":
        plain = []
        for one, times in courses:
            told = {
                "runs": [line.id for line, _ in times],
                "seconds": [seconds for _, seconds in times],
            }
            plain.append({"fingerprint": one.fingerprint, **asdict(one), **told})
        return encode_report({"series": plain})
    shown = []
    for one, times in courses:
        last, window = [seconds for _, seconds in times[-30:]], times[-rule.window :]
        low, high = min(last), max(last)
        step = (high - low) / (len(_BARS) - 1) or 1.0
        bars = "".join(_BARS[round((value - low) / step)] for value in last)
        shown += [one.case.label, f"    on {describe_world(one.world)}"]
        shown.append(
            f"    {bars}  {format_seconds(low)} to {format_seconds(high)}, {len(times)} runs"
        )
        for level in segments([seconds for _, seconds in window], rule):
            since, count = window[level.start][0].id, level.stop - level.start
            shown.append(f"    {format_seconds(level.seconds)} from {since} on ({count} runs)")
    return "\n".join([*shown, ""])


def render_csv(history: History, branch: str | None) -> str:
    """Return a row per run and a column per series, in seconds."""
    lines = history.runs(branch)
    known = [
        (one, {line.id: value for line, value in history.times(n, lines)})
        for n, one in history.series().items()
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
