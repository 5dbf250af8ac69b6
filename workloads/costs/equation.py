"""An equation that prints twice: in symbols, and with their numbers in place of them. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PRODUCT = re.compile(r"(?<=[\w)]) (?=[\w(])")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The ``text`` of an equation, factors side by side, and what its ``symbols`` stand for."""

    text: str
    symbols: Mapping[str, float]

    @property
    def numbers(self) -> str:
        """The same with numbers and all its signs, as Python and any calculator take it."""
        return _NAME.sub(lambda found: _number(self.symbols[found[0]]), _PRODUCT.sub(" * ", self.text))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.10g}"
