"""What can be measured, as text: a line for each name, all about some of them, and both as Markdown."""

import textwrap
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from parbench.bench.plan.cases import Definition
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS
from parbench.bench.text import format_size


def render_names(definitions: Sequence[Definition]) -> str:
    """Return a line of at most 80 columns for each name, by kind, and for each preset."""
    lines = []
    for kind, found in groupby(sorted(definitions, key=attrgetter("kind")), attrgetter("kind")):
        lines.append(f"{kind}.*")
        lines += [f"  {one.short_name:20}{one.help.partition(';')[0]}" for one in found]
    lines += ["", "Presets: parbench run --preset NAME"]
    lines += [f"  {name:6}{preset.help:59} {preset.lasts:>11}" for name, preset in PRESETS.items()]
    return "\n".join([*lines, "", "All about one, with its parameters: parbench list NAME"])


def render_details(definitions: Sequence[Definition], width: int) -> str:
    """Return all that is known of each name, and their parameters, which several may share."""
    lines = []
    for one in definitions:
        told = f"{one.name}: {one.help}; presets: {', '.join(_presets(one))}"
        lines += textwrap.wrap(told, width, subsequent_indent="    ")
    lines += ["", "--set NAME=VALUE, or several values with commas; shown with the defaults:"]
    for param, of in _params(definitions):
        head, told = f"  {param.name}={_default(param)}", f"{param.help} [{_allowed(param)}]".removesuffix(" []")
        told += f"; of {of}" if of else ""
        lines += textwrap.wrap(told, width, initial_indent=f"{head:25} ", subsequent_indent=" " * 26)
    return "\n".join(lines)


def render_markdown(definitions: Sequence[Definition]) -> str:
    """Return a table of the names and one of their parameters."""
    rows = [["name", "what it is", "presets"]]
    rows += [[f"`{one.name}`", one.help, ", ".join(_presets(one))] for one in definitions]
    params = [["parameter", "default", "what it is", "allowed", "of"]]
    for param, of in _params(definitions):
        default = f"`{text}`" if (text := _default(param)) else ""
        params.append([f"`{param.name}`", default, param.help, _allowed(param), of or "all"])
    tables = ([head, ["---"] * len(head), *rest] for head, *rest in (rows, params))
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in tables)


def _presets(definition: Definition) -> list[str]:
    return [name for name in PRESETS if name == "full" or name in definition.tags]


def _params(definitions: Sequence[Definition]) -> list[tuple[Param, str]]:
    """Return each parameter once, and the short names that have it where not all do."""
    found: dict[Param, list[str]] = {}
    for one in definitions:
        for param in one.params:
            found.setdefault(param, []).append(one.short_name)
    rest = {param: [one.short_name for one in definitions if one.short_name not in of] for param, of in found.items()}
    but = {param: f"all but {', '.join(names)}" if names else "" for param, names in rest.items()}
    return [(param, but[param] if len(rest[param]) < len(of) else ", ".join(of)) for param, of in found.items()]


def _default(param: Param) -> str:
    return format_size(int(param.default)) if param.kind == "size" else f"{param.default}".replace("False", "false")


def _allowed(param: Param) -> str:
    if param.choices:
        return ", ".join(str(choice) for choice in param.choices if choice != "")
    if param.kind in ("int", "float"):
        return f"{param.minimum:g} to {param.maximum:g}" if param.maximum else f">={param.minimum:g}"
    return {"size": "1K,3M or 1K:64M:x4", "bool": "false, true", "str": ""}.get(param.kind, param.allowed())
