"""Suspects launched again: which, on what sides, by what plan, and whose verdict counts in the end."""

import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from compare_fixtures import CASE, OTHER, compared, launches, only, run_of
from history_fixtures import put
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective, make_plan
from test_ab_launch import FAKE

import parbench
from bench.cases import Case
from bench.errors import UserError
from bench.plan import Spread
from bench.planfile import read_plan_file
from bench.runs import Run
from reports.comparing.ab import LOOKS, Launch, Outcome, Side, measure_in_turns
from reports.comparing.compare import Comparison, compare
from reports.comparing.compare_rule import Rule
from reports.comparing.confirm import Confirming, confirm, plan_text, run_words, sides_of, suspects, with_fresh

SLOW, QUIET = collective(size_bytes=4096), OTHER
ALGO = {**ENVIRONMENT, "variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}}
TREE = {**ENVIRONMENT, "variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Tree"}}
HOW = Confirming(base_python="old/python")


def first(factor: float = 1.2, **more: Any) -> Comparison:
    """Return a comparison in which one case of three became slower by a factor, and one cannot be told."""
    base = [record for case in (CASE, SLOW, QUIET) for record in launches(case)]
    new = [*launches(CASE, 1.03), *launches(SLOW, factor), *launches(QUIET)]
    return compare(run_of(base, **more), run_of(new, **more), Rule())


def fresh(factor: float, cases: tuple[Case, ...] = (CASE, SLOW), count: int = 6) -> Outcome:
    """Return what fresh launches find where all cases are slower by a factor."""
    sides = [[one for case in cases for one in launches(case, f, count)] for f in (1.0, factor)]
    return Outcome(comparison=compared(*sides), launches=count, reason="every series is decided")


def words(found: Comparison) -> dict[str, str]:
    return {one.case.id: one.word for one in found.series}


def refused(comparison: Comparison, how: Confirming = HOW, **environment: str) -> str:
    with pytest.raises(UserError) as error:
        sides_of(comparison, how, environment)
    return str(error.value)


# --- what is launched again ---


def test_suspects_are_what_is_slower_or_cannot_be_told() -> None:
    found = first()
    assert {one.case.id: one.word for one in suspects(found)} == {CASE.id: "AMBIGUOUS", SLOW.id: "SLOWER"}
    assert suspects(compared(launches(), launches(factor=0.8))) == ()
    assert suspects(compared(launches(), launches(count=2))) == (), "fresh launches are no cure for too few"


def test_a_plan_asks_for_the_same_cases(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(make_plan([CASE]), timeout_seconds=12.5)
    odd = collective(size_bytes=1 << 20, root=0, share=0.5, inplace=True, note='a "b" \\ c')
    file = tmp_path / "plan.toml"
    file.write_text(plan_text([CASE, odd], plan))
    read = read_plan_file(file)
    assert (read.preset, read.nproc, read.backend, read.device, read.timeout) == ("node", 4, "gloo", "cpu", 12.5)
    assert read.launches is None
    assert read.budget is None
    assert [case.name for case in read.case] == [CASE.name, odd.name]
    assert [case.set for case in read.case] == [CASE.params, odd.params]
    assert "preset" not in tomllib.loads(plan_text([CASE], msgspec.structs.replace(plan, preset="imported")))


def test_ranks_over_nodes_are_asked_for_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    assert run_words(file, make_plan([CASE])) == ("--plan", str(file))
    alone = msgspec.structs.replace(make_plan([CASE]), nproc=1)
    assert run_words(file, alone) == ("--plan", str(file), "--allow-single")
    spread = Spread(nodes=4, ntasks_per_node=2, placement="cyclic")
    plan = msgspec.structs.replace(make_plan([CASE]), nproc=8, spread=spread)
    words = run_words(file, plan)
    assert " ".join(words[2:]) == "--launcher srun --nodes 4 --ntasks-per-node 2 --placement cyclic"
    file.write_text(plan_text([CASE], plan))
    assert read_plan_file(file).nproc is None, "with srun parbench run refuses it"


def test_ranks_over_nodes_need_an_allocation_and_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("bench.options.check_srun", lambda: None)
    plan = msgspec.structs.replace(make_plan([CASE]), nproc=8, spread=Spread(nodes=4, ntasks_per_node=2))
    file = tmp_path / "plan.toml"
    file.write_text(plan_text([CASE], plan))
    done = CliRunner().invoke(parbench.main, ["run", *run_words(file, plan)])
    assert done.exit_code == 2
    assert "--launcher srun needs an allocation, and SLURM_JOB_ID is not set" in done.stderr


# --- the sides ---


def test_bases_python_is_a_side() -> None:
    base, new = sides_of(first(), replace(HOW, new_python="new/python"), {})
    assert (base.name, base.python, base.variables) == ("base", "old/python", {})
    assert (new.name, new.python, new.variables) == ("new", "new/python", {})


def meant(base: dict[str, Any], new: dict[str, Any], *across: str) -> Comparison:
    return compare(run_of(launches(), base), run_of(launches(factor=1.2), new), Rule(), across)


def test_variables_that_differ_are_the_sides_where_no_python_is_given() -> None:
    found = meant(ALGO, TREE, "variables.NCCL_ALGO")
    assert only(found).word == "SLOWER"
    base, new = sides_of(found, Confirming(), {})
    assert (dict(base.variables), dict(new.variables)) == ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"})
    assert base.python == new.python == ""


def test_a_variable_that_one_side_lacks_must_not_be_set_here() -> None:
    found = meant(ENVIRONMENT, TREE, "variables.NCCL_ALGO")
    base, new = sides_of(found, Confirming(), {})
    assert (dict(base.variables), dict(new.variables)) == ({}, {"NCCL_ALGO": "Tree"})
    told = refused(found, Confirming(), NCCL_ALGO="Tree")
    assert told == "--confirm: NCCL_ALGO is set here, and was not in BASE: unset it first"


def test_the_same_code_is_not_launched_twice_as_if_it_were_two() -> None:
    told = refused(first(), Confirming())
    assert told == (
        "--confirm cannot launch BASE again: nothing that can be set here tells it from NEW; "
        "give the Python of BASE's code, --base-python"
    )


def test_other_versions_need_their_python() -> None:
    newer = {**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "version": "2.14.0"}}  # type: ignore[dict-item]
    found = meant(ENVIRONMENT, newer, "torch.version")
    assert "torch.version: 2.13.0 -> 2.14.0; give the Python" in refused(found, Confirming())
    assert sides_of(found, HOW, {})[0].python == "old/python"


