"""Suspects, confirmed: what a comparison calls slower or cannot tell is launched again, both sides in turns (ABBA).

Fresh launches in turns know nothing of the hours between two runs; their verdict takes the place of the first.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.plan.cases import Case
from bench.plan.params import Value
from bench.plan.plan import PRESETS, Plan
from bench.results.records import WorldInfo
from bench.text import UserError, format_duration, writing
from reports.regression.ab import FOLLOWS, LOOKS, Launch, Launcher, Outcome, Side, measure_in_turns
from reports.regression.compare import Comparison, Family, Series, Word, world_words
from reports.regression.environment import NOT_SET, Change
from reports.regression.noise_floor import Floor

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
        nothing = "Nothing was launched again: nothing is SLOWER or AMBIGUOUS."
        return replace(comparison, notes=(*comparison.notes, nothing))
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
    lines += [f"nproc = {plan.nproc}"] if plan.spread is None else []  # srun's ranks are counted by nodes
    lines += [f"backend = {json.dumps(plan.backend)}", f"device = {json.dumps(plan.device)}"]
    lines.append(f"timeout = {plan.timeout_seconds}")
    for case in cases:
        lines += ["", "[[case]]", f"name = {json.dumps(case.name)}", "[case.set]"]
        lines += [f"{name} = {_toml(value)}" for name, value in case.params.items()]
    return "\n".join([*lines, ""])


def run_words(file: Path, plan: Plan) -> tuple[str, ...]:
    """Return the options of ``parbench run`` that measure a plan file's cases on ranks such as a run's plan had."""
    words = ("--plan", str(file))
    if plan.spread is None:
        return (*words, "--allow-single") if plan.nproc == 1 else words
    spread = plan.spread
    where = ("--launcher", "srun", "--nodes", str(spread.nodes), "--ntasks-per-node", str(spread.ntasks_per_node))
    return (*words, *where, "--placement", spread.placement)


def with_fresh(comparison: Comparison, outcome: Outcome) -> Comparison:
    """Return the comparison with the verdicts that the fresh launches gave, and sentences on each suspect.

    A verdict on another world is none on the suspect's.
    """
    fresh = {_key(one): one for one in outcome.comparison.series if one.word not in _NO_VERDICT}
    told = f"{outcome.launches} fresh launches a side"
    notes = [f"Suspects were launched again in turns, {told}; it ended because {outcome.reason}."]
    for one in suspects(comparison):
        name = one.case.label
        if _key(one) in fresh:
            notes.append(f"{name}: {one.word} at first, {fresh[_key(one)].word} by the fresh launches.")
        else:
            notes.append(f"{name}: {one.word} stands, as {_why_not(one, outcome)}.")
    families = tuple(
        Family(series=tuple(_taken(one, fresh, told) for one in family.series)) for family in comparison.families
    )
    return replace(comparison, families=families, notes=(*comparison.notes, *outcome.comparison.notes, *notes))


def _key(one: Series) -> tuple[str, WorldInfo]:
    return one.case.id, _world(one)


def _world(one: Series) -> WorldInfo:
    """Return the world of the side that was measured: ranks that never started do not know over how many nodes."""
    rows = [row for row in (one.new, one.base) if row is not None and row.launches]
    return rows[0].world if rows else one.world


def _taken(one: Series, fresh: Mapping[tuple[str, WorldInfo], Series], told: str) -> Series:
    found = fresh.get(_key(one)) if one.word in SUSPECTS else None
    if found is None:
        return one
    return replace(found, reason="; ".join(part for part in (found.reason, f"by {told}") if part))


def _why_not(one: Series, outcome: Outcome) -> str:
    """Return why the fresh launches say nothing of a suspect."""
    found = [other for other in outcome.comparison.series if other.case.id == one.case.id]
    if not found:
        return "it was not launched again"
    alike = [other for other in found if _world(other) == _world(one)]
    if not alike:
        return f"the fresh launches ran on {world_words(_world(found[0]))}, and it on {world_words(_world(one))}"
    return f"the fresh launches tell nothing: {alike[0].word}, {alike[0].reason}"


def _launcher(cases: Sequence[Case], plan: Plan, how: Confirming) -> Launch:
    file = how.out / "suspects.toml"
    with writing(file):
        how.out.mkdir(parents=True, exist_ok=True)
        file.write_text(plan_text(cases, plan))
    what = "1 suspect is" if len(cases) == 1 else f"{len(cases)} suspects are"
    how.tell(f"{what} launched again, within {format_duration(how.budget_seconds)}")
    seconds = how.budget_seconds / (2 * LOOKS[0])
    return Launcher(out=how.out, words=run_words(file, plan), seconds=seconds, tell=how.tell).launch


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
