"""The sentence with which something refuses what it was given."""

from collections.abc import Callable
from typing import Any

from parbench.bench.text import UserError


def usage_error(call: Callable[..., Any], *given: Any, **more: Any) -> str:
    try:
        call(*given, **more)
    except UserError as error:
        return str(error)
    raise AssertionError(f"not refused: {given} {more}")
