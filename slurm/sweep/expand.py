"""The points (runs) of a sweep file: every combination of its settings that is not excluded."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, select_definitions
from parbench.bench.plan.groups import MAX_RANKS
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.params import Param, Value, is_variable
from parbench.bench.plan.plan import Entry, Plan
from parbench.bench.text import UserError, format_list, format_size, pluralize
from parbench.slurm.sweep.folder import Point
from parbench.slurm.sweep.sweepfile import Distribution, SweepFile, locate_errors

_START_SECONDS = 10.0
"""The seconds of a run outside of its budget: parbench and srun start, and the last case ends."""
_MAX_POINTS = 10_000  # of a sweep
SHAPE = ("repeat", "nodes", "ntasks_per_node", "distribution")
"""The names of axes of a sweep that are neither parameters of cases nor environment variables."""

Row = dict[str, str]
"""One combination of the settings of a sweep: one value of each axis as text, by the axis's name.

An axis is a setting of the sweep file such as ``nodes``, a parameter of cases such as
``size_bytes``, or an environment variable. An axis with only one value is in every combination.
Equal values such as ``"1K"`` and 1024 have equal texts.
"""


class Expansion:
    """A sweep file, with methods that expand it into its points.

    A point is one run of the sweep with one value per setting. An axis is a setting that may have
    several values: ``nodes``, a parameter of cases such as ``size_bytes``, or an environment
    variable.
    """

    def __init__(self, file: SweepFile, catalogue: Sequence[BenchmarkDefinition]) -> None:
        """Look up the parameters of the benchmarks that each ``[[case]]`` of the file selects.

        ``catalogue`` has all benchmarks.
        """
        self._file = file
        self._catalogue = catalogue
        self._params_of_case: list[dict[str, Param]] = []
        for case in file.case:
            definitions = select_definitions(catalogue, [case.name])
            params = [param for definition in definitions for param in definition.params]
            self._params_of_case.append({param.name: param for param in params})

    def list_axes(self) -> dict[str, list[str]]:
        """Return the values of each axis of the sweep as text, by name of the axis.

        An axis is a setting of the file (such as ``nodes``), a parameter of cases, or an
        environment variable. A setting with one value is in the result, with a list of length 1.
        The values are in the order of the file. The first axis, ``repeat``, varies slowest, so that
        drift affects all other settings equally. Raises ``UserError`` if an axis is set twice or a
        value is not allowed.
        """
        file = self._file
        settings: dict[str, Any] = {"$.repeat": list(range(1, file.repeat + 1))}
        for name in SHAPE[1:]:
            settings[f"$.{name}"] = getattr(file, name)
        for table in ("matrix", "environment"):
            for name, setting in getattr(file, table).items():
                settings[f"$.{table}.{name}"] = setting
        axes: dict[str, list[str]] = {}
        places: dict[str, str] = {}
        for place, setting in settings.items():
            name = place.rpartition(".")[2]
            with locate_errors(place):
                if places.setdefault(name, place) != place:
                    raise UserError(f"{places[name]} sets {name!r} too; leave out one of them")
                axes[name] = self._format_values(name, setting)
        return axes

    def _format_values(self, name: str, setting: Any) -> list[str]:
        """Return the distinct values of the axis ``name`` as text, in the order of the file.

        ``setting`` is the axis's value or list of values in the sweep file. Raises ``UserError`` if
        a value is not allowed, or if the list is empty.
        """
        values = setting if isinstance(setting, list) else [setting]
        texts = [self.format_value(name, value) for value in values]
        if not texts:
            raise UserError("the list is empty: write at least one value")
        return list(dict.fromkeys(texts))

    def format_value(self, name: str, value: Value) -> str:
        """Return a value of the axis ``name`` as text, such as ``1K`` for a size of 1024.

        Raises ``UserError`` if no case has a parameter ``name``, if a case sets it too, or if the
        parameter does not allow the value. Other axes (``SHAPE``, environment variables) allow all.
        """
        if name in SHAPE or is_variable(name):
            return _format_scalar(value)
        params = {key: param for case in self._params_of_case for key, param in case.items()}
        if name not in params:
            allowed = format_list(sorted(params) or ["none without a [[case]]"])
            raise UserError(f"{name!r} is not a parameter of the cases; allowed are {allowed}")
        if any(name in case.set for case in self._file.case):
            raise UserError(f"{name!r} is also in set of a $.case; leave out one of them")
        values = params[name].parse_many(value)
        if len(values) != 1:
            hint = "write a list with an element for each value"
            raise UserError(f"{name} = {value!r} has {len(values)} values: {hint}")
        if params[name].kind == "size":
            return format_size(int(values[0]))
        return _format_scalar(values[0])

    def remove_excluded(self, rows: Sequence[Row]) -> list[Row]:
        """Return the combinations of settings that no table of ``exclude`` in the file matches.

        ``rows`` are all combinations. A table names values for some axes. It matches a combination
        that has one of the table's values on each of these axes. Raises ``UserError`` if no
        combination remains.
        """
        remaining = list(rows)
        for index, table in enumerate(self._file.exclude):
            excluded = rows
            with locate_errors(f"$.exclude[{index}]"):
                for name, setting in table.items():
                    if name not in rows[0]:
                        problem = f"{name!r} in exclude is not a setting of the sweep"
                        raise UserError(f"{problem}: allowed are {format_list(rows[0])}")
                    texts = self._format_values(name, setting)
                    excluded = [row for row in excluded if row[name] in texts]
            remaining = [row for row in remaining if row not in excluded]
        if not remaining:
            raise UserError(f"$.exclude removes all {len(rows)} points")
        return remaining

    def make_point(self, row: Row, varied: set[str]) -> Point:
        """Return the point (run) with the settings of ``row``, an empty id and a duration of 0.

        ``row`` has one value of each axis as text, by name of the axis, such as ``nodes`` or
        ``size_bytes``. ``varied`` has the names of the axes that have several values in the sweep.
        The label shows nodes, ranks per node and parameters of cases always, and other axes only if
        they vary. It also shows a distribution other than ``block``.
        """
        variables = {name: text for name, text in row.items() if is_variable(name)}
        settings = {name: row[name] for name in row if name not in (*SHAPE, *variables)}
        differences = [f"{name}={text}" for name, text in variables.items() if name in varied]
        parts = [f"{pluralize(int(row['nodes']), 'node')} x {row['ntasks_per_node']}"]
        if "distribution" in varied or row["distribution"] != "block":
            parts.append(row["distribution"])
        parts += [f"{name}={text}" for name, text in settings.items()] + differences
        if "repeat" in varied:
            parts.append(f"repeat {row['repeat']}")
        cases = []
        for case, params in zip(self._file.case, self._params_of_case, strict=True):
            own_settings = {name: settings[name] for name in settings if name in params}
            cases.append(Entry(name=case.name, set={**case.set, **own_settings}))
        return Point(
            id="",
            label=", ".join(parts),
            nodes=int(row["nodes"]),
            ntasks_per_node=int(row["ntasks_per_node"]),
            distribution=cast(Distribution, row["distribution"]),
            repeat=int(row["repeat"]),
            environment=", ".join(differences),
            variables=variables,
            cases=tuple(cases),
            seconds=0.0,
        )


def _format_scalar(value: Value) -> str:
    """Return a single value as text, a boolean as ``true`` or ``false`` as in TOML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def expand(
    file: SweepFile, catalogue: Sequence[BenchmarkDefinition]
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the points of a sweep file in the order of execution, and notes on skipped cases.

    A point is one run with one value per setting. Each note names a number of nodes and of ranks
    per node, and the number of cases that are skipped because they cannot run there. Points on more
    nodes come first, because they show a dead node early. Points on few nodes come last, because
    they fit into the rest of a job's time. ``catalogue`` has the benchmarks. Raises ``UserError``
    with the place in the file that is wrong, also if a point cannot run or there are too many.
    """
    expansion = Expansion(file, catalogue)
    axes = expansion.list_axes()
    number = math.prod(len(values) for values in axes.values())
    if number > _MAX_POINTS:
        product = " * ".join(str(len(values)) for values in axes.values() if len(values) > 1)
        hint = "submit several smaller sweep files"
        raise UserError(f"{product} = {number} points are more than {_MAX_POINTS}: {hint}")
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    varied = {name for name, values in axes.items() if len(values) > 1}
    points = []
    plans: dict[tuple[int, int, bytes], Plan] = {}
    for row in sorted(expansion.remove_excluded(rows), key=lambda row: -int(row["nodes"])):
        point = expansion.make_point(row, varied)
        key = (point.nodes, point.ntasks_per_node, msgspec.json.encode(point.cases))
        if key not in plans:
            with locate_errors(f"the point {point.label!r} cannot run"):
                plans[key] = plan_point(file, catalogue, point)
        seconds = _START_SECONDS + plans[key].budget_seconds
        points.append(replace(point, seconds=seconds).with_id())
    notes = []
    for (nodes, tasks, _), plan in plans.items():
        if plan.skipped:
            first = plan.skipped[0]
            total = len(plan.skipped) + len(plan.cases)
            counts = f"{len(plan.skipped)} of {total} cases are skipped"
            notes.append(f"on {nodes} x {tasks} ranks {counts}: {first.case.label}: {first.reason}")
    return tuple(points), list(dict.fromkeys(notes))


def plan_point(file: SweepFile, catalogue: Sequence[BenchmarkDefinition], point: Point) -> Plan:
    """Return the cases, repetitions and time budget of one point, a run of the sweep.

    Without a device in the file, the plan is for CPUs, or for GPUs with the backend ``nccl``.
    ``catalogue`` has the benchmarks. Raises ``UserError`` if the ranks cannot run the point.
    """
    ranks = point.nodes * point.ntasks_per_node
    if not 2 <= ranks <= MAX_RANKS:
        product = f"nodes({point.nodes}) * ntasks_per_node({point.ntasks_per_node})"
        allowed = f"2 to {MAX_RANKS} are allowed; leave this combination out with [[exclude]]"
        raise UserError(f"{product} = {pluralize(ranks, 'rank')}, {allowed}")
    options = Options(
        preset=file.preset,
        entries=point.cases,
        repetitions=file.repetitions,
        budget=file.budget,
        timeout=file.timeout,
    )
    device = file.device or ("cuda" if file.backend == "nccl" else "cpu")
    backend = file.backend or ("nccl" if device == "cuda" else "gloo")
    if (backend, device) == ("nccl", "cpu"):
        raise UserError("backend = 'nccl' needs device = 'cuda'")
    world = WorldSpec(nproc=ranks, backend=backend, device=device, nodes=point.nodes)
    return make_plan(options, catalogue, world)
