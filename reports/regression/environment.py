"""What differs between the surroundings of two runs, and whether it keeps their times from being compared. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from bench.machine.environment import VOLATILE, leaves
from bench.plan.plan import Plan
from bench.results.records import Record
from bench.results.runs import Run
from reports import cells

HARMLESS = (
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
NOT_SET = "not set"
_Values = tuple[str, ...]
Surroundings = Mapping[str, tuple[_Values, ...]]
"""By path the values of a record's ranks, as text; several such where records differ: the run changed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that differs between base and new, as text; ``decisive`` is whether it forbids a comparison.

    ``within`` names the run that changed within itself, or is empty; ``meant`` is whether the user declared it.
    """

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
    return {path: tuple(dict.fromkeys(one.get(path, (_absent(path),)) for one in seen)) for path in paths}


def changes(base: Surroundings, new: Surroundings, meant: Sequence[str] = ()) -> tuple[Change, ...]:
    """Return what differs, decisive first; a path that fits a glob of ``meant`` is shown and decides nothing.

    A variable that one side has not set is a difference like any other; what one side does not know otherwise
    decides nothing.
    """
    found = []
    for path in sorted({*base, *new}):
        ours, theirs = (side.get(path, ((_absent(path),),)) for side in (base, new))
        if ours == theirs and len(ours) == 1:
            continue
        is_meant = any(fnmatchcase(path, pattern) for pattern in meant)
        unknown = (cells.UNKNOWN,) in (*ours, *theirs)
        change = Change(
            path=path,
            base=" then ".join(map(", ".join, ours)),
            new=" then ".join(map(", ".join, theirs)),
            decisive=not (is_meant or unknown or path in HARMLESS),
            meant=is_meant,
            within=" and ".join(name for name, side in (("BASE", ours), ("NEW", theirs)) if len(side) > 1),
        )
        found.append(change)
    return tuple(sorted(found, key=lambda one: not one.decisive))


def plan_changes(base: Plan, new: Plan) -> tuple[Change, ...]:
    """Return how the runs were asked for differently, apart from cases and world: none decides."""
    ours, theirs = map(_plan_leaves, (base, new))
    return tuple(
        Change(path=f"plan.{name}", base=value, new=theirs[name], decisive=False)
        for name, value in ours.items()
        if value != theirs[name]
    )


def _of_record(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, _Values]:
    """Return the values by path: what ranks do not share stands in the record under ``rank N``."""
    values: dict[str, list[Any]] = {path: [value] for path, value in leaves(common)}
    values |= {path: [pair[1]] for path, pair in own.get("changed", {}).items()}
    by_rank = [dict(leaves(part)) for name, part in own.items() if name.startswith("rank ")]
    values |= {path: [part.get(path) for part in by_rank] for path in {path for part in by_rank for path in part}}
    return {
        path: tuple(sorted({_absent(path) if value is None else cells.visible(str(value)) for value in found}))
        for path, found in values.items()
        if path.partition(".")[0] != VOLATILE
    }


def _absent(path: str) -> str:
    return NOT_SET if path.startswith("variables.") else cells.UNKNOWN


def _plan_leaves(plan: Plan) -> dict[str, str]:
    apart = ("cases", "skipped", "nproc", "backend", "device", "notes", "path", "measure", "injection")
    asked = {name: value for name, value in msgspec.structs.asdict(plan).items() if name not in apart}
    asked |= {f"measure.{name}": value for name, value in msgspec.structs.asdict(plan.measure).items()}
    asked["injection"] = plan.injection.text if plan.injection else "none"
    return {name: cells.UNKNOWN if value is None else str(value) for name, value in asked.items()}
