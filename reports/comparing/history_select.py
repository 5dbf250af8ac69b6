"""Words that mean runs of a history: ``main``, ``main~1``, ``main:10``, ``last:10``, or a run's id."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.environment import difference
from bench.errors import UserError
from bench.records import Record
from bench.runs import Run
from reports.comparing.history import Line, open_history

_SELECTOR = re.compile(r"(?P<name>[^~:\s]+)(?:~(?P<back>\d{1,9})|:(?P<count>\d{1,9}))?")
_ALLOWED = "a branch, BRANCH~1 for the run before its newest, BRANCH:10 or last:10 for the newest ten as one, or an id"


def means_run(word: str) -> bool:
    """Say whether a word can only mean a run of a history."""
    found = _SELECTOR.fullmatch(word)
    return found is not None and (found["back"] or found["count"]) is not None and "/" not in word


def select_run(path: Path, word: str, *, without: str = "") -> Run:
    """Return the run that a word means in the history of a file; several become one of all their launches.

    Where a word means several, the run of the id ``without`` is none of them.
    """
    with open_history(path) as history:
        lines = select_lines(history.runs(), word, without=without)
        return pool([history.run(line.id) for line in lines], word)


def select_lines(lines: Sequence[Line], word: str, *, without: str = "") -> tuple[Line, ...]:
    """Return what a word means among runs in the order of time; ``UserError`` if it means none."""
    named = [line for line in lines if line.id == word]
    if named:
        return tuple(named)
    found = _SELECTOR.fullmatch(word)
    if found is None:
        raise UserError(f"{word!r} names no run of the history: write {_ALLOWED}")
    own = [line for line in lines if found["name"] in (line.branch, "last")]
    if not own:
        known = ", ".join(sorted({line.branch for line in lines})) or "no run at all"
        raise UserError(f"{word!r} names no run of the history, which has {known}: write {_ALLOWED}")
    if found["count"] is not None:
        return _newest([line for line in own if line.id != without], int(found["count"]), word)
    back = int(found["back"] or 0)
    if back >= len(own):
        raise UserError(f"{word!r} goes back {back} runs, and the history has {len(own)} of {found['name']!r}")
    return (own[-1 - back],)


def pool(runs: Sequence[Run], name: str) -> Run:
    """Return runs as one, their launches numbered on and the newest's environment in common."""
    if len(runs) == 1:
        return runs[0]
    newest = runs[-1].info
    records: list[Record] = []
    launches = 0
    for run in runs:
        changed = difference(newest.environment or {}, run.info.environment or {})
        records += [_moved(record, launches, changed) for record in run.records]
        launches += max([run.info.plan.launches, *(record.launch + 1 for record in run.records)])
    cases = {case.id: case for run in runs for case in run.info.plan.cases}
    skipped = tuple(one for one in newest.plan.skipped if one.case.id not in cases)
    plan = msgspec.structs.replace(newest.plan, cases=tuple(cases.values()), skipped=skipped, launches=launches)
    info = msgspec.structs.replace(newest, id=name, plan=plan)
    return Run(path=Path(name), info=info, records=tuple(records))


def _newest(lines: Sequence[Line], count: int, word: str) -> tuple[Line, ...]:
    if count < 1 or not lines:
        raise UserError(f"{word!r} means no run beside the one it is compared with: at least 1 is needed")
    return tuple(lines[-count:])


def _moved(record: Record, launches: int, changed: dict[str, list[Any]]) -> Record:
    own = record.environment.get("changed", {})
    merged = {**changed, **own}
    environment = {**record.environment, **({"changed": merged} if merged else {})}
    return msgspec.structs.replace(record, launch=launches + record.launch, environment=environment)
