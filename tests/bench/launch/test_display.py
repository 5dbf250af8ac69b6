"""The progress of a run on standard error."""

import io

import pytest
from rich.console import Console

from parbench.bench.launch.display import Display


def test_progress_is_a_line_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    seconds = iter([0.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds, 30.0))
    with Display(Console(file=output)) as shown:
        shown.show_progress("repetition 2/5: collective.all_reduce", 0.25)
    expected = "repetition 2/5: collective.all_reduce, 25% of the run\n"
    assert output.getvalue() == expected
