"""The charts of a table, whether it belongs to a run or to a plan."""

from parbench.bench.results.tables import GanttChart, ParetoChart, Plot, Table
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.pipeline import chart_pipeline
from parbench.reports.figures.quantities import PLANNED_MEMORY, STEP_TIME
from parbench.reports.figures.steps import chart_pareto, chart_stacks

_QUANTITIES = {"memory": PLANNED_MEMORY, "step": STEP_TIME}
"""The x axis of stacked bars, keyed by ``StackedBars.quantity``."""


def list_table_charts(table: Table) -> list[Chart]:
    """Return the charts of a table of a run or of a plan.

    The figures of a plan's table are ``Plot`` objects, which are converted to charts. Figures
    without data are left out.
    """
    charts: list[Chart | None] = []
    for number, figure in enumerate(table.figures(), start=1):
        if isinstance(figure, Plot):
            figure = _chart_plot(f"{table.id}_figure_{number}", figure)
        charts.append(figure)
    return list_charts(*charts)


def _chart_plot(name: str, plot: Plot) -> Chart | None:
    """Return the chart of a plan's figure: a pipeline, stacked bars, or a Pareto front.

    ``name`` is the id of the chart and the stem of its file. None if no bar has a part above zero.
    """
    if isinstance(plot, GanttChart):
        return chart_pipeline(name, plot.title, plot.caption, plot.details)
    if isinstance(plot, ParetoChart):
        return chart_pareto(name, plot.title, plot.caption, plot.points)
    quantity = _QUANTITIES[plot.quantity]
    return chart_stacks(name, plot.title, plot.caption, plot.bars, quantity, plot.limit)
