"""The environment of a run: the part that identifies a series, and differences between two runs.

A series is a case on given ranks, nodes, backend and device in an environment. The environment is
the type of the hosts, their connections, versions and variables. The fingerprint of a series is a
hash of all this. It changes if any value does, because times are comparable only within one series.
Some values may explain a change of the time and must not start a new series, such as the version of
the kernel. They are kept next to the series.
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
"""Values of the environment that change between runs on one machine and do not affect its speed."""
NON_BLOCKING_PATHS = (*HARMLESS_PATHS, "imported.nccl")
"""Values of the environment that do not block a comparison of times if they differ.

Logs are often compared because of the NCCL version.
"""
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
"""Values of the environment that may explain a change of the time.

They do not start a new series.
"""
NOT_SET = "not set"
"""The text for an environment variable that is not set."""
EnvironmentValues = Mapping[str, tuple[tuple[str, ...], ...]]
"""The values of an environment during a run, keyed by path, such as ``versions.torch``.

Each value is a tuple with the distinct values of the ranks as text. There are several such tuples
if the environment changed during the run.
"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange:
    """A value of the environment, or an option of the plan, that differs between BASE and NEW."""

    path: str
    """The name of the value, such as ``versions.torch`` or ``plan.repetitions``."""
    base: str
    """The value in BASE as text."""
    new: str
    """The value in NEW as text."""
    is_blocking: bool
    """True if times must not be compared because of the difference."""
    is_intended: bool = False
    """True if the user declared the difference intentional with ``--across``."""
    changed_during: str = ""
    """The runs during which the value changed: ``BASE``, ``NEW`` or ``BASE and NEW``.

    Empty for none.
    """

    @property
    def text(self) -> str:
        """The difference as ``path: base -> new``."""
        return f"{self.path}: {self.base} -> {self.new}"


def collect_environment(run: Run, records: Sequence[Record]) -> EnvironmentValues:
    """Return the environment in which some records of a run were measured.

    It has the distinct values of each path over these records. ``records`` are records of ``run``.
    """
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
    """Return the values that differ between two environments, blocking ones first.

    A blocking difference forbids a comparison of times. A difference does not block if it matches a
    glob of ``intended``, if one side does not know the value, or if it is harmless. A value that
    changed during one of the runs also differs.

    Args:
        base: the environment of BASE, keyed by path.
        new: the environment of NEW, keyed by path.
        intended: globs for the paths of differences that are intentional.
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
    """Return the options that differ between the plans of two runs.

    They never block the comparison of times.
    """
    changes = find_environment_changes(_collect_plan_options(base), _collect_plan_options(new))
    return tuple(replace(change, is_blocking=False) for change in changes)


def _join_values(values: Sequence[Sequence[str]]) -> str:
    """Return the values of an environment variable or fact as one text.

    ``values`` has a sequence for each value during the run, with the distinct values of the ranks.
    Values of different ranks are joined by commas, and successive values by ``then``.
    """
    return " then ".join(", ".join(by_rank) for by_rank in values)


def _merge_environment(
    shared: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the distinct values of the ranks in one record as text, keyed by path.

    Args:
        shared: the environment of the run by path.
        own: the environment of the record: values that changed since the run began, and under
            ``rank N`` values that the ranks do not share.
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
    """Return a value of the environment as one line of text. None gives the default of the path."""
    return _get_default(path) if value is None else to_single_line(str(value))


def _get_default(path: str) -> str:
    """Return the text for a missing value: ``not set`` for variables, otherwise ``UNKNOWN``."""
    return NOT_SET if path.startswith("variables.") else UNKNOWN


_COMPARED_ELSEWHERE = frozenset(
    {"cases", "skipped", "nproc", "backend", "device", "notes", "path", "measure", "injection"}
)
"""The fields of a plan that are not compared as options."""


def _collect_plan_options(plan: Plan) -> EnvironmentValues:
    """Return the options of a plan in the form of an environment, keyed by ``plan.NAME``.

    Options that are compared elsewhere, such as the number of ranks, are left out.
    """
    options = msgspec.structs.asdict(plan)
    options = {name: value for name, value in options.items() if name not in _COMPARED_ELSEWHERE}
    options["measure"] = msgspec.structs.asdict(plan.measure)
    options["injection"] = plan.injection.text if plan.injection else "none"
    return {
        f"plan.{name}": ((_format_value(name, value),),) for name, value in flatten(options).items()
    }


class SeriesIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a series: a case on given ranks, nodes, backend and device in an environment.

    Only times with the same identity are comparable.
    """

    case: Case
    """The benchmark and its parameters."""
    world: WorldInfo
    """The ranks, nodes, backend and device."""
    environment: dict[str, str]
    """The values of the environment that may affect the time, as text by path."""

    @property
    def fingerprint(self) -> str:
        """A hash of the case, its ranks, nodes, backend and device, and its environment.

        It has 20 hexadecimal digits.
        """
        content = {"case": self.case.id, "world": self.world, "environment": self.environment}
        return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """The result of one case in one environment in one run."""

    series: SeriesIdentity
    """The case with its ranks and its environment."""
    status: Status
    """The worst status of a repetition."""
    seconds: float | None
    """The duration of the case in seconds, merged over the repetitions.

    None if the case failed or was not measured.
    """
    repetitions: int
    """The number of repetitions that measured the case."""
    reason: str = ""
    """The reasons for a status other than ok, empty for ok."""
    explanatory_values: Mapping[str, str]
    """Values of the environment, by path, that may explain a change of the time.

    They do not identify the series.
    """
    counts: ExactCounts
    """The exact counts of the case (calls, bytes, memory, schedule), keyed by name."""


def collect_points(
    run: Run, results: Iterable[CaseResult] | None = None
) -> tuple[SeriesPoint, ...]:
    """Return the results of a run for the history, one for each case in its environment.

    A case that was skipped in every repetition has none. ``results`` are the results of the cases,
    None to merge them from the records of the run.
    """
    points = []
    for result in merge_records(run) if results is None else results:
        if result.status != "skipped" or result.repetitions:
            points.append(_build_point(run, result))
    return tuple(points)


def _build_point(run: Run, result: CaseResult) -> SeriesPoint:
    """Return the result of a case for the history, with the environment in which it was measured.

    The environment is divided into values that identify the series and values that explain changes.
    """
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
