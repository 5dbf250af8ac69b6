"""The formats of other tools that ``parbench import`` and ``parbench export`` offer.

A format is an entry of this table and functions in a module of this package. Modules are imported
when their format is used, so that ``--help`` stays fast.
"""

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
    "nccl-tests": "export_nccl:render_text",
    "chrome-trace": "chrome_trace:render_trace",
}
"""The formats that ``parbench export`` writes, keyed by name.

A value is the function that renders a run as the bytes of a file, as ``module:function``.
"""


def render_export(name: str, data: Any) -> bytes:
    """Return the content of a run in an export format: the bytes of the file.

    Args:
        name: the name of the format, a key of ``EXPORT_FORMATS``.
        data: the ``RunData`` of the run.
    """
    content: bytes = load_function(EXPORT_FORMATS[name])(data)
    return content


def load_function(path: str) -> Any:
    """Return the function that the text ``path`` names, such as ``import_osu:parse_osu``.

    The module before the colon is in this package.
    """
    module, _, function = path.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


def describe_imports() -> str:
    """Return the names of the tools whose output can be imported as text."""
    return format_list(entry.title for entry in IMPORT_FORMATS.values())
