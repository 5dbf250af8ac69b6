"""The section on expert parallelism: load, drops and bytes of each step, and tokens per expert."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parbench.bench.results.details import ExpertLoadDetails, MeshDetails, read_details
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.tables import (
    Column,
    Section,
    SortedText,
    Table,
    keep_known_columns,
    metric_column,
)
from parbench.reports.case_results import CaseResult
from parbench.reports.labels import label_differences, label_results
from parbench.reports.run_data import RunData
from parbench.reports.tables.step_columns import (
    STEP_COLUMN,
    STEP_TIME_COLUMN,
    make_metric_columns,
    make_step_row,
)

MAX_LISTED_EXPERTS = 16
_OWN_PARAMS = ("routing", "capacity", "ep", "variant")
"""The parameters that have a column of their own."""
_CAPACITY = Column(
    key="capacity",
    title="capacity",
    kind="number",
    number_format="{:g}",
    help="capacity factor, above which experts drop tokens; dropless drops none",
)
_STEP_COLUMNS = (
    Column(
        key="scope",
        title="scope",
        help="benchmark with the parameters that differ; rows of different scope do not compare",
    ),
    Column(key="routing", title="routing", help="distribution of tokens over experts"),
    _CAPACITY,
    Column(key="ep", title="EP", kind="count", help="ranks that share the experts of a layer"),
    Column(key="variant", title="variant", help="communication of dispatch and combine"),
    STEP_TIME_COLUMN,
)
_LOAD_COLUMNS = (
    STEP_COLUMN,
    Column(key="layer", title="layer", help="layer, from 0; all if the loads are equal"),
    _CAPACITY,
    Column(key="rank", title="rank", kind="count", help="rank on the ep axis"),
    Column(key="experts", title="experts", help="experts of the rank"),
    Column(
        key="routed",
        title="routed tokens",
        kind="count",
        help="tokens of all ranks that the router assigned to these experts",
    ),
    Column(
        key="relative_load",
        title="load / mean",
        kind="number",
        number_format="{:.2f}",
        help="routed tokens relative to the mean over ranks",
    ),
    Column(
        key="kept",
        title="kept",
        kind="count",
        help="token-expert pairs that the rank receives, without dropped ones",
    ),
    Column(
        key="by_expert",
        title="tokens per expert",
        help=f"routed tokens of each expert, or their range above {MAX_LISTED_EXPERTS} experts",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ExpertResult:
    """The result of an expert-parallel step, with the load of its experts."""

    result: CaseResult
    details: ExpertLoadDetails
    num_ranks: int
    """The ranks that share the experts of a layer."""

    @property
    def capacity(self) -> float | SortedText:
        capacity = self.result.case.params.get("capacity")
        if isinstance(capacity, int | float) and capacity:
            return float(capacity)
        return SortedText("dropless", None)

    @property
    def layers(self) -> Sequence[int]:
        """The layers with different loads; only the first if all have the same."""
        loads = list(zip(self.details.expert_load, self.details.rank_load, strict=True))
        return [0] if all(load == loads[0] for load in loads) else range(len(loads))


def read_experts(result: CaseResult) -> ExpertResult | str | None:
    """Return an expert-parallel step, None for another case, or a sentence about its details."""
    for record in result.measured:
        details = read_details(record, ExpertLoadDetails)
        if isinstance(details, str):
            return details
        if details is not None:
            mesh = read_details(record, MeshDetails)
            if isinstance(mesh, str):
                return mesh
            num_ranks = mesh.axes.get("ep", {}).get("ranks", 1) if mesh else 1
            return _check_load(result, details, num_ranks)
    return None


def _check_load(
    result: CaseResult, details: ExpertLoadDetails, num_ranks: int
) -> ExpertResult | str:
    for name, load in (("experts", details.expert_load), ("ranks", details.rank_load)):
        if num_ranks < 1 or len(load[0]) % num_ranks:
            reason = f"{name}({len(load[0])}) is not a multiple of ep({num_ranks})"
            return f"{result.case.label}: its expert load cannot be read: {reason}."
    return ExpertResult(result=result, details=details, num_ranks=num_ranks)


def read_expert_steps(results: Iterable[CaseResult]) -> tuple[ExpertResult, ...]:
    """Return the expert-parallel steps whose details can be read."""
    steps = map(read_experts, results)
    return tuple(step for step in steps if isinstance(step, ExpertResult))


def make_expert_section(data: RunData) -> Section | None:
    """Return the tables of expert-parallel steps, None without such steps."""
    problems = [problem for problem in map(read_experts, data.steps) if isinstance(problem, str)]
    steps = read_expert_steps(data.steps)
    if not steps and not problems:
        return None
    tables = (_make_step_table(steps), _make_load_table(steps)) if steps else ()
    return Section(id="experts", title="Expert parallelism", tables=tables, notes=tuple(problems))


def _make_step_table(steps: Sequence[ExpertResult]) -> Table:
    results = [step.result for step in steps]
    differences = label_differences(results, _OWN_PARAMS)
    rows = []
    for step in steps:
        case = step.result.case
        row = make_step_row("", step.result)
        row["scope"] = to_single_line(f"{case.short_name} {differences[case.id]}")
        row["routing"] = to_single_line(str(case.params.get("routing", "")))
        row["capacity"] = step.capacity
        row["ep"] = step.num_ranks
        row["variant"] = to_single_line(str(case.params.get("variant", "")))
        rows.append(row)
    columns = [
        *_STEP_COLUMNS,
        *make_metric_columns("experts", results),
        metric_column("bytes_ratio.ep"),
        metric_column("exposed_comm.ep"),
    ]
    return Table(
        id="experts-table",
        title="Expert parallelism",
        caption="expert load, dropped tokens, bytes and the cost of imbalance",
        columns=keep_known_columns(columns, rows),
        rows=rows,
    )


def _make_load_table(steps: Sequence[ExpertResult]) -> Table:
    """Return the load of each rank, once for all capacities and variants of a routing."""
    first_steps: dict[object, ExpertResult] = {}
    for step in steps:
        params = step.result.case.params
        routing = {name: params[name] for name in params if name not in ("capacity", "variant")}
        first_steps.setdefault((step.result.case.name, frozenset(routing.items())), step)
    labels = label_results([step.result for step in first_steps.values()])
    rows = []
    for step in first_steps.values():
        label = labels[step.result.case.id]
        rows += [{"step": label, **row} for row in _make_load_rows(step)]
    return Table(
        id="experts-load",
        title="Expert load",
        caption="tokens by rank and expert in the profiled step",
        columns=_LOAD_COLUMNS,
        rows=rows,
    )


def _make_load_rows(step: ExpertResult) -> Iterator[dict[str, Any]]:
    """Yield the load of each rank in each layer; ranks have consecutive experts."""
    for layer in step.layers:
        expert_load = step.details.expert_load[layer]
        num_experts = len(expert_load) // step.num_ranks
        mean = sum(expert_load) / step.num_ranks
        for rank in range(step.num_ranks):
            first = rank * num_experts
            load = expert_load[first : first + num_experts]
            # The ranks of all replicas of these experts.
            replicas = step.details.rank_load[layer][rank :: step.num_ranks]
            yield {
                "layer": str(layer) if len(step.layers) > 1 else "all",
                "capacity": step.capacity,
                "rank": rank,
                "experts": _format_range(first, first + num_experts - 1),
                "routed": sum(load),
                "relative_load": sum(load) / mean if mean else None,
                "kept": sum(replicas),
                "by_expert": _format_load(load),
            }


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _format_load(load: Sequence[int]) -> str:
    if len(load) > MAX_LISTED_EXPERTS:
        return _format_range(min(load), max(load))
    return " ".join(map(str, load))
