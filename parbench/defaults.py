"""Defaults of a project: the file ``parbench.toml`` in the working folder."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from parbench.bench.text import UserError, format_list, suggest_similar

DEFAULTS_FILE = Path("parbench.toml")


def read_defaults(context: click.Context) -> dict[str, Any]:
    """Return the defaults of the invoked command for click's ``default_map``, empty without a file.

    A table has the name of a command, and a key that of an option without its dashes. Raises
    ``UserError`` if a name is unknown.
    """
    if not DEFAULTS_FILE.is_file() or context.invoked_subcommand is None:
        return {}
    import tomllib

    from parbench.bench.files import convert_read_errors

    with convert_read_errors(str(DEFAULTS_FILE), "is not TOML"):
        tables = tomllib.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
    group = context.command
    assert isinstance(group, click.Group)
    _check_names("", tables, group.list_commands(context))
    name = context.invoked_subcommand
    command = group.get_command(context, name)
    if name not in tables or command is None:
        return {}
    return {name: _convert_table(name, tables[name], command)}


def _convert_table(place: str, table: object, command: click.Command) -> dict[str, Any]:
    """Return the values of a table by parameter name, also of the tables of subcommands."""
    if not isinstance(table, dict):
        raise UserError(f"{DEFAULTS_FILE}: {place} is not a table", hint=f"write [{place}]")
    if isinstance(command, click.Group):
        _check_names(place, table, command.commands)
        tables = {}
        for name, value in table.items():
            tables[name] = _convert_table(f"{place}.{name}", value, command.commands[name])
        return tables
    params: dict[str, click.Option] = {}
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            params |= {name.removeprefix("--"): param for name in param.opts if name[:2] == "--"}
    _check_names(place, table, params)
    return {str(params[name].name): value for name, value in table.items()}


def _check_names(place: str, table: Mapping[str, object], allowed: Collection[str]) -> None:
    for name in table:
        if name not in allowed:
            key = f"{place}.{name}" if place else name
            suggestion = suggest_similar(name, allowed)
            raise UserError(
                f"{DEFAULTS_FILE}: {key} is not known{suggestion}",
                hint=f"allowed are {format_list(allowed, 'and')}",
            )
