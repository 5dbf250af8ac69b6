"""The message of a refusal."""

from collections.abc import Callable
from typing import Any

from parbench.bench.text import UserError


def usage_error(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message and the hint of the ``UserError`` that the call raises."""
    try:
        call(*args, **kwargs)
    except UserError as error:
        return f"{error} {error.hint}".strip()
    raise AssertionError(f"no UserError: {args} {kwargs}")
