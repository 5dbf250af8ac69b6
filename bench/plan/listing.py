"""The catalogue as text: a line for each benchmark, or the parameters of some benchmarks."""

import textwrap
from collections.abc import Sequence

from parbench.bench.plan.cases import BenchmarkDefinition
from parbench.bench.plan.params import Param
from parbench.bench.plan.plan import PRESETS
from parbench.bench.text import format_size


def render_names(definitions: Sequence[BenchmarkDefinition]) -> str:
    """Return the text of ``parbench list``: a line for each benchmark and for each preset.

    Lines have at most 80 columns. Benchmarks are grouped by the part of the name before the dot.
    """
    by_kind: dict[str, list[str]] = {}
    for definition in definitions:
        line = f"  {definition.short_name:20}{definition.help.partition(';')[0]}"
        by_kind.setdefault(definition.name.partition(".")[0], []).append(line)
    lines = []
    for kind in sorted(by_kind):
        lines += [f"{kind}.*", *by_kind[kind]]
    lines += ["", "Presets: parbench run --preset NAME"]
    lines += [f"  {name:6}{preset.help}" for name, preset in PRESETS.items()]
    lines += ["", "Details and parameters of one: parbench list NAME"]
    return "\n".join(lines)


def render_details(definitions: Sequence[BenchmarkDefinition], width: int) -> str:
    """Return the text of ``parbench list NAME``: help, presets and parameters of the benchmarks.

    Each parameter is listed once, with the benchmarks that have it. ``width`` is the number of
    columns to which lines are wrapped.
    """
    lines = []
    for definition in definitions:
        presets = [name for name in PRESETS if name == "full" or name in definition.tags]
        text = f"{definition.name}: {definition.help}; presets: {', '.join(presets)}"
        lines += textwrap.wrap(text, width, subsequent_indent="    ")
    lines += ["", "--set NAME=VALUE, or several values with commas; shown with the defaults:"]
    for param, owners in _find_owners(definitions).items():
        default = str(param.default)
        if param.kind == "size":
            default = format_size(int(param.default))
        head = f"  {param.name}={default.lower() if param.kind == 'bool' else default}"
        text = f"{param.help} [{param.describe_allowed()}]"
        if owners != "all":
            text += f"; of {owners}"
        lines += textwrap.wrap(
            text, width, initial_indent=f"{head:25} ", subsequent_indent=" " * 26
        )
    return "\n".join(lines)


def _find_owners(definitions: Sequence[BenchmarkDefinition]) -> dict[Param, str]:
    """Return for each parameter the short names of the benchmarks that have it.

    The keys are parameters. A value is the names separated by commas, or ``all`` if all benchmarks
    have the parameter.
    """
    owners: dict[Param, list[str]] = {}
    for definition in definitions:
        for param in definition.params:
            owners.setdefault(param, []).append(definition.short_name)
    return {
        param: "all" if len(names) == len(definitions) else ", ".join(names)
        for param, names in owners.items()
    }
