"""From a sweep file to its points: every combination once, what is excluded left out, what cannot run refused."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition, select
from bench.plan.options import Options, make_plan
from bench.plan.params import Value
from bench.plan.plan import Entry, Plan
from bench.text import UserError
from slurm.sweep.axes import SHAPE, Combination, read_axes
from slurm.sweep.condition import Condition, check_names, parse_condition
from slurm.sweep.points import Placement, Point, make_point, point_label
from slurm.sweep.script import point_seconds
from slurm.sweep.sweepfile import SweepFile

_MAX_POINTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The points in the order of execution, and in words what is skipped or of no effect."""

    points: tuple[Point, ...]
    notes: tuple[str, ...]


def expand(file: SweepFile, catalogue: Sequence[Definition]) -> Expansion:
    """Return the points; ``UserError`` names what is wrong in the file.

    Larger points come first: a dead node is found early, and what no longer fits into a job's time is small. Repeats
    are taken in rounds, for the same reason as environments are taken in turns.
    """
    rows = read_axes(file, catalogue)
    _check_number(file, [len(row) for row in rows])
    combinations = [_merged(parts) for parts in itertools.product(*rows)]
    rounds = [(combination, repeat) for repeat in range(1, file.repeat + 1) for combination in combinations]
    kept, notes = _excluded(file, rounds)
    kept.sort(key=lambda pair: -_number(pair[0], "nodes"))
    varied = {name for row in rows if len(row) > 1 for name in row[0]}
    planner = _Planner(file, catalogue, varied)
    points = tuple(planner.point(combination, repeat) for combination, repeat in kept)
    return Expansion(points=points, notes=(*notes, *dict.fromkeys(planner.notes)))


def _check_number(file: SweepFile, lengths: Sequence[int]) -> None:
    number = file.repeat
    for length in lengths:
        number *= length
    if number > _MAX_POINTS:
        product = " * ".join(str(length) for length in [*lengths, file.repeat] if length > 1)
        raise UserError(f"{product} = {number} points are more than {_MAX_POINTS}: make several sweeps of them")


def _merged(parts: Sequence[Combination]) -> Combination:
    return {name: choice for part in parts for name, choice in part.items()}


Round = tuple[Combination, int]


def _excluded(file: SweepFile, rounds: Sequence[Round]) -> tuple[list[Round], list[str]]:
    """Return what no condition takes out, with a note for each condition that takes out nothing."""
    judged = []
    for index, text in enumerate(file.exclude):
        try:
            judged.append(_judge(parse_condition(text), rounds))
        except UserError as error:
            raise UserError(f"$.exclude[{index}]: {error}") from error
    kept = [one for index, one in enumerate(rounds) if not any(holds[index] for holds in judged)]
    if not kept:
        raise UserError(f"$.exclude takes out all of the {len(rounds)} points")
    idle = [text for text, holds in zip(file.exclude, judged, strict=True) if not any(holds)]
    return kept, [f"exclude {text!r} takes out no point" for text in idle]


def _judge(condition: Condition, rounds: Sequence[Round]) -> list[bool]:
    check_names(condition, _values(*rounds[0]))
    return [condition.holds(_values(combination, repeat)) for combination, repeat in rounds]


def _values(combination: Combination, repeat: int) -> Mapping[str, Value]:
    """Return what a condition can speak of."""
    values = {name: choice.value for name, choice in combination.items()}
    ranks = _number(combination, "nodes") * _number(combination, "ntasks_per_node")
    return {**values, "ranks": ranks, "repeat": repeat}


def _number(combination: Combination, name: str) -> int:
    value = combination[name].value
    assert isinstance(value, int)
    return value


