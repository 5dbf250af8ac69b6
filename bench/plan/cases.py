"""Cases, and the definitions that they are made from.

``parbench list`` shows definitions: a name, a target and declared parameters. They need no torch. Only the ranks import
the target, which is written ``package.module:prepare``.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from parbench.bench.limits import ParamValue
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Param, Value, refuse_unknown
from parbench.bench.text import UserError, suggest_similar

_OWN = "custom."
EXPLAINER = "parbench.workloads.step.own:OwnStep"
"""The target that explains a custom step."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure."""

    id: str  # the hash of name, target and ``params`` in canonical JSON
    name: str
    target: str
    params: dict[str, ParamValue]
    defaults: dict[str, ParamValue] = {}  # the optional parameters with their default

    @property
    def whole(self) -> dict[str, Value]:
        """All parameters."""
        return {**self.defaults, **self.params}

    @property
    def is_own(self) -> bool:
        """Whether it is a custom step, from ``--target``."""
        return self.name.startswith(_OWN)

    @property
    def short_name(self) -> str:
        """The name without its kind: ``all_reduce``."""
        return self.name.partition(".")[2] or self.name

    @property
    def label(self) -> str:
        """The name with all parameters."""
        params = [f"{name}={value}" for name, value in self.params.items()]
        return " ".join([self.name, *params])


def make_case(name: str, target: str, params: Mapping[str, Value], defaults: Mapping[str, Value] | None = None) -> Case:
    """Return a case with its id."""
    canonical = msgspec.json.encode({"name": name, "target": target, "params": params}, order="deterministic")
    digest = hashlib.sha256(canonical).hexdigest()[:12]
    return Case(id=digest, name=name, target=target, params=dict(params), defaults=dict(defaults or {}))


Params = Mapping[str, Value]


Refusal = Callable[[Params, WorldSpec], str | None]
Expansion = Callable[[Params, WorldSpec], Iterable[Params]]


def refuse_nothing(params: Params, spec: WorldSpec) -> str | None:
    return None


def keep_params(params: Params, spec: WorldSpec) -> Iterable[Params]:
    return [params]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Something that can be measured."""

    name: str
    target: str
    help: str
    params: tuple[Param, ...]
    tags: tuple[str, ...] = ()  # Presets select by them, and by their own name.
    refusal: Refusal = refuse_nothing
    expansion: Expansion = keep_params

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return why the parameters, all of them, cannot run in a world; None if they can."""
        return self.refusal(params, spec)

    def expand(self, params: Params, spec: WorldSpec) -> Iterable[Params]:
        """Return the parameters of each case, such as one for each group of ranks."""
        return self.expansion(params, spec)

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[2]

    def whole(self, values: Mapping[str, object]) -> dict[str, Value]:
        """Return all parameters in declared order, by default with their defaults."""
        refuse_unknown(values, [param.name for param in self.params], self.name)
        all_params = {}
        for param in self.params:
            has_value = param.name in values
            all_params[param.name] = param.parse(values[param.name]) if has_value else param.default
        return all_params

    def case(self, values: Mapping[str, object]) -> Case:
        """Return the case with these values and the defaults of other parameters."""
        all_params = self.whole(values)
        optional = {param.name: param.default for param in self.params if param.optional}
        params: dict[str, Value] = {}
        defaults: dict[str, Value] = {}
        for name, value in all_params.items():
            is_default = name in optional and value == optional[name]
            destination = defaults if is_default else params
            destination[name] = value
        return make_case(self.name, self.target, params, defaults)


def _comparable_name(name: str, pattern: str) -> str:
    """Return the name for patterns with a dot, otherwise the part after the dot."""
    return name if "." in pattern else name.rpartition(".")[2]


def matches(name: str, pattern: str) -> bool:
    """Return True if a case's name matches a glob."""
    return fnmatchcase(_comparable_name(name, pattern), pattern)


def load_catalogue(modules: Iterable[str]) -> tuple[Definition, ...]:
    """Import the modules and return their definitions."""
    return tuple(definition for name in modules for definition in importlib.import_module(name).DEFINITIONS)


def select(catalogue: Sequence[Definition], patterns: Sequence[str]) -> tuple[Definition, ...]:
    """Return the definitions that match any pattern, all without patterns.

    Raises ``UserError`` if a pattern matches none.
    """
    if not patterns:
        return tuple(catalogue)
    for pattern in patterns:
        if not any(matches(definition.name, pattern) for definition in catalogue):
            names = [_comparable_name(definition.name, pattern) for definition in catalogue]
            hint = suggest_similar(pattern, names)
            raise UserError(f"no case is named {pattern!r}{hint} (parbench list shows what can be measured)")
    return tuple(
        definition for definition in catalogue if any(matches(definition.name, pattern) for pattern in patterns)
    )
