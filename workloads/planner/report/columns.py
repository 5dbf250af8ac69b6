"""The columns of the planner's tables. Pure."""

from typing import Any

from parbench.bench.results.tables import Column, ColumnKind
from parbench.workloads.planner.describe import describe_bottleneck, describe_settings
from parbench.workloads.planner.dry_run import GIGA, DryRun


def make_column(
    key: str, title: str = "", kind: ColumnKind = "text", description: str = ""
) -> Column:
    """Return a table column of the planner. An empty ``title`` means ``key``.

    ``kind`` is the format in which values print, such as "s", "GB" or "percent". ``description`` is
    the explanation of the column. A "text" column with one value in all rows is moved out of the
    table. Columns of other kinds stay.
    """
    return Column(
        key=key, title=title or key, kind=kind, help=description, is_result=kind != "text"
    )


def format_value(value: float, unit: str) -> str:
    """Return a number with its unit as text, such as ``1,234 GB`` or ``12.34 GB``.

    Numbers from 1,000 have no fraction. Smaller ones have four significant digits.
    """
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def summarize_run(run: DryRun) -> dict[str, Any]:
    """Return the table row of a predicted step, by the keys of its columns.

    The keys are ``mesh``, ``settings``, ``step_seconds``, ``memory_gb`` (of the rank that holds
    most), ``mfu`` (a fraction) and ``bottleneck``.
    """
    return {
        "mesh": run.spec.dims.label,
        "settings": describe_settings(run.spec),
        "step_seconds": run.seconds,
        "memory_gb": run.fullest.memory.total / GIGA,
        "mfu": run.mfu,
        "bottleneck": describe_bottleneck(run),
    }
