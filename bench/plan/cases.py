"""Cases, and the definitions that they are made from.

``parbench list`` shows definitions: a name, a target and declared parameters. They need no torch.
Only the ranks import the target, which is written ``package.module:prepare``.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import msgspec

from parbench.bench.limits import ParamValue
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Param, Value, is_variable, refuse_unknown
from parbench.bench.text import UserError, suggest_similar

EXPLAINER = "parbench.workloads.step.user_step:ExplainedUserStep"
"""The class that profiles a custom step and breaks down its time, as ``package.module:class``."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement to make: a benchmark, such as all-reduce, with values of its parameters."""

    id: str
    """The first 12 hex digits of the SHA-256 of name, target and ``params`` in canonical JSON.

    Equal cases of different runs have equal ids.
    """
    name: str
    """The name of the benchmark with its kind, such as ``collective.all_reduce``."""
    target: str
    """The function that sets up the benchmark on a rank, as ``package.module:function``."""
    params: dict[str, ParamValue]
    """The values of parameters by name, without optional parameters that have their default."""
    defaults: dict[str, ParamValue] = {}
    """The default values, by name, of the optional parameters that have their default."""

    @property
    def all_params(self) -> dict[str, Value]:
        """The values of all parameters by name, ``defaults`` included."""
        return {**self.defaults, **self.params}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which all ranks must be started, as values by name.

        They are the parameters whose names consist of capital letters, digits and underscores.
        """
        return {name: str(value) for name, value in self.params.items() if is_variable(name)}

    @property
    def kind(self) -> str:
        """The kind of benchmark, which is the part of the name before the dot.

        It is ``collective``, ``p2p``, ``compute``, ``memory``, ``workload`` (a training step) or
        ``custom`` (a function of the user).
        """
        return self.name.partition(".")[0]

    @property
    def is_custom(self) -> bool:
        """True if the benchmark is a function of the user, written ``module:function``."""
        return self.kind == "custom"

    @property
    def is_step(self) -> bool:
        """True if the benchmark is a training step of parbench or a function of the user."""
        return self.kind in ("workload", "custom")

    @property
    def short_name(self) -> str:
        """The name without its kind, such as ``all_reduce``."""
        return self.name.partition(".")[2] or self.name

    @property
    def label(self) -> str:
        """The benchmark and ``params`` as text: ``collective.all_reduce size_bytes=1024 ...``."""
        params = [f"{name}={value}" for name, value in self.params.items()]
        return " ".join([self.name, *params])


Params = Mapping[str, Value]
"""The values of parameters by the name of the parameter."""


def make_case(name: str, target: str, params: Params, defaults: Params | None = None) -> Case:
    """Return a case of the benchmark ``name`` with these parameter values.

    The id of the case is a hash of its name, target and ``params``. ``target`` is the function that
    sets up the benchmark, as ``package.module:function``. ``defaults`` holds, by name, the
    optional parameters that have their default and are not part of the id.
    """
    identity = {"name": name, "target": target, "params": params}
    digest = hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()
    return Case(
        id=digest[:12],
        name=name,
        target=target,
        params=dict(params),
        defaults=dict(defaults or {}),
    )


def group_by_variables(cases: Iterable[Case]) -> list[list[Case]]:
    """Divide the cases into groups, in which all cases set the same environment variables.

    The ranks must be started once for each group, because libraries read variables at the start.
    Groups are in the order of their first case.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case.variables.items()), []).append(case)
    return list(groups.values())


Refusal = Callable[[Params, WorldSpec], str | None]
"""A function that returns the reason why a case cannot run on the ranks, None if it can.

Its arguments are the values of the case's parameters by name, and the description of the ranks.
"""
Expansion = Callable[[Params, WorldSpec], Iterable[Params]]
"""A function that makes several cases of the parameter values that a user has selected.

Its arguments are these values by name, and the description of the ranks. It returns the values for
each case to measure, for example one for each process group.
"""