def test_another_parbench_needs_its_python_even_where_a_variable_differs() -> None:
    found = meant(ALGO, TREE, "variables.NCCL_ALGO")
    info = msgspec.structs.replace(found.base.info, parbench="0.0.9")
    older = replace(found, base=msgspec.structs.replace(found.base, info=info))
    assert "parbench: 0.0.9 -> 0.1.0; give the Python" in refused(older, Confirming())


def test_threads_that_follow_a_variable_are_no_other_difference() -> None:
    def threads(count: int) -> dict[str, Any]:
        variables = {"OMP_NUM_THREADS": str(count)}
        return {**ENVIRONMENT, "variables": variables, "torch": {"version": "2.13.0", "threads": count}}

    found = meant(threads(1), threads(2), "variables.OMP_NUM_THREADS", "torch.threads")
    assert sides_of(found, Confirming(), {})[1].variables == {"OMP_NUM_THREADS": "2"}


# --- whose verdict counts ---


def test_the_verdict_is_that_of_the_fresh_launches() -> None:
    found = with_fresh(first(), fresh(1.0))
    assert words(found) == {CASE.id: "SAME", SLOW.id: "SAME", QUIET.id: "SAME"}
    assert (first().code(), found.code()) == (1, 0)
    assert only(found, SLOW).reason == "by 6 fresh launches a side"
    assert len(only(found, SLOW).new_seconds) == 6
    assert only(found, QUIET).reason == "", "what was no suspect was not launched"
    assert f"{SLOW.label}: SLOWER at first, SAME by the fresh launches." in found.notes


def test_what_is_slower_again_is_slower() -> None:
    found = with_fresh(first(), fresh(1.2))
    assert words(found) == {CASE.id: "SLOWER", SLOW.id: "SLOWER", QUIET.id: "SAME"}
    assert found.code() == 1
    assert found.counts == {"SLOWER": 2, "SAME": 1}


def test_too_few_fresh_launches_acquit_nobody() -> None:
    found = with_fresh(first(), fresh(1.0, count=3))
    assert only(found, SLOW).word == "SLOWER"
    assert found.code() == 1
    [note] = [note for note in found.notes if note.startswith(SLOW.label)]
    assert "SLOWER stands, as the fresh launches tell nothing: INSUFFICIENT, at least 5 launches" in note


def test_what_was_not_launched_again_keeps_its_verdict() -> None:
    found = with_fresh(first(), fresh(1.0, cases=(CASE,)))
    assert (only(found, CASE).word, only(found, SLOW).word) == ("SAME", "SLOWER")
    assert f"{SLOW.label}: SLOWER stands, as it was not launched again." in found.notes


def over(comparison: Comparison, nodes: int) -> Comparison:
    """Return a comparison with all its series on so many nodes."""

    def moved(run: Run) -> Run:
        world = msgspec.structs.replace(WORLD, nodes=nodes)
        records = tuple(msgspec.structs.replace(one, world=world) for one in run.records if one.status == "ok")
        rest = tuple(one for one in run.records if one.status != "ok")
        return msgspec.structs.replace(run, records=(*records, *rest))

    return compare(moved(comparison.base), moved(comparison.new), comparison.rule)


def test_a_fresh_verdict_on_another_world_is_none() -> None:
    found = with_fresh(over(first(), nodes=2), fresh(1.0))
    assert (only(found, SLOW).word, only(found, SLOW).world.nodes, found.code()) == ("SLOWER", 2, 1)
    assert (
        f"{SLOW.label}: SLOWER stands, as the fresh launches ran on 4 ranks on 1 node, gloo, cpu, "
        "and it on 4 ranks on 2 nodes, gloo, cpu."
    ) in found.notes


