"""Words that mean runs of a history: ``main``, ``main~1``, ``main:10``, ``last:10``, or a run's id."""

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from bench.machine.environment import difference
from bench.results.records import Record, WorldInfo
from bench.results.runs import Run
from bench.text import UserError, counted
from reports.regression.compare import world_words
from reports.regression.history import Line, open_history

_SELECTOR = re.compile(r"(?P<name>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>\d{1,9}))?")
_LEFT_OUT = "Left out of "


def means_run(word: str) -> bool:
    """Say whether a word can only mean a run of a history."""
    found = _SELECTOR.fullmatch(word)
    return found is not None and (found["back"] or found["count"]) is not None and "/" not in word


def select_run(path: Path, word: str, *, without: str = "") -> Run:
    """Return the run that a word means in a file's history; several, but that of the id ``without``, become one."""
    with open_history(path) as history:
        lines = select_lines(history.runs(), word, without=without)
        return pool([history.run(line) for line in lines], word)


def select_lines(lines: Sequence[Line], word: str, *, without: str = "") -> tuple[Line, ...]:
    """Return what a word means among runs in the order of time; ``UserError`` if it means none."""
    if named := tuple(line for line in lines if line.id == word):
        return named
    allowed = (
        "a branch, BRANCH~1 for the run before its newest, BRANCH:10 or last:10 for the newest ten as one, or an id"
    )
    found = _SELECTOR.fullmatch(word)
    if found is None:
        raise UserError(f"{word!r} names no run of the history: write {allowed}")
    own = [line for line in lines if found["name"] in (line.branch, "last")]
    if not own:
        known = ", ".join(sorted({line.branch for line in lines})) or "no run at all"
        raise UserError(f"{word!r} names no run of the history, which has {known}: write {allowed}")
    if found["count"] is not None:
        count, others = int(found["count"]), [line for line in own if line.id != without]
        if not (count and others):
            raise UserError(f"{word!r} means no run beside the one it is compared with: at least 1 is needed")
        return tuple(others[-count:])
    back = int(found["back"] or 0)
    if back >= len(own):
        raise UserError(f"{word!r} goes back {back} runs, and the history has {len(own)} of {found['name']!r}")
    return (own[-1 - back],)


def pool(runs: Sequence[Run], name: str) -> Run:
    """Return runs as one, their launches numbered on and the newest's environment in common.

    Of each case count the records on the world of its newest; a note of the plan says what is left out.
    """
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    # of each case the newest record's world, preferably of one that was not skipped; over how many nodes it ran only a
    # record that was measured knows
    every = [record for run in runs for record in run.records]
    by_worth = (*every, *(record for record in every if record.status != "skipped"))
    worlds = {record.case.id: record.world for record in by_worth}
    sure = [record for record in every if record.status == "ok"]
    worlds |= {one.case.id: one.world for one in sure if _ranks(one.world) == _ranks(worlds[one.case.id])}
    records: list[Record] = []
    left_out: list[Record] = []
    launches = 0
    for run in runs:
        own: list[Record] = []
        for record in run.records:
            (own if _is_on(worlds[record.case.id], record) else left_out).append(record)
        if run.records and not own:
            continue
        common = difference(newest.environment or {}, run.info.environment or {})
        for record in own:
            changed = {**common, **record.environment.get("changed", {})}
            environment = {**record.environment, **({"changed": changed} if changed else {})}
            records.append(replace(record, launch=launches + record.launch, environment=environment))
        launches += max([run.info.plan.launches, *(record.launch + 1 for record in own)])
    cases = {case.id: case for run in runs for case in run.info.plan.cases}
    notes = newest.plan.notes
    if left_out:
        told = "; ".join(dict.fromkeys(world_words(record.world) for record in left_out))
        count = counted(len(left_out), "record")
        notes += (f"{_LEFT_OUT}{name}: {count} on another world than the newest of their case, {told}.",)
    skipped = tuple(one for one in newest.plan.skipped if one.case.id not in cases)
    plan = replace(newest.plan, cases=tuple(cases.values()), skipped=skipped, launches=launches, notes=notes)
    return Run(path=Path(name), info=replace(newest, id=name, plan=plan), records=tuple(records))


def notes_of_pools(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return what ``pool`` left out of these runs, a sentence for each of which it left out anything."""
    return tuple(note for run in runs for note in run.info.plan.notes if note.startswith(_LEFT_OUT))


def _is_on(world: WorldInfo, record: Record) -> bool:
    return record.world == world or (record.status != "ok" and _ranks(record.world) == _ranks(world))


def _ranks(world: WorldInfo) -> tuple[int, str, str]:
    return world.size, world.backend, world.device
