"""Fixtures of the planner's tests."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from parbench import cli

PlanCommand = Callable[[str], Result]


@pytest.fixture
def plan_command(monkeypatch: pytest.MonkeyPatch) -> PlanCommand:
    """Return a function that runs ``parbench plan`` with a line of arguments."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda arguments: CliRunner().invoke(cli.main, ["plan", *arguments.split()])
