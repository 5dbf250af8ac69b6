"""The catalogue as text: a line for each name, all facts about some names, and both as Markdown."""

import textwrap
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from parbench.bench.plan.cases import Definition
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS
from parbench.bench.text import format_size

_VALUES_OF_KINDS = {"size": "1K,3M or 1K:64M:x4", "bool": "false, true", "str": ""}


def render_names(definitions: Sequence[Definition]) -> str:
    """Return a line of at most 80 columns for each name, by kind, and for each preset."""
    by_kind = attrgetter("kind")
    lines = []
    for kind, members in groupby(sorted(definitions, key=by_kind), by_kind):
        lines.append(f"{kind}.*")
        for definition in members:
            lines.append(f"  {definition.short_name:20}{definition.help.partition(';')[0]}")
    lines += ["", "Presets: parbench run --preset NAME"]
    for name, preset in PRESETS.items():
        lines.append(f"  {name:6}{preset.help:59} {preset.lasts:>11}")
    return "\n".join([*lines, "", "All about one, with its parameters: parbench list NAME"])


def render_details(definitions: Sequence[Definition], width: int) -> str:
    """Return the help of each name, and the parameters, which several names may share."""
    lines = []
    for definition in definitions:
        presets = ", ".join(_presets_with(definition))
        text = f"{definition.name}: {definition.help}; presets: {presets}"
        lines += textwrap.wrap(text, width, subsequent_indent="    ")
    lines += ["", "--set NAME=VALUE, or several values with commas; shown with the defaults:"]
    for param, owners in _shared_params(definitions):
        head = f"  {param.name}={_format_default(param)}"
        text = f"{param.help} [{_format_allowed(param)}]".removesuffix(" []")
        if owners:
            text += f"; of {owners}"
        lines += textwrap.wrap(text, width, initial_indent=f"{head:25} ", subsequent_indent=" " * 26)
    return "\n".join(lines)


def render_markdown(definitions: Sequence[Definition]) -> str:
    """Return a table of the names and one of their parameters."""
    names = []
    for definition in definitions:
        names.append([f"`{definition.name}`", definition.help, ", ".join(_presets_with(definition))])
    params = []
    for param, owners in _shared_params(definitions):
        default = _format_default(param)
        cells = [f"`{param.name}`", f"`{default}`" if default else "", param.help, _format_allowed(param)]
        params.append([*cells, owners or "all"])
    tables = [
        _render_table(["name", "what it is", "presets"], names),
        _render_table(["parameter", "default", "what it is", "allowed", "of"], params),
    ]
    return "\n\n".join(tables)


def _render_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _presets_with(definition: Definition) -> list[str]:
    return [name for name in PRESETS if name == "full" or name in definition.tags]


def _shared_params(definitions: Sequence[Definition]) -> list[tuple[Param, str]]:
    """Return each parameter once, with the names that have it if not all do."""
    owners_of: dict[Param, list[str]] = {}
    for definition in definitions:
        for param in definition.params:
            owners_of.setdefault(param, []).append(definition.short_name)
    all_names = [definition.short_name for definition in definitions]
    return [(param, _describe_owners(owners, all_names)) for param, owners in owners_of.items()]


def _describe_owners(owners: Sequence[str], all_names: Sequence[str]) -> str:
    others = [name for name in all_names if name not in owners]
    if not others:
        return ""
    if len(others) < len(owners):
        return f"all but {', '.join(others)}"
    return ", ".join(owners)


def _format_default(param: Param) -> str:
    if param.kind == "size":
        return format_size(int(param.default))
    return "false" if param.default is False else str(param.default)


def _format_allowed(param: Param) -> str:
    if param.choices:
        return ", ".join(str(choice) for choice in param.choices if choice != "")
    if param.kind in ("int", "float"):
        return f"{param.minimum:g} to {param.maximum:g}" if param.maximum else f">={param.minimum:g}"
    return _VALUES_OF_KINDS.get(param.kind, param.allowed())
