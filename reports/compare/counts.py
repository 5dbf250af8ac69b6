"""What is counted of a step, held exactly: calls and bytes by axis and operation, memory, the schedule. Pure.

Counts need no quiet machine and no repetitions: what is alike in all repetitions of one run and other than in another's
is a
change, with its cause. What repetitions of BASE do not agree on depends on data, and is not held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isclose
from typing import Literal

from parbench.bench.results.details import ExpertLoadDetails, PipelineDetails, read_details
from parbench.bench.results.formatting import (
    format_bytes,
    format_number,
    format_percent,
    format_quantity,
)
from parbench.bench.results.metrics import find_metric
from parbench.bench.text import pluralize
from parbench.reports.analysis.summary import Row

ExactCounts = Mapping[str, Sequence[float | str]]
"""By name the values that repetitions counted: one, where they agree."""
SCHEDULE = "schedule"
_CALLS, _SENT, _MEMORY = "calls.", "sent.", "memory_counted."
_ROUTED = (
    f"{_MEMORY}activations"  # of a mixture they are of the tokens that its routes bring to a rank
)


@dataclass(frozen=True, kw_only=True)
class CountChange:
    """A count that is other than it was, and how, in a sentence; ``path`` is its name for ``--across``.

    AMBIGUOUS is one that may be a change of what counts: one side alone knows it.
    """

    path: str
    base: Sequence[float | str]
    new: Sequence[float | str]
    told: str
    word: Literal["CHANGED", "AMBIGUOUS"] = "CHANGED"
    meant: bool = False

    @property
    def fails(self) -> bool:
        return self.word == "CHANGED" and not self.meant


@dataclass(frozen=True, kw_only=True)
class CountComparison:
    """How many counts two sides share, those that changed, and those on which BASE's repetitions do not agree."""

    count: int
    changes: tuple[CountChange, ...]
    loose: tuple[str, ...] = ()


def collect_counts(row: Row) -> dict[str, list[float | str]]:
    """Return what the repetitions of a row counted, nothing of one that has a wrong result."""
    found: dict[str, dict[float | str, None]] = {}
    for record in row.measured if row.metrics else ():
        routed = isinstance(read_details(record, ExpertLoadDetails), ExpertLoadDetails)
        for name, metric in record.metrics.items():
            kept = (known := find_metric(name)) and (known.is_exact or name.startswith(_CALLS))
            if kept and metric.value is not None and not (routed and name == _ROUTED):
                found.setdefault(name, {})[metric.value] = None
        if isinstance(told := read_details(record, PipelineDetails), PipelineDetails):
            chunks = f", {pluralize(told.chunks, 'chunk')} a rank" if told.chunks > 1 else ""
            text = f"{told.schedule} of {pluralize(told.microbatches, 'microbatch')}{chunks}"
            found.setdefault(SCHEDULE, {})[text] = None
    return {name: [*values] for name, values in found.items()}


def compare_counts(
    base: ExactCounts, new: ExactCounts, meant: Sequence[str] = (), *, other_torch: bool = False
) -> CountComparison:
    """Return what changed; a count that fits a ``meant`` glob may, and one of ``other_torch`` may have another name."""
    operations = [name.removeprefix(_CALLS) for name in {**base, **new} if _is_call(name)]
    names = [name for name in {**base, **new} if not name.startswith((_CALLS, _SENT))]
    both = [side for side in (base, new) if any(name.startswith(_CALLS) for name in side)]
    changes = (
        [_of_calls(name, base, new, other_torch) for name in operations] if len(both) == 2 else []
    )
    changes += [_of(name, base.get(name), new.get(name)) for name in names] if base and new else []
    found = [
        replace(one, meant=any(fnmatchcase(one.path, glob) for glob in meant))
        for one in changes
        if one
    ]
    shared = sum(name in new for name in base if _is_call(name) or not name.startswith(_CALLS))
    return CountComparison(
        count=shared,
        changes=tuple(found),
        loose=tuple(name for name in base if len(base[name]) > 1),
    )


