"""Equations whose printed text is what is evaluated. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType

_NAME = re.compile(r"[A-Za-z]\w*")
"""The pattern of a symbol in an expression."""


@dataclass(frozen=True, kw_only=True)
class Equation:
    """An arithmetic expression as text, with the values of its symbols.

    Reports print the same text that is evaluated.
    """

    text: str
    """The expression in Python's syntax, such as ``2 * tokens * hidden``."""
    symbols: Mapping[str, float]
    """The value of each symbol, by name. Symbols that the text does not use are allowed."""

    @cached_property
    def value(self) -> float:
        """The result of the expression with the values of its symbols."""
        return float(eval(_compile(self.text), {"__builtins__": {}}, dict(self.symbols)))

    @property
    def numbers(self) -> str:
        """The text with the value of each symbol in its place, such as ``2 * 1024 * 4096``."""
        return _NAME.sub(lambda match: format_number(self.symbols[match[0]]), self.text)


@lru_cache(maxsize=4096)
def _compile(text: str) -> CodeType:
    """Return the code object of an expression, cached by text."""
    return compile(text, text, "eval")


def format_number(value: float) -> str:
    """Format a number as text: integers with all digits, others with ten significant digits."""
    is_integer = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if is_integer else f"{value:.10g}"
