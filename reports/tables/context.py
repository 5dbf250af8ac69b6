"""The section on context parallelism: steps whose ranks share a sequence, and methods compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parbench.bench.results.details import AttentionDetails, MeshDetails, read_details
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import Column, Section, Table, keep_known_columns, metric_column
from parbench.reports.case_results import CaseResult
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import chart_context_methods
from parbench.reports.labels import label_differences
from parbench.reports.run_data import RunData
from parbench.reports.stats import estimate_paired_effect
from parbench.reports.tables.step_columns import (
    STEP_TIME_COLUMN,
    make_metric_columns,
    make_step_row,
)
from parbench.reports.tables.step_parts import find_worst_ratio, get_share_of_profile, sum_if_known

_METHOD_PARAMS = ("cp_method", "ulysses", "sequence")
"""The parameters in which compared steps may differ. All others make another model."""
_COLUMNS = (
    Column(
        key="method", title="method", help="context-parallel method, with parameters that differ"
    ),
    Column(key="ranks", title="cp", kind="count", help="ranks that share a sequence"),
    Column(key="sequence", title="sequence", kind="count", help="tokens of a full sequence"),
    STEP_TIME_COLUMN,
    Column(
        key="change",
        title="time change",
        kind="percent",
        has_interval=True,
        is_result=True,
        help="step time relative to the first method at the same sequence length, less 1, with its "
        "95 % interval (t-test, paired by repetition)",
    ),
    metric_column("tokens_per_second"),
    Column(
        key="bytes_sent",
        title="bytes sent",
        kind="B",
        is_result=True,
        help="bytes that a rank sends for attention in a step",
    ),
    *(
        Column(
            key=f"ratio_{direction}",
            title=f"ratio {direction}",
            kind="number",
            number_format="{:.3f}",
            is_result=True,
            help=f"counted over analytical {direction} bytes, on the axis where they differ most",
        )
        for direction in ("forward", "backward")
    ),
    Column(
        key="exposed",
        title="exposed cp",
        kind="percent",
        is_result=True,
        help="exposed communication of attention, as a share of the profiled step",
    ),
)
_ACTIVATIONS = metric_column("memory.activations", title="activations")


@dataclass(frozen=True, kw_only=True)
class ContextResult:
    """The result of a context-parallel step, with the details that it recorded."""

    result: CaseResult
    details: AttentionDetails
    mesh: Mapping[str, Mapping[str, int]]

    @property
    def num_ranks(self) -> int:
        return self.details.sequence // self.details.tokens_per_rank

    @property
    def method(self) -> str:
        """The name of the method; that of usp with the number of ranks that share heads."""
        ulysses = self.mesh.get("ulysses")
        if ulysses is None:
            return self.details.method
        return f"{self.details.method} ulysses={ulysses.get('ranks')}"

    def get_values(self, metric: str, direction: str = "") -> dict[str, float | None]:
        """Return a metric by axis of attention; those of dp are communication of gradients.

        ``direction`` is ``forward`` or ``backward``, and by default their sum.
        """
        suffix = f".{direction}" if direction else ""
        axes = [axis for axis in self.mesh if axis != "dp"]
        return {axis: self.result.value(f"{metric}.{axis}{suffix}") for axis in axes}


def read_context(result: CaseResult) -> ContextResult | str | None:
    """Return a context-parallel step, None for another case, or a sentence about its details."""
    for record in result.measured:
        details = read_details(record, AttentionDetails)
        mesh = read_details(record, MeshDetails)
        if isinstance(details, str):
            return details
        if details is not None:
            if isinstance(mesh, str):
                return mesh
            return ContextResult(result=result, details=details, mesh=mesh.axes) if mesh else None
    return None


def read_contexts(results: Iterable[CaseResult]) -> tuple[ContextResult, ...]:
    """Return the context-parallel steps whose details can be read."""
    contexts = map(read_context, results)
    return tuple(context for context in contexts if isinstance(context, ContextResult))


def make_context_section(data: RunData) -> Section | None:
    """Return the table of context-parallel steps, None without such steps."""
    problems = [problem for problem in map(read_context, data.steps) if isinstance(problem, str)]
    contexts = read_contexts(data.steps)
    if not contexts and not problems:
        return None
    tables = (_make_table(contexts),) if contexts else ()
    return Section(id="context", title="Context parallelism", tables=tables, notes=tuple(problems))


def _make_table(contexts: Sequence[ContextResult]) -> Table:
    results = [context.result for context in contexts]
    labels = label_differences(results, _METHOD_PARAMS)
    rows = {context.result.case.id: _make_row(context, labels) for context in contexts}
    comparisons = _group_by_setup(contexts)
    notes = []
    for group in comparisons:
        for case_id, cells in _compare_methods(group).items():
            rows[case_id].update(cells)
        note = describe_crossover(group)
        if note:
            notes.append(note)
    columns = [*_COLUMNS, *make_metric_columns("attention", results), _ACTIVATIONS]
    return Table(
        id="context-table",
        title="Context parallelism",
        caption="time, bytes and balance of each method",
        columns=keep_known_columns(columns, list(rows.values())),
        rows=list(rows.values()),
        notes=notes,
        figures=lambda: _chart_comparisons(comparisons, rows, labels),
    )


def _make_row(context: ContextResult, labels: Mapping[str, str]) -> dict[str, Any]:
    result = context.result
    row = make_step_row("", result)
    row["method"] = to_single_line(f"{context.method} {labels[result.case.id]}")
    row["ranks"] = context.num_ranks
    row["sequence"] = context.details.sequence
    row["bytes_sent"] = sum_if_known(context.get_values("bytes_sent").values())
    exposed = sum_if_known(context.get_values("exposed_comm").values())
    row["exposed"] = get_share_of_profile(result, exposed)
    for direction in ("forward", "backward"):
        worst = find_worst_ratio(context.get_values("bytes_ratio", direction))
        row[f"ratio_{direction}"] = worst[1] if worst else None
    return row


def _group_by_setup(contexts: Iterable[ContextResult]) -> list[list[ContextResult]]:
    """Return the steps of each model and world that ran with several methods."""
    groups: dict[object, list[ContextResult]] = {}
    for context in contexts:
        case = context.result.case
        model = {name: value for name, value in case.params.items() if name not in _METHOD_PARAMS}
        setup = (case.name, frozenset(model.items()), context.num_ranks, context.result.world)
        groups.setdefault(setup, []).append(context)
    return [group for group in groups.values() if len({context.method for context in group}) > 1]


def _compare_methods(group: Sequence[ContextResult]) -> dict[str, dict[str, float | None]]:
    """Return by case id the change of the step time from that of the first method."""
    cells = {}
    bases: dict[int, CaseResult] = {}
    for context in group:
        result = context.result
        base = bases.setdefault(context.details.sequence, result)
        effect = estimate_paired_effect(
            base.by_repetition(base.headline), result.by_repetition(result.headline)
        )
        if effect is not None and base is not result:
            change = {"change": effect.change, "change_low": effect.low, "change_high": effect.high}
            cells[result.case.id] = change
    return cells


def describe_crossover(group: Sequence[ContextResult]) -> str:
    """Return from how many ranks on Ulysses sends less than a ring, empty if it is unknown."""
    for context in group:
        crossover = context.details.crossover_ranks
        if crossover is not None:
            ranks = context.num_ranks
            comparison = (
                "as many" if ranks == crossover else "fewer" if ranks > crossover else "more"
            )
            return (
                f"Ulysses sends fewer forward bytes than a ring above 1 + 1/g = {crossover:.4g} "
                f"ranks (g = kv_heads / heads). On cp = {ranks} it sends {comparison}."
            )
    return ""


def _chart_comparisons(
    comparisons: Sequence[Sequence[ContextResult]],
    rows: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
) -> Iterator[Chart]:
    for number, group in enumerate(comparisons, start=1):
        model = labels[group[0].result.case.id]
        title = f"Methods compared: cp = {group[0].num_ranks}"
        if model:
            title += f", {model}"
        # The lines of a figure are the methods, without the parameters that its title names.
        charted = [{**rows[context.result.case.id], "method": context.method} for context in group]
        yield from chart_context_methods(number, title, charted)
