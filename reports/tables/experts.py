"""The section on expert parallelism: load, drops and bytes of each step, and tokens by expert."""

from collections.abc import Iterator, Sequence
from typing import Any

from parbench.bench.results.details import ExpertLoadDetails
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.analysis.labels import label_differences
from parbench.reports.analysis.steps import StepRow, list_rows_with_details
from parbench.reports.run_data import RunData
from parbench.reports.tables.columns import STEP_COLUMN, STEP_TIME_COLUMN, list_metric_columns

MAX_LISTED_EXPERTS = 16
_OWN_PARAMS = ("routing", "capacity", "ep", "variant")
"""The parameters that have a column of their own."""
_CAPACITY = Column(
    "capacity",
    kind="number",
    number_format="{:g}",
    help="capacity factor, above which experts drop tokens; dropless drops none",
)
_STEP_COLUMNS = (
    Column(
        "scope",
        help="benchmark with the parameters that differ; rows of different scope do not compare",
    ),
    Column("routing", help="distribution of tokens over experts"),
    _CAPACITY,
    Column("ep", "EP", kind="count", help="ranks that share the experts of a layer"),
    Column("variant", help="communication of dispatch and combine"),
    STEP_TIME_COLUMN,
)
_LOAD_COLUMNS = (
    STEP_COLUMN,
    Column("layer", help="layer, from 0; all if the loads are equal"),
    _CAPACITY,
    Column("rank", kind="count", help="rank on the ep axis"),
    Column("experts", help="experts of the rank"),
    Column(
        "routed",
        "routed tokens",
        kind="count",
        help="tokens of all ranks that the router assigned to these experts",
    ),
    Column(
        "relative_load",
        "load / mean",
        kind="number",
        number_format="{:.2f}",
        help="routed tokens relative to the mean over ranks",
    ),
    Column(
        "kept",
        kind="count",
        help="token-expert pairs that the rank receives, without dropped ones",
    ),
    Column(
        "by_expert",
        "tokens per expert",
        help=f"routed tokens of each expert, or their range above {MAX_LISTED_EXPERTS} experts",
    ),
)


def list_expert_tables(data: RunData) -> list[Table]:
    """Return two tables: expert-parallel steps with their cost, and the load of experts by rank.

    The tables have no rows if no step recorded ``ExpertLoadDetails``.
    """
    steps, problems = list_rows_with_details(data, ExpertLoadDetails)
    rows = []
    for step in steps:
        step["ep"] = step["axes"].get("ep", {}).get("ranks", 1)
        problem = _check_load(step)
        if problem:
            problems.append(f"{step['label']}: its expert load cannot be read: {problem}.")
        else:
            rows.append(step | _read_settings(step))
    return [_make_step_table(rows, problems), _make_load_table(rows)]


def _check_load(row: StepRow) -> str:
    """Return the reason why a step's expert load cannot be split over its ep ranks.

    The numbers of experts and of ranks must be multiples of ``ep``. The text is empty if they are.
    """
    ep = row["ep"]
    details: ExpertLoadDetails = row["details"]
    for name, load in (("experts", details.expert_load), ("ranks", details.rank_load)):
        if ep < 1 or len(load[0]) % ep:
            return f"{name}({len(load[0])}) is not a multiple of ep({ep})"
    return ""


def _read_settings(row: StepRow) -> StepRow:
    """Return the routing, the communication variant and the capacity factor of a step as cells.

    Without a capacity factor, the cell is the text ``dropless``.
    """
    params = row["result"].case.params
    return {
        "routing": to_single_line(str(params.get("routing", ""))),
        "variant": to_single_line(str(params.get("variant", ""))),
        "capacity": params.get("capacity") or SortedText("dropless", None),
    }


def _make_step_table(rows: Sequence[StepRow], problems: Sequence[str]) -> Table:
    """Return the table of expert-parallel steps: time, load imbalance, drops and bytes.

    ``rows`` are steps with their routing and capacity. ``problems`` are sentences that become
    notes.
    """
    scopes = label_differences([row["result"] for row in rows], _OWN_PARAMS)
    for row in rows:
        row["scope"] = to_single_line(f"{row['result'].case.short_name} {scopes[row['case_id']]}")
    columns = [
        *_STEP_COLUMNS,
        *list_metric_columns("experts", rows),
        metric_column("bytes_ratio.ep"),
        metric_column("exposed_comm.ep"),
    ]
    return Table(
        "experts-table",
        "Expert parallelism",
        caption="expert load, dropped tokens, bytes and the cost of imbalance",
        columns=keep_known_columns(columns, rows),
        rows=rows,
        notes=problems,
    )


def _make_load_table(rows: Sequence[StepRow]) -> Table:
    """Return the table of tokens by layer and rank, once for each routing.

    Steps that differ only in capacity or variant have the same routing, so the first step counts.
    """
    first_rows: dict[object, StepRow] = {}
    for row in rows:
        first_rows.setdefault(row["result"].make_key("capacity", "variant"), row)
    return Table(
        "experts-load",
        "Expert load",
        caption="tokens by rank and expert in the profiled step",
        columns=_LOAD_COLUMNS,
        rows=[load_row for row in first_rows.values() for load_row in _make_load_rows(row)],
    )


def _make_load_rows(row: StepRow) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer and ep rank: its experts, and the tokens routed to them.

    A rank has consecutive experts. If all layers have equal loads, only one layer is listed as
    ``all``.
    """
    details: ExpertLoadDetails = row["details"]
    ep = row["ep"]
    loads = list(zip(details.expert_load, details.rank_load, strict=True))
    is_uniform = all(load == loads[0] for load in loads)
    for layer, (expert_load, rank_load) in enumerate(loads[:1] if is_uniform else loads):
        num_experts = len(expert_load) // ep
        mean = sum(expert_load) / ep
        for rank in range(ep):
            first = rank * num_experts
            load = expert_load[first : first + num_experts]
            yield {
                "label": row["label"],
                "layer": "all" if is_uniform else str(layer),
                "capacity": row["capacity"],
                "rank": rank,
                "experts": _format_range(first, first + num_experts - 1),
                "routed": sum(load),
                "relative_load": sum(load) / mean if mean else None,
                # The replicas of these experts are on every ep-th rank.
                "kept": sum(rank_load[rank::ep]),
                "by_expert": _format_load(load),
            }


def _format_range(first: int, last: int) -> str:
    """Return two numbers as ``first to last``, or as one number if they are equal."""
    return str(first) if first == last else f"{first} to {last}"


def _format_load(load: Sequence[int]) -> str:
    """Return the tokens of each expert as text, only their range if there are over 16 experts."""
    if len(load) > MAX_LISTED_EXPERTS:
        return _format_range(min(load), max(load))
    return " ".join(map(str, load))
