"""From a sweep file to its points: every combination once, what is excluded left out, what cannot run refused."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import cast

import msgspec

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition, select
from bench.plan.options import Options, make_plan
from bench.plan.plan import Entry, Plan
from bench.text import UserError, counted
from slurm.sweep.axes import SHAPE, Combination, read_axes
from slurm.sweep.condition import parse_condition
from slurm.sweep.folder import Placement, Point
from slurm.sweep.sweepfile import SweepFile, at

_START_SECONDS = 10.0
"""What a run takes beside its budget: parbench and srun start, the last case ends. Launches are in the budget."""

_MAX_POINTS = 10_000


def expand(file: SweepFile, catalogue: Sequence[Definition]) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points in the order of execution, and in words what is skipped or of no effect.

    Larger points come first: a dead node is found early, and what no longer fits into a job's time is small. Repeats
    are taken in rounds, for the same reason as environments are taken in turns. ``UserError`` names what is wrong.
    """
    rows = read_axes(file, catalogue)
    lengths = [*map(len, rows), file.repeat]
    if (number := math.prod(lengths)) > _MAX_POINTS:
        product = " * ".join(str(length) for length in lengths if length > 1)
        raise UserError(f"{product} = {number} points are more than {_MAX_POINTS}: make several sweeps of them")
    combinations = [functools.reduce(operator.or_, parts) for parts in itertools.product(*rows)]
    rounds = [(combination, repeat) for repeat in range(1, file.repeat + 1) for combination in combinations]
    kept, notes = _excluded(file, rounds)
    varied = {name for row in rows if len(row) > 1 for name in row[0]}
    bases = []
    for case in file.case:
        params = {param.name for definition in select(catalogue, [case.name]) for param in definition.params}
        bases.append((case.entry(catalogue), params))
    drafts = [_draft(file, bases, varied, combination, repeat) for combination, repeat in kept]
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
    return tuple(points), [*notes, *dict.fromkeys(skips)]


Round = tuple[Combination, int]


def _excluded(file: SweepFile, rounds: Sequence[Round]) -> tuple[list[Round], list[str]]:
    """Return what no condition takes out, with a note for each condition that takes out nothing."""
    values = []  # what a condition can speak of
    for combination, repeat in rounds:
        ranks = int(combination["nodes"].text) * int(combination["ntasks_per_node"].text)
        values.append({name: choice.value for name, choice in combination.items()} | {"ranks": ranks, "repeat": repeat})
    out, notes = [False] * len(rounds), []
    for index, text in enumerate(file.exclude):
        with at(f"$.exclude[{index}]"):
            condition = parse_condition(text, values[0])
            holds = [condition(one) for one in values]
        out = [*map(operator.or_, out, holds)]
        notes += [] if any(holds) else [f"exclude {text!r} takes out no point"]
    if all(out):
        raise UserError(f"$.exclude takes out all of the {len(rounds)} points")
    return [one for one, is_out in zip(rounds, out, strict=True) if not is_out], notes


Bases = list[tuple[Entry, set[str]]]
"""The file's cases, each with the names of its parameters, of which it gets those that vary."""


def _draft(file: SweepFile, bases: Bases, varied: set[str], combination: Combination, repeat: int) -> Point:
    """Return a point, but for its id and the seconds that its plan tells; labels tell the names of ``varied``."""
    nodes, tasks, placement, environment = (combination[name].text for name in SHAPE)
    varying = {name: choice.text for name, choice in combination.items() if name not in SHAPE}
    words = [placement] if "placement" in varied or placement != "block" else []
    words += [f"{name}={text}" for name, text in varying.items()]
    words += [f"environment {environment}"] if environment else []
    words += [f"repeat {repeat}"] if file.repeat > 1 else []
    cases = []
    for entry, params in bases:
        own = {name: text for name, text in varying.items() if name in params}
        cases.append(Entry(name=entry.name, set={**entry.set, **own}))
    return Point(
        id="",
        label=", ".join([f"{counted(int(nodes), 'node')} x {tasks}", *words]),
        nodes=int(nodes),
        ntasks_per_node=int(tasks),
        placement=cast(Placement, placement),
        repeat=repeat,
        environment=environment,
        variables=file.environment[environment].texts() if environment else {},
        cases=tuple(cases),
        seconds=0.0,
    )


def plan_point(file: SweepFile, catalogue: Sequence[Definition], point: Point) -> Plan:
    """Return the plan of a point; ``UserError`` if it asks for what cannot run on so many ranks.

    Where the file names neither backend nor device the nodes decide, so it is enough that one of the two can run it.
    Without a backend a device has the one that suits it, as in ``parbench run``; gloo on GPUs is used where asked for.
    """
    ranks = point.nodes * point.ntasks_per_node
    if ranks == 1:
        raise UserError(
            "nodes(1) * ntasks_per_node(1) = 1 rank: at least 2 are needed; give ntasks_per_node, or leave it out with "
            'exclude = ["ranks == 1"]'
        )
    options = Options(
        preset=file.preset,
        entries=point.cases,
        launches=file.launches,
        budget=None if file.budget is None else str(file.budget),
        timeout=None if file.timeout is None else str(file.timeout),
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
