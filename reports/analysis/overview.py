"""The overview of a run: where it ran, its verdicts, and the main number of each benchmark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parbench.bench.results.formatting import format_quantity, format_seconds
from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.fits import Ceiling, get_size
from parbench.reports.analysis.labels import AXES, label_differences
from parbench.reports.analysis.repetitions import describe_measuring_time
from parbench.reports.analysis.verdicts import ReportVerdict, judge_run
from parbench.reports.run_data import RunData
from parbench.reports.tables.step_parts import compute_profiled_share, sum_exposed_communication

MAX_LATENCY_BYTES = 64 << 10
"""The latency of an operation is the time of its smallest size up to this one."""


@dataclass(frozen=True, kw_only=True)
class OperationSummary:
    """An operation over all its sizes."""

    name: str
    latency: float | None
    """The seconds of the smallest size in blocking mode."""
    busbw: MetricValue | None
    """The largest bus bandwidth."""
    share: float | None
    """The bus bandwidth over the ceiling."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """A training step."""

    name: str
    result: CaseResult

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden."""
        return self.result.value("overlap")

    @property
    def parts(self) -> Mapping[str, float]:
        """The known shares of compute, exposed communication and idle time."""
        seconds = {
            "compute": self.result.value("compute"),
            "exposed": sum_exposed_communication(self.result),
            "idle": self.result.value("idle"),
        }
        shares = {
            name: compute_profiled_share(self.result, value) for name, value in seconds.items()
        }
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The contents of the first screen of a run."""

    path: Path
    setup: str
    """The host, the ranks, the backend and the time that measuring took."""
    verdicts: tuple[ReportVerdict, ...]
    ceiling: Ceiling | None
    operations: tuple[OperationSummary, ...]
    """From the largest bus bandwidth to the smallest."""
    steps: tuple[StepSummary, ...]

    @property
    def tiles(self) -> tuple[tuple[str, str], ...]:
        """The main numbers, each with its meaning."""
        return (*self._make_step_tiles(), *self._make_operation_tiles())

    def _make_step_tiles(self) -> list[tuple[str, str]]:
        if not self.steps:
            return []
        step = self.steps[0]
        shares = {name: share for name, share in step.parts.items() if name != "compute"}
        if step.overlap is not None:
            shares["overlap"] = step.overlap
        tiles = [(format_seconds(step.result.seconds), f"step of {step.name}")]
        if shares:
            parts = [f"{name} {100 * share:.0f} %" for name, share in shares.items()]
            tiles.append((", ".join(parts), f"of a step of {step.name}"))
        return tiles

    def _make_operation_tiles(self) -> list[tuple[str, str]]:
        tiles = []
        fastest = self.operations[0] if self.operations else None
        if fastest and fastest.busbw and fastest.busbw.value:
            bandwidth = format_quantity(fastest.busbw.value, "B/s")
            tiles.append((bandwidth, f"bus bandwidth of {fastest.name}"))
        latencies = [
            (operation.latency, operation.name)
            for operation in self.operations
            if operation.latency
        ]
        if latencies:
            seconds, name = min(latencies)
            tiles.append((format_seconds(seconds), f"latency of {name}"))
        return tiles


def make_overview(data: RunData, extra_verdicts: Sequence[ReportVerdict] = ()) -> Overview:
    """Return the overview of a run with further verdicts after its own."""
    return Overview(
        path=data.run.path,
        setup=_describe_setup(data),
        verdicts=(*judge_run(data), *extra_verdicts),
        ceiling=data.ceiling,
        operations=_summarize_operations(data),
        steps=tuple(
            StepSummary(name=data.labels[result.case.id], result=result) for result in data.steps
        ),
    )


def _describe_setup(data: RunData) -> str:
    environment = data.run.info.environment or {}
    torch = (environment.get("versions") or {}).get("torch")
    parts = [
        data.run.info.host,
        pluralize(data.plan.nproc, "rank"),
        f"{data.plan.backend}, {data.plan.device}",
        f"torch {torch}" if torch else "",
        describe_measuring_time(data.run),
    ]
    return " · ".join(part for part in parts if part)


def _summarize_operations(data: RunData) -> tuple[OperationSummary, ...]:
    results = [result for result in data.communication if result.kind != "memory"]
    differences = label_differences(results, AXES)
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        name = f"{result.case.short_name} {differences[result.case.id]}".strip()
        groups.setdefault(name, []).append(result)
    operations = [_summarize_sizes(name, group, data.ceiling) for name, group in groups.items()]
    return tuple(sorted(operations, key=_get_bandwidth, reverse=True))


def _get_bandwidth(operation: OperationSummary) -> float:
    return (operation.busbw.value if operation.busbw else None) or 0.0


def _summarize_sizes(
    name: str, results: Sequence[CaseResult], ceiling: Ceiling | None
) -> OperationSummary:
    fastest = max(results, key=lambda result: result.value("busbw") or 0.0)
    bandwidth = fastest.value("busbw")
    small = [
        result
        for result in results
        if result.case.params.get("mode") == "blocking" and get_size(result) <= MAX_LATENCY_BYTES
    ]
    smallest = min(small, key=get_size, default=None)
    return OperationSummary(
        name=name,
        latency=smallest.value("time") if smallest else None,
        busbw=fastest.metrics.get("busbw"),
        share=bandwidth / ceiling.bytes_per_second if bandwidth and ceiling else None,
    )
