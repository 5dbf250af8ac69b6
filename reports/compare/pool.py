"""Pools several runs into one, which has the repetitions of all of them."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from parbench.bench.machine.environment import find_differing_values
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run, RunInfo
from parbench.bench.text import pluralize


def pool_runs(runs: Sequence[Run], name: str) -> Run:
    """Return one run with the repetitions of several runs, in the environment of the newest.

    Runs on other ranks, nodes or devices than the newest are left out, and the exclusions of the
    pooled run name them. A single run is returned as it is.

    Args:
        runs: the runs, oldest first.
        name: the id and path of the pooled run, for reports.
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
    """Return the ranks, nodes, backend and device as text: ``8 ranks on 2 nodes, nccl, cuda``."""
    ranks = pluralize(world.size, "rank")
    return f"{ranks} on {pluralize(world.nodes, 'node')}, {world.backend}, {world.device}"


def are_equal_worlds(world: WorldInfo, other: WorldInfo) -> bool:
    """Return True if two worlds have the same number of ranks and nodes, backend and device.

    0 nodes stand for an unknown number, which equals every number.
    """
    is_unknown = 0 in (world.nodes, other.nodes)
    return structs.replace(world, nodes=other.nodes) == other and (
        is_unknown or world.nodes == other.nodes
    )


def _find_world(run: Run) -> WorldInfo:
    """Return the ranks, nodes, backend and device of a run.

    The number of nodes is 0 (unknown) if nothing was measured.
    """
    plan = run.info.plan
    nodes = [record.world.nodes for record in run.records if record.status == "ok"]
    return WorldInfo(
        size=plan.nproc, nodes=max(nodes, default=0), backend=plan.backend, device=plan.device
    )


def _move_record(record: Record, offset: int, own: RunInfo, newest: RunInfo) -> Record:
    """Return a record with the repetition number and environment that it has in the pooled run.

    Args:
        record: the record in its own run.
        offset: the number of repetitions of earlier runs, which is added to the record's
            repetition.
        own: the run of the record. Values in which its environment differs from the newest run are
            stored with the record.
        newest: the newest run, whose environment the pooled run has.
    """
    changed = find_differing_values(newest.environment or {}, own.environment or {})
    changed |= record.environment.get("changed") or {}
    environment = dict(record.environment)
    if changed:
        environment["changed"] = changed
    return structs.replace(record, repetition=offset + record.repetition, environment=environment)
