"""The formats of other tools that ``parbench import`` and ``parbench export`` offer.

A format is an entry of this table and functions in a module of this package. Modules are imported
when their format is used, so that ``--help`` stays fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from parbench.bench.text import format_list


@dataclass(frozen=True, kw_only=True)
class ImportFormat:
    """A format of another tool's output that ``parbench import`` reads."""

    name: str
    """The name of the tool for the option ``--from``."""
    title: str
    """The name of the tool in a list of tools."""
    markers: tuple[str, ...]
    """Texts by which the format is recognized: a file of this format contains all of them."""
    parser: str
    """The function that parses a file, as ``module:function``.

    Its arguments are the text, the name of the file and the number of ranks or None. It returns an
    ``ImportedRun``.
    """


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format in which ``parbench export`` writes a run."""

    name: str
    """The name of the format for the option ``--format``."""
    help: str
    """A phrase about the content, for the help of the command."""
    renderer: str
    """The function that renders a run as the bytes of a file, as ``module:function``."""


IMPORT_FORMATS = {
    entry.name: entry
    for entry in (
        ImportFormat(
            name="nccl-tests",
            title="nccl-tests, rccl-tests",
            markers=("time", "algbw", "busbw"),
            parser="import_nccl:parse_nccl",
        ),
        ImportFormat(
            name="osu",
            title="the OSU micro-benchmarks",
            markers=("# OSU ",),
            parser="import_osu:parse_osu",
        ),
    )
}
"""The formats that ``parbench import`` reads, keyed by the name of the tool."""
EXPORT_FORMATS = {
    entry.name: entry
    for entry in (
        ExportFormat(
            name="nccl-tests",
            help="collectives, a table for each operation and mode",
            renderer="export_nccl:render_text",
        ),
        ExportFormat(
            name="chrome-trace",
            help="timelines for Perfetto",
            renderer="chrome_trace:render_trace",
        ),
    )
}
"""The formats that ``parbench export`` writes, keyed by name."""


def render_export(name: str, data: Any) -> bytes:
    """Return the content of a run in an export format: the bytes of the file.

    Args:
        name: the name of the format, a key of ``EXPORT_FORMATS``.
        data: the ``RunData`` of the run.
    """
    content: bytes = load_function(EXPORT_FORMATS[name].renderer)(data)
    return content


def load_function(path: str) -> Callable[..., Any]:
    """Return the function that the text ``path`` names, such as ``import_osu:parse_osu``.

    The module before the colon is in this package.
    """
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return loaded


def describe_imports() -> str:
    """Return the names of the tools whose output can be imported as text."""
    return format_list(entry.title for entry in IMPORT_FORMATS.values())


def describe_exports() -> str:
    """Return the help text on the export formats: a line for each, with its name and its help."""
    width = max(map(len, EXPORT_FORMATS))
    return "\n".join(f"{name:{width}}  {entry.help}" for name, entry in EXPORT_FORMATS.items())
