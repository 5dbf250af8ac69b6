"""Several runs pooled into one, whose repetitions are those of all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from parbench.bench.machine.environment import find_differing_values
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run, RunInfo
from parbench.bench.text import pluralize


def pool_runs(runs: Sequence[Run], name: str) -> Run:
    """Return a run with the repetitions of several, in the environment of the newest.

    The runs are sorted from the oldest. Of each case only the records on the world of its newest
    record are kept. The exclusions of the pooled run list the others.
    """
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    worlds = _find_newest_worlds(runs)
    pooled: list[Record] = []
    excluded: list[Record] = []
    num_repetitions = 0
    for run in runs:
        matching = [record for record in run.records if _is_on_world(record, worlds)]
        excluded += [record for record in run.records if not _is_on_world(record, worlds)]
        if run.records and not matching:
            continue
        pooled += [_move_record(record, num_repetitions, run.info, newest) for record in matching]
        num_repetitions += max(
            [run.info.plan.repetitions, *(record.repetition + 1 for record in matching)]
        )
    cases = {case.id: case for run in runs for case in run.info.plan.cases}
    plan = structs.replace(
        newest.plan,
        cases=tuple(cases.values()),
        skipped=tuple(skip for skip in newest.plan.skipped if skip.case.id not in cases),
        repetitions=num_repetitions,
    )
    return Run(
        path=Path(name),
        info=structs.replace(newest, id=name, plan=plan),
        records=tuple(pooled),
        exclusions=_describe_excluded(excluded, name),
    )


def describe_world(world: WorldInfo) -> str:
    ranks = pluralize(world.size, "rank")
    return f"{ranks} on {pluralize(world.nodes, 'node')}, {world.backend}, {world.device}"


def get_rank_layout(world: WorldInfo) -> tuple[int, str, str]:
    """Return the size, backend and device of a world. A skipped case knows them as well."""
    return world.size, world.backend, world.device


def _find_newest_worlds(runs: Sequence[Run]) -> Mapping[str, WorldInfo]:
    """Return the world of each case's newest record, preferably of one that was not skipped.

    Only a record that was measured knows over how many nodes it ran.
    """
    records = [record for run in runs for record in run.records]
    skipped_first = sorted(records, key=lambda record: record.status != "skipped")
    worlds = {record.case.id: record.world for record in skipped_first}
    for record in records:
        layout = get_rank_layout(worlds[record.case.id])
        if record.status == "ok" and get_rank_layout(record.world) == layout:
            worlds[record.case.id] = record.world
    return worlds


def _is_on_world(record: Record, worlds: Mapping[str, WorldInfo]) -> bool:
    world = worlds[record.case.id]
    if record.status == "ok":
        return record.world == world
    return get_rank_layout(record.world) == get_rank_layout(world)


def _move_record(record: Record, offset: int, own: RunInfo, newest: RunInfo) -> Record:
    """Return a record with its repetition and its environment relative to the pooled run."""
    changed = find_differing_values(newest.environment or {}, own.environment or {})
    changed |= record.environment.get("changed") or {}
    environment = dict(record.environment)
    if changed:
        environment["changed"] = changed
    return structs.replace(record, repetition=offset + record.repetition, environment=environment)


def _describe_excluded(excluded: Sequence[Record], name: str) -> tuple[str, ...]:
    if not excluded:
        return ()
    worlds = dict.fromkeys(describe_world(record.world) for record in excluded)
    count = pluralize(len(excluded), "record")
    return (
        f"{name} excludes {count}: the newest record of the case is from another world. "
        f"Excluded worlds: {', '.join(worlds)}.",
    )
