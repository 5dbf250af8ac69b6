"""From a sweep file to its points: every combination once, what is excluded left out, what cannot run refused."""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, select_definitions
from parbench.bench.plan.groups import MOST_RANKS
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import Entry, Plan
from parbench.bench.text import UserError, format_choices, format_list, pluralize, suggest_similar
from parbench.slurm.sweep.folder import Distribution, Point
from parbench.slurm.sweep.sweepfile import SweepFile, at

_START_SECONDS = 10.0
"""What a run takes beside its budget: parbench and srun start, the last case ends. Repetitions are in the budget."""

_MAX_POINTS = 10_000

SHAPE = ("nodes", "ntasks_per_node", "distribution", "environment", "repeat")
"""What a matrix may vary beside the parameters of the cases."""


Combination = dict[str, str]
"""A value of each axis, by its name, as it was written."""


def read_axes(file: SweepFile, catalogue: Sequence[BenchmarkDefinition]) -> list[list[Combination]]:
    """Return the rows of every axis, whose product is the sweep; UserError names the place and what is allowed.

    The first axis, repeat, varies slowest and the last, environment, fastest, so that slow drift affects all alike.
    """
    axes = []
    for place, axis in _axes(file):
        rows = [{name: str(value) for name, value in row.items()} for row in axis]
        with at(place):
            for values in axis:
                for name, value in values.items():
                    _check_value(name, value, file, catalogue)
            for row, count in Counter(tuple(row.items()) for row in rows).items():
                if count > 1:
                    row_text = ", ".join(f"{name} = {text}" for name, text in row)
                    hint = f"give it once, and repeat = {count} if that is meant"
                    raise UserError(f"{row_text} is given {count} times; {hint}")
        axes.append(rows)
    return axes


def _axes(file: SweepFile) -> Iterator[tuple[str, list[dict[str, Value]]]]:
    """Yield what varies, each as its place in the file and its rows; those of a zip set several names together."""
    given = Counter([*file.matrix, *(name for table in file.zip for name in table)])
    for name, count in given.items():
        if count > 1:
            raise UserError(
                f"{name!r} varies in {count} places of matrix and zip; it can vary in one"
            )
        if (
            name in ("nodes", "ntasks_per_node", "distribution", "repeat")
            and getattr(file, name) is not None
        ):
            raise UserError(
                f"{name!r} varies in matrix or zip, and $.{name} is given too; leave out one of them"
            )
    if "nodes" not in given and file.nodes is None:
        raise UserError("$.nodes is missing: write nodes = 2, or nodes = [1, 2, 4]")

    def own(name: str, values: Any) -> Iterator[tuple[str, list[dict[str, Value]]]]:
        if name not in given:
            yield (
                f"$.{name}",
                [{name: value} for value in (values if isinstance(values, list) else [values])],
            )

    yield from own("repeat", list(range(1, (file.repeat or 1) + 1)))
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
    yield from own("distribution", file.distribution or "block")
    yield from own("environment", list(file.environment) or [""])


def _zipped(table: Mapping[str, list[Value]]) -> list[dict[str, Value]]:
    lengths = {name: len(values) for name, values in table.items()}
    if not lengths or not min(lengths.values()):
        raise UserError("an empty table or list leaves no point; give it values")
    (first, count), *others = lengths.items()
    for name, number in others:
        if number != count:
            raise UserError(
                f"{first} has {count} values and {name} has {number}: what varies together has as many"
            )
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _check_value(
    name: str, value: Value, file: SweepFile, catalogue: Sequence[BenchmarkDefinition]
) -> None:
    if name in ("nodes", "ntasks_per_node", "repeat"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"{name} = {value!r} is not allowed: it is a whole number of at least 1"
            )
    elif name in SHAPE:
        allowed = (
            get_args(Distribution) if name == "distribution" else tuple(file.environment) or ("",)
        )
        if value not in allowed:
            choices = (
                format_list(allowed)
                if any(allowed)
                else "one of the tables [environment.NAME], and there is none"
            )
            raise UserError(
                f"{name} = {value!r} is not allowed: it is {choices}{suggest_similar(str(value), allowed)}"
            )
    else:
        _check_parameter(name, str(value), file, catalogue)


def _check_parameter(
    name: str, text: str, file: SweepFile, catalogue: Sequence[BenchmarkDefinition]
) -> None:
    """Refuse what is not one value of a parameter of the cases."""
    if not file.case:
        raise UserError(
            f"{name!r} is a parameter of no case: add a [[case]] that has it, or vary {format_list(SHAPE)}"
        )
    definitions = select_definitions(catalogue, [case.name for case in file.case])
    params = {param.name: param for definition in definitions for param in definition.params}
    if name not in params:
        known = (*SHAPE, *sorted(params))
        raise UserError(
            f"{name!r} is not a parameter of the cases; there are {format_choices(known, name)}"
        )
    for index, case in enumerate(file.case):
        if name in case.set:
            raise UserError(f"{name!r} is set in $.case[{index}] too; leave out one of them")
    values = params[name].parse_many(text)
    if len(values) != 1:
        raise UserError(
            f"{name} = {text!r} is {len(values)} values: a point has one; write each as its own"
        )


