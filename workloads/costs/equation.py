"""Equations whose printed text is what is evaluated. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The ``text`` of an equation in Python's syntax, and the values of its symbols by name."""

    text: str
    symbols: Mapping[str, float]

    @cached_property
    def value(self) -> float:
        """The value of the equation with the values of its symbols."""
        return float(eval(_compile(self.text), {"__builtins__": {}}, dict(self.symbols)))

    @property
    def numbers(self) -> str:
        """The text with numbers in place of symbols."""
        return _NAME.sub(lambda match: format_number(self.symbols[match[0]]), self.text)


@lru_cache(maxsize=4096)
def _compile(text: str) -> CodeType:
    """Return the compiled expression of an equation's text."""
    return compile(text, text, "eval")


def format_number(value: float) -> str:
    """Return a number as text: integers in full, others with ten digits."""
    is_integer = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if is_integer else f"{value:.10g}"
