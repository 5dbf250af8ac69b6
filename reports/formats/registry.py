"""The formats of other tools that ``parbench import`` and ``parbench export`` offer.

A format is an entry of this table and functions in a module of this package. Modules are imported
when their format is used, so that ``--help`` stays fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ImportFormat:
    """The output of another tool."""

    name: str
    title: str
    markers: tuple[tuple[str, ...], ...]
    """A file has this format if it contains all texts of one of these tuples."""
    parser: str
    """``module:function`` from (text, source, number of ranks) to ``ImportedRun``."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format that a run can be written in, as one file or as a folder of files."""

    name: str
    help: str
    renderer: str
    """``module:function`` from a run to bytes, for a folder to bytes keyed by file name."""
    is_folder: bool = False


IMPORT_FORMATS = {
    entry.name: entry
    for entry in (
        ImportFormat(
            name="nccl-tests",
            title="nccl-tests and rccl-tests",
            markers=(("time", "algbw", "busbw"), ('"nccl_version"', '"results"')),
            parser="import_nccl:parse_nccl",
        ),
        ImportFormat(
            name="osu",
            title="OSU micro-benchmarks",
            markers=(("# OSU ",),),
            parser="import_osu:parse_osu",
        ),
    )
}
EXPORT_FORMATS = {
    entry.name: entry
    for entry in (
        ExportFormat(
            name="nccl-tests",
            help="collectives, a table for each operation and mode",
            renderer="nccl_tests:render_text",
        ),
        ExportFormat(
            name="csv",
            help="a row for each metric and repetition",
            renderer="csv_export:render_csv",
        ),
        ExportFormat(
            name="chrome-trace",
            help="timelines for Perfetto",
            renderer="chrome_trace:render_trace",
        ),
        ExportFormat(
            name="hta",
            help="a folder per step for HolisticTraceAnalysis",
            renderer="chrome_trace:render_for_analysis",
            is_folder=True,
        ),
    )
}


def render_export(name: str, data: Any) -> Any:
    """Return a run in a format as bytes, or as the bytes of its files, keyed by file name."""
    return load_function(EXPORT_FORMATS[name].renderer)(data)


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at a ``module:function`` of this package."""
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return loaded


def describe_exports() -> str:
    """Return a line for each export format, aligned for the help of a command."""
    width = max(map(len, EXPORT_FORMATS))
    return "\n".join(f"{name:{width}}  {entry.help}" for name, entry in EXPORT_FORMATS.items())
