"""Pools several runs into one, which has the repetitions of all of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import structs

from parbench.bench.machine.environment import find_differing_values
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run
from parbench.reports.analysis.labels import describe_ranks


def pool_runs(runs: Sequence[Run], name: str) -> Run:
    """Return one run with the repetitions of several runs, in the environment of the newest.

    Runs on other ranks, nodes or devices than the newest are left out, and ``Run.exclusions`` of
    the pooled run names them. A single run is returned as it is.

    Args:
        runs: the runs, oldest first.
        name: the id and path of the pooled run, for reports.
    """
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    world = find_world(runs[-1].records)
    similar = [run for run in runs if are_equal_worlds(find_world(run.records), world)]
    records: list[Record] = []
    num_repetitions = 0
    for run in similar:
        changed = find_differing_values(newest.environment or {}, run.info.environment or {})
        for record in run.records:
            environment = dict(record.environment)
            environment["changed"] = changed | (environment.get("changed") or {})
            number = num_repetitions + record.repetition
            records.append(structs.replace(record, repetition=number, environment=environment))
        numbers = [record.repetition + 1 for record in run.records]
        num_repetitions += max([run.info.plan.repetitions, *numbers])
    cases = {case.id: case for run in similar for case in run.info.plan.cases}
    plan = structs.replace(
        newest.plan,
        cases=tuple(cases.values()),
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


def find_world(records: Iterable[Record]) -> WorldInfo | None:
    """Return the ranks, nodes, backend and device of the first record with status ok.

    None if nothing was measured.
    """
    return next((record.world for record in records if record.status == "ok"), None)


def are_equal_worlds(world: WorldInfo | None, other: WorldInfo | None) -> bool:
    """Return True if two worlds are equal, or if one of them is unknown (None).

    A world is the number of ranks and nodes, the backend and the device.
    """
    return world is None or other is None or world == other


def describe_world(world: WorldInfo) -> str:
    """Return the ranks, nodes, backend and device as text: ``8 ranks on 2 nodes, nccl, cuda``."""
    return f"{describe_ranks(world.size, world.nodes)}, {world.backend}, {world.device}"
