"""Cases, and the definitions that they are made from.

``parbench list`` shows definitions: a name, a target and declared parameters. They need no torch.
Only the ranks import the target, which is written ``package.module:prepare``.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from parbench.bench.limits import ParamValue
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Param, Value, is_variable, refuse_unknown
from parbench.bench.text import UserError, suggest_similar

EXPLAINER = "parbench.workloads.step.user_step:ExplainedUserStep"
"""The target that explains a custom step."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark with the values of its parameters."""

    id: str
    """A hash of name, target and ``params`` in canonical JSON."""
    name: str
    """The name with its kind, such as ``collective.all_reduce``."""
    target: str
    """The function that prepares the benchmark, as ``package.module:function``."""
    params: dict[str, ParamValue]
    """The values of the parameters by name, without optional parameters at their default."""
    defaults: dict[str, ParamValue] = {}
    """The values of the optional parameters at their default, by name."""

    @property
    def all_params(self) -> dict[str, Value]:
        """The required and the optional parameters by name, with their values."""
        return {**self.defaults, **self.params}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which all ranks of the case must be started."""
        return {name: str(value) for name, value in self.params.items() if is_variable(name)}

    @property
    def kind(self) -> str:
        """The first part of the name, such as ``collective``."""
        return self.name.partition(".")[0]

    @property
    def is_custom(self) -> bool:
        """True for a custom step, from ``module:function``."""
        return self.kind == "custom"

    @property
    def is_step(self) -> bool:
        """True for a training step, also a custom one."""
        return self.kind in ("workload", "custom")

    @property
    def short_name(self) -> str:
        """The name without its kind, such as ``all_reduce``."""
        return self.name.partition(".")[2] or self.name

    @property
    def label(self) -> str:
        """The name with all parameters that are not defaults, as text."""
        params = [f"{name}={value}" for name, value in self.params.items()]
        return " ".join([self.name, *params])


Params = Mapping[str, Value]


def make_case(name: str, target: str, params: Params, defaults: Params | None = None) -> Case:
    """Return the case. Its id is a hash of its name, target and ``params``."""
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
    """Return groups of cases with equal environment variables.

    Each group needs ranks of its own.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case.variables.items()), []).append(case)
    return list(groups.values())


Refusal = Callable[[Params, WorldSpec], str | None]
Expansion = Callable[[Params, WorldSpec], Iterable[Params]]


def keep_params(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameters unchanged, as the only case."""
    return [params]


@dataclass(frozen=True, kw_only=True)
class BenchmarkDefinition:
    """A benchmark that can be measured: its parameters, and the function that prepares it."""

    name: str
    """The name with its kind, such as ``collective.all_reduce``."""
    target: str
    """The function that prepares the benchmark, as ``package.module:function``."""
    help: str
    params: tuple[Param, ...]
    tags: tuple[str, ...] = ()
    """The tags by which presets select it. The name of a preset is also a tag."""
    refusal: Refusal | None = None
    """Returns the reason why a case cannot run in a world, None if it can run."""
    expand: Expansion = keep_params
    """Returns the parameters of each case, such as one case for each group of ranks."""

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return the reason why a case cannot run in a world, None if it can run.

        ``params`` holds all parameters of the case.
        """
        return None if self.refusal is None else self.refusal(params, spec)

    @property
    def short_name(self) -> str:
        """The name without its kind, such as ``all_reduce``."""
        return self.name.partition(".")[2]

    def complete(self, values: Mapping[str, object]) -> dict[str, Value]:
        """Return the values of all parameters in declared order, with defaults for missing ones.

        Raises ``UserError`` for an unknown name or a value that is not allowed.
        """
        refuse_unknown(values, [param.name for param in self.params], self.name)
        return {
            param.name: param.parse(values.get(param.name, param.default)) for param in self.params
        }

    def build_case(self, values: Mapping[str, object]) -> Case:
        """Return the case with these values and the defaults of other parameters."""
        params = self.complete(values)
        defaults = {}
        for param in self.params:
            if param.optional and params[param.name] == param.default:
                defaults[param.name] = params.pop(param.name)
        return make_case(self.name, self.target, params, defaults)


def matches(name: str, pattern: str) -> bool:
    """Return True if the glob ``pattern`` matches the name of a case.

    A pattern without a dot is compared with the name without its kind.
    """
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def load_catalogue(modules: Iterable[str]) -> tuple[BenchmarkDefinition, ...]:
    """Import the modules and return the definitions of their benchmarks."""
    definitions: list[BenchmarkDefinition] = []
    for name in modules:
        definitions += importlib.import_module(name).DEFINITIONS
    return tuple(definitions)


def select_definitions(
    catalogue: Sequence[BenchmarkDefinition], patterns: Sequence[str]
) -> tuple[BenchmarkDefinition, ...]:
    """Return the definitions whose name matches any pattern, or all if there is no pattern.

    Raises ``UserError`` if a pattern matches none.
    """
    if not patterns:
        return tuple(catalogue)
    names = [definition.name for definition in catalogue]
    selected: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if matches(name, pattern)]
        if not matching:
            short_names = [name.rpartition(".")[2] for name in names]
            similar = suggest_similar(pattern, [*names, *short_names])
            raise UserError(f"no case is named {pattern!r}{similar}", hint="parbench list")
        selected.update(matching)
    return tuple(definition for definition in catalogue if definition.name in selected)
