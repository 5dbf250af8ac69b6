"""Progress: what a person sees on a terminal and elsewhere, and what a program reads."""

import io
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from parbench.bench.launch.measure import Display
from parbench.bench.results.records import Record, Status, WorldInfo
from tests.support.fakes import make_fake_case


def record(status: Status = "ok", reason: str = "", number: int = 0) -> Record:
    return Record(
        case=make_fake_case(number),
        world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
        launch=0,
        status=status,
        reason=reason,
        started="2026-01-02T03:04:05.678Z",
        seconds=0.1,
    )


class Screen:
    """A display on a console that the test can read."""

    def __init__(self, total: int, *, terminal: bool = False, as_json: bool = False) -> None:
        self.file = io.StringIO()
        console = Console(
            file=self.file, force_terminal=terminal, width=200, soft_wrap=True, highlight=False
        )
        self.display = Display(total, 60.0, console, as_json=as_json)

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_without_a_terminal_a_launch_is_a_line_and_now_and_then_how_far_it_is_and_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        "parbench.bench.launch.measure.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    screen = Screen(4)
    with screen.display as display:
        display.launch(2, 3, 4)
        for seconds, lines in ((3, 1), (3, 2), (1, 2)):
            now[0] += seconds
            display.visit(make_fake_case(), 0.5)
            display.record(record())
            assert len(screen.lines()) == lines
        display.tell("a launch takes [long]")
    told = [
        "launch 2/3: 4 cases",
        "launch 2/3: 50% of the run, about 6 s left",
        "a launch takes [long]",
    ]
    assert screen.lines() == told


def test_a_program_reads_each_record_as_a_line_as_soon_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", stdout)
    screen = Screen(2, as_json=True)
    screen.display.launch(1, 1, 2)
    screen.display.visit(make_fake_case(), 0.0)
    for number in range(2):
        screen.display.record(record(number=number))
        lines = pipe.getvalue().splitlines()
        assert len(lines) == number + 1
        assert msgspec.json.decode(lines[-1], type=Record) == record(number=number)
    assert screen.lines() == ["launch 1/1: 2 cases"]
