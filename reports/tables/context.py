"""The section on context parallelism: steps whose ranks share a sequence, and their methods."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from parbench.bench.results.details import AttentionDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.labels import label_differences
from parbench.reports.analysis.steps import (
    StepRow,
    compute_profiled_share,
    list_rows_with_details,
    sum_if_known,
)
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import chart_context_methods
from parbench.reports.run_data import RunData
from parbench.reports.stats import estimate_paired_effect
from parbench.reports.tables.columns import (
    ACTIVATIONS_COLUMN,
    STEP_TIME_COLUMN,
    list_metric_columns,
)

_METHOD_PARAMS = ("cp_method", "ulysses", "sequence")
"""The parameters in which compared steps may differ. All others make another model."""
_COLUMNS = (
    Column("method", help="context-parallel method, with parameters that differ"),
    Column("cp", kind="count", help="ranks that share a sequence"),
    Column("sequence", kind="count", help="tokens of a full sequence"),
    STEP_TIME_COLUMN,
    Column(
        "change",
        "time change",
        kind="percent",
        is_result=True,
        has_interval=True,
        help="step time relative to the first method at the same sequence length, less 1, with its "
        "95 % interval (t-test, paired by repetition)",
    ),
    metric_column("tokens_per_second"),
    Column(
        "bytes_sent",
        "bytes sent",
        kind="B",
        help="bytes that a rank sends for attention in a step",
    ),
    Column(
        "exposed",
        "exposed cp",
        kind="percent",
        is_result=True,
        help="exposed communication of attention, as a share of the profiled step",
    ),
)


def list_context_tables(data: RunData) -> list[Table]:
    """Return the table of context-parallel steps, as a list of one table.

    The table has no rows if no step recorded ``AttentionDetails``.
    """
    rows, problems = list_rows_with_details(data, AttentionDetails)
    for row in rows:
        row |= _read_values(row)
    return [_make_context_parallel_table(rows, problems)]


def _read_values(row: StepRow) -> StepRow:
    """Return the cells of a context-parallel step, keyed by column.

    These are ``method``, ``cp`` (ranks), ``sequence`` (tokens), ``bytes_sent``, and ``exposed`` (a
    fraction of the profiled step). The latter two are sums over all mesh axes except ``dp``,
    because attention communicates on these axes.
    """
    result: CaseResult = row["result"]
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


def _make_context_parallel_table(rows: Sequence[StepRow], problems: Sequence[str]) -> Table:
    """Return the table that compares methods of context parallelism, such as ring and Ulysses.

    ``rows`` are context-parallel steps. ``problems`` are sentences that become its first notes.
    """
    models = label_differences([row["result"] for row in rows], _METHOD_PARAMS)
    comparisons = _group_by_setup(rows)
    for comparison in comparisons:
        _compare_times(comparison)
    columns = [*_COLUMNS, *list_metric_columns("attention", rows), ACTIVATIONS_COLUMN]
    labeled_rows = [
        {**row, "method": to_single_line(f"{row['method']} {models[row['case_id']]}")}
        for row in rows
    ]
    return Table(
        "context-table",
        "Context parallelism",
        caption="time, bytes and balance of each method",
        columns=keep_known_columns(columns, labeled_rows),
        rows=labeled_rows,
        notes=[*problems, *map(describe_crossover, comparisons)],
        figures=lambda: _chart_comparisons(comparisons, models),
    )


def _group_by_setup(rows: Iterable[StepRow]) -> list[list[StepRow]]:
    """Return lists of steps with the same model and ranks that ran with several methods.

    Steps without another method to compare with are left out.
    """
    groups: dict[object, list[StepRow]] = {}
    for row in rows:
        setup = (row["result"].make_key(*_METHOD_PARAMS), row["cp"])
        groups.setdefault(setup, []).append(row)
    return [group for group in groups.values() if len({row["method"] for row in group}) > 1]


def _compare_times(comparison: Sequence[StepRow]) -> None:
    """Add the change of the step time relative to a base method to each row of ``comparison``.

    The rows are steps of one model. The base is the first row with the same sequence length. The
    added keys are ``change`` (the step time over the time of the base, minus 1, paired by
    repetition), and ``change_low`` and ``change_high``, its 95 % interval. ``change`` is the text
    ``base`` for the base itself.
    """
    bases: dict[int, StepRow] = {}
    for row in comparison:
        base = bases.setdefault(row["sequence"], row)
        if base is row:
            row["change"] = SortedText("base", 0.0)
            continue
        effect = estimate_paired_effect(
            base["result"].by_repetition(base["headline"]),
            row["result"].by_repetition(row["headline"]),
        )
        if effect is not None:
            row["change"] = effect.change
            row["change_low"] = effect.low
            row["change_high"] = effect.high


def describe_crossover(comparison: Sequence[StepRow]) -> str:
    """Return a sentence with the number of ranks above which Ulysses sends fewer bytes than a ring.

    ``comparison`` has steps of one model and number of ranks, which the sentence also names.
    """
    cp = comparison[0]["cp"]
    crossover = comparison[0]["details"].crossover_ranks
    amount = "as many" if cp == crossover else "fewer" if cp > crossover else "more"
    return (
        f"Ulysses sends fewer forward bytes than a ring above 1 + 1/g = {crossover:.4g} ranks "
        f"(g = kv_heads / heads). On cp = {cp} it sends {amount}."
    )


def _chart_comparisons(
    comparisons: Sequence[Sequence[StepRow]], models: Mapping[str, str]
) -> Iterator[Chart]:
    """Yield charts of time, bytes and exposed communication over sequence length.

    ``comparisons`` has a list of steps for each model and number of ranks. ``models`` has the label
    of the model of each case, keyed by case id.
    """
    for number, comparison in enumerate(comparisons, start=1):
        first = comparison[0]
        setup = ", ".join(filter(None, (f"cp = {first['cp']}", models[first["case_id"]])))
        yield from chart_context_methods(number, f"Methods compared: {setup}", comparison)
