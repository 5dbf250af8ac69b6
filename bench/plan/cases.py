"""What is asked: a case, and the definitions that cases are made from.

A definition is what ``parbench list`` shows: a name, a target and declared parameters. It needs no torch; the target,
written ``package.module:prepare``, is imported only by the ranks.
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
from parbench.bench.text import UserError, did_you_mean

_OWN = "custom."
EXPLAINER = "parbench.workloads.step.own:OwnStep"
"""What explains a step of the user's own; as text, as all targets are."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure: ``params`` tell it from others, ``defaults`` are the optional ones that nobody changed.

    ``id`` is the hash of name, target and ``params`` in canonical JSON.
    """

    id: str
    name: str
    target: str
    params: dict[str, ParamValue]
    defaults: dict[str, ParamValue] = {}

    @property
    def whole(self) -> dict[str, Value]:
        """All parameters."""
        return {**self.defaults, **self.params}

    @property
    def is_own(self) -> bool:
        """Whether it is a step of the user's own, of ``--target``."""
        return self.name.startswith(_OWN)

    @property
    def short_name(self) -> str:
        """The name without its kind: ``all_reduce``."""
        return self.name.partition(".")[2] or self.name

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.params.items())])


def make_case(name: str, target: str, params: Mapping[str, Value], defaults: Mapping[str, Value] | None = None) -> Case:
    canonical = msgspec.json.encode({"name": name, "target": target, "params": params}, order="deterministic")
    digest = hashlib.sha256(canonical).hexdigest()[:12]
    return Case(id=digest, name=name, target=target, params=dict(params), defaults=dict(defaults or {}))


Params = Mapping[str, Value]


def only_itself(given: Params, spec: WorldSpec) -> Iterable[Params]:
    return (given,)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Something that can be measured.

    ``refuse`` says in words why given parameters cannot run in a world; ``expand`` makes several cases of them where
    one is not enough, such as one for each group of ranks. Presets choose it by ``tags``, their own names among them.
    """

    name: str
    target: str
    help: str
    params: tuple[Param, ...]
    tags: tuple[str, ...] = ()
    refuse: Callable[[Params, WorldSpec], str | None] = lambda params, spec: None
    expand: Callable[[Params, WorldSpec], Iterable[Params]] = only_itself

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[2]

    def whole(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return all parameters in declared order, those not given by their defaults."""
        refuse_unknown(given, [param.name for param in self.params], self.name)
        return {p.name: p.parse(given[p.name]) if p.name in given else p.default for p in self.params}

    def case(self, given: Mapping[str, object]) -> Case:
        whole = self.whole(given)
        defaults = {p.name: p.default for p in self.params if p.optional and whole[p.name] == p.default}
        params = {name: value for name, value in whole.items() if name not in defaults}
        return make_case(self.name, self.target, params, defaults)


def matches(name: str, pattern: str) -> bool:
    """Return True if a case's name matches a glob. A pattern without a dot is compared with the part after the dot."""
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def load_catalogue(modules: Iterable[str]) -> tuple[Definition, ...]:
    return tuple(definition for name in modules for definition in importlib.import_module(name).DEFINITIONS)


def select(catalogue: Sequence[Definition], patterns: Sequence[str]) -> tuple[Definition, ...]:
    """Return the definitions that match any pattern, all if there is none; a pattern that matches none is refused."""
    for pattern in patterns:
        if not any(matches(definition.name, pattern) for definition in catalogue):
            names = [d.name if "." in pattern else d.name.rpartition(".")[2] for d in catalogue]
            hint = did_you_mean(pattern, names)
            raise UserError(f"no case is named {pattern!r}{hint} (parbench list shows what can be measured)")
    return tuple(d for d in catalogue if not patterns or any(matches(d.name, pattern) for pattern in patterns))
