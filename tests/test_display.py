"""Progress: what a person sees on a terminal and elsewhere, and what a program reads."""

import io
import time
from pathlib import Path

import msgspec
import pytest
from fakes import case
from rich.console import Console

from bench.display import Display, JsonLines
from bench.records import Record, Status, WorldInfo

RUN = Path("runs/20260101T000000Z-host-1a2b3c")


def record(status: Status = "ok", reason: str = "", number: int = 0) -> Record:
    return Record(
        case=case(number),
        world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
        launch=0,
        status=status,
        reason=reason,
        started="2026-01-02T03:04:05.678Z",
        seconds=0.1,
    )


class Screen:
    """A display on a console that the test can read."""

    def __init__(self, total: int, *, terminal: bool = False) -> None:
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=200, soft_wrap=True, highlight=False)
        self.display = Display(total, console)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


class FakeTime:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("bench.display.time", fake)
    return fake


def test_a_launch_is_a_line_where_there_is_no_terminal() -> None:
    screen = Screen(6)
    with screen.display as display:
        display.launch(2, 3, 6)
        display.case(case())
        display.record(record())
    assert screen.lines == ["launch 2/3: 6 cases"]


@pytest.mark.parametrize("status", ["failed", "hang", "wrong"])
def test_what_went_badly_is_told_at_once_with_its_case_and_reason(status: Status) -> None:
    screen = Screen(2)
    with screen.display as display:
        display.record(record(status, "rank 1 died"))
        assert screen.lines == [f"{status}: {case().label}: rank 1 died"]


@pytest.mark.parametrize("status", ["ok", "skipped"])
def test_what_went_well_or_not_at_all_is_not_told(status: Status) -> None:
    screen = Screen(2)
    with screen.display as display:
        display.record(record(status, "no such dtype"))
    assert screen.lines == []


def test_now_and_then_a_line_says_how_far_it_is_and_how_long_it_takes(clock: FakeTime) -> None:
    screen = Screen(4)
    with screen.display as display:
        display.launch(1, 1, 4)
        clock.now += 3
        display.record(record())
        assert len(screen.lines) == 1
        clock.now += 3
        display.record(record())
        assert screen.lines[1:] == ["launch 1/1: 2 of 4 cases, about 6 s left"]
        clock.now += 1
        display.record(record())
        assert len(screen.lines) == 2


def test_a_terminal_has_a_bar_instead_of_lines() -> None:
    screen = Screen(2, terminal=True)
    with screen.display as display:
        display.launch(1, 1, 2)
        display.case(case())
        display.record(record())
        time.sleep(0.15)  # the bar is drawn ten times a second
    shown = screen.file.getvalue()
    assert "1/2" in shown
    assert "launch 1/1: collective.all_reduce" in shown
    assert "2 cases" not in shown


def test_a_reason_with_brackets_is_shown_as_it_is() -> None:
    screen = Screen(1)
    screen.display.record(record("failed", "[bold]rank[/] raised KeyError: [0]"))
    assert screen.lines == [f"failed: {case().label}: [bold]rank[/] raised KeyError: [0]"]


def test_a_long_reason_is_one_line() -> None:
    screen = Screen(1)
    screen.display.record(record("failed", "word " * 100))
    assert len(screen.lines) == 1


def test_a_run_that_stops_says_why_what_is_kept_and_how_to_go_on() -> None:
    screen = Screen(5)
    with screen.display as display:
        display.record(record())
        display.stopped("interrupted", RUN)
    assert screen.lines == [f"interrupted: 1 of 5 cases measured; go on with: parbench run --resume {RUN}"]


def test_progress_goes_to_stderr_and_nothing_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(1) as display:
        display.launch(1, 1, 1)
        display.record(record("failed", "it broke"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "it broke" in shown.err


def test_a_program_reads_each_record_as_a_line_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", stdout)
    screen = Screen(2)
    audience = JsonLines(screen.display)
    audience.launch(1, 1, 2)
    audience.case(case())
    for number in range(2):
        audience.record(record(number=number))
        lines = pipe.getvalue().splitlines()
        assert len(lines) == number + 1
        assert msgspec.json.decode(lines[-1], type=Record) == record(number=number)
    assert screen.lines == ["launch 1/1: 2 cases"]
