"""The section on context parallelism: steps whose ranks share a sequence, and their methods."""

from collections.abc import Iterator, Mapping, Sequence

from parbench.bench.results.details import AttentionDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import Column, Table, metric_column
from parbench.reports.analysis.labels import label_differences
from parbench.reports.analysis.steps import (
    StepRow,
    compute_profiled_share,
    list_rows_with_details,
    sum_if_known,
)
from parbench.reports.figures.chart import Chart, list_charts
from parbench.reports.figures.lines import chart_context_methods
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import (
    ACTIVATIONS_COLUMN,
    STEP_TIME_COLUMN,
)

_METHOD_PARAMS = ("cp_method", "ulysses", "sequence")
"""The parameters in which compared steps may differ. All other parameters define the model."""
_COLUMNS = (
    Column("label", "method", help="context-parallel method, with parameters that differ"),
    Column("cp", kind="count", help="ranks that share a sequence"),
    Column("sequence", kind="count", help="tokens of a full sequence"),
    STEP_TIME_COLUMN,
    metric_column("tokens_per_second"),
    Column("bytes_sent", "bytes sent", kind="B", help="bytes that a rank sends for attention"),
    Column(
        "exposed",
        "exposed cp",
        kind="percent",
        is_result=True,
        help="exposed communication of attention, as a share of the profiled step",
    ),
)


def list_context_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of context-parallel steps with the charts of their methods.

    The table has no rows if no step recorded ``AttentionDetails``.
    """
    rows = list_rows_with_details(data, AttentionDetails)
    models = label_differences([row["result"] for row in rows], _METHOD_PARAMS)
    for row in rows:
        row |= _read_values(row)
        row["label"] = to_single_line(f"{row['method']} {models[row['case_id']]}")
    columns = [*_COLUMNS, ACTIVATIONS_COLUMN]
    yield Table(
        "context-table",
        "Context parallelism",
        caption="time, bytes and memory of each method",
        columns=columns,
        rows=rows,
        figures=lambda: _chart_methods(rows, models),
    )


def _read_values(row: StepRow) -> StepRow:
    """Return the cells of a context-parallel step, keyed by column.

    These are ``method``, ``cp`` (ranks that share a sequence), ``sequence`` (tokens),
    ``bytes_sent`` (per rank and step), and ``exposed`` (exposed communication as a fraction of the
    profiled step). ``bytes_sent`` and ``exposed`` are sums over all mesh axes except ``dp``,
    because attention communicates on these axes.
    """
    result = row["result"]
    details: AttentionDetails = row["details"]
    axes = [axis for axis in row["axes"] if axis != "dp"]
    exposed = sum_if_known(result.value(f"exposed_comm.{axis}") for axis in axes)
    values: StepRow = {
        "method": details.method,
        "cp": details.sequence // details.tokens_per_rank,
        "sequence": details.sequence,
        "bytes_sent": sum_if_known(result.value(f"bytes_sent.{axis}") for axis in axes),
        "exposed": compute_profiled_share(result, exposed),
    }
    if "ulysses" in axes:
        values["method"] += f" ulysses={row['axes']['ulysses'].get('ranks')}"
    return values


def _chart_methods(rows: Sequence[StepRow], models: Mapping[str, str]) -> Iterator[Chart]:
    """Yield charts of step time over sequence length.

    There is a chart for each model and number of ranks that ran with several methods of context
    parallelism. ``rows`` has a row per step. ``models`` has the parameters of the model of
    each case as text, keyed by case id.
    """
    groups: dict[object, list[StepRow]] = {}
    for row in rows:
        setup = (row["result"].make_key(*_METHOD_PARAMS), row["cp"])
        groups.setdefault(setup, []).append(row)
    for number, group in enumerate(groups.values(), start=1):
        first = group[0]
        if len({row["method"] for row in group}) > 1:
            setup_text = f"cp = {first['cp']} {models[first['case_id']]}".strip()
            chart = chart_context_methods(number, f"Methods compared: {setup_text}", group)
            yield from list_charts(chart)
