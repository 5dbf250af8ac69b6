"""A report in any of its formats, of one run or of several."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.results.runs import Run, load_run
from bench.text import UserError
from reports.analysis.problems import warnings_of, write_whole
from reports.analysis.several import Several, gather, is_sweep
from reports.analysis.summary import Row, Summary, common_details, summarize
from reports.render.markdown import render_markdown, render_several_markdown
from reports.sections.several_sections import several_sections

DID_NOT_RUN = 4


@dataclass(frozen=True, kw_only=True)
class Built:
    """A report's content, and the exit code: 4 if it can only say that the run cannot be read."""

    content: bytes
    code: int = 0


def build(paths: Sequence[Path], form: str) -> Built:
    """Return the report of the runs' folders, or a sweep's, as ``html``, ``markdown``, ``csv`` or ``json``.

    ``UserError`` where a folder is no run; one that holds a run which cannot be read has a page that says why.
    """
    if len(paths) > 1 or is_sweep(paths[0]):
        return Built(content=_several(gather(paths, whole=True), form).encode(errors="replace"))
    (path,) = paths
    try:
        run = load_run(path)
    except UserError as error:
        if form != "html" or not (path / "run.json").is_file():
            raise
        # matplotlib takes a second to import, which only pages wait for
        from reports.render.page import render_refusal

        return Built(content=render_refusal(path.resolve().name, str(error)).encode(errors="replace"), code=DID_NOT_RUN)
    return Built(content=_one(run, form).encode(errors="replace"))


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page of these runs, or of a sweep's folder, whole or not at all.

    A run that cannot be read is told in it; ``UserError`` if none can, or the file cannot be written.
    """
    one = len(runs) == 1 and not is_sweep(runs[0])
    built = build(runs, "html").content if one else _several(gather(runs), "html").encode(errors="replace")
    write_whole(output, built)


def _one(run: Run, form: str) -> str:
    summary = summarize(run)
    if form == "markdown":
        return render_markdown(run, summary)
    if form == "csv":
        return as_csv(summary)
    if form == "json":
        return as_json(run, summary) + "\n"
    from reports.render.page import render_page

    return render_page(run, summary, warnings_of(run))


def _several(found: Several, form: str) -> str:
    both = [(one.run, one.summary) for one in found.runs]
    if form == "csv":
        return several_csv(both)
    if form == "json":
        return several_json(both) + "\n"
    if form == "markdown":
        return render_several_markdown(found, several_sections(found))
    from reports.render.page import render_several

    return render_several(found, several_sections(found), embedded_json(both))


MOST_EMBEDDED_BYTES = 400_000
"""What of a page of at most a megabyte is left to its data."""
CSV_COLUMNS = (
    "case",
    "name",
    "params",
    "status",
    "launches",
    "planned",
    "iterations",
    "check_passed",
    "noise",
    "metric",
    "value",
    "low",
    "high",
    "unit",
    "better",
    "method",
)


def as_json(run: Run, summary: Summary) -> str:
    """Return the run, its rows and what has none; intervals keep their method, unknown is null."""
    whole = {
        "run": run.info,
        "verdict": summary.verdict,
        "rows": [_row(row) for row in summary.rows],
        "skipped": summary.skipped,
        "missing": summary.missing,
    }
    return msgspec.json.encode(whole).decode()


def as_csv(summary: Summary) -> str:
    """Return one line for each metric of each row; a row without metrics has one with its status."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in summary.rows:
        writer.writerows(_lines(row))
    return buffer.getvalue()


def several_json(runs: Sequence[tuple[Run, Summary]]) -> str:
    """Return several runs as ``{"runs": [...]}``."""
    return f'{{"runs":[{",".join(as_json(run, summary) for run, summary in runs)}]}}'


def embedded_json(runs: Sequence[tuple[Run, Summary]], most_bytes: int = MOST_EMBEDDED_BYTES) -> str:
    """Return the same to stand in a page: where it is too long, without plans, and rows without details and notes."""
    whole = several_json(runs)
    if len(whole) <= most_bytes:
        return whole
    told = [
        {"run": {"id": run.info.id, "started": run.info.started}, "rows": [_brief(row) for row in summary.rows]}
        for run, summary in runs
    ]
    return msgspec.json.encode({"runs": told}).decode()


def several_csv(runs: Sequence[tuple[Run, Summary]]) -> str:
    """Return several runs' lines, each after its run's id."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("run", *CSV_COLUMNS))
    for run, summary in runs:
        writer.writerows([run.info.id, *line] for row in summary.rows for line in _lines(row))
    return buffer.getvalue()


def _row(row: Row) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in Row.__dataclass_fields__ if name != "records"}
    return {**fields, "details": common_details(row)}


def _brief(row: Row) -> dict[str, Any]:
    kept = ("case", "world", "status", "launches", "planned", "iterations", "check", "metrics", "grade")
    return {name: getattr(row, name) for name in kept}


def _lines(row: Row) -> list[list[Any]]:
    params = " ".join(f"{name}={value}" for name, value in row.case.params.items())
    counts = [row.launches, row.planned, row.iterations]
    start = [row.case.id, row.case.name, params, row.status, *counts, row.check.passed, row.grade]
    if not row.metrics:
        return [start + [None] * (len(CSV_COLUMNS) - len(start))]
    return [
        [*start, name, metric.value, metric.low, metric.high, metric.unit, metric.better, metric.method]
        for name, metric in row.metrics.items()
    ]