def _is_call(name: str) -> bool:
    return name.startswith(_CALLS) and "." in name.removeprefix(_CALLS)


def _of_calls(
    name: str, base: ExactCounts, new: ExactCounts, other_torch: bool
) -> CountChange | None:
    """Return how an operation's calls and bytes changed; where a side counts calls and has none of it, there are 0."""
    calls = [side.get(f"{_CALLS}{name}", [0.0]) for side in (base, new)]
    absent = [f"{_CALLS}{name}" not in side for side in (base, new)]
    sent = [
        side.get(f"{_SENT}{name}", [0.0] if gone else [])
        for side, gone in zip((base, new), absent, strict=True)
    ]
    axis, _, op = name.rpartition(".")
    change = CountChange(
        path=f"counts.{name}", base=calls[0], new=calls[1], told=f"{op} on {axis}: "
    )
    if _same(*calls) and (_same(*sent) or not all(sent)):
        lacks = [side for side, known in zip(("BASE", "NEW"), sent, strict=True) if not known]
        if len(lacks) != 1:
            return None
        told = f"{change.told}its bytes are told by data in {lacks[0]} alone"
        return replace(change, base=sent[0], new=sent[1], told=told, word="AMBIGUOUS")
    known = sent[0][0] if len(sent[0]) == 1 else None, sent[1][0] if len(sent[1]) == 1 else None
    if _same(*calls):
        before, after = (
            " or ".join(format_bytes(_number(value)) for value in side) for side in sent
        )
        told = f"{change.told}{before} -> {after} a step in {_plain(calls[1])} calls"
        if None not in known and _number(known[0]):
            told += f", each {format_number(_number(known[1]) / _number(known[0]))} times as large"
        return replace(change, base=sent[0], new=sent[1], told=told)
    told = f"{change.told}{_plain(calls[0])} -> {_plain(calls[1])} calls a step"
    if None not in known:
        more = _number(known[1]) - _number(known[0])
        told += (
            ", as many bytes"
            if _same(*sent)
            else f", {'+' if more > 0 else ''}{format_bytes(more)}"
        )
    if other_torch and any(absent):
        told += (
            f", only in {'NEW' if absent[0] else 'BASE'}: another torch may name another operation"
        )
        return replace(change, told=told, word="AMBIGUOUS")
    return replace(change, told=told + _unlike(calls[1]))


def _of(
    name: str, base: Sequence[float | str] | None, new: Sequence[float | str] | None
) -> CountChange | None:
    """Return how a count that is of no operation changed."""
    component = name.removeprefix(_MEMORY)
    title = (
        f"{component} in memory"
        if component != name
        else known.title
        if (known := find_metric(name))
        else name
    )
    change = CountChange(path=f"counts.{component}", base=base or (), new=new or (), told="")
    if base is None or new is None:
        told = f"{title}: counted in {'NEW' if base is None else 'BASE'} alone"
        return replace(change, told=told, word="AMBIGUOUS")
    if _same(base, new):
        return None
    unit = known.unit if (known := find_metric(name)) else ""
    before, after = (
        " or ".join(_text(name, value, unit) for value in side) for side in (base, new)
    )
    return replace(change, told=f"{title}: {before} -> {after}{_unlike(new)}")


def _text(name: str, value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    return format_percent(value) if name.startswith("bubble") else format_quantity(value, unit)


def _plain(values: Sequence[float | str]) -> str:
    return " or ".join(f"{value:g}" for value in sorted(map(_number, values)))


def _unlike(new: Sequence[float | str]) -> str:
    return ": repetitions do not agree" if len(new) > 1 else ""


def _number(value: float | str | None) -> float:
    assert isinstance(value, int | float), "calls and bytes are numbers"
    return value


def _same(base: Sequence[float | str], new: Sequence[float | str]) -> bool:
    """Say whether a count is as it was; one that BASE's repetitions do not agree on tells nothing."""
    return len(base) > 1 or (len(new) == 1 and len(base) == 1 and _alike(base[0], new[0]))


def _alike(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return isclose(one, other, rel_tol=1e-9)
