"""Runs, shown: tables on standard output, the report in any of its forms, and what other tools read."""

import fcntl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_write_errors, write_output
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError, format_duration, pluralize
from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.render.closing import render_closing
from parbench.reports.render.data import render_csv, render_json
from parbench.reports.render.markdown import render_markdown
from parbench.reports.render.terminal import print_report, render_text
from parbench.reports.report import Report
from parbench.reports.run_set import RunSet
from parbench.reports.sections.one_run import report_of
from parbench.reports.sweeps import expand_folders, is_sweep
from parbench.reports.tables.several_runs import make_report_of_runs

REPORT = "report.html"


def show_run(path: Path, *more: Verdict, form: str = "tables", whole: bool = False) -> int:
    """Print a run and its folder, write its report, and return the exit code.

    As tables, of which the first page is printed unless ``whole``, the folder is the last line; in another tool's
    format it goes to standard error, out of the way of parsers. A report that cannot be written does not hide the
    results: it is a warning, and the exit code 4 if all else is fine.
    """
    run = load_run(path)
    report = report_of(run, *more)
    code = report.code
    if form == "tables":
        print_report(report, render=render_text if whole else render_closing)
    else:
        from parbench.reports.formats.registry import render_file

        click.echo(render_file(form, run), nl=False)
    try:
        write_output(path / REPORT, rendered(report, "html"))
    except UserError as error:
        click.echo(f"no report: {error}", err=True)
        code = combine_exit_codes([code, ExitCode.DID_NOT_RUN])
    click.echo(str(path), err=form != "tables")
    return code


def show_again(path: Path, *, whole: bool = False) -> int:
    """Print the first page of a run or all its tables, or those of a sweep's runs, and the folder.

    Nothing is written; the exit code is returned.
    """
    report = (
        make_report_of_runs(RunSet.load([path])) if is_sweep(path) else report_of(load_run(path))
    )
    print_report(report, render=render_text if whole else render_closing)
    click.echo(str(path))
    return report.code


def rendered(report: Report, form: str) -> bytes:
    """Return a report as ``html``, ``markdown``, ``csv``, ``json`` or ``tables``."""
    if form == "html":
        # only pages wait for jinja2
        from parbench.reports.render.page import render_page

        return render_page(report).encode(errors="replace")
    texts = {
        "markdown": render_markdown,
        "csv": render_csv,
        "json": render_json,
        "tables": render_text,
    }
    return texts[form](report).encode(errors="replace")


def load_report(paths: Sequence[Path]) -> Report:
    """Return the report of one run or several, or of a sweep; ``UserError`` if one cannot be read."""
    paths = expand_folders(paths)
    if len(paths) > 1 or is_sweep(paths[0]):
        return make_report_of_runs(RunSet.load(paths))
    return report_of(load_run(paths[0]))


def build(
    paths: Sequence[Path], form: str, figures: Path | None = None, formats: Sequence[str] = ()
) -> tuple[bytes, int]:
    """Return the report of one run or several, or of a sweep, and the exit code.

    Figures are also written to a folder if there is one. ``UserError`` where a folder is no run; one that holds a run
    which cannot be read has a page that says why, and the exit code 4.
    """
    try:
        report = load_report(paths)
    except UserError as error:
        [path, *others] = expand_folders(paths)
        if form != "html" or others or not (path / "run.json").is_file():
            raise
        from parbench.reports.render.page import render_refusal

        page = render_refusal(path.resolve().name, str(error))
        return page.encode(errors="replace"), ExitCode.DID_NOT_RUN
    if figures is not None:
        write_figures(report, figures, formats)
    return rendered(report, form), 0


def build_report(
    paths: Sequence[Path],
    form: str = "html",
    out: Path | None = None,
    figures: Path | None = None,
    formats: Sequence[str] = (),
) -> int:
    """Write the report of one run or several, or of a sweep, and return the exit code.

    A page goes to ``out``, by default ``report.html`` in the run's or the sweep's folder, or here for several, and
    where it is is printed; another format goes to ``out`` or to standard output. Figures go to a folder in each of the
    formats, which is printed on standard error.
    """
    content, code = build(paths, form, figures, formats)
    target = out
    if target is None and form == "html":
        target = paths[0] / REPORT if len(paths) == 1 else Path(REPORT)
    if target is None:
        click.echo(content, nl=False)
    else:
        write_output(target, content)
        click.echo(str(target))
    return code


def write_figures(report: Report, folder: Path, formats: Sequence[str]) -> None:
    """Write every figure of a report to a folder, and print what was written on standard error."""
    from parbench.reports.figures.svg import save_charts

    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = save_charts(report.charts, folder, formats)
    count = pluralize(len(files) // len(formats), "figure")
    click.echo(f"{folder}: {count} as {', '.join(formats)}", err=True)


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write a page of several runs, which names those that cannot be read."""
    run_set = RunSet.load(runs, is_strict=False)
    write_output(output, rendered(make_report_of_runs(run_set), "html"))


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    for name, content in files.items():
        target = folder / name
        with convert_write_errors(target.parent, "cannot be made"):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_output(target, content)
    return [folder / name for name in files]


EVERY_SECONDS = 1.0
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def follow(
    path: Path,
    out: TextIO | None = None,
    pause: Callable[[float], None] = time.sleep,
    *,
    whole: bool = False,
) -> int:
    """Show a run until its writer ends, then its tables once more; return its exit code.

    On a terminal the tables are drawn anew; elsewhere each step of progress is a line on standard error.
    """
    out, render = sys.stdout if out is None else out, render_text if whole else render_closing
    shown = -1
    while True:
        is_over, run = not is_written(path), load_run(path)
        if is_over or len(run.records) != shown:
            shown, report = len(run.records), report_of(run)
            if out.isatty():
                out.write(_CLEAR)
            if is_over or out.isatty():
                print_report(report, out, render)
            if is_over:
                return report.code
            click.echo(_progress(report), err=True)
        pause(EVERY_SECONDS)


def is_written(path: Path) -> bool:
    """Say whether another process holds the run's lock, as ``parbench run`` does until it ends."""
    try:
        with (path / "records.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can tell, so nobody is waited for
        return False
    return False


def _progress(report: Report) -> str:
    ((run, summary),) = report.runs
    done, left = len(run.records), summary.tally.missing
    seconds = sum(record.seconds for record in run.records)
    counts = ", ".join(f"{count} {status}" for status, count in summary.tally.counts.items())
    expected = f", about {format_duration(seconds / done * left)} left" if done and left else ""
    return f"{done} of {done + left} measurements; cases: {counts or 'none yet'}{expected}"