class _Planner:
    """Makes the points of combinations, planning each kind of run once; ``varied`` are the names that labels tell."""

    def __init__(self, file: SweepFile, catalogue: Sequence[Definition], varied: set[str]) -> None:
        self._file, self._catalogue, self._varied = file, catalogue, varied
        self._plans: dict[tuple[int, int, bytes], Plan] = {}
        self._params = [
            {param.name for definition in select(catalogue, [case.name]) for param in definition.params}
            for case in file.case
        ]
        self.notes: list[str] = []

    def point(self, combination: Combination, repeat: int) -> Point:
        """Return the point; ``UserError`` names it if it cannot run."""
        nodes, tasks = _number(combination, "nodes"), _number(combination, "ntasks_per_node")
        cases = self._cases(combination)
        words = self._words(combination, repeat)
        try:
            plan = self._plan(nodes, tasks, cases)
        except UserError as error:
            raise UserError(f"the point {point_label(nodes, tasks, words)!r} cannot run: {error}") from error
        environment = combination["environment"].text
        return make_point(
            nodes=nodes,
            ntasks_per_node=tasks,
            placement=cast(Placement, combination["placement"].text),
            repeat=repeat,
            environment=environment,
            variables=self._file.environment[environment].texts() if environment else {},
            cases=cases,
            seconds=point_seconds(plan.budget_seconds),
            words=words,
        )

    def _cases(self, combination: Combination) -> tuple[Entry, ...]:
        """Return the file's cases, each with those of the varying parameters that it has."""
        varying = {name: choice.text for name, choice in combination.items() if name not in SHAPE}
        cases = []
        for case, params in zip(self._file.case, self._params, strict=True):
            own = {name: text for name, text in varying.items() if name in params}
            cases.append(Entry(name=case.name, set={**case.entry(self._catalogue).set, **own}))
        return tuple(cases)

    def _words(self, combination: Combination, repeat: int) -> list[str]:
        words = []
        if "placement" in self._varied or combination["placement"].text != "block":
            words.append(combination["placement"].text)
        words += [f"{name}={choice.text}" for name, choice in combination.items() if name not in SHAPE]
        if combination["environment"].text:
            words.append(f"environment {combination['environment'].text}")
        return words if self._file.repeat == 1 else [*words, f"repeat {repeat}"]

    def _plan(self, nodes: int, tasks: int, cases: tuple[Entry, ...]) -> Plan:
        key = nodes, tasks, msgspec.json.encode(cases)
        if key not in self._plans:
            plan = plan_point(self._file, self._catalogue, nodes=nodes, ntasks_per_node=tasks, entries=cases)
            self._plans[key] = plan
            self.notes += _skips(nodes, tasks, plan)
        return self._plans[key]


def _skips(nodes: int, tasks: int, plan: Plan) -> list[str]:
    """Say how many of a plan's cases cannot run there, and why the first cannot."""
    if not plan.skipped:
        return []
    first, total = plan.skipped[0], len(plan.skipped) + len(plan.cases)
    why = f"{first.case.label}: {first.reason}"
    return [f"on {nodes} x {tasks} ranks {len(plan.skipped)} of {total} cases are skipped: {why}"]


_WHERE = (("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cuda"))


def plan_point(
    file: SweepFile, catalogue: Sequence[Definition], *, nodes: int, ntasks_per_node: int, entries: Sequence[Entry]
) -> Plan:
    """Return the plan of a point; ``UserError`` if it asks for what cannot run on so many ranks.

    Where the file names neither backend nor device the nodes decide, so it is enough that one of the two can run it.
    """
    ranks = nodes * ntasks_per_node
    if ranks == 1:
        raise UserError(
            "nodes(1) * ntasks_per_node(1) = 1 rank, which moves nothing; give ntasks_per_node, or leave it out with "
            'exclude = ["ranks == 1"]'
        )
    options = Options(
        preset=file.preset,
        entries=tuple(entries),
        launches=file.launches,
        budget=None if file.budget is None else str(file.budget),
        timeout=None if file.timeout is None else str(file.timeout),
    )
    refusals = []
    for backend, device in possible(file.backend, file.device):
        try:
            return make_plan(options, catalogue, WorldSpec(nproc=ranks, backend=backend, device=device, nodes=nodes))
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def possible(backend: str | None, device: str | None) -> list[tuple[str, str]]:
    """Return the backends and devices that may be used for what the file says, the likeliest first.

    Without a backend a device has the one that suits it, as in ``parbench run``; gloo on GPUs is used where asked for.
    """
    fitting = [one for one in _WHERE if backend in (None, one[0]) and device in (None, one[1])]
    return fitting if backend else [one for one in fitting if one != ("gloo", "cuda")]
