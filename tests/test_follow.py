"""Following a run: a line for each change, nothing while nothing happens, and the tables when its writer ends."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reports_fixtures import bad, collective, make_plan, make_run, ok, write_run

from bench.runs import RecordWriter, load_run, open_writer
from reports.follow import follow
from reports.summary import summarize
from reports.tables import render_tables


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def folder(out: Path) -> Path:
    return write_run(out, make_run(make_plan([collective()], launches=3), [ok(collective())]))


def pauses(path: Path, *steps: Callable[[RecordWriter], None]) -> Callable[[float], None]:
    """Return what to do in each pause: a step, then the end of the writer."""

    def written() -> Iterator[None]:
        with open_writer(path) as writer:
            yield
            for step in steps:
                step(writer)
                yield
        yield

    told = written()
    next(told)
    return lambda seconds: next(told)


def test_a_finished_run_is_shown_at_once(tmp_path: Path) -> None:
    path, out = folder(tmp_path), io.StringIO()
    assert follow(path, out, pause=lambda seconds: pytest.fail("nobody writes")) == 4
    run = load_run(path)
    assert out.getvalue() == render_tables(run, summarize(run), width=None, full=True)


def test_each_change_is_a_line_and_the_tables_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = folder(tmp_path), io.StringIO()
    pause = pauses(
        path,
        lambda writer: writer.write(ok(collective(), 1)),
        lambda writer: None,
        lambda writer: writer.write(bad(collective(), 2)),
    )
    assert follow(path, out, pause) == 4
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3 measurements; cases: 1 ok, about 1 s left",
        "2 of 3 measurements; cases: 1 ok, about 500 ms left",
        "3 of 3 measurements; cases: 1 failed",
    ]
    run = load_run(path)
    assert out.getvalue() == render_tables(run, summarize(run), width=None, full=True)


def test_a_run_that_has_measured_nothing_yet_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, make_run(make_plan([collective()]), []))
    follow(path, io.StringIO(), pauses(path))
    assert capsys.readouterr().err == "0 of 1 measurements; cases: none yet\n"


def test_a_terminal_is_drawn_anew(tmp_path: Path) -> None:
    path, out = folder(tmp_path), Terminal()
    follow(path, out, pauses(path, lambda writer: writer.write(ok(collective(), 1))))
    screens = out.getvalue().split("\x1b[2J\x1b[3J\x1b[H")
    assert screens[0] == ""
    assert ["240" in screen for screen in screens[1:]] == [False, True, True]
