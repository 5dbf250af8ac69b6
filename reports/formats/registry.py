"""The formats of other tools that ``parbench import`` and ``parbench export`` offer.

A format is an entry of this table and functions in a module of this package. Modules are imported
when their format is used, so that ``--help`` stays fast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from parbench.bench.text import UserError

if TYPE_CHECKING:
    from parbench.reports.run_data import RunData


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
    file: str = ""
    """``module:function`` from a run to bytes, empty if one file cannot hold the format."""
    folder: str = ""
    """``module:function`` from a run to bytes keyed by file name, empty without such a format."""


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
            file="nccl_tests:render_text",
        ),
        ExportFormat(
            name="csv",
            help="a row for each metric and repetition",
            file="csv_export:render_csv",
        ),
        ExportFormat(
            name="chrome-trace",
            help="timelines for Perfetto, a folder has a file per step",
            file="chrome_trace:render_trace",
            folder="chrome_trace:render_traces",
        ),
        ExportFormat(
            name="hta",
            help="a folder per step for HolisticTraceAnalysis",
            folder="chrome_trace:render_for_analysis",
        ),
    )
}


def render_file(name: str, data: "RunData") -> bytes:
    """Return a run in a format as bytes. Raises ``UserError`` if the format has several files."""
    entry = EXPORT_FORMATS[name]
    if not entry.file:
        raise UserError(f"--format {name} writes several files: name their folder with -o FOLDER")
    content: bytes = load_function(entry.file)(data)
    return content


def render_folder(name: str, data: "RunData") -> Mapping[str, bytes]:
    """Return the bytes of the files of a format with a folder, keyed by file name."""
    files: Mapping[str, bytes] = load_function(EXPORT_FORMATS[name].folder)(data)
    return files


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at a ``module:function`` of this package."""
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return loaded


def describe_exports() -> str:
    """Return a line for each export format, aligned for the help of a command."""
    width = max(map(len, EXPORT_FORMATS))
    return "\n".join(f"{name:{width}}  {entry.help}" for name, entry in EXPORT_FORMATS.items())
