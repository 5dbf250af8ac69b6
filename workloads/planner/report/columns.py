"""The columns of the planner's tables. Pure."""

from typing import Any

from parbench.bench.results.tables import Column, ColumnKind
from parbench.workloads.planner.describe import describe_bottleneck, describe_settings
from parbench.workloads.planner.dry_run import GIGA, DryRun


def make_column(
    key: str, title: str = "", kind: ColumnKind = "text", description: str = ""
) -> Column:
    """Return a column whose title is its key by default. Numbers stay in the table if all agree."""
    return Column(
        key=key, title=title or key, kind=kind, help=description, is_result=kind != "text"
    )


def format_value(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


STEP = make_column("step_seconds", "step", "s", "seconds of a step")
MFU = make_column("mfu", "MFU", "percent", "PaLM's model FLOPs, as a share of the dense peak")
MEMORY = make_column("memory_gb", "memory", "GB", "of the rank that holds most")
BOTTLENECK = make_column("bottleneck", description="the largest loss, or compute")
MESH = make_column("mesh", description="axes and their ranks, outermost first")
SETTINGS = make_column("settings", description="the settings besides the mesh")


def summarize_run(run: DryRun) -> dict[str, Any]:
    """Return the cells of a step by key: those of the columns above and ``tokens_per_second``."""
    return {
        "mesh": run.spec.dims.label,
        "settings": describe_settings(run.spec),
        "step_seconds": run.seconds,
        "memory_gb": run.fullest.memory.total / GIGA,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "bottleneck": describe_bottleneck(run),
    }
