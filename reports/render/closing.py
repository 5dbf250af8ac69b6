"""The first page of a run as text: verdicts, operations, steps and what to look at first.

The page has 40 lines of 80 columns. A run of at most three operations has their tables over sizes instead of the
fastest size of each, and more lines if they need them.
"""

from collections.abc import Sequence
from textwrap import wrap

from parbench.bench.results.formatting import (
    UNKNOWN,
    format_bytes,
    format_gigabytes,
    format_interval,
    format_measurement,
    format_quantity,
    format_seconds,
    to_single_line,
)
from parbench.reports.analysis.analysis import Front, Operation, Step
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.labels import operation
from parbench.reports.analysis.summary import Row
from parbench.reports.render.terminal import Sheet, render_text, write_table, write_verdicts
from parbench.reports.report import Report
from parbench.reports.sections.row_columns import size_columns
from parbench.reports.tables.step_parts import get_deviating_profile, sum_memory

_WIDTH, _LINES, _BAR = 80, 40, 20
_MAX_TABULATED_OPERATIONS, _MAX_TABULATED_ROWS = 3, 60
_MOST_SENTENCES, _MOST_COMPARISONS, _SENTENCE_LINES = 4, 2, 3
_MAX_STEPS = 6
_MAX_NAME = 14  # of a step in the table
_STEP_PARTS = {"compute": 8, "exposed": 8, "idle": 6}  # with the widths of their columns


