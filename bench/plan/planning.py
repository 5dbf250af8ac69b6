"""From what the user asked to a plan. Pure; done before any rank starts."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.errors import UserError
from bench.plan.cases import Case, Definition, Setting, matches, select
from bench.plan.dtypes import DTYPES
from bench.plan.params import Value, unknown_parameter
from bench.plan.plan import Plan, Skipped
from bench.plan.presets import PRESETS, Entry, Preset
from bench.words import did_you_mean, listed

_LARGEST_ITEMSIZE = max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for: None and empty mean that the preset decides.

    ``settings`` holds the text of ``--set`` by parameter; ``entries`` replace the preset's when there are any.
    """

    preset: str = "node"
    only: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    launches: int | None = None
    budget_seconds: float | None = None
    timeout_seconds: float | None = None


Candidate = tuple[Case, str | None]
"""A case with the reason why it cannot run here, None if it can."""


def make_plan(request: Request, catalogue: Sequence[Definition], setting: Setting) -> Plan:
    """Return the plan; ``UserError`` if it names what does not exist, or asks for what cannot run here."""
    preset = _preset(request.preset)
    entries = request.entries or preset.entries
    chosen = _chosen(request, catalogue)
    _check_settings(request.settings, chosen, "--set: what was chosen")
    for entry in request.entries:
        _check_settings(entry.set, select(catalogue, [entry.name]), f"case {entry.name!r}")
    candidates = [pair for definition in chosen for pair in _candidates(definition, entries, request, setting)]
    _check_possible(candidates, {*request.settings, *(name for entry in request.entries for name in entry.set)})
    skipped = {case.id: Skipped(case=case, reason=reason) for case, reason in candidates if reason is not None}
    return Plan(
        preset=request.preset,
        cases=tuple({case.id: case for case, reason in candidates if reason is None}.values()),
        skipped=tuple(skipped.values()),
        nproc=setting.nproc,
        backend=setting.backend,
        device=setting.device,
        launches=request.launches or preset.launches,
        budget_seconds=request.budget_seconds or preset.budget_seconds,
        timeout_seconds=request.timeout_seconds or preset.timeout_seconds,
        measure=preset.measure,
    )


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"no preset is named {name!r}: it is {listed(PRESETS)}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def _chosen(request: Request, catalogue: Sequence[Definition]) -> tuple[Definition, ...]:
    """Return what is to be measured: the given entries' cases, or all, narrowed by ``only``."""
    named = select(catalogue, [entry.name for entry in request.entries])
    wanted = select(catalogue, request.only)
    chosen = tuple(definition for definition in named if definition in wanted)
    if not request.only and not request.entries:
        omit = PRESETS[request.preset].omit
        chosen = tuple(d for d in chosen if not any(matches(d.name, pattern) for pattern in omit))
    if not chosen:
        raise UserError(f"--only {' '.join(request.only)} leaves nothing of the plan's cases")
    return chosen


def _check_settings(settings: Mapping[str, str], chosen: Sequence[Definition], source: str) -> None:
    known = {param.name for definition in chosen for param in definition.params}
    for name in settings:
        if name not in known:
            where = chosen[0].name if len(chosen) == 1 else f"{source} ({len(chosen)} cases)"
            raise unknown_parameter(name, known, where)


def _candidates(
    definition: Definition, entries: Sequence[Entry], request: Request, setting: Setting
) -> list[Candidate]:
    fitting = [entry for entry in entries if matches(definition.name, entry.name)] or [Entry(name=definition.name)]
    candidates = []
    for entry in fitting:
        for given in _product(definition, entry.set, request.settings):
            if not request.entries and "size_bytes" not in request.settings:
                given = _divisible(given, setting.nproc)
            candidates += _expanded(definition, given, setting)
    return candidates


def _expanded(definition: Definition, given: Mapping[str, Value], setting: Setting) -> list[Candidate]:
    """Return the cases that ``given`` means, or itself with the reason why it means none here."""
    try:
        cases = [definition.case(one) for one in definition.expand(given, setting)]
    except UserError as error:
        return [(definition.case(given), str(error))]
    return [(case, definition.refuse(case.params, setting)) for case in cases]


def _divisible(given: dict[str, Value], nproc: int) -> dict[str, Value]:
    """Return a preset's parameters with the size rounded up to whole elements of any type on every rank.

    A preset means a size about so large; what a user asks for is measured as asked, or refused.
    """
    if "size_bytes" not in given:
        return given
    step = nproc * _LARGEST_ITEMSIZE
    return {**given, "size_bytes": -(-int(given["size_bytes"]) // step) * step}


def _product(definition: Definition, preset: Mapping[str, str], settings: Mapping[str, str]) -> list[dict[str, Value]]:
    """Return the product of all values given for the definition's parameters; the user's replace the preset's."""
    by_name = {param.name: param for param in definition.params}
    texts = {name: text for name, text in {**preset, **settings}.items() if name in by_name}
    many = [by_name[name].parse_many(text) for name, text in texts.items()]
    return [dict(zip(texts, values, strict=True)) for values in itertools.product(*many)]


def _check_possible(candidates: Sequence[Candidate], asked: Iterable[str]) -> None:
    """Refuse a value of a parameter asked for by name under which no case can run; a preset's is only skipped."""
    for name in asked:
        for value in dict.fromkeys(case.params[name] for case, _ in candidates if name in case.params):
            reasons = [reason for case, reason in candidates if case.params.get(name) == value]
            if None not in reasons:
                raise UserError(f"{name} = {value}: {reasons[0]}")
    if all(reason is not None for _, reason in candidates):
        case, reason = candidates[0]
        raise UserError(f"none of the {len(candidates)} cases asked for can run here; {case.label}: {reason}")
