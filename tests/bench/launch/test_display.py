"""The progress of a run on standard error."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from parbench.bench.launch.display import Display
from tests.support.reports.reports_fixtures import failed_record, step_case


def test_progress_is_a_line_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    seconds = iter([0.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds, 30.0))
    with Display(Console(file=output)) as shown:
        shown.show_progress("repetition 2/5: collective.all_reduce", 0.25)
    expected = "repetition 2/5: collective.all_reduce, 25% of the run\n"
    assert output.getvalue() == expected


def test_result_of_injected_fault_is_not_printed() -> None:
    output = io.StringIO()
    with Display(Console(file=output)) as shown:
        record = failed_record(step_case("ddp"), 0, "wrong", "3 values differ")
        shown.show_record(replace(record, injected="corrupt:1"))
        assert output.getvalue() == ""
        shown.show_record(replace(record, injected="late:1:3ms"))
    assert output.getvalue().startswith("wrong: ")