def render_closing(report: Report, width: int | None = None, color: bool = False) -> str:
    """Return the page; what it has no room for is counted, and where all the rest is stands last."""
    front = report.front
    if front is None:  # several runs
        return render_text(report, width, color)
    sheet = Sheet(_WIDTH, color)
    sheet.tell(front.where, *report.emulated[:1])
    write_verdicts(sheet, front.verdicts)
    first, last = _first(report), ["", f"All rows  parbench show --all {front.path}"]
    if not front.operations:
        steps = _steps(front.steps, _MAX_STEPS)
    elif all(len(step.name) <= _MAX_NAME for step in front.steps):
        steps = _list_steps_in_table(front.steps, _MAX_STEPS)
    else:
        steps = _steps(front.steps, _MAX_STEPS // 2)
    rows = _rows_of_few_operations(report)
    if rows:
        _write_series(sheet, rows)
    else:
        # The run's folder is printed on one more line.
        left = _LINES - len(sheet.text().splitlines()) - len(first) - len(steps) - len(last) - 1
        sheet.write(*_operations(front, left))
    sheet.write(*steps, *first, *last)
    return sheet.text()


def _rows_of_few_operations(report: Report) -> list[Row]:
    """Return the measured communication of a run with at most three operations, otherwise nothing."""
    _, summary = report.runs[0]
    rows = [row for row in summary.rows if row.is_communication and row.metrics]
    operations = {row.case.name for row in rows}
    return rows if len(operations) <= _MAX_TABULATED_OPERATIONS else []


def _write_series(sheet: Sheet, rows: Sequence[Row]) -> None:
    """Write a table over sizes for each operation, mode and element type."""
    shown = rows[:_MAX_TABULATED_ROWS]
    for title, series in group_by(shown, _series_title).items():
        by_size = sorted(series, key=lambda row: row.size_bytes or 0)
        write_table(sheet, title, size_columns(by_size), by_size)
    hidden = len(rows) - len(shown)
    if hidden:
        sheet.write(f"  and {hidden} more")


def _series_title(row: Row) -> str:
    params = row.case.params
    words = [
        operation(row.case),
        *(str(params[name]) for name in ("mode", "dtype") if name in params),
    ]
    return ", ".join(words)


def _operations(front: Front, room: int) -> list[str]:
    found, most = front.operations, max(room - 3, 3)
    if not found:
        return []
    shown = found if len(found) <= most + 1 else found[:most]
    name, of = max(len(one.name[:26]) for one in shown), ""
    if front.ceiling:
        of = (
            f"   of {front.ceiling.name} ({format_quantity(front.ceiling.bytes_per_second, 'B/s')})"
        )
    lines = ["", f"{'Operations':{name + 2}}   latency  bus GB/s{'':17}{of}".rstrip()]
    lines += [_operation(one, name) for one in shown]
    return lines + ([f"  and {len(found) - len(shown)} more"] if len(shown) < len(found) else [])


def _operation(one: Operation, width: int) -> str:
    value, interval = one.rate.value if one.rate else None, format_interval(one.rate)
    rate = f"{format_gigabytes(value):>8} {'' if interval == UNKNOWN else interval:17}"
    share = f"   {_percent(one.share):>5} {_bar(one.share, 12)}" if one.share is not None else ""
    return f"  {one.name[:26]:{width}} {format_seconds(one.latency):>9}  {rate}{share}".rstrip()


def _steps(steps: Sequence[Step], most: int) -> list[str]:
    if not steps:
        return []
    lines = ["", "Training steps"]
    for one in steps[:most]:
        tokens, mfu = one.row.value("tokens_per_second"), one.row.value("mfu")
        told = [
            format_measurement(one.row.metrics.get(one.row.headline)),
            f"{tokens:,.0f} tokens/s" if tokens else "",
            f"MFU {_percent(mfu)}" if mfu is not None else "",
            f"memory {format_bytes(held)}" if (held := sum_memory(one.row)) else "",
        ]
        line = f"  {one.name[:30]} "
        for i, text in enumerate(filter(None, told)):  # what has no room is left out whole
            line += f"{' ·' * (i > 0)} {text}" if len(line) + len(text) + 3 <= _WIDTH else ""
        lines.append(line)
        parts = [
            f"{name} {_bar(share, _BAR)} {_percent(share)}" for name, share in one.parts.items()
        ]
        parts += [f"overlap {_percent(one.overlap)}"] if one.overlap is not None else []
        lines += [f"    {'  '.join(parts)}"[:_WIDTH]] if parts else []
        if traced := get_deviating_profile(one.row):
            lines.append(f"    (shares of a traced step, which took {format_seconds(traced)})")
    left = len(steps) - most
    return lines + ([f"  and {left} more"] if left > 0 else [])


def _list_steps_in_table(steps: Sequence[Step], max_steps: int) -> list[str]:
    """Return a line for each step: its time, the parts of it, and its memory."""
    if not steps:
        return []
    header = f"{'Training steps':16}{'time':>22}{'compute':>8}{'exposed':>8}{'idle':>6}"
    lines = ["", f"{header}{'overlap':>8}{'memory':>11}"]
    for step in steps[:max_steps]:
        time = format_measurement(step.row.metrics.get(step.row.headline))
        line = f"  {step.name:{_MAX_NAME}}{time:>22}"
        for part, width in _STEP_PARTS.items():
            line += f"{_percent(step.parts.get(part)):>{width}}"
        line += f"{_percent(step.overlap):>8}{format_bytes(sum_memory(step.row)):>11}"
        lines.append(line)
    num_hidden = len(steps) - max_steps
    if num_hidden > 0:
        lines.append(f"  and {num_hidden} more")
    return lines


def _first(report: Report) -> list[str]:
    """Return what to look at first: what went wrong, then what stands out."""
    bad = [
        f"{one.case}: {one.status} ({one.repetitions} repetitions): {one.reason}"
        for one in report.problems
    ]
    sentences = [*bad, *(finding.text for finding in report.findings)]
    lines = (
        _sentences("Look at first", sentences, _MOST_SENTENCES)
        if sentences
        else ["", "Nothing stands out."]
    )
    return lines + _sentences("Settings compared", report.comparisons, _MOST_COMPARISONS)


def _sentences(title: str, sentences: Sequence[str], most: int) -> list[str]:
    lines = ["", title] if sentences else []
    for i, sentence in enumerate(sentences[:most], start=1):
        found = wrap(to_single_line(sentence), _WIDTH - 5, break_on_hyphens=False)
        if len(found) > _SENTENCE_LINES:
            found = [
                *found[: _SENTENCE_LINES - 1],
                f"{found[_SENTENCE_LINES - 1][: _WIDTH - 9]} ...",
            ]
        lines += [f"  {i}. {found[0]}", *(f"     {line}" for line in found[1:])]
    left = len(sentences) - most
    return lines + ([f"  and {left} more"] if left > 0 else [])


def _bar(share: float | None, width: int) -> str:
    return "#" * min(round((share or 0.0) * width), 2 * width)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"
