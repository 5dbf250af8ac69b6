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
    similar = [run for run in runs if _are_on_same_world(run, runs[-1])]
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


def get_rank_layout(world: WorldInfo) -> tuple[int, str, str]:
    """Return the size, backend and device of a world. A skipped case knows them as well."""
    return world.size, world.backend, world.device


def _are_on_same_world(run: Run, newest: Run) -> bool:
    """Return True if two runs have the same ranks, and the same nodes as far as known."""
    layouts = [
        (plan.nproc, plan.backend, plan.device) for plan in (run.info.plan, newest.info.plan)
    ]
    # The number of nodes is unknown for a run that measured nothing.
    nodes = _count_nodes(run)
    newest_nodes = _count_nodes(newest)
    return layouts[0] == layouts[1] and (nodes == newest_nodes or 0 in (nodes, newest_nodes))


def _count_nodes(run: Run) -> int:
    """Return the number of nodes that measured a run, 0 if nothing was measured."""
    return max((record.world.nodes for record in run.records if record.status == "ok"), default=0)


def _move_record(record: Record, offset: int, own: RunInfo, newest: RunInfo) -> Record:
    """Return a record with its repetition and its environment relative to the pooled run."""
    changed = find_differing_values(newest.environment or {}, own.environment or {})
    changed |= record.environment.get("changed") or {}
    environment = dict(record.environment)
    if changed:
        environment["changed"] = changed
    return structs.replace(record, repetition=offset + record.repetition, environment=environment)
