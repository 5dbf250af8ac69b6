"""Parameters of a case: declared once, used by listing, validation, ``--set``, plan files and the docs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from parbench.bench.files import read_rows
from parbench.bench.limits import ParamValue
from parbench.bench.plan.groups import parse_mesh, read_matrix
from parbench.bench.text import UserError, did_you_mean, listed, one_of, parse_size, parse_sizes

Value = bool | int | float | str
Kind = Literal["int", "float", "str", "bool", "size", "matrix", "rows", "mesh"]

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a word",
    "bool": "true or false",
    "size": "a size such as 64K",
    "matrix": "a file with n rows of n numbers, or the rows themselves, separated by semicolons",
    "rows": "a file, or its rows, separated by semicolons",
    "mesh": "axes and their ranks, such as dp=2,tp=2",
}
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter of a case; bounds are inclusive, ``choices`` empty where every value of the kind is allowed."""

    name: str
    kind: Kind
    default: Value
    help: str
    choices: tuple[Value, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False  # tells a case from others only where it is not its default: a new one changes no id

    def allowed(self) -> str:
        if self.choices:
            return listed(self.choices)
        above = "" if self.minimum is None else f" of at least {self.minimum:g}"
        below = "" if self.maximum is None else f"{' and' if above else ' of'} at most {self.maximum:g}"
        return _WORDS[self.kind] + above + below

    def parse(self, found: object) -> Value:
        """Return ``found``, text or a value from a file, as this parameter's kind; ``UserError`` if it does not fit."""
        try:
            value = _convert(self.kind, found)
        except ValueError as error:
            if self.kind in ("matrix", "rows", "mesh") and isinstance(error, UserError):
                raise  # its own words name the file, the row and the column, or the axis
        else:
            try:
                msgspec.convert(value, ParamValue)
            except msgspec.ValidationError as error:
                raise UserError(
                    f"{self.name} = {found!r} is not allowed: whole numbers have at most 64 bits"
                ) from error
            low = -math.inf if self.minimum is None else self.minimum
            high = math.inf if self.maximum is None else self.maximum
            if (isinstance(value, str) or low <= value <= high) and (not self.choices or value in self.choices):
                return value
        hint = did_you_mean(str(found), map(str, self.choices))
        raise UserError(f"{self.name} = {found!r} is not allowed: {self.name} is {self.allowed()}{hint}")

    @property
    def separator(self) -> str:
        """What stands between several values; meshes have commas of their own."""
        return ";" if self.kind == "mesh" else ","

    def parse_many(self, text: str) -> tuple[Value, ...]:
        """Return the values of a list in one text; a size list may hold ranges such as ``1K:64M:x4``."""
        if self.kind in ("matrix", "rows"):
            return (self.parse(text),)
        if self.kind == "size":
            return tuple(self.parse(size) for size in parse_sizes(text))
        return tuple(dict.fromkeys(self.parse(word.strip()) for word in text.split(self.separator)))


def choice(name: str, help_text: str, *choices: str, optional: bool = True) -> Param:
    """Return a parameter whose default is the first of its choices."""
    return Param(name=name, kind="str", default=choices[0], choices=choices, optional=optional, help=help_text)


def _convert(kind: Kind, found: object) -> Value:
    match kind, found:
        case "bool", _ if (word := str(found).lower()) in _TRUTHS:
            return _TRUTHS[word]
        case ("bool", _) | (_, bool()):
            pass
        case "size", str(text):
            return parse_size(text)
        case (("int" | "size"), (str(given) | int(given))):
            return int(given)
        case (("int" | "size"), float(number)) if number.is_integer():
            return int(number)
        case "float", (str(given) | int(given) | float(given)) if math.isfinite(float(given)):
            return float(given)  # JSON has neither NaN nor infinity
        case (("matrix" | "rows"), str(text)) if text:
            return read_matrix(text) if kind == "matrix" else read_rows(text)
        case "mesh", str(text) if text:
            return ",".join(f"{axis}={size}" for axis, size in parse_mesh(text).items())
        case (("str" | "matrix" | "rows" | "mesh"), str(text)):
            return text
    raise ValueError(f"{found!r} is no {kind}")


def refuse_unknown(given: Iterable[str], declared: Iterable[str], where: str) -> None:
    names = sorted(declared)
    for name in given:
        if name not in names:
            raise UserError(f"{where} has no parameter {name!r}: it has {one_of(names or ['none'], name)}")
