"""Several runs pooled into one, which has the repetitions of all runs."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from parbench.bench.machine.environment import find_differing_values
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run, RunInfo
from parbench.bench.text import pluralize


def pool_runs(runs: Sequence[Run], name: str) -> Run:
    """Return a run with the repetitions of several, in the environment of the newest.

    The runs are sorted from the oldest. Runs on other ranks, nodes or devices than the newest are
    left out, and the exclusions of the pooled run name them.
    """
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    world = _find_world(runs[-1])
    similar = [run for run in runs if are_equal_worlds(_find_world(run), world)]
    records: list[Record] = []
    num_repetitions = 0
    for run in similar:
        records += [
            _move_record(record, num_repetitions, run.info, newest) for record in run.records
        ]
        num_repetitions += max(
            [run.info.plan.repetitions, *(record.repetition + 1 for record in run.records)]
        )
    cases = {case.id: case for run in similar for case in run.info.plan.cases}
    plan = structs.replace(
        newest.plan,
        cases=tuple(cases.values()),
        skipped=tuple(skip for skip in newest.plan.skipped if skip.case.id not in cases),
        repetitions=num_repetitions,
    )
    excluded = [run.info.id for run in runs if run not in similar]
    reason = f"{name} excludes runs on other ranks, nodes or devices: {', '.join(excluded)}."
    return Run(
        path=Path(name),
        info=structs.replace(newest, id=name, plan=plan),
        records=tuple(records),
        exclusions=(reason,) if excluded else (),
    )


def describe_world(world: WorldInfo) -> str:
    """Return the ranks, nodes, backend and device of a world as text."""
    ranks = pluralize(world.size, "rank")
    return f"{ranks} on {pluralize(world.nodes, 'node')}, {world.backend}, {world.device}"


def are_equal_worlds(world: WorldInfo, other: WorldInfo) -> bool:
    """Return True for the same ranks, and the same nodes as far as known. 0 nodes are unknown."""
    is_unknown = 0 in (world.nodes, other.nodes)
    return structs.replace(world, nodes=other.nodes) == other and (
        is_unknown or world.nodes == other.nodes
    )


def _find_world(run: Run) -> WorldInfo:
    """Return the world of a run. The nodes are unknown if nothing was measured."""
    plan = run.info.plan
    nodes = [record.world.nodes for record in run.records if record.status == "ok"]
    return WorldInfo(
        size=plan.nproc, nodes=max(nodes, default=0), backend=plan.backend, device=plan.device
    )


def _move_record(record: Record, offset: int, own: RunInfo, newest: RunInfo) -> Record:
    """Return a record with its repetition and its environment relative to the pooled run."""
    changed = find_differing_values(newest.environment or {}, own.environment or {})
    changed |= record.environment.get("changed") or {}
    environment = dict(record.environment)
    if changed:
        environment["changed"] = changed
    return structs.replace(record, repetition=offset + record.repetition, environment=environment)
