"""Parameters of a case, declared once for listing, validation, plan files and the docs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from parbench.bench.files import read_option_rows
from parbench.bench.limits import ParamValue
from parbench.bench.plan.groups import parse_mesh, read_matrix
from parbench.bench.text import (
    UserError,
    format_choices,
    format_list,
    parse_size,
    parse_sizes,
    suggest_similar,
)

Value = bool | int | float | str
Kind = Literal["int", "float", "str", "bool", "size", "matrix", "rows", "mesh"]

_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a word",
    "bool": "true or false",
    "size": "a size such as 64K",
    "matrix": "a file with n rows of n numbers, or the rows themselves, separated by semicolons",
    "rows": "a file, or its rows, separated by semicolons",
    "mesh": "axes and their ranks, such as dp=2,tp=2",
}
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter of a case."""

    name: str
    kind: Kind
    default: Value
    help: str
    choices: tuple[Value, ...] = ()  # Empty if every value of the kind is allowed.
    minimum: float | None = None  # inclusive
    maximum: float | None = None  # inclusive
    # Part of a case's id only if it is not the default, so that a new parameter changes no id.
    optional: bool = False

    def allowed(self) -> str:
        """Return a description of the allowed values."""
        if self.choices:
            return format_list(self.choices)
        bounds = []
        if self.minimum is not None:
            bounds.append(f"at least {self.minimum:g}")
        if self.maximum is not None:
            bounds.append(f"at most {self.maximum:g}")
        description = _DESCRIPTIONS[self.kind]
        return f"{description} of {' and '.join(bounds)}" if bounds else description

    def parse(self, raw: object) -> Value:
        """Return a text, or a value from a file, as this parameter's kind.

        Raises ``UserError`` if it is not allowed.
        """
        try:
            value = _convert(self.kind, raw)
        except UserError:
            # The message names the row and column of a file, or the axis of a mesh.
            if self.kind in ("matrix", "rows", "mesh"):
                raise
            value = None
        except ValueError:
            value = None
        if value is None or not self._is_allowed(value):
            hint = suggest_similar(str(raw), map(str, self.choices))
            raise UserError(f"{self.name} = {raw!r} is not allowed: {self.name} is {self.allowed()}{hint}")
        try:
            msgspec.convert(value, ParamValue)
        except msgspec.ValidationError as error:
            raise UserError(f"{self.name} = {raw!r} is not allowed: whole numbers have at most 64 bits") from error
        return value

    def _is_allowed(self, value: Value) -> bool:
        if self.choices and value not in self.choices:
            return False
        if isinstance(value, str):
            return True
        if self.minimum is not None and value < self.minimum:
            return False
        return self.maximum is None or value <= self.maximum

    @property
    def separator(self) -> str:
        """The text between several values. Meshes contain commas."""
        return ";" if self.kind == "mesh" else ","

    def parse_many(self, text: str) -> tuple[Value, ...]:
        """Return the values of a list, each once. Sizes may be ranges such as ``1K:64M:x4``."""
        if self.kind in ("matrix", "rows"):
            return (self.parse(text),)
        if self.kind == "size":
            return tuple(self.parse(size) for size in parse_sizes(text))
        values = [self.parse(word.strip()) for word in text.split(self.separator)]
        return tuple(dict.fromkeys(values))


def choice(name: str, help_text: str, *choices: str, optional: bool = True) -> Param:
    """Return a parameter whose default is the first of its choices."""
    return Param(name=name, kind="str", default=choices[0], choices=choices, optional=optional, help=help_text)


def _convert(kind: Kind, raw: object) -> Value:
    """Return a text or a value from a file as a kind; ``ValueError`` if it is not of the kind."""
    match kind:
        case "bool":
            return _convert_bool(raw)
        case "int" | "size" | "float":
            return _convert_number(kind, raw)
        case "mesh" if isinstance(raw, str) and raw:
            return ",".join(f"{axis}={size}" for axis, size in parse_mesh(raw).items())
        case "matrix" if isinstance(raw, str) and raw:
            return read_matrix(raw)
        case "rows" if isinstance(raw, str) and raw:
            return read_option_rows(raw)
    if isinstance(raw, str):
        return raw
    raise ValueError(f"{raw!r} is not a {kind}")


def _convert_bool(raw: object) -> bool:
    word = str(raw).lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise ValueError(f"{raw!r} is not a bool")


def _convert_number(kind: Kind, raw: object) -> int | float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"{raw!r} is not a number")
    if kind == "float":
        number = float(raw)
        if not math.isfinite(number):  # JSON has neither NaN nor infinity.
            raise ValueError(f"{raw!r} is not finite")
        return number
    if kind == "size" and isinstance(raw, str):
        return parse_size(raw)
    if isinstance(raw, float) and not raw.is_integer():
        raise ValueError(f"{raw!r} is not a whole number")
    return int(raw)


def refuse_unknown(names: Iterable[str], declared: Iterable[str], owner: str) -> None:
    """Raise ``UserError`` if a parameter is not one that ``owner`` has."""
    declared_names = sorted(declared)
    for name in names:
        if name not in declared_names:
            raise UserError(
                f"{owner} has no parameter {name!r}: it has {format_choices(declared_names or ['none'], name)}"
            )
