"""The environment of a run: what identifies a series, and what differs between two runs.

A series is a case on a world in an environment: the class of its hosts and how they are connected,
versions and variables. Its fingerprint changes if any of these does, because times are comparable
only within one series. Some values may explain a change of the time and must not start a new
series, such as the kernel's version. They are kept next to the series.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from parbench.bench.machine.environment import VOLATILE, flatten
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Plan
from parbench.bench.results.formatting import UNKNOWN, to_single_line
from parbench.bench.results.records import Record, Status, WorldInfo
from parbench.bench.results.runs import Run
from parbench.reports.analysis.case_results import CaseResult, merge_records
from parbench.reports.compare.counts import ExactCounts, collect_counts

HARMLESS_PATHS = (
    "gpu.uuid",
    "host.address",
    "host.boot_id",
    "host.memory_bytes",
    "slurm.job",
    "slurm.nodelist",
    "variables.SLURM_JOB_ID",
    "variables.SLURM_JOB_NODELIST",  # The host names of the ranks are compared instead.
    "variables.SLURM_RESTART_COUNT",
)
"""Values that change between runs on one machine and do not affect its speed."""
NON_BLOCKING_PATHS = (*HARMLESS_PATHS, "imported.nccl")
"""Values that do not block a comparison. Logs are often compared because of the NCCL version."""
EXPLANATORY_PATHS = frozenset(
    {
        "host.clock_source",
        "host.governor",
        "host.kernel",
        "host.name",
        "host.os",
        "host.virtualised",
        "imported.nccl",
        "process.affinity",
        "versions.numpy",
        "versions.python",
    }
)
"""Values that may explain a change of the time, so they do not start a new series."""
NOT_SET = "not set"
EnvironmentValues = Mapping[str, tuple[tuple[str, ...], ...]]
"""The distinct values of the records, keyed by path.

Each value is a tuple with the values of the ranks as text. There are several values if the
environment changed during the run.
"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange:
    """A value of the environment or the plan that differs between two runs, as text."""

    path: str
    base: str
    new: str
    is_blocking: bool
    """True if times must not be compared because of the difference."""
    is_intended: bool = False
    """True if the user declared the difference intentional."""
    changed_during: str = ""
    """The runs during which the value changed: ``BASE and NEW``. Empty if it is constant."""

    @property
    def text(self) -> str:
        """The change as ``path: base -> new``."""
        return f"{self.path}: {self.base} -> {self.new}"


def collect_environment(run: Run, records: Sequence[Record]) -> EnvironmentValues:
    """Return the environment of the ranks that measured these records."""
    shared = flatten(run.info.environment or {})
    environments = [_merge_environment(shared, record.environment) for record in records]
    paths = sorted({path for environment in environments for path in environment})
    values = {}
    for path in paths:
        by_record = [environment.get(path, (_get_default(path),)) for environment in environments]
        values[path] = tuple(dict.fromkeys(by_record))
    return values


def find_environment_changes(
    base: EnvironmentValues, new: EnvironmentValues, intended: Sequence[str] = ()
) -> tuple[EnvironmentChange, ...]:
    """Return the differences, blocking ones first.

    A difference does not block if it matches a glob of ``intended``, if one side does not know the
    value, or if it is harmless.
    """
    changes = []
    for path in sorted({*base, *new}):
        default = ((_get_default(path),),)
        base_values = base.get(path, default)
        new_values = new.get(path, default)
        if base_values == new_values and len(base_values) == 1:
            continue
        is_intended = any(fnmatchcase(path, pattern) for pattern in intended)
        is_unknown = (UNKNOWN,) in (*base_values, *new_values)
        sides = {"BASE": base_values, "NEW": new_values}
        changed_during = [side for side, values in sides.items() if len(values) > 1]
        changes.append(
            EnvironmentChange(
                path=path,
                base=_join_values(base_values),
                new=_join_values(new_values),
                is_blocking=not (is_intended or is_unknown or path in NON_BLOCKING_PATHS),
                is_intended=is_intended,
                changed_during=" and ".join(changed_during),
            )
        )
    return tuple(sorted(changes, key=lambda change: not change.is_blocking))


def find_plan_changes(base: Plan, new: Plan) -> tuple[EnvironmentChange, ...]:
    """Return the options of the plans that differ. They never block."""
    changes = find_environment_changes(_collect_plan_options(base), _collect_plan_options(new))
    return tuple(replace(change, is_blocking=False) for change in changes)


