"""All that a run's rows say together, found once for all renderers, and of that what stands on one page. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parbench.bench.results.formatting import format_quantity, format_seconds
from parbench.bench.results.metrics import MetricValue
from parbench.bench.text import pluralize
from parbench.reports.analysis.fits import Ceiling, size_of
from parbench.reports.analysis.frame import group_by
from parbench.reports.analysis.labels import AXES, differences, short_labels
from parbench.reports.analysis.summary import Row, Summary, summarize
from parbench.reports.repetitions import describe_measuring_time
from parbench.reports.run_data import RunData
from parbench.reports.tables.step_parts import get_share_of_profile, sum_exposed_communication
from parbench.reports.verdicts import Verdict, judge_run


class Analysis(RunData):
    """A run with what sections that do not compute it themselves read."""

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.run)

    @property
    def shown(self) -> tuple[Row, ...]:
        return self.measured


_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation over all its sizes: the time of the smallest (64 KiB at most), one at a time; the best bandwidth.

    ``share`` is that bandwidth over the ceiling's.
    """

    name: str
    latency: float | None
    rate: MetricValue | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step."""

    name: str
    row: Row

    @property
    def overlap(self) -> float | None:
        """The share of communication that is hidden."""
        return self.row.value("overlap")

    @property
    def parts(self) -> Mapping[str, float]:
        """The shares of the traced step that are known."""
        row = self.row
        seconds = {
            "compute": row.value("compute"),
            "exposed": sum_exposed_communication(row),
            "idle": row.value("idle"),
        }
        shares = {name: get_share_of_profile(row, value) for name, value in seconds.items()}
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(frozen=True, kw_only=True)
class Front:
    """The first page of a run: where it ran, verdicts, operations with the fastest first, and steps."""

    path: Path
    where: str
    verdicts: tuple[Verdict, ...]
    ceiling: Ceiling | None
    operations: tuple[Operation, ...]
    steps: tuple[Step, ...]

    @property
    def tiles(self) -> tuple[tuple[str, str], ...]:
        """The numbers to see first, each with what it is."""
        found = []
        for step in self.steps[:1]:
            parts = [
                f"{name} {100 * share:.0f} %"
                for name, share in step.parts.items()
                if name != "compute"
            ]
            parts += [f"overlap {100 * step.overlap:.0f} %"] if step.overlap is not None else []
            found.append((format_seconds(step.row.seconds), f"step of {step.name}"))
            found += [(", ".join(parts), f"of a step of {step.name}")] if parts else []
        rates = [
            (one.rate.value, one.name) for one in self.operations if one.rate and one.rate.value
        ]
        latencies = [(one.latency, one.name) for one in self.operations if one.latency]
        found += [
            (format_quantity(rate, "B/s"), f"bus bandwidth of {name}") for rate, name in rates[:1]
        ]
        found += [
            (format_seconds(seconds), f"latency of {name}")
            for seconds, name in sorted(latencies)[:1]
        ]
        return tuple(found)


def front_of(found: Analysis, more: tuple[Verdict, ...] = ()) -> Front:
    run, plan = found.run, found.run.info.plan
    environment = run.info.environment or {}
    torch = (environment.get("versions") or {}).get("torch")
    ranks, labels = pluralize(plan.nproc, "rank"), short_labels(found.steps)
    parts = [
        run.info.host,
        ranks,
        f"{plan.backend}, {plan.device}",
        f"torch {torch}" if torch else "",
    ]
    return Front(
        path=run.path,
        where=" · ".join(filter(None, [*parts, describe_measuring_time(run)])),
        verdicts=(*judge_run(found), *more),
        ceiling=found.ceiling,
        operations=_operations(found),
        steps=tuple(Step(name=labels[row.case.id], row=row) for row in found.steps),
    )


def _operations(found: Analysis) -> tuple[Operation, ...]:
    made, differing = list[Operation](), differences(found.communication, AXES)
    rows = [row for row in found.communication if row.kind != "memory"]
    for name, of in group_by(
        rows, lambda row: f"{row.case.short_name} {differing[row.case.id]}".strip()
    ).items():
        fastest = max(of, key=lambda row: row.value("busbw") or 0.0)
        alone = [
            row
            for row in of
            if row.case.params.get("mode") == "blocking" and size_of(row) <= _SMALL_BYTES
        ]
        smallest = min(alone, key=size_of, default=None)
        rate = fastest.metrics.get("busbw")
        share = (
            rate.value / found.ceiling.bytes_per_second
            if rate and rate.value and found.ceiling
            else None
        )
        latency = smallest.value("time") if smallest else None
        made.append(Operation(name=name, latency=latency, rate=rate, share=share))
    return tuple(sorted(made, key=lambda one: -((one.rate and one.rate.value) or 0.0)))
