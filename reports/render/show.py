"""The functions behind ``parbench run``, ``show`` and ``report`` that print and write reports."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.files import convert_write_errors, write_output
from parbench.bench.text import UserError, pluralize
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.render.closing import render_closing
from parbench.reports.render.data import render_csv, render_json
from parbench.reports.render.markdown import render_markdown
from parbench.reports.render.terminal import print_report, render_text, width_of
from parbench.reports.report import Report
from parbench.reports.run_data import RunData
from parbench.reports.run_reports import make_report, make_report_of_runs
from parbench.reports.run_set import RunSet
from parbench.reports.sweeps import expand_folders, is_sweep

REPORT_FILE = "report.html"


def show_run(data: RunData, *more: ReportVerdict, form: str = "tables") -> int:
    """Print the results of a run, write its HTML page, print its folder, and return the exit code.

    ``more`` are verdicts that follow the verdicts on the run. ``form`` selects what is printed:
    ``tables`` for the summary, or a format of ``parbench export``.
    The page is ``report.html`` in the folder of the run. If the page cannot be written, a warning
    is printed, and the exit code is 4 instead of 0.
    """
    path = data.run.path
    report = make_report(data, more)
    code = report.code
    if form == "tables":
        print_report(report, render=render_closing)
    else:
        from parbench.reports.formats.registry import render_export

        click.echo(render_export(form, data), nl=False)
    try:
        write_output(path / REPORT_FILE, render_report(report, "html"))
    except UserError as error:
        click.echo(f"no report: {error}", err=True)
        code = combine_exit_codes([code, ExitCode.DID_NOT_RUN])
    # Parsers of another format read standard output.
    click.echo(str(path), err=form != "tables")
    return code


def show_again(path: Path, *, show_all: bool = False) -> int:
    """Print a run or the runs of a sweep without writing files, and return the exit code.

    ``show_all`` prints all tables instead of the summary.
    """
    report = load_report([path])
    print_report(report, render=render_text if show_all else render_closing)
    click.echo(str(path))
    return report.code


def render_report(report: Report, form: str) -> bytes:
    """Return a report encoded as UTF-8 in the format ``form``.

    ``form`` is ``html``, ``markdown``, ``csv``, ``json``, or ``tables`` for text. The text has the
    width of the terminal.
    """
    if form == "html":
        # Only pages wait for the import of jinja2.
        from parbench.reports.render.page import render_page

        text = render_page(report)
    elif form == "tables":
        text = render_text(report, width_of(sys.stdout))
    else:
        renderers = {"markdown": render_markdown, "csv": render_csv, "json": render_json}
        text = renderers[form](report)
    return text.encode(errors="replace")


def load_report(paths: Sequence[Path]) -> Report:
    """Load the runs in folders and return the report of one run, several runs, or a sweep.

    Each path is a run, a folder of runs, or a sweep. Raises ``UserError`` if no run can be read.
    """
    paths = expand_folders(paths)
    if len(paths) > 1 or is_sweep(paths[0]):
        return make_report_of_runs(RunSet.load(paths))
    return make_report(RunData.load(paths[0]))


def build_report(
    paths: Sequence[Path],
    form: str = "html",
    output: Path | None = None,
    figures: Path | None = None,
    formats: Sequence[str] = (),
) -> int:
    """Write the report of one run, of several runs, or of a sweep, and return its exit code.

    ``form`` is a format of ``render_report``. An HTML page goes to the file ``output``, by default
    ``report.html`` in the folder of the run or sweep, or in the current folder for several paths.
    Other formats go to ``output`` if it is given, otherwise to standard output. The path of a
    written file is printed. If ``figures`` is a folder, the figures are written to the folder in
    each of ``formats``, such as ``pdf``.
    """
    target = output
    if target is None and form == "html":
        target = paths[0] / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE)
    report = load_report(paths)
    if figures is not None:
        write_figures(report, figures, formats)
    content = render_report(report, form)
    if target is None:
        click.echo(content, nl=False)
    else:
        write_output(target, content)
        click.echo(str(target))
    return report.code


def write_figures(report: Report, folder: Path, formats: Sequence[str]) -> None:
    """Write every figure of a report to a folder in each of ``formats``, such as ``pdf``.

    The number of figures is printed to standard error.
    """
    from parbench.reports.figures.svg import save_charts

    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = save_charts(report.charts, folder, formats)
    count = pluralize(len(files) // len(formats), "figure")
    click.echo(f"{folder}: {count} as {', '.join(formats)}", err=True)


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the HTML page of several runs to the file ``output``.

    The page names the runs that are missing or cannot be read.
    """
    report = make_report_of_runs(RunSet.load(runs))
    write_output(output, render_report(report, "html"))