def _join_values(values: Sequence[Sequence[str]]) -> str:
    """Return the values of ranks joined by commas, and successive values joined by ``then``."""
    return " then ".join(", ".join(by_rank) for by_rank in values)


def _merge_environment(
    shared: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the distinct values of the ranks by path.

    ``shared`` has values of the run by path. ``own`` is the environment of a record: values that
    changed since the run began, and under ``rank N`` values that the ranks do not share.
    """
    values: dict[str, list[Any]] = {path: [value] for path, value in shared.items()}
    for path, (_, value) in (own.get("changed") or {}).items():
        values[path] = [value]
    by_rank = [flatten(part or {}) for name, part in own.items() if name.startswith("rank ")]
    for path in {path for rank_values in by_rank for path in rank_values}:
        values[path] = [rank_values.get(path) for rank_values in by_rank]
    return {
        path: tuple(sorted({_format_value(path, value) for value in rank_values}))
        for path, rank_values in values.items()
        if path.partition(".")[0] != VOLATILE
    }


def _format_value(path: str, value: Any) -> str:
    """Return a value as one line of text. None is the default of the path."""
    return _get_default(path) if value is None else to_single_line(str(value))


def _get_default(path: str) -> str:
    """Return the text for a missing value: ``not set`` for variables, otherwise ``UNKNOWN``."""
    return NOT_SET if path.startswith("variables.") else UNKNOWN


_COMPARED_ELSEWHERE = frozenset(
    {"cases", "skipped", "nproc", "backend", "device", "notes", "path", "measure", "injection"}
)


def _collect_plan_options(plan: Plan) -> EnvironmentValues:
    """Return the options of a plan that are not compared elsewhere, keyed by ``plan.NAME``."""
    options = msgspec.structs.asdict(plan)
    options = {name: value for name, value in options.items() if name not in _COMPARED_ELSEWHERE}
    options["measure"] = msgspec.structs.asdict(plan.measure)
    options["injection"] = plan.injection.text if plan.injection else "none"
    return {
        f"plan.{name}": ((_format_value(name, value),),) for name, value in flatten(options).items()
    }


class SeriesIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A case on a world in an environment, whose values are text by path."""

    case: Case
    world: WorldInfo
    environment: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """A hash of the case, the world and the environment, in 20 hexadecimal digits."""
        content = {"case": self.case.id, "world": self.world, "environment": self.environment}
        return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """The result of a series in one run."""

    series: SeriesIdentity
    status: Status
    seconds: float | None
    """The time of the case that is compared, None if nothing was measured."""
    repetitions: int
    reason: str = ""
    explanatory_values: Mapping[str, str]
    """Values of the environment that do not identify the series."""
    counts: ExactCounts


def collect_points(
    run: Run, results: Iterable[CaseResult] | None = None
) -> tuple[SeriesPoint, ...]:
    """Return a point for each case of a run, except cases that were skipped in every repetition.

    ``results`` are those of the cases, by default of all cases of the run.
    """
    points = []
    for result in merge_records(run) if results is None else results:
        if result.status != "skipped" or result.repetitions:
            points.append(_build_point(run, result))
    return tuple(points)


def _build_point(run: Run, result: CaseResult) -> SeriesPoint:
    """Return the point of a result with the identifying and the explanatory environment."""
    identifying = {}
    explanatory = {}
    for path, values in collect_environment(run, result.measured or result.records).items():
        if path in EXPLANATORY_PATHS or path.startswith("gpu."):
            if path not in HARMLESS_PATHS:
                explanatory[path] = _join_values(values)
        elif path not in HARMLESS_PATHS:
            identifying[path] = _join_values(values)
    injected = sorted({record.injected for record in result.records if record.injected})
    if injected:
        identifying["injected"] = ", ".join(injected)
    seconds = result.seconds
    if result.status not in ("ok", "skipped"):
        seconds = None
    return SeriesPoint(
        series=SeriesIdentity(case=result.case, world=result.world, environment=identifying),
        status=result.status,
        seconds=seconds if seconds and seconds > 0 else None,
        repetitions=result.repetitions,
        reason="; ".join(result.reasons),
        explanatory_values=explanatory,
        counts=collect_counts(result),
    )
