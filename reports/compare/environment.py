"""What surrounds a run: what of it makes a series, and what differs between two runs. Pure.

A series' fingerprint is the case, its world, and what around it makes times comparable: hosts and how they are
connected, hardware, versions, variables. What may change them without making another series is kept beside the point.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from parbench.bench.machine.environment import VOLATILE, flatten
from parbench.bench.plan.cases import Case
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import Plan
from parbench.bench.results.formatting import UNKNOWN, to_single_line
from parbench.bench.results.records import Record, Status, WorldInfo
from parbench.bench.results.runs import Run
from parbench.reports.analysis.summary import Row, summarize
from parbench.reports.compare.counts import ExactCounts, collect_counts

HARMLESS = (
    "gpu.uuid",
    "host.address",
    "host.boot_id",
    "host.memory_bytes",
    "slurm.job",
    "slurm.nodelist",
    "variables.SLURM_JOB_ID",
    "variables.SLURM_JOB_NODELIST",  # the ranks' own host names tell
    "variables.SLURM_RESTART_COUNT",
)
"""What may change from run to run on one machine without a word on its speed."""
_BESIDE = {f"host.{name}" for name in ("clock_source", "governor", "kernel", "os", "virtualised")}
_BESIDE |= {
    "versions.numpy",
    "versions.python",
}  # what may explain a step and so must not begin another series
NOT_SET = "not set"
_Values = tuple[str, ...]
Surroundings = Mapping[str, tuple[_Values, ...]]
"""By path the values of a record's ranks, as text; several such where records differ: the run changed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that differs, as text; ``within`` names the runs that changed within themselves."""

    path: str
    base: str
    new: str
    decisive: bool
    meant: bool = False
    within: str = ""

    @property
    def text(self) -> str:
        return f"{self.path}: {self.base} -> {self.new}"


def surroundings(run: Run, records: Sequence[Record]) -> Surroundings:
    """Return what the ranks of these records saw: the run's environment, with each record's own in its place."""
    seen = [_of_record(run.info.environment or {}, record.environment) for record in records]
    paths = sorted({path for one in seen for path in one})
    return {
        path: tuple(dict.fromkeys(one.get(path, (_absent(path),)) for one in seen))
        for path in paths
    }


def changes(base: Surroundings, new: Surroundings, meant: Sequence[str] = ()) -> tuple[Change, ...]:
    """Return what differs, decisive first; what fits a glob of ``meant``, or one side does not know, is not."""
    found = []
    for path in sorted({*base, *new}):
        ours, theirs = (side.get(path, ((_absent(path),),)) for side in (base, new))
        if ours == theirs and len(ours) == 1:
            continue
        is_meant = any(fnmatchcase(path, pattern) for pattern in meant)
        unknown = (UNKNOWN,) in (*ours, *theirs)
        texts = [" then ".join(map(", ".join, side)) for side in (ours, theirs)]
        decisive = not (is_meant or unknown or path in HARMLESS)
        within = " and ".join(
            name for name, side in (("BASE", ours), ("NEW", theirs)) if len(side) > 1
        )
        found.append(
            Change(
                path=path,
                base=texts[0],
                new=texts[1],
                decisive=decisive,
                meant=is_meant,
                within=within,
            )
        )
    return tuple(sorted(found, key=lambda one: not one.decisive))


def plan_changes(base: Plan, new: Plan) -> tuple[Change, ...]:
    ours, theirs = map(_plan_leaves, (base, new))
    differ = [name for name in ours if ours[name] != theirs[name]]
    return tuple(
        Change(path=f"plan.{name}", base=ours[name], new=theirs[name], decisive=False)
        for name in differ
    )


def _of_record(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, _Values]:
    """Return the values by path: what ranks do not share stands in the record under ``rank N``."""
    values: dict[str, list[Any]] = {path: [value] for path, value in flatten(common).items()}
    values |= {path: [pair[1]] for path, pair in (own.get("changed") or {}).items()}
    by_rank = [flatten(part or {}) for name, part in own.items() if name.startswith("rank ")]
    values |= {
        path: [part.get(path) for part in by_rank]
        for path in {path for part in by_rank for path in part}
    }
    return {
        path: tuple(
            sorted(
                {_absent(path) if value is None else to_single_line(str(value)) for value in found}
            )
        )
        for path, found in values.items()
        if path.partition(".")[0] != VOLATILE
    }


def _absent(path: str) -> str:
    return NOT_SET if path.startswith("variables.") else UNKNOWN


def _plan_leaves(plan: Plan) -> dict[str, str]:
    apart = (
        "cases",
        "skipped",
        "nproc",
        "backend",
        "device",
        "notes",
        "path",
        "measure",
        "injection",
    )
    asked = {
        name: value for name, value in msgspec.structs.asdict(plan).items() if name not in apart
    }
    asked |= {
        f"measure.{name}": value for name, value in msgspec.structs.asdict(plan.measure).items()
    }
    asked["injection"] = plan.injection.text if plan.injection else "none"
    return {name: UNKNOWN if value is None else str(value) for name, value in asked.items()}


class SeriesIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a series is; ``around`` are the surroundings that belong to it, as text by path."""

    case: Case
    world: WorldInfo
    around: dict[str, str]

    @property
    def fingerprint(self) -> str:
        whole = {"case": self.case.id, "world": self.world, "around": self.around}
        return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()[:20]

    @property
    def family(self) -> tuple[object, ...]:
        """What it shares with the series that differ from it in size alone."""
        return (self.case.name, self.case.target, *shared_params(self.case).items(), self.world)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A series in one run; ``seconds`` is None where nothing was measured, ``beside`` what else was around it.

    ``facts`` are what it counted, none in runs of before counts were kept.
    """

    series: SeriesIdentity
    status: Status
    seconds: float | None
    repetitions: int
    reason: str = ""
    beside: Mapping[str, str]
    facts: ExactCounts


def collect_points(run: Run, rows: Iterable[Row] | None = None) -> tuple[Point, ...]:
    """Return a point for each row of a run, those given or all, except what was skipped in every repetition."""
    points = []
    for row in summarize(run).rows if rows is None else rows:
        if row.status == "skipped" and not row.repetitions:
            continue
        seen = surroundings(run, row.measured or row.records)
        around = {
            path: " then ".join(map(", ".join, seen[path])) for path in seen if path not in HARMLESS
        }
        beside = {
            path: around.pop(path)
            for path in [*around]
            if path in _BESIDE or path.startswith("gpu.")
        }
        if injected := sorted({record.injected for record in row.records if record.injected}):
            around["injected"] = ", ".join(injected)
        value = row.value(row.headline)
        point = Point(
            series=SeriesIdentity(case=row.case, world=row.world, around=around),
            status=row.status,
            seconds=value if value and value > 0 and row.status in ("ok", "skipped") else None,
            repetitions=row.repetitions,
            reason="; ".join(row.reasons),
            beside=beside,
            facts=collect_counts(row),
        )
        points.append(point)
    return tuple(points)


def shared_params(case: Case) -> dict[str, Value]:
    return {name: value for name, value in case.params.items() if name != "size_bytes"}