def test_fresh_launches_that_failed_to_start_are_a_verdict_over_any_nodes() -> None:
    records = [[*launches(SLOW, count=6)], [bad(SLOW, 0, "failed", "no rank came")]]
    failed = over(compared(*records), nodes=2)
    assert only(failed, SLOW).world.nodes == 1, "which is not known"
    found = with_fresh(over(first(), nodes=2), Outcome(comparison=failed, launches=6, reason="it is decided"))
    assert only(found, SLOW).word == "FAILED"


def test_what_was_noted_before_stays() -> None:
    noted = replace(first(), notes=("Left out of main:2: 5 records.",))
    assert with_fresh(noted, fresh(1.0)).notes[0] == "Left out of main:2: 5 records."
    quiet = replace(compared(launches(), launches()), notes=noted.notes)
    assert len(confirm(quiet, Confirming(), (), {}).notes) == 2


def test_a_fresh_verdict_on_what_was_no_suspect_is_not_taken() -> None:
    found = with_fresh(first(), fresh(1.5, cases=(CASE, SLOW, QUIET)))
    assert only(found, QUIET).word == "SAME"


# --- the whole, with launches that are made up ---


def runs_of(factor: float) -> Callable[[Side], Run]:
    """Return a machine on which the new side takes longer by a factor."""
    count = {"base": 0, "new": 0}

    def launch(side: Side) -> Run:
        i = count[side.name]
        count[side.name] += 1
        records = [launches(case, factor if side.name == "new" else 1.0)[i % 5] for case in (CASE, SLOW)]
        run = run_of([msgspec.structs.replace(record, launch=0) for record in records])
        plan = msgspec.structs.replace(run.info.plan, launches=1)
        return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))

    return launch


@pytest.mark.parametrize(("factor", "word"), [(1.0, "SAME"), (1.3, "SLOWER")])
def test_suspects_are_confirmed_or_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, word: str
) -> None:
    def made_up(sides: tuple[Side, Side], launch: Launch, **more: Any) -> Outcome:
        return measure_in_turns(sides, runs_of(factor), **more)

    monkeypatch.setattr("reports.comparing.confirm.measure_in_turns", made_up)
    found = confirm(first(), replace(HOW, out=tmp_path), (), {})
    assert {only(found, case).word for case in (CASE, SLOW)} == {word}
    assert found.notes[0] == (
        f"Suspects were launched again in turns, {LOOKS[0]} fresh launches a side; it ended because every series is "
        "decided."
    )
    asked = tomllib.loads((tmp_path / "suspects.toml").read_text())
    assert [case["set"]["size_bytes"] for case in asked["case"]] == [1024, 4096], "only suspects"


def test_nothing_is_launched_where_nothing_is_suspect() -> None:
    found = confirm(compared(launches(), launches()), Confirming(), (), {})
    assert found.notes == ("Nothing was launched again: nothing is SLOWER or AMBIGUOUS.",)
    assert found.counts == {"SAME": 1}


def test_a_step_of_the_users_own_is_named_as_what_cannot_be_launched() -> None:
    own = msgspec.structs.replace(CASE, target="mine.step:prepare")
    found = compared(launches(own), launches(own, 1.2))
    with pytest.raises(UserError, match=r"a plan names no case of mine\.step:prepare"):
        confirm(found, HOW, (), {})


def test_launches_are_parbench_run_with_the_plan_on_each_sides_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, run=str(put(tmp_path / "template", 0))))
    python.chmod(0o755)
    told: list[str] = []
    how = Confirming(base_python=str(python), new_python=str(python), out=tmp_path / "out", tell=told.append)
    found = compared(launches(), launches(factor=1.2))
    fake = confirm(found, how, (), {})
    assert told[0] == "1 suspect is launched again, within 10 min 0 s"
    assert [line.split(":")[0] for line in told[1:5]] == ["BASE", "NEW", "NEW", "BASE"]
    [run, *_] = sorted((tmp_path / "out" / "base").iterdir())
    words = (run / "told").read_text().splitlines()
    assert words[words.index("--plan") + 1] == str(tmp_path / "out" / "suspects.toml")
    assert only(fake).word == "SAME", "the made-up launches are alike"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"suspects\.toml cannot be written"):
        confirm(first(), replace(HOW, out=tmp_path / "file"), (), {})


def test_floors_go_to_the_fresh_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, Any]] = []

    def noted(sides: tuple[Side, Side], launch: Launch, **more: Any) -> Outcome:
        seen.append(more)
        return fresh(1.0)

    monkeypatch.setattr("reports.comparing.confirm.measure_in_turns", noted)
    floors: dict[str, Any] = {"a": None}
    confirm(first(), replace(HOW, out=tmp_path), ("versions.*",), floors)
    assert seen[0]["floors"] is floors
    assert "versions.*" in seen[0]["across"]
