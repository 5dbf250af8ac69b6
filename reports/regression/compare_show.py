"""A comparison as text for a terminal, as Markdown for a step summary, as JSON and as JUnit XML."""

import html
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from bench.results.runs import Run, load_run
from bench.text import UserError
from reports import cells
from reports.regression.compare import (
    DID_NOT_RUN,
    UNKNOWN,
    WORST_FIRST,
    Comparison,
    Family,
    Series,
    Word,
    compare,
    world_words,
)
from reports.regression.compare_columns import (
    change_columns,
    effect_words,
    family_columns,
    heading,
    sentences,
    series_columns,
    verdict_words,
    worst_first,
)
from reports.regression.confirm import Confirming, confirm
from reports.regression.history_select import means_run, notes_of_pools, select_run
from reports.regression.noise_floor import find_floor
from reports.regression.rule import Rule
from reports.report import Column, T

SCHEMA_VERSION = 1
"""History of the JSON: 1 is the first."""
MARKDOWN_BYTES = 1_000_000
"""A GitHub step summary holds 1024 KiB; the rest is left to what else a job says."""
_SHARES = (0.2, 0.2, 0.5)


def as_table(comparison: Comparison, *, width: int | None = None) -> str:
    """Return tables for a terminal of so many columns; for None, a pipe's, nothing is left out."""
    lines = [cells.visible(line) for line in heading(comparison)]
    lines += _titled("Families", family_columns(comparison.families), comparison.families, width)
    lines += _titled("Series", series_columns(comparison.series), comparison.series, width)
    lines += _titled("What differs around them", change_columns(), comparison.changes, width)
    return "\n".join([*lines, "", *(cells.visible(sentence) for sentence in sentences(comparison)), ""])


def as_markdown(comparison: Comparison, *, limit_bytes: int = MARKDOWN_BYTES) -> str:
    """Return GitHub's Markdown: the worst first, so that what goes beyond ``limit_bytes`` is cut, and counted."""
    families = sorted(comparison.families, key=lambda family: WORST_FIRST.index(family.word))
    series = worst_first(comparison.series)
    room = [round(limit_bytes * share) for share in _SHARES]
    lines = [
        f"## parbench compare: {_escaped(verdict_words(comparison))}",
        "",
        *(f"{_escaped(line)}  " for line in (*heading(comparison)[:2], *heading(comparison)[3:])),
        *_markdown("Families", family_columns(families), families, room[0]),
        *_markdown("What differs around them", change_columns(), comparison.changes, room[1]),
        *_markdown("Series", series_columns(series), series, room[2]),
        "",
        *(f"- {_escaped(sentence)}" for sentence in sentences(comparison)),
        "",
    ]
    return "\n".join(lines)


