"""What varies in a sweep file: every axis as its rows, each value read as the plan of a point will read it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.plan.cases import Definition, select
from bench.plan.params import Value
from bench.text import UserError, did_you_mean, listed
from slurm.sweep.sweepfile import SweepFile

SHAPE = ("nodes", "ntasks_per_node", "placement", "environment")
"""What a matrix may vary beside the parameters of the cases."""

_PLACEMENTS = ("block", "cyclic")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of what varies: as it was written, and as conditions compare it."""

    text: str
    value: Value


Combination = Mapping[str, Choice]
Axis = list[dict[str, Value]]


def read_axes(file: SweepFile, catalogue: Sequence[Definition]) -> tuple[tuple[Combination, ...], ...]:
    """Return the rows of every axis, whose product is the sweep; ``UserError`` names the place and what is allowed.

    The last axis varies fastest: environments follow one another, so that what drifts slowly meets all of them alike.
    """
    rows = tuple(tuple(_rows(axis, place, file, catalogue)) for axis, place in _axes(file))
    _check_once(rows)
    return rows


def _axes(file: SweepFile) -> Iterator[tuple[Axis, str]]:
    """Yield what varies, each as its rows with its place in the file; rows of a zip set several names together."""
    given = [*file.matrix, *(name for table in file.zip for name in table)]
    for name, count in Counter(given).items():
        if count > 1:
            raise UserError(f"{name!r} varies in {count} places of matrix and zip; it can vary in one")
    nodes = _own(file, "nodes", given) or ([] if "nodes" in given else None)
    if nodes is None:
        raise UserError("$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]")
    yield [{"nodes": value} for value in nodes] or [{}], "$.nodes"
    tasks = _own(file, "ntasks_per_node", given) or ([] if "ntasks_per_node" in given else [1])
    yield [{"ntasks_per_node": value} for value in tasks] or [{}], "$.ntasks_per_node"
    for name, values in file.matrix.items():
        if not values:
            raise UserError(f"$.matrix.{name}: an empty list leaves no point; give it a value")
        yield [{name: value} for value in values], f"$.matrix.{name}"
    for index, table in enumerate(file.zip):
        yield _zipped(table, f"$.zip[{index}]"), f"$.zip[{index}]"
    placements = _own(file, "placement", given) or ([] if "placement" in given else ["block"])
    yield [{"placement": value} for value in placements] or [{}], "$.placement"
    if "environment" not in given:
        yield [{"environment": name} for name in file.environment or ("",)], "$.environment"


def _own(file: SweepFile, name: str, given: Sequence[str]) -> list[Value]:
    """Return the values that a key of the file has of its own, and refuse two sources."""
    values = getattr(file, name)
    if values is not None and name in given:
        raise UserError(f"{name!r} varies in matrix or zip, and $.{name} is given too; leave out one of them")
    if values is None:
        return []
    return list(values) if isinstance(values, list) else [values]


def _zipped(table: Mapping[str, list[Value]], place: str) -> Axis:
    lengths = {name: len(values) for name, values in table.items()}
    if not lengths or not min(lengths.values()):
        raise UserError(f"{place}: an empty table or list leaves no point; give it values")
    if len(set(lengths.values())) > 1:
        first, *others = lengths
        other = next(name for name in others if lengths[name] != lengths[first])
        raise UserError(
            f"{place}: {first} has {lengths[first]} values and {other} has {lengths[other]}: what varies together has "
            "as many"
        )
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _rows(axis: Axis, place: str, file: SweepFile, catalogue: Sequence[Definition]) -> list[dict[str, Choice]]:
    try:
        return [{name: _choice(name, value, file, catalogue) for name, value in row.items()} for row in axis]
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _choice(name: str, value: Value, file: SweepFile, catalogue: Sequence[Definition]) -> Choice:
    if name in ("nodes", "ntasks_per_node"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} = {value!r} is not allowed: it is a whole number of at least 1")
        return Choice(text=str(value), value=value)
    if name == "placement":
        return _named(name, value, _PLACEMENTS)
    if name == "environment":
        return _named(name, value, tuple(file.environment) or ("",))
    return _parameter(name, value, file, catalogue)


def _named(name: str, value: Value, allowed: Sequence[str]) -> Choice:
    if value not in allowed:
        choices = listed(allowed) if any(allowed) else "one of the tables [environment.NAME], and there is none"
        raise UserError(f"{name} = {value!r} is not allowed: it is {choices}{did_you_mean(str(value), allowed)}")
    return Choice(text=str(value), value=value)


def _parameter(name: str, value: Value, file: SweepFile, catalogue: Sequence[Definition]) -> Choice:
    """Return a value of a parameter, read as the plan file of a point will be."""
    if not file.case:
        raise UserError(f"{name!r} is a parameter of no case: add a [[case]] that has it, or vary {listed(SHAPE)}")
    definitions = select(catalogue, [case.name for case in file.case])
    params = [param for definition in definitions for param in definition.params if param.name == name]
    if not params:
        known = (*SHAPE, *sorted({param.name for definition in definitions for param in definition.params}))
        raise UserError(f"{name!r} is no parameter of the cases; there are {listed(known)}{did_you_mean(name, known)}")
    for index, case in enumerate(file.case):
        if name in case.set:
            raise UserError(f"{name!r} is set in $.case[{index}] too; leave out one of them")
    text = str(value)
    values = params[0].parse_many(text)
    if len(values) != 1:
        raise UserError(f"{name} = {text!r} is {len(values)} values: a point has one; write each as its own")
    is_file = params[0].kind in ("matrix", "rows")
    return Choice(text=text, value=text if is_file else values[0])


def _check_once(rows: Sequence[Sequence[Mapping[str, Choice]]]) -> None:
    for row in rows:
        counts = Counter(tuple((name, choice.value) for name, choice in part.items()) for part in row)
        for part, count in counts.items():
            if count > 1:
                words = ", ".join(f"{name} = {value!r}" for name, value in part)
                raise UserError(f"{words} is given {count} times; give it once, and repeat = {count} if that is meant")
