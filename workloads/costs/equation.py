"""Equations whose printed text is what is evaluated. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType

_PRODUCT = re.compile(r"(?<=[\w)]) (?=[\w(])")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The ``text`` of an equation, factors side by side, and what its ``symbols`` stand for."""

    text: str
    symbols: Mapping[str, float]

    @cached_property
    def value(self) -> float:
        return float(eval(_compiled(self.text), {"__builtins__": {}}, dict(self.symbols)))

    @property
    def numbers(self) -> str:
        """The same with numbers and all its signs, as Python and any calculator take it."""
        return _NAME.sub(
            lambda found: _number(self.symbols[found[0]]), _PRODUCT.sub(" * ", self.text)
        )


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(_PRODUCT.sub(" * ", text), text, "eval")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.10g}"