def as_json(comparison: Comparison, *, code: int) -> str:
    """Return everything as JSON, with the exit code; times in seconds, changes as fractions, unknown is null."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "base": _run(comparison.base),
        "new": _run(comparison.new),
        "rule": asdict(comparison.rule),
        "exit_code": code,
        "verdicts": comparison.counts,
        "environment": [asdict(change) for change in comparison.changes],
        "notes": comparison.notes,
        "families": [_family(family) for family in comparison.families],
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode() + "\n"


def as_junit(comparison: Comparison) -> str:
    """Return JUnit XML, a suite for each family, that Jenkins' junit-10.xsd accepts.

    Slower is a failure; wrong, failed and missing are errors; what cannot be told is skipped. That schema gives
    properties to suites alone, so a suite's name the size they belong to.
    """
    suites = [_suite(family) for family in comparison.families]
    totals = {name: str(sum(int(suite.get(name, "0")) for suite in suites)) for name in ("tests", "failures", "errors")}
    root = ElementTree.Element("testsuites", {"name": "parbench compare", **totals})
    root.extend(suites)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _titled(title: str, columns: Sequence[Column[T]], rows: Sequence[T], width: int | None) -> list[str]:
    """Return a table with its title, without the columns of the highest ``drop`` where the terminal is too narrow."""
    if not rows:
        return []
    kept = list(columns)
    while width is not None and max(map(len, lines := _aligned(kept, rows))) > width:
        droppable = max(kept, key=lambda column: column.drop)
        if droppable.drop == 0:
            break
        kept.remove(droppable)
    hidden = [column.title for column in columns if column not in kept]
    lines = _aligned(kept, rows)
    return ["", title, *lines, *([f"No room for: {', '.join(hidden)}; --format json has all."] if hidden else [])]


def _aligned(columns: Sequence[Column[T]], rows: Sequence[T]) -> list[str]:
    table = [[column.title for column in columns], *_texts(columns, rows)]
    widths = [max(map(len, texts)) for texts in zip(*table, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if column.number else text.ljust(width)
            for text, width, column in zip(texts, widths, columns, strict=True)
        ).rstrip()
        for texts in table
    ]


def _texts(columns: Sequence[Column[T]], rows: Sequence[T]) -> list[list[str]]:
    return [[cells.visible(column.text(row)) for column in columns] for row in rows]


def _markdown(title: str, columns: Sequence[Column[T]], rows: Sequence[T], limit_bytes: int) -> list[str]:
    """Return a table of the first rows, as many as there is room for."""
    if not rows:
        return []
    lines = ["", f"### {title}", "", _line([column.title for column in columns])]
    lines.append(_line(["---:" if column.number else "---" for column in columns]))
    left = limit_bytes - sum(len(line.encode()) + 1 for line in lines)
    for number, texts in enumerate(_texts(columns, rows)):
        line = _line([_escaped(text) for text in texts])
        left -= len(line.encode()) + 1
        if left < 0:
            return [*lines, "", f"{len(rows) - number} more rows have no room here; `--format json` has all."]
        lines.append(line)
    return lines


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _escaped(text: str) -> str:
    """Return text that Markdown and HTML leave alone."""
    return html.escape(cells.visible(text), quote=False).replace("|", "\\|").replace("`", "\\`").replace("*", "\\*")


def _run(run: Run) -> dict[str, Any]:
    info = run.info
    return {"id": info.id, "path": str(run.path), "host": info.host, "started": info.started, "parbench": info.parbench}


def _family(family: Family) -> dict[str, Any]:
    return {
        "name": family.name,
        "verdict": family.word,
        "p_value": family.p_value,
        "slower_size_bytes": _sizes(family, "SLOWER"),
        "faster_size_bytes": _sizes(family, "FASTER"),
        "series": [_series(one) for one in family.series],
    }


def _sizes(family: Family, word: Word) -> list[Any]:
    return [one.case.params.get("size_bytes") for one in family.series if one.word == word]


def _series(one: Series) -> dict[str, Any]:
    return {
        "case": one.case,
        "world": one.world,
        "verdict": one.word,
        "reason": one.reason,
        "metric": one.row.headline,
        "effect": asdict(one.effect) if one.effect else None,
        "base_seconds": one.base_seconds,
        "new_seconds": one.new_seconds,
        "environment": [change.path for change in one.changes],
        "measured_floor": one.measured,
    }


def _suite(family: Family) -> ElementTree.Element:
    cases = [_testcase(one) for one in family.series]
    counts = {
        name: str(sum(case.find(tag) is not None for case in cases))
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    name = f"{family.name} on {world_words(family.series[0].world)}"
    suite = ElementTree.Element("testsuite", {"name": cells.visible(name), "tests": str(len(cases)), **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in _properties(family).items():
        ElementTree.SubElement(properties, "property", name=cells.visible(key), value=cells.visible(value))
    suite.extend(cases)
    return suite


def _properties(family: Family) -> dict[str, str]:
    """Return each effect's numbers under its size, then what differs around the family."""
    found: dict[str, str] = {}
    for one in family.series:
        size = cells.size(one.case.params.get("size_bytes"))
        prefix = "" if size == cells.UNKNOWN else f"{size} "
        known = asdict(one.effect) if one.effect else {}
        found |= {f"{prefix}{name}": f"{value:.6g}" for name, value in known.items() if value is not None}
        found[f"{prefix}verdict"] = one.word
    around = {change.path: f"{change.base} -> {change.new}" for one in family.series for change in one.changes}
    return found | {f"environment {path}": text for path, text in around.items()}


def _testcase(one: Series) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=one.case.name, name=cells.visible(one.case.label))
    seconds = one.new.value(one.new.headline) if one.new else None
    if seconds is not None:
        case.set("time", f"{seconds:.9f}")
    tag = _tag(one.word)
    if tag:
        message = ": ".join(part for part in (effect_words(one.effect) if one.effect else "", one.reason) if part)
        text = cells.visible(message or one.word)
        ElementTree.SubElement(case, tag, type=one.word, message=text).text = f"{one.word}: {text}"
    return case


def _tag(word: Word) -> str | None:
    if word == "SLOWER":
        return "failure"
    if word == "WRONG" or word in DID_NOT_RUN:
        return "error"
    return "skipped" if word == "NEW" or word in UNKNOWN else None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How to compare: the floor as text, the differences that are meant, the form, and strictness.

    ``floor`` is a percentage, the file of ``parbench aa``, or None for 3 % and the usual file if it is there.
    ``history`` is the file whose runs words such as ``main~1`` mean; ``confirming`` says how to launch suspects again.
    """

    floor: str | None = None
    across: tuple[str, ...] = ()
    form: str = "table"
    fail_on_unknown: bool = False
    history: Path | None = None
    confirming: Confirming | None = None


def compare_runs(base: str, new: str, asked: Asked) -> tuple[str, int]:
    """Return the comparison of two runs as text, and the exit code; ``UserError`` if they cannot be compared."""
    newer = find_run(new, asked.history)
    runs = find_run(base, asked.history, without=newer.info.id), newer
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise UserError(f"BASE and NEW are the same run, {runs[0].path}: name two runs")
    floor, floors = find_floor(asked.floor)
    comparison = compare(*runs, Rule(floor=floor), asked.across, floors)
    comparison = replace(comparison, notes=notes_of_pools(runs))
    if asked.confirming is not None:
        comparison = confirm(comparison, asked.confirming, asked.across, floors)
    code = comparison.code(fail_on_unknown=asked.fail_on_unknown)
    return _render(comparison, asked.form, code), code


def find_run(word: str, history: Path | None = None, *, without: str = "") -> Run:
    """Return the run that a word of the command line means: a run's folder, or runs of the history.

    Where a word means several runs, that of the id ``without`` is none of them.
    """
    if history is not None and not Path(word).exists() and (means_run(word) or history.exists()):
        return select_run(history, word, without=without)
    return load_run(Path(word))


def _render(comparison: Comparison, form: str, code: int) -> str:
    if form == "json":
        return as_json(comparison, code=code)
    if form == "junit":
        return as_junit(comparison)
    if form == "markdown":
        return as_markdown(comparison)
    return as_table(comparison, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
