"""A finished run, shown: tables on standard output and the report in its folder."""

import os
from pathlib import Path

import click

from bench.errors import UserError
from bench.runs import Run, load_run
from reports.summary import Summary, summarize
from reports.tables import print_tables

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


def export_run(run: Run, form: str) -> bytes:
    """Return a run's collectives as another tool would write them: ``nccl-tests`` text, or ``nccl-tests-json``."""
    from reports.nccl_json import render_json
    from reports.nccl_text import render_text

    return render_json(run) if form == "nccl-tests-json" else render_text(run).encode(errors="replace")


def build_report(path: Path, out: Path | None = None) -> Path:
    """Write the report of a run to ``out``, by default in its folder; return where."""
    run = load_run(path)
    target = path / REPORT if out is None else out
    _write_page(run, summarize(run), target)
    return target


def _write_page(run: Run, summary: Summary, target: Path) -> None:
    # matplotlib takes a second to import, which tables alone need not wait for
    from reports.page import render_page

    content = render_page(run, summary).encode(errors="replace")
    try:
        _write_whole(target, content)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from error


def _write_whole(target: Path, content: bytes) -> None:
    """Write the file whole or not at all."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
