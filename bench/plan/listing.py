"""The catalogue as text: a line for each name, all facts about some names, and both as Markdown."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from parbench.bench.plan.cases import BenchmarkDefinition
from parbench.bench.plan.params import MAX_FLOAT, Param
from parbench.bench.plan.plan import PRESETS
from parbench.bench.text import format_size


def _get_kind(definition: BenchmarkDefinition) -> str:
    """Return the part of the name before the dot, such as ``collective``."""
    return definition.name.partition(".")[0]


def render_names(definitions: Sequence[BenchmarkDefinition]) -> str:
    """Return the text of ``parbench list``: a line for each benchmark and for each preset.

    Lines have at most 80 columns. Benchmarks are grouped by the part of the name before the dot.
    """
    lines = []
    for kind, members in groupby(sorted(definitions, key=_get_kind), _get_kind):
        lines.append(f"{kind}.*")
        for definition in members:
            lines.append(f"  {definition.short_name:20}{definition.help.partition(';')[0]}")
    lines += ["", "Presets: parbench run --preset NAME"]
    for name, preset in PRESETS.items():
        lines.append(f"  {name:6}{preset.help:59} {preset.lasts:>11}")
    lines += ["", "All about one, with its parameters: parbench list NAME"]
    return "\n".join(lines)


def render_details(definitions: Sequence[BenchmarkDefinition], width: int) -> str:
    """Return the text of ``parbench list NAME``: help, presets and parameters of the benchmarks.

    Each parameter is listed once, with the benchmarks that have it. ``width`` is the number of
    columns to which lines are wrapped.
    """
    lines = []
    for definition in definitions:
        text = f"{definition.name}: {definition.help}; presets: {_list_presets(definition)}"
        lines += textwrap.wrap(text, width, subsequent_indent="    ")
    lines += ["", "--set NAME=VALUE, or several values with commas; shown with the defaults:"]
    for param, owners in _list_params(definitions):
        head = f"  {param.name}={_format_default(param)}"
        allowed = _format_allowed(param)
        text = f"{param.help} [{allowed}]" if allowed else param.help
        if owners:
            text += f"; of {owners}"
        lines += textwrap.wrap(
            text, width, initial_indent=f"{head:25} ", subsequent_indent=" " * 26
        )
    return "\n".join(lines)


def render_markdown(definitions: Sequence[BenchmarkDefinition]) -> str:
    """Return two Markdown tables: the benchmarks with their help, and their parameters."""
    lines = ["| name | what it is | presets |", "| --- | --- | --- |"]
    for definition in definitions:
        lines.append(_join(f"`{definition.name}`", definition.help, _list_presets(definition)))
    lines += ["", "| parameter | default | what it is | allowed | of |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for param, owners in _list_params(definitions):
        default = _format_default(param)
        code = f"`{default}`" if default else ""
        allowed = _format_allowed(param)
        lines.append(_join(f"`{param.name}`", code, param.help, allowed, owners or "all"))
    return "\n".join(lines)


def _join(*cells: str) -> str:
    """Return a row of a Markdown table with these cells."""
    return f"| {' | '.join(cells)} |"


def _list_presets(definition: BenchmarkDefinition) -> str:
    """Return the names of the presets that contain the benchmark, separated by commas."""
    return ", ".join(name for name in PRESETS if name == "full" or name in definition.tags)


def _list_params(definitions: Sequence[BenchmarkDefinition]) -> Iterable[tuple[Param, str]]:
    """Yield each distinct parameter with a phrase about the benchmarks that have it.

    The phrase is a list of names, or ``all but`` and the names of the others if these are fewer. It
    is empty if all benchmarks have the parameter.
    """
    owners: dict[Param, list[str]] = {}
    for definition in definitions:
        for param in definition.params:
            owners.setdefault(param, []).append(definition.short_name)
    for param, names in owners.items():
        others = [entry.short_name for entry in definitions if entry.short_name not in names]
        if len(others) < len(names):
            yield param, f"all but {', '.join(others)}" if others else ""
        else:
            yield param, ", ".join(names)


def _format_default(param: Param) -> str:
    """Return the default of a parameter as a user types it, such as ``1M`` or ``false``."""
    if param.kind == "size":
        return format_size(int(param.default))
    return "false" if param.default is False else str(param.default)


def _format_allowed(param: Param) -> str:
    """Return the allowed values of a parameter as a phrase, empty if any text is allowed.

    The phrase lists the choices, gives the bounds of a number, or shows an example.
    """
    if param.choices:
        return ", ".join(str(choice) for choice in param.choices if choice != "")
    if param.kind in ("int", "float"):
        is_limited = param.maximum < MAX_FLOAT
        return f"{param.minimum:g} to {param.maximum:g}" if is_limited else f">={param.minimum:g}"
    return {"size": "1K,3M or 1K:64M:x4", "str": ""}.get(param.kind, param.describe_allowed())
