"""Defaults of a project: the file ``parbench.toml`` in the working folder."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from parbench.bench.text import UserError, format_list, suggest_similar

DEFAULTS_FILE = Path("parbench.toml")
"""The file with defaults of options, relative to the working folder."""


def read_defaults(context: click.Context) -> dict[str, Any]:
    """Return the defaults of the invoked command's options from ``parbench.toml``.

    In the file, a table has the name of a command. A key has the name of an option without its
    dashes. The result has click's form ``default_map``: the key is the command, and the value has
    the defaults by name of the parameter. It is empty if the file or the table does not exist.
    Raises ``UserError`` if a name of a table or a key is unknown.
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
    """Return the defaults in the table of a command, by name of click's parameter.

    For a group, the result has such a dict for each subcommand, by its name. Raises ``UserError``
    if ``table`` is not a table or has an unknown key.

    Args:
        place: the name of the table for messages, such as ``slurm.submit``.
        table: the content of the table.
        command: the command that the table is for.
    """
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
    """Raise ``UserError`` if a key of ``table`` is not one of the ``allowed`` names.

    ``place`` is the name of the table for the message, empty for the whole file.
    """
    for name in table:
        if name not in allowed:
            key = f"{place}.{name}" if place else name
            suggestion = suggest_similar(name, allowed)
            raise UserError(
                f"{DEFAULTS_FILE}: {key} is not known{suggestion}",
                hint=f"allowed are {format_list(allowed, 'and')}",
            )
