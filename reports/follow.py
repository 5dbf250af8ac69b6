"""A run in progress, followed: its tables again whenever a case has ended, until nobody writes it any more."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import click

from bench.results.runs import load_run
from bench.text import format_duration
from reports.folder import is_written
from reports.summary import Summary, summarize
from reports.tables import print_tables

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