def expand(
    file: SweepFile, catalogue: Sequence[BenchmarkDefinition]
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points in the order of execution, and notes on cases that are skipped.

    Larger points come first: a dead node is found early, and what no longer fits into a job's time is small.
    UserError names what is wrong.
    """
    axes = read_axes(file, catalogue)
    if (number := math.prod(map(len, axes))) > _MAX_POINTS:
        product = " * ".join(str(len(axis)) for axis in axes if len(axis) > 1)
        raise UserError(
            f"{product} = {number} points are more than {_MAX_POINTS}: make several sweeps of them"
        )
    combinations = [functools.reduce(operator.or_, rows) for rows in itertools.product(*axes)]
    varied = {name for axis in axes if len(axis) > 1 for name in axis[0]}
    bases = []
    for case in file.case:
        params = {
            param.name
            for definition in select_definitions(catalogue, [case.name])
            for param in definition.params
        }
        bases.append((case, params))
    drafts = [
        _draft(file, bases, varied, combination) for combination in _exclude(file, combinations)
    ]
    points, plans = [], dict[tuple[int, int, bytes], Plan]()
    for point in sorted(drafts, key=lambda point: -point.nodes):
        key = point.nodes, point.ntasks_per_node, msgspec.json.encode(point.cases)
        if key not in plans:
            with at(f"the point {point.label!r} cannot run"):
                plans[key] = plan_point(file, catalogue, point)
        seconds = _START_SECONDS + plans[key].budget_seconds
        points.append(msgspec.structs.replace(point, seconds=seconds).identified())
    skips = [
        f"on {nodes} x {tasks} ranks {len(plan.skipped)} of {len(plan.skipped) + len(plan.cases)} cases are skipped: "
        f"{plan.skipped[0].case.label}: {plan.skipped[0].reason}"
        for (nodes, tasks, _), plan in plans.items()
        if plan.skipped
    ]
    return tuple(points), list(dict.fromkeys(skips))


def _exclude(file: SweepFile, points: Sequence[Combination]) -> list[Combination]:
    """Remove the points that match every key of an entry of ``exclude``; a list matches any of its values."""
    kept = list(points)
    for index, entry in enumerate(file.exclude):
        excluded = {
            name: set(map(str, value if isinstance(value, list) else [value]))
            for name, value in entry.items()
        }
        with at(f"$.exclude[{index}]"):
            _check_exclusion(excluded, points)
        kept = [
            point for point in kept if not all(point[name] in excluded[name] for name in excluded)
        ]
    if not kept:
        raise UserError(f"$.exclude removes all {len(points)} points")
    return kept


def _check_exclusion(excluded: Mapping[str, set[str]], points: Sequence[Combination]) -> None:
    """Raise UserError for a key or a value that no point has."""
    for name, values in excluded.items():
        if name not in points[0]:
            raise UserError(
                f"{name!r} is not a key of the points; allowed are {format_choices(points[0], name)}"
            )
        known = dict.fromkeys(point[name] for point in points)
        for value in sorted(values - known.keys()):
            raise UserError(
                f"no point has {name} = {value}; allowed are {format_choices(known, value)}"
            )


Bases = list[tuple[Entry, set[str]]]
"""The file's cases, each with the names of its parameters, of which it gets those that vary."""


def _draft(file: SweepFile, bases: Bases, varied: set[str], combination: Combination) -> Point:
    """Build a point without its id and the seconds of its plan; its label shows what is ``varied``."""
    nodes, tasks, distribution, environment, repeat = (combination[name] for name in SHAPE)
    varying = {name: text for name, text in combination.items() if name not in SHAPE}
    words = [distribution] if "distribution" in varied or distribution != "block" else []
    words += [f"{name}={text}" for name, text in varying.items()]
    words += [f"environment {environment}"] if environment else []
    words += [f"repeat {repeat}"] if "repeat" in varied else []
    cases = []
    for entry, params in bases:
        own = {name: text for name, text in varying.items() if name in params}
        cases.append(Entry(name=entry.name, set={**entry.set, **own}))
    return Point(
        id="",
        label=", ".join([f"{pluralize(int(nodes), 'node')} x {tasks}", *words]),
        nodes=int(nodes),
        ntasks_per_node=int(tasks),
        distribution=cast(Distribution, distribution),
        repeat=int(repeat),
        environment=environment,
        variables=file.environment[environment].texts() if environment else {},
        cases=tuple(cases),
        seconds=0.0,
    )


def plan_point(file: SweepFile, catalogue: Sequence[BenchmarkDefinition], point: Point) -> Plan:
    """Return the plan of a point; ``UserError`` if it asks for what cannot run on so many ranks.

    Where the file names neither backend nor device the nodes decide, so it is enough that one of the two can run it.
    Without a backend a device has the one that suits it, as in ``parbench run``; gloo on GPUs is used where asked for.
    """
    ranks = point.nodes * point.ntasks_per_node
    if ranks > MOST_RANKS:
        raise UserError(
            f"nodes({point.nodes}) * ntasks_per_node({point.ntasks_per_node}) > {MOST_RANKS}"
        )
    if ranks == 1:
        raise UserError(
            "nodes(1) * ntasks_per_node(1) = 1 rank: at least 2 are needed; give ntasks_per_node, or "
            "exclude = [{ nodes = 1, ntasks_per_node = 1 }]"
        )
    plan = file.plan()
    options = Options(
        preset=plan.preset,
        entries=point.cases,
        repetitions=plan.repetitions,
        budget=None if plan.budget is None else str(plan.budget),
        timeout=None if plan.timeout is None else str(plan.timeout),
    )
    worlds = [("gloo", "cpu"), ("nccl", "cuda"), *([("gloo", "cuda")] if file.backend else [])]
    refusals = []
    for backend, device in worlds:
        if file.backend in (None, backend) and file.device in (None, device):
            world = WorldSpec(nproc=ranks, backend=backend, device=device, nodes=point.nodes)
            try:
                return make_plan(options, catalogue, world)
            except UserError as error:
                refusals.append(error)
    raise refusals[0]
