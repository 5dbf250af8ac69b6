"""Parameters of a case, each declared once for listing, validation, files of cases and the docs."""

import re
import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import msgspec

from parbench.bench.limits import Int64
from parbench.bench.plan.groups import parse_mesh
from parbench.bench.text import UserError, format_list, parse_size, parse_sizes

Value = bool | int | float | str
"""One value of a parameter."""
Setting = Value | list[Value]
"""One or several values of a parameter: text of ``--set``, or a value or list in a file of cases."""
Kind = Literal["int", "float", "str", "bool", "size", "mesh"]
"""The type of a parameter. ``size`` is a number of bytes, ``mesh`` a text such as ``dp=2,tp=4``."""

_TYPES: dict[str, Any] = {"int": Int64, "size": Int64, "float": float, "bool": bool}
_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "bool": "true or false",
    "size": "a size (64K, or 1K:64M:x4)",
    "mesh": "axes and their ranks, such as dp=2,tp=2",
}
MAX_FLOAT = sys.float_info.max
_VARIABLE = re.compile("[A-Z_][A-Z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Param:
    """The declaration of a benchmark's parameter: its type, default, help and allowed values."""

    name: str
    """The parameter's name for ``--set``, or the name of an environment variable for ``--env``."""
    kind: Kind
    """The type of the values.

    ``size`` is a number of bytes, ``mesh`` a text such as ``dp=2,tp=4``.
    """
    default: Value
    """The value without ``--set`` and without a value in a preset or file of cases."""
    help: str
    """A phrase about the meaning of the parameter, for ``parbench list``."""
    _: KW_ONLY
    choices: tuple[Value, ...] = ()
    """The allowed values, empty if every value of the kind from minimum to maximum is allowed."""
    minimum: float = -MAX_FLOAT
    """The least allowed number of a parameter that is a number."""
    maximum: float = MAX_FLOAT
    """The largest allowed number of a parameter that is a number."""
    optional: bool = False
    """True if the id of a case leaves out this parameter while its value is the default.

    So a case keeps its id when an optional parameter is added to its benchmark, and results of
    earlier runs stay comparable. The field affects neither the default nor the allowed values.
    """

    def describe_allowed(self) -> str:
        """Return a phrase about the allowed values, such as ``a finite number >= 0``."""
        if self.choices:
            return format_list(choice or "empty" for choice in self.choices)
        description = _DESCRIPTIONS[self.kind]
        if self.maximum < MAX_FLOAT:
            return f"{description} from {self.minimum:g} to {self.maximum:g}"
        return f"{description} >= {self.minimum:g}" if self.minimum > -MAX_FLOAT else description

    def parse(self, raw: object) -> Value:
        """Return a value in this parameter's type, given as text or as a value of a file of cases.

        For the kind ``size``, the text ``64K`` becomes 65536 (K, M, G and T are powers of 1024).
        Raises ``UserError`` if the value cannot be converted or is not allowed.
        """
        value: Value | None
        if isinstance(raw, str):
            raw = raw.strip()
        if self.kind == "size" and isinstance(raw, str):
            value = parse_size(raw)
        elif self.kind == "mesh" and isinstance(raw, str) and raw:
            value = ",".join(f"{axis}={size}" for axis, size in parse_mesh(raw).items())
        else:
            try:
                value = msgspec.convert(raw, _TYPES.get(self.kind, str), strict=False)
            except msgspec.ValidationError:
                value = None
        is_allowed = value in self.choices
        if not self.choices:
            is_allowed = isinstance(value, str) or (
                value is not None and self.minimum <= value <= self.maximum
            )
        if value is None or not is_allowed:
            allowed = self.describe_allowed()
            has_name = isinstance(raw, str) and "=" in raw
            hint = f"another parameter needs its own option: --set {raw}" if has_name else ""
            raise UserError(f"{self.name} = {raw!r} is not allowed: choose {allowed}", hint=hint)
        return value

    def parse_many(self, setting: Setting) -> tuple[Value, ...]:
        """Return all values in the text of ``--set`` or in a value or list of a file of cases.

        Commas separate the values in a text, but semicolons separate meshes. Sizes may be ranges:
        ``1K:64M:x4`` begins at 1 KiB and multiplies the size by 4 up to 64 MiB. The result has the
        order of the text or list, without duplicates. Raises ``UserError`` if a value is not
        allowed.
        """
        separator = ";" if self.kind == "mesh" else ","  # Meshes contain commas.
        values: list[Value] = []
        for raw in setting if isinstance(setting, list) else [setting]:
            if not isinstance(raw, str):
                values.append(self.parse(raw))
                continue
            parts = parse_sizes(raw) if self.kind == "size" else raw.split(separator)
            values += map(self.parse, parts)
        return tuple(dict.fromkeys(values))


def choice(name: str, help_text: str, *choices: str, optional: bool = True) -> Param:
    """Return a text parameter with these allowed values, of which the first is the default.

    If ``optional`` is True, the id of a case leaves out the parameter while its value is the
    default.
    """
    return Param(name, "str", choices[0], help_text, choices=choices, optional=optional)


def is_variable(name: str) -> bool:
    """Return True if a parameter's name is that of an environment variable.

    It then consists of capital letters, digits and underscores.
    """
    return _VARIABLE.fullmatch(name) is not None


def refuse_unknown(names: Iterable[str], declared: Iterable[str], owner: str) -> None:
    """Raise ``UserError`` if one of ``names`` is not among the ``declared`` parameter names.

    ``owner`` is a phrase for the error message that names the benchmarks with these parameters.
    """
    declared_names = sorted(declared)
    for name in names:
        if name not in declared_names:
            choices = format_list(declared_names or ["none"])
            message = f"{name!r} is not a parameter of {owner}: allowed are {choices}"
            hint = "parbench run hybrid --mesh" if name == "mesh" else ""
            raise UserError(message, hint=hint)
