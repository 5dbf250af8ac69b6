"""The columns of the planner's tables. Pure."""

from parbench.bench.results.tables import Column, ColumnKind


def make_column(
    key: str, title: str = "", kind: ColumnKind = "text", description: str = ""
) -> Column:
    """Return a column whose title is its key by default. Numbers stay in the table if all agree."""
    return Column(
        key=key, title=title or key, kind=kind, help=description, is_result=kind != "text"
    )


STEP = make_column("step_seconds", "step", "s", "seconds of a step")
MFU = make_column("mfu", "MFU", "percent", "PaLM's model FLOPs, as a share of the dense peak")
MEMORY = make_column("memory_gb", "memory", "GB", "of the rank that holds most")
BOTTLENECK = make_column("bottleneck", description="the largest loss, or compute")
MESH = make_column("mesh", description="axes and their ranks, outermost first")
SETTINGS = make_column("settings", description="the settings besides the mesh")
