"""The report on a terminal and in a pipe: no cell lost, no line too long, text escaped."""

import io
import re
from collections.abc import Callable
from functools import partial

import pytest

from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_run
from parbench.bench.results.tables import Table
from parbench.reports.render.terminal import print_report, render_text
from tests.support.golden import GOLDEN
from tests.support.reports.report_rows import report_of, run_from_records
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    sample_run,
)

ESCAPE = "\x1b"


def render(*records: Record, width: int | None = None, color: bool = False) -> str:
    return render_text(report_of(run_from_records(*records)), width, color)


RUNS: dict[str, Callable[[], Run]] = {
    "steps": partial(load_run, GOLDEN / "runs" / "steps"),
    "sample": sample_run,
}


def list_fragments(table: Table) -> list[str]:
    """Return all numbers and words of a table, which may be wrapped between words."""
    fragments = []
    for column in table.varying:
        for row in table.rows:
            cell = column.format_cell(row)
            fragments += [cell] if column.is_number else cell.split()
    return fragments


@pytest.mark.parametrize("width", [60, None])
@pytest.mark.parametrize("name", RUNS)
def test_every_width_shows_all_cells(name: str, width: int | None) -> None:
    report = report_of(RUNS[name]())
    text = render_text(report, width)
    if width is not None:
        assert max(map(len, text.splitlines())) <= width
    for section in report.sections:
        for table in section.tables:
            assert not table.rows or table.caption[1:] in " ".join(text.split())
            for fragment in list_fragments(table):
                assert fragment in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def print_sample(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **variables: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    print_report(report_of(sample_run()), stream)
    return stream.getvalue()


def test_terminal_has_width_and_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ESCAPE not in print_sample(monkeypatch, Terminal(), NO_COLOR="1")
    text = print_sample(monkeypatch, Terminal(), COLUMNS="120")
    assert ESCAPE in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= 120


def test_pipe_output_has_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ESCAPE in print_sample(monkeypatch, io.StringIO(), FORCE_COLOR="1")
    text = print_sample(monkeypatch, io.StringIO())
    assert ESCAPE not in text
    assert max(map(len, text.splitlines())) > 120
    text = print_sample(monkeypatch, io.StringIO(), COLUMNS="80")
    assert max(map(len, text.splitlines())) <= 80


def test_ascii_stream_is_escaped() -> None:
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding="ascii")
    run = run_from_records(failed_record(collective_case(), reason="größer"))
    print_report(report_of(run), stream)
    stream.flush()
    assert b"gr\\xf6\\xdfer" in content.getvalue()


def test_hostile_text_is_escaped() -> None:
    failed = failed_record(collective_case(), reason=HOSTILE_TEXT)
    text = render(failed, width=200, color=True)
    assert "<script>alert('x')</script> [bold]$x$ & \\x1b[31mred" in text
