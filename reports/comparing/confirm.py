"""Suspects, confirmed: what a comparison calls slower or cannot tell is launched again, both sides in turns (ABBA).

Fresh launches in turns know nothing of the hours between two runs; their verdict takes the place of the first.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cases import Case
from bench.errors import UserError
from bench.params import Value
from bench.plan import Plan
from bench.presets import PRESETS
from bench.units import format_duration
from reports.comparing.ab import FOLLOWS, LOOKS, Launch, Outcome, Side, measure_in_turns
from reports.comparing.ab_launch import Launcher
from reports.comparing.compare import Comparison, Family, Series, Word
from reports.comparing.compare_environment import NOT_SET, Change
from reports.comparing.noise_floor import Floor

SUSPECTS: frozenset[Word] = frozenset({"SLOWER", "AMBIGUOUS"})
_NO_VERDICT: frozenset[Word] = frozenset({"INSUFFICIENT", "ENV-CHANGED", "MISSING", "NEW"})
_OWN = ("bench", "workloads")
"""Packages whose cases a plan file can name."""
_VARIABLES = "variables."
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Confirming:
    """How to launch suspects again: the Pythons of both sides, empty for this one, the time, and the runs' folder."""

    base_python: str = ""
    new_python: str = ""
    budget_seconds: float = 600.0
    out: Path = Path("runs/confirm")
    tell: Callable[[str], None] = lambda text: None


def confirm(comparison: Comparison, how: Confirming, across: Sequence[str], floors: Mapping[str, Floor]) -> Comparison:
    """Return the comparison with the verdicts of fresh launches for its suspects.

    ``UserError`` if BASE cannot be launched again from here.
    """
    found = suspects(comparison)
    if not found:
        return replace(comparison, notes=("Nothing was launched again: nothing is SLOWER or AMBIGUOUS.",))
    sides = sides_of(comparison, how, os.environ)
    again = [one.case for one in found if one.case.target.partition(".")[0] in _OWN]
    if not again:
        raise UserError(
            f"--confirm cannot launch {found[0].case.label} again: a plan names no case of {found[0].case.target}"
        )
    launch = _launcher(again, comparison.new.info.plan, how)
    outcome = measure_in_turns(
        sides,
        launch,
        budget_seconds=how.budget_seconds,
        floor=comparison.rule.floor,
        across=(*across, *(change.path for change in comparison.changes if change.meant)),
        floors=floors,
    )
    return with_fresh(comparison, outcome)


def suspects(comparison: Comparison) -> tuple[Series, ...]:
    """Return the series that are launched again."""
    return tuple(one for one in comparison.series if one.word in SUSPECTS)


def sides_of(comparison: Comparison, how: Confirming, environment: Mapping[str, str]) -> tuple[Side, Side]:
    """Return BASE and NEW as sides to launch from this environment.

    Variables that differ are set. All else needs BASE's Python: ``UserError`` if it is not given, or if nothing that
    could be set tells the two apart, for then the same would be launched twice.
    """
    differ = [one for one in comparison.changes if one.path.startswith(_VARIABLES)]
    if not how.base_python:
        follow = {FOLLOWS[name] for name in map(_name, differ) if name in FOLLOWS}
        versions = {run.info.parbench for run in (comparison.base, comparison.new)}
        rest = [f"parbench: {' -> '.join(sorted(versions))}"] if len(versions) > 1 else []
        rest += [one.text for one in comparison.changes if one.meant and one not in differ and one.path not in follow]
        if rest or not differ:
            what = "; ".join(rest[:_SHOWN]) or "nothing that can be set here tells it from NEW"
            raise UserError(
                f"--confirm cannot launch BASE again: {what}; give the Python of BASE's code, --base-python"
            )
    return (
        Side(name="base", variables=_variables(differ, environment, new=False), python=how.base_python),
        Side(name="new", variables=_variables(differ, environment, new=True), python=how.new_python),
    )


def plan_text(cases: Sequence[Case], plan: Plan) -> str:
    """Return a plan file that asks for these cases as a run's plan did."""
    lines = [f"preset = {json.dumps(plan.preset)}"] if plan.preset in PRESETS else []
    lines += [f"nproc = {plan.nproc}", f"backend = {json.dumps(plan.backend)}", f"device = {json.dumps(plan.device)}"]
    lines.append(f"timeout = {plan.timeout_seconds}")
    for case in cases:
        lines += ["", "[[case]]", f"name = {json.dumps(case.name)}", "[case.set]"]
        lines += [f"{name} = {_toml(value)}" for name, value in case.params.items()]
    return "\n".join([*lines, ""])


def with_fresh(comparison: Comparison, outcome: Outcome) -> Comparison:
    """Return the comparison with the verdicts that the fresh launches gave, and sentences on each suspect."""
    fresh = {one.case.id: one for one in outcome.comparison.series if one.word not in _NO_VERDICT}
    told = f"{outcome.launches} fresh launches a side"
    notes = [f"Suspects were launched again in turns, {told}; it ended because {outcome.reason}."]
    for one in suspects(comparison):
        name = one.case.label
        if one.case.id in fresh:
            notes.append(f"{name}: {one.word} at first, {fresh[one.case.id].word} by the fresh launches.")
        else:
            notes.append(f"{name}: {one.word} stands, as {_why_not(one, outcome)}.")
    families = tuple(
        Family(series=tuple(_taken(one, fresh, told) for one in family.series)) for family in comparison.families
    )
    return replace(comparison, families=families, notes=tuple(notes))


def _taken(one: Series, fresh: Mapping[str, Series], told: str) -> Series:
    found = fresh.get(one.case.id) if one.word in SUSPECTS else None
    if found is None:
        return one
    return replace(found, reason="; ".join(part for part in (found.reason, f"by {told}") if part))


def _why_not(one: Series, outcome: Outcome) -> str:
    """Return why the fresh launches say nothing of a suspect."""
    found = [other for other in outcome.comparison.series if other.case.id == one.case.id]
    return (
        f"the fresh launches tell nothing: {found[0].word}, {found[0].reason}" if found else "it was not launched again"
    )


def _launcher(cases: Sequence[Case], plan: Plan, how: Confirming) -> Launch:
    file = how.out / "suspects.toml"
    try:
        how.out.mkdir(parents=True, exist_ok=True)
        file.write_text(plan_text(cases, plan))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    what = "1 suspect is" if len(cases) == 1 else f"{len(cases)} suspects are"
    how.tell(f"{what} launched again, within {format_duration(how.budget_seconds)}")
    words = ("--plan", str(file), *(("--allow-single",) if plan.nproc == 1 else ()))
    seconds = how.budget_seconds / (2 * LOOKS[0])
    return Launcher(out=how.out, words=words, seconds=seconds, tell=how.tell).launch


def _variables(differ: Sequence[Change], environment: Mapping[str, str], *, new: bool) -> dict[str, str]:
    """Return the variables of a side; ``UserError`` if one that is set here was not."""
    values = {_name(one): one.new if new else one.base for one in differ}
    for name, value in values.items():
        if value == NOT_SET and name in environment:
            raise UserError(f"--confirm: {name} is set here, and was not in {'NEW' if new else 'BASE'}: unset it first")
    return {name: value for name, value in values.items() if value != NOT_SET}


def _name(change: Change) -> str:
    return change.path.removeprefix(_VARIABLES)


def _toml(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)