@dataclass(frozen=True, kw_only=True)
class BenchmarkDefinition:
    """A benchmark that can be measured: its parameters, and the function that sets it up."""

    name: str
    """The name with its kind, such as ``collective.all_reduce``."""
    target: str
    """The function that sets up the benchmark on a rank, as ``package.module:function``."""
    help: str
    """A phrase about the benchmark for ``parbench list`` and the documentation."""
    params: tuple[Param, ...]
    """The declarations of the parameters, in the order in which they are listed."""
    tags: tuple[str, ...] = ()
    """Words by which presets select the benchmark.

    They are the presets ``smoke`` and ``node``, and the groups of operations ``main`` and
    ``sized``.
    """
    refusal: Refusal | None = None
    """A check of a case before the run, None if every case can run on any ranks."""
    expand: Expansion | None = None
    """A function that turns the parameter values of a user into those of each case to measure.

    For example, it makes a case for each process group. None if the values of a user make one case.
    """

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return a sentence with the reason why the benchmark cannot run, None if it can.

        ``params`` holds the values of all its parameters by name. ``spec`` describes the ranks.
        """
        return None if self.refusal is None else self.refusal(params, spec)

    @property
    def short_name(self) -> str:
        """The name without its kind, such as ``all_reduce``."""
        return self.name.partition(".")[2]

    def complete(self, values: Mapping[str, object]) -> dict[str, Value]:
        """Return the values of all parameters by name, in the order of their declaration.

        ``values`` holds some values by parameter name, as texts or already converted. Other
        parameters get their default. Raises ``UserError`` for an unknown name or a value that is
        not allowed.
        """
        refuse_unknown(values, [param.name for param in self.params], self.name)
        return {
            param.name: param.parse(values.get(param.name, param.default)) for param in self.params
        }

    def build_case(self, values: Mapping[str, object]) -> Case:
        """Return the case of this benchmark with these parameter values.

        ``values`` holds values by parameter name, as texts or already converted. Other parameters
        get their default. Raises ``UserError`` for an unknown name or a value that is not allowed.
        """
        params = self.complete(values)
        defaults = {}
        for param in self.params:
            if param.optional and params[param.name] == param.default:
                defaults[param.name] = params.pop(param.name)
        return make_case(self.name, self.target, params, defaults)


def matches(name: str, pattern: str) -> bool:
    """Return True if the glob ``pattern`` matches the name of a benchmark.

    A pattern without a dot, such as ``all_*``, is compared with the part of the name after the dot.
    """
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def load_target(target: str) -> Callable[..., Any]:
    """Import a module and return the function in it that ``package.module:function`` names.

    The function prepares a benchmark on a rank. Raises ``UserError`` if the module has no such
    function, and the exceptions of the import.
    """
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    try:
        return cast(Callable[..., Any], getattr(module, name))
    except AttributeError as error:
        raise UserError(f"target {target!r} cannot be loaded: {error}") from error


def load_catalogue(modules: Iterable[str]) -> tuple[BenchmarkDefinition, ...]:
    """Import the modules and return the benchmarks in their ``DEFINITIONS``, in this order.

    ``modules`` are names of Python modules.
    """
    definitions: list[BenchmarkDefinition] = []
    for name in modules:
        definitions += importlib.import_module(name).DEFINITIONS
    return tuple(definitions)


def select_definitions(
    catalogue: Sequence[BenchmarkDefinition], patterns: Sequence[str]
) -> tuple[BenchmarkDefinition, ...]:
    """Return the definitions whose name matches any pattern, or all if there is no pattern.

    The order is that of the catalogue. Raises ``UserError`` if a pattern matches no definition.
    """
    if not patterns:
        return tuple(catalogue)
    selected_names: set[str] = set()
    for pattern in patterns:
        names = [entry.name for entry in catalogue if matches(entry.name, pattern)]
        if not names:
            similar = suggest_similar(pattern, [entry.short_name for entry in catalogue])
            raise UserError(f"no case is named {pattern!r}{similar}", hint="type parbench list")
        selected_names.update(names)
    return tuple(entry for entry in catalogue if entry.name in selected_names)
