"""A plan as a TOML file: some of the command line's options, and cases with their parameters."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from bench.errors import UserError
from bench.plan.cases import Definition, select
from bench.plan.presets import Entry
from bench.words import did_you_mean, listed

Scalar = bool | int | float | str


class FileCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[case]]`` of the file: a name or glob, and its parameters."""

    name: str
    set: dict[str, Scalar | list[Scalar]] = {}

    def entry(self, catalogue: Sequence[Definition]) -> Entry:
        """Return it as a preset's entry, lists as text that the catalogue's parameters read."""
        params = [param for definition in select(catalogue, [self.name]) for param in definition.params]
        separators = {param.name: param.separator for param in params}
        texts = {name: _text(value, separators.get(name, ",")) for name, value in self.set.items()}
        return Entry(name=self.name, set=texts)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; what is absent is decided by the preset, what the command line says goes before it."""

    preset: str | None = None
    nproc: Annotated[int, msgspec.Meta(ge=1)] | None = None
    backend: str | None = None
    device: str | None = None
    launches: Annotated[int, msgspec.Meta(ge=1)] | None = None
    budget: str | float | None = None
    timeout: str | float | None = None
    case: tuple[FileCase, ...] = ()


_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def read_plan_file(path: Path) -> PlanFile:
    """Return the file's contents; ``UserError`` names the file and the place in it that is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"plan file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"plan file {path} is no TOML: {error}") from error
    try:
        return msgspec.convert(raw, PlanFile)
    except msgspec.ValidationError as error:
        raise UserError(f"plan file {path}: {_explain(str(error))}") from error


def _explain(message: str) -> str:
    """Add what is allowed to msgspec's sentence, which ends in the path of the fault: ``- at `$.case[0].set```."""
    match = _UNKNOWN.search(message)
    if match is None:
        return message
    fields = (FileCase if "$.case" in message else PlanFile).__struct_fields__
    return f"{message}; allowed are {listed(fields)}{did_you_mean(match[1], fields)}"


def _text(value: Scalar | list[Scalar], separator: str) -> str:
    return separator.join(map(str, value)) if isinstance(value, list) else str(value)
