"""What varies in a sweep file: every axis as its rows, each value read as the plan of a point will read it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from bench.plan.cases import Definition, select
from bench.plan.params import Value
from bench.text import UserError, did_you_mean, listed
from slurm.sweep.folder import Placement
from slurm.sweep.sweepfile import SweepFile, at

SHAPE = ("nodes", "ntasks_per_node", "placement", "environment")
"""What a matrix may vary beside the parameters of the cases."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of what varies: as it was written, and as conditions compare it."""

    text: str
    value: Value


Combination = dict[str, Choice]


def read_axes(file: SweepFile, catalogue: Sequence[Definition]) -> list[list[Combination]]:
    """Return the rows of every axis, whose product is the sweep; ``UserError`` names the place and what is allowed.

    The last axis varies fastest: environments follow one another, so that what drifts slowly meets all of them alike.
    """
    axes = []
    for place, axis in _axes(file):
        with at(place):
            rows = [{name: _choice(name, value, file, catalogue) for name, value in row.items()} for row in axis]
        counts = Counter(tuple((name, choice.value) for name, choice in row.items()) for row in rows)
        for given, count in counts.items():
            if count > 1:
                words = ", ".join(f"{name} = {value!r}" for name, value in given)
                raise UserError(f"{words} is given {count} times; give it once, and repeat = {count} if that is meant")
        axes.append(rows)
    return axes


def _axes(file: SweepFile) -> Iterator[tuple[str, list[dict[str, Value]]]]:
    """Yield what varies, each as its place in the file and its rows; those of a zip set several names together."""
    given = Counter([*file.matrix, *(name for table in file.zip for name in table)])
    for name, count in given.items():
        if count > 1:
            raise UserError(f"{name!r} varies in {count} places of matrix and zip; it can vary in one")
        if name in ("nodes", "ntasks_per_node", "placement") and getattr(file, name) is not None:
            raise UserError(f"{name!r} varies in matrix or zip, and $.{name} is given too; leave out one of them")
    if "nodes" not in given and file.nodes is None:
        raise UserError("$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]")

    def own(name: str, values: Any) -> Iterator[tuple[str, list[dict[str, Value]]]]:
        if name not in given:
            yield f"$.{name}", [{name: value} for value in (values if isinstance(values, list) else [values])]

    yield from own("nodes", file.nodes)
    yield from own("ntasks_per_node", file.ntasks_per_node or 1)
    for name, values in file.matrix.items():
        if not values:
            raise UserError(f"$.matrix.{name}: an empty list leaves no point; give it a value")
        yield f"$.matrix.{name}", [{name: value} for value in values]
    for index, table in enumerate(file.zip):
        with at(f"$.zip[{index}]"):
            rows = _zipped(table)
        yield f"$.zip[{index}]", rows
    yield from own("placement", file.placement or "block")
    yield from own("environment", list(file.environment) or [""])


def _zipped(table: Mapping[str, list[Value]]) -> list[dict[str, Value]]:
    lengths = {name: len(values) for name, values in table.items()}
    if not lengths or not min(lengths.values()):
        raise UserError("an empty table or list leaves no point; give it values")
    (first, count), *others = lengths.items()
    for name, number in others:
        if number != count:
            raise UserError(f"{first} has {count} values and {name} has {number}: what varies together has as many")
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _choice(name: str, value: Value, file: SweepFile, catalogue: Sequence[Definition]) -> Choice:
    if name in ("nodes", "ntasks_per_node"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} = {value!r} is not allowed: it is a whole number of at least 1")
    elif name in SHAPE:
        allowed = get_args(Placement) if name == "placement" else tuple(file.environment) or ("",)
        if value not in allowed:
            choices = listed(allowed) if any(allowed) else "one of the tables [environment.NAME], and there is none"
            raise UserError(f"{name} = {value!r} is not allowed: it is {choices}{did_you_mean(str(value), allowed)}")
    else:
        return _parameter(name, str(value), file, catalogue)
    return Choice(text=str(value), value=value)


def _parameter(name: str, text: str, file: SweepFile, catalogue: Sequence[Definition]) -> Choice:
    """Return a value of a parameter, read as the plan file of a point will be."""
    if not file.case:
        raise UserError(f"{name!r} is a parameter of no case: add a [[case]] that has it, or vary {listed(SHAPE)}")
    definitions = select(catalogue, [case.name for case in file.case])
    params = [param for definition in definitions for param in definition.params]
    found = next((param for param in params if param.name == name), None)
    if found is None:
        known = (*SHAPE, *sorted({param.name for param in params}))
        raise UserError(f"{name!r} is no parameter of the cases; there are {listed(known)}{did_you_mean(name, known)}")
    for index, case in enumerate(file.case):
        if name in case.set:
            raise UserError(f"{name!r} is set in $.case[{index}] too; leave out one of them")
    values = found.parse_many(text)
    if len(values) != 1:
        raise UserError(f"{name} = {text!r} is {len(values)} values: a point has one; write each as its own")
    return Choice(text=text, value=text if found.kind in ("matrix", "rows") else values[0])
