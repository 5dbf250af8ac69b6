"""The columns of the planner's tables. Pure."""

from parbench.bench.results.document import DocumentColumn, Unit


def make_column(title: str, unit: Unit = "text", description: str = "") -> DocumentColumn:
    """Return a column whose description is shown with its title."""
    return DocumentColumn(title=title, help=description, unit=unit)
