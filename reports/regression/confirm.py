"""Suspects, confirmed: what a comparison calls slower or cannot tell is launched again, both sides in turns (ABBA).

Fresh launches in turns know nothing of the hours between two runs; their verdict takes the place of the first.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from parbench.bench.files import encode_json
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import PRESETS, FileCase, Plan, PlanFile
from parbench.bench.results.records import WorldInfo
from parbench.bench.text import UserError, format_duration, writing
from parbench.reports.regression.ab import FOLLOWS, Outcome, Side, launch_run, measure_in_turns
from parbench.reports.regression.compare import Comparison, Family, Series, Word, world_words
from parbench.reports.regression.environment import NOT_SET
from parbench.reports.regression.noise_floor import Floor

SUSPECTS: frozenset[Word] = frozenset({"SLOWER", "AMBIGUOUS"})
_NO_VERDICT: frozenset[Word] = frozenset({"INSUFFICIENT", "ENV-CHANGED", "MISSING", "NEW"})


@dataclass(frozen=True, kw_only=True)
class Confirming:
    """How to launch suspects again: both sides' Pythons, empty for this one, the time, the most launches, a folder."""

    base_python: str = ""
    new_python: str = ""
    budget_seconds: float = 600.0
    launches: int | None = None
    out: Path = Path("runs/confirm")
    tell: Callable[[str], None] = lambda text: None


def confirm(comparison: Comparison, how: Confirming, across: Sequence[str], floors: Mapping[str, Floor]) -> Comparison:
    """Return it with fresh launches' verdicts for suspects; ``UserError`` if BASE cannot be launched from here."""
    found = [one for one in comparison.series if one.word in SUSPECTS]
    if not found:
        nothing = "Nothing was launched again: nothing is SLOWER or AMBIGUOUS."
        return replace(comparison, notes=(*comparison.notes, nothing))
    sides = sides_of(comparison, how, os.environ)
    again = [one.case for one in found if one.case.target.startswith("parbench.")]
    if not again:
        case = found[0].case
        raise UserError(f"--confirm cannot launch {case.label} again: a plan names no case of {case.target}")
    file, plan = how.out / "suspects.json", comparison.new.info.plan
    with writing(file):
        how.out.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode_json(plan_file(again, plan)))
    what = "1 suspect is" if len(again) == 1 else f"{len(again)} suspects are"
    how.tell(f"{what} launched again, within {format_duration(how.budget_seconds)}")
    outcome = measure_in_turns(
        sides,
        partial(launch_run, out=how.out, words=run_words(file, plan), tell=how.tell),
        budget_seconds=how.budget_seconds,
        floor=comparison.rule.floor,
        launches=how.launches,
        across=(*across, *(change.path for change in comparison.changes if change.meant)),
        floors=floors,
    )
    return with_fresh(comparison, outcome)


def sides_of(comparison: Comparison, how: Confirming, environment: Mapping[str, str]) -> tuple[Side, Side]:
    """Return both sides to launch from here; ``UserError`` if BASE needs a Python, or nothing tells it from NEW."""
    prefix = "variables."
    differ = {one.path.removeprefix(prefix): one for one in comparison.changes if one.path.startswith(prefix)}
    if not how.base_python:
        follow = {FOLLOWS.get(name) for name in differ}
        versions = {run.info.parbench for run in (comparison.base, comparison.new)}
        rest = [f"parbench: {' -> '.join(sorted(versions))}"] if len(versions) > 1 else []
        others = [one for one in comparison.changes if one.meant and not one.path.startswith(prefix)]
        rest += [one.text for one in others if one.path not in follow]
        if rest or not differ:
            what = "; ".join(rest[:3]) or "nothing that can be set here tells it from NEW"
            give = "give the Python of BASE's code, --base-python"
            raise UserError(f"--confirm cannot launch BASE again: {what}; {give}")
    sides = []
    for side, python in (("base", how.base_python), ("new", how.new_python)):
        values = {name: one.new if side == "new" else one.base for name, one in differ.items()}
        for name, value in values.items():
            if value == NOT_SET and name in environment:
                raise UserError(f"--confirm: {name} is set here, and was not in {side.upper()}: unset it first")
        variables = {name: value for name, value in values.items() if value != NOT_SET}
        sides.append(Side(name=side, variables=variables, python=python))
    return sides[0], sides[1]


def plan_file(cases: Sequence[Case], plan: Plan) -> PlanFile:
    return PlanFile(
        preset=plan.preset if plan.preset in PRESETS else None,
        nproc=plan.nproc if plan.spread is None else None,  # srun's ranks are counted by nodes
        backend=plan.backend,
        device=plan.device,
        timeout=plan.timeout_seconds,
        case=tuple(FileCase(name=case.name, set=dict(case.params)) for case in cases),
    )


def run_words(file: Path, plan: Plan) -> tuple[str, ...]:
    """Return the options of ``parbench run`` that measure a plan file's cases on ranks such as a run's plan had."""
    words = ("--plan", str(file))
    if (spread := plan.spread) is None:
        return (*words, "--allow-single") if plan.nproc == 1 else words
    where = ("--launcher", "srun", "--nodes", str(spread.nodes), "--ntasks-per-node", str(spread.ntasks_per_node))
    return (*words, *where, "--placement", spread.placement)


def with_fresh(comparison: Comparison, outcome: Outcome) -> Comparison:
    """Return it with the verdicts that fresh launches on the suspects' worlds gave, and a note on each suspect."""
    again = {(one.case.id, _world(one)): one for one in outcome.comparison.series}
    told = f"{outcome.launches} fresh launches a side"
    notes = [f"Suspects were launched again in turns, {told}; it ended because {outcome.reason}."]

    def taken(one: Series) -> Series:
        if one.word not in SUSPECTS:
            return one
        fresh = again.get((one.case.id, _world(one)))
        worlds = [world for case_id, world in again if case_id == one.case.id]
        if fresh and fresh.word not in _NO_VERDICT:
            notes.append(f"{one.case.label}: {one.word} at first, {fresh.word} by the fresh launches.")
            return replace(fresh, reason="; ".join(part for part in (fresh.reason, f"by {told}") if part))
        why = "it was not launched again"
        if fresh:
            why = f"the fresh launches tell nothing: {fresh.word}, {fresh.reason}"
        elif worlds:
            why = f"the fresh launches ran on {world_words(worlds[0])}, and it on {world_words(_world(one))}"
        notes.append(f"{one.case.label}: {one.word} stands, as {why}.")
        return one

    families = tuple(Family(series=tuple(map(taken, family.series))) for family in comparison.families)
    whole = comparison.whole
    if whole and whole.word in SUSPECTS and (fresh_whole := outcome.comparison.whole):
        notes.append(f"The whole run: {whole.word} at first, {fresh_whole.word} by the fresh launches.")
        whole = fresh_whole
    return replace(
        comparison, whole=whole, families=families, notes=(*comparison.notes, *outcome.comparison.notes, *notes)
    )


def _world(one: Series) -> WorldInfo:
    """Return the world of the side that was measured: ranks that never started do not know over how many nodes."""
    rows = [row for row in (one.new, one.base) if row is not None and row.launches]
    return rows[0].world if rows else one.world
