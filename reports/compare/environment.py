"""The environment of a run: the part that identifies a series, and differences between two runs.

A series is a case on given ranks, nodes, backend and device in an environment. The environment is
the type of the hosts, their connections, versions and variables. The fingerprint of a series is a
hash of all this. It changes if any value does, because times are comparable only within one series.
Some values may explain a change of the time and must not start a new series, such as the version of
the kernel. They are kept next to the series.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from parbench.bench.machine.environment import flatten
from parbench.bench.plan.cases import Case
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
        "host.governor",
        "host.kernel",
        "host.name",
        "host.os",
        "imported.nccl",
        "process.affinity",
        "versions.numpy",
        "versions.python",
    }
)
"""Values of the environment that may explain a change of the time.

They do not start a new series.
"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange:
    """A value of the environment that differs between the runs BASE and NEW."""

    path: str
    """The dotted name of the value, such as ``versions.torch``."""
    base: str
    """The value in BASE as text."""
    new: str
    """The value in NEW as text."""
    is_blocking: bool
    """True if times must not be compared because of the difference."""

    @property
    def text(self) -> str:
        """The name of the value with both values as text: ``versions.torch: 2.7 -> 2.8``."""
        return f"{self.path}: {self.base} -> {self.new}"


def collect_environment(run: Run, records: Sequence[Record]) -> dict[str, str]:
    """Return the environment in which some records of a run were measured.

    Each value is text, keyed by its path, a dotted name such as ``versions.torch``. Values that
    differ between ranks are joined by commas, and values that differ between records by ``then``.
    An injected fault (``injected``) is part of the environment.
    """
    shared = flatten(run.info.environment or {})
    environments = [_merge_environment(shared, record) for record in records]
    paths = sorted({path for environment in environments for path in environment})
    return {
        path: " then ".join(
            dict.fromkeys(environment.get(path, _get_default(path)) for environment in environments)
        )
        for path in paths
    }


def _merge_environment(shared: Mapping[str, Any], record: Record) -> dict[str, str]:
    """Return the values of the environment of one record as text, keyed by path.

    A path is a dotted name, such as ``versions.torch``. ``shared`` has the values at the start of
    the run, keyed by path. The record has the values that changed since then, and under ``rank N``
    the values that differ between ranks.
    """
    values: dict[str, list[Any]] = {path: [value] for path, value in shared.items()}
    for path, (_, value) in (record.environment.get("changed") or {}).items():
        values[path] = [value]
    by_rank = [
        flatten(part or {}) for name, part in record.environment.items() if name.startswith("rank ")
    ]
    for path in {path for rank_values in by_rank for path in rank_values}:
        values[path] = [rank_values.get(path) for rank_values in by_rank]
    if record.injected:
        values["injected"] = [record.injected]
    texts = {}
    for path, rank_values in values.items():
        distinct = {
            _get_default(path) if value is None else to_single_line(str(value))
            for value in rank_values
        }
        texts[path] = ", ".join(sorted(distinct))
    return texts


def _get_default(path: str) -> str:
    """Return the text for a value of the environment that a run does not state.

    ``path`` is the dotted name of the value. The text is ``not set`` for an environment variable,
    whose name begins with ``variables.``. It is ``UNKNOWN`` for any other value.
    """
    return "not set" if path.startswith("variables.") else UNKNOWN


def find_environment_changes(
    base: Mapping[str, str], new: Mapping[str, str], intended: Sequence[str] = ()
) -> tuple[EnvironmentChange, ...]:
    """Return the values that differ between two environments, blocking ones first.

    A blocking difference forbids a comparison of times. A difference does not block if it matches a
    glob of ``intended``, if a run does not state the value, or if its path is in
    ``NON_BLOCKING_PATHS``.

    Args:
        base: the values of BASE as text, keyed by path, a dotted name such as ``versions.torch``.
        new: the values of NEW as text, keyed by path.
        intended: globs for the paths of values whose differences are intentional.
    """
    changes = []
    for path in sorted({*base, *new}):
        base_text, new_text = (values.get(path, _get_default(path)) for values in (base, new))
        if base_text != new_text:
            is_intended = any(fnmatchcase(path, pattern) for pattern in intended)
            is_harmless = UNKNOWN in (base_text, new_text) or path in NON_BLOCKING_PATHS
            changes.append(
                EnvironmentChange(
                    path=path,
                    base=base_text,
                    new=new_text,
                    is_blocking=not (is_intended or is_harmless),
                )
            )
    return tuple(sorted(changes, key=lambda change: not change.is_blocking))


class SeriesIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a series: a case on given ranks, nodes, backend and device in an environment.

    Only times with the same identity are comparable.
    """

    case: Case
    """The benchmark and its parameters."""
    world: WorldInfo
    """The ranks, nodes, backend and device."""
    environment: dict[str, str]
    """The values of the environment that may affect the time, as text.

    The key is the dotted name of a value, such as ``versions.torch``.
    """

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
    """The worst status of the case over the repetitions."""
    seconds: float | None
    """The duration of one iteration in seconds, the geometric mean over repetitions.

    None if the case failed or was not measured.
    """
    reason: str = ""
    """The reasons for a status other than ok, empty for ok."""
    explanatory_values: Mapping[str, str]
    """Values of the environment that may explain a change of the time but do not start a new series.

    The key is the dotted name of a value, such as ``host.kernel``.
    """
    counts: ExactCounts
    """The exact counts of the case (calls, bytes, memory, schedule), keyed by name."""


def collect_points(run: Run) -> tuple[SeriesPoint, ...]:
    """Return the result of each case of a run in the form in which the history stores it.

    Cases that were skipped in every repetition are left out.
    """
    return tuple(
        _build_point(run, result)
        for result in merge_records(run)
        if result.status != "skipped" or result.repetitions
    )


def _build_point(run: Run, result: CaseResult) -> SeriesPoint:
    """Return the result of a case of ``run`` in the form of the history, with its environment.

    The environment is divided into values that are part of the identity of the case over runs, and
    values that may explain a change of its time.
    """
    identifying = {}
    explanatory = {}
    for path, text in collect_environment(run, result.measured or result.records).items():
        if path not in HARMLESS_PATHS:
            if path in EXPLANATORY_PATHS or path.startswith("gpu."):
                explanatory[path] = text
            else:
                identifying[path] = text
    return SeriesPoint(
        series=SeriesIdentity(case=result.case, world=result.world, environment=identifying),
        status=result.status,
        seconds=result.seconds if result.status in ("ok", "skipped") else None,
        reason="; ".join(result.reasons),
        explanatory_values=explanatory,
        counts=collect_counts(result),
    )
