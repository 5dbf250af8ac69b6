"""A finished run, shown: tables on standard output and the report in its folder."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click

from bench.results.runs import Run, load_run
from bench.text import UserError, format_duration
from reports.analysis.problems import is_written, warnings_of, write_whole
from reports.analysis.several import gather, is_sweep, point_of
from reports.analysis.summary import Summary, summarize
from reports.render.tables import print_several, print_tables
from reports.sections.several_sections import terminal_sections

REPORT = "report.html"
DID_NOT_RUN = 4


def show_run(path: Path, form: str = "tables", *, page: bool = True) -> int:
    """Print a run and its folder, write its report unless told not to, and return the exit code.

    As tables, the folder is their last line; in another tool's format, it goes to standard error, out of the way of
    parsers. A report that cannot be written does not hide the results: it is a warning, and the exit code 4 if all
    else is fine.
    """
    run = load_run(path)
    summary = summarize(run)
    code = summary.verdict.code
    if form == "tables":
        print_tables(run, summary)
    else:
        click.echo(export_run(run, form), nl=False)
    if page:
        try:
            _write_page(run, summary, path / REPORT)
        except UserError as error:
            click.echo(f"no report: {error}", err=True)
            code = code or DID_NOT_RUN
    click.echo(str(path), err=form != "tables")
    return code


def show_again(path: Path) -> int:
    """Print the tables of a run, or of a sweep's runs, and the folder; write nothing, and return the exit code."""
    if is_sweep(path):
        found = gather([path])
        print_several(found, terminal_sections(found))
        click.echo(str(path))
        return found.code
    run = load_run(path)
    summary = summarize(run)
    print_tables(run, summary, full=True)
    click.echo(str(path))
    return summary.verdict.code


def export_run(run: Run, form: str) -> bytes:
    """Return a run as another tool would write it: ``nccl-tests`` text, ``nccl-tests-json``, a ``chrome-trace``, ..."""
    from reports.formats.chrome_trace import render_trace
    from reports.formats.exports import FORMATS
    from reports.formats.nccl_tests import render_json, render_text

    if form in FORMATS:
        return FORMATS[form](run)
    if form == "csv":
        from reports.analysis.frame import metrics_frame

        return (
            metrics_frame([(run, point.name if (point := point_of(run.path)) else None)])
            .to_csv(index=False)
            .encode(errors="replace")
        )
    if form == "chrome-trace":
        return render_trace(run)
    return render_json(run) if form == "nccl-tests-json" else render_text(run).encode(errors="replace")


def export_files(run: Run, form: str) -> dict[str, bytes]:
    """Return a run as files: a ``chrome-trace`` for each case, for ``hta`` one for each case and rank, ..."""
    from reports.formats.chrome_trace import render_for_analysis, render_traces
    from reports.formats.exports import FOLDERS

    if form in FOLDERS:
        return FOLDERS[form](run)
    return render_for_analysis(run) if form == "hta" else render_traces(run)


def build_report(paths: Sequence[Path], form: str = "html", out: Path | None = None) -> int:
    """Write the report of one run or several, and return the exit code.

    A page goes to ``out``, by default ``report.html`` in the run's or the sweep's folder, or here for several, and
    where it is is printed; another format goes to ``out`` or to standard output.
    """
    from reports.render.build import build

    built = build(paths, form)
    target = out
    if target is None and form == "html":
        target = paths[0] / REPORT if len(paths) == 1 else Path(REPORT)
    if target is None:
        click.echo(built.content, nl=False)
    else:
        write_whole(target, built.content)
        click.echo(str(target))
    return built.code


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files under a folder that is made where it is not there; return where they are."""
    for name, content in files.items():
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{target.parent} cannot be made: {error.strerror}") from error
        write_whole(target, content)
    return [folder / name for name in files]


def _write_page(run: Run, summary: Summary, target: Path) -> None:
    # matplotlib takes a second to import, which tables alone need not wait for
    from reports.render.page import render_page

    write_whole(target, render_page(run, summary, warnings_of(run)).encode(errors="replace"))


EVERY_SECONDS = 1.0
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def follow(path: Path, out: TextIO | None = None, pause: Callable[[float], None] = time.sleep) -> int:
    """Show a run until its writer ends, then its tables once more; return its exit code.

    On a terminal the tables are drawn anew; elsewhere each step of progress is a line on standard error.
    """
    out = sys.stdout if out is None else out
    shown = -1
    while is_written(path):
        run = load_run(path)
        if len(run.records) != shown:
            shown = len(run.records)
            summary = summarize(run)
            if out.isatty():
                out.write(_CLEAR)
                print_tables(run, summary, out)
            click.echo(_progress(summary, shown, sum(one.seconds for one in run.records)), err=True)
        pause(EVERY_SECONDS)
    run = load_run(path)
    summary = summarize(run)
    if out.isatty():
        out.write(_CLEAR)
    print_tables(run, summary, out, full=True)
    return summary.verdict.code


def _progress(summary: Summary, done: int, seconds: float) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in summary.verdict.counts.items())
    left = summary.verdict.missing
    expected = f", about {format_duration(seconds / done * left)} left" if done and left else ""
    return f"{done} of {done + left} measurements; cases: {counts or 'none yet'}{expected}"
