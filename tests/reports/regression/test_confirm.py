"""Suspects launched again: which, on what sides, by what plan, and whose verdict counts in the end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_fixtures import CASE, OTHER, compared, launches, only, run_of
from fake_python import fake
from refusals import refusal
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective, make_plan

from parbench.bench.files import encode_json
from parbench.bench.machine.slurm_allocation import NodeLayout
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import read_plan_file
from parbench.bench.results.runs import Run
from parbench.reports.regression.ab import LOOKS, Launch, Outcome, Side, measure_in_turns
from parbench.reports.regression.compare import Comparison, compare
from parbench.reports.regression.confirm import Confirming, confirm, plan_file, run_words, sides_of, with_fresh
from parbench.reports.regression.rule import Rule

SLOW, QUIET = collective(size_bytes=4096), OTHER
ALGO = {**ENVIRONMENT, "variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}}
TREE = {**ENVIRONMENT, "variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Tree"}}
ANY = "variables.*"
HOW = Confirming(base_python="old/python")


def first() -> Comparison:
    base = [record for case in (CASE, SLOW, QUIET) for record in launches(case)]
    return compared(base, [*launches(CASE, 1.03), *launches(SLOW, 1.2), *launches(QUIET)])


def fresh(factor: float, cases: tuple[Case, ...] = (CASE, SLOW), count: int = 6) -> Outcome:
    sides = [[one for case in cases for one in launches(case, f, count)] for f in (1.0, factor)]
    return Outcome(comparison=compared(*sides), launches=count, reason="every series is decided")


def words(found: Comparison) -> dict[str, str]:
    return {one.case.id: one.word for one in found.series}


def test_suspects_are_what_is_slower_or_cannot_be_told() -> None:
    assert words(first()) == {CASE.id: "AMBIGUOUS", SLOW.id: "SLOWER", QUIET.id: "SAME"}
    for new, word in ((launches(), "SAME"), (launches(factor=0.8), "FASTER"), (launches(count=2), "INSUFFICIENT")):
        found = confirm(compared(launches(), new), Confirming(), (), {})  # fresh launches are no cure for too few
        assert found.notes == ("Nothing was launched again: nothing is SLOWER or AMBIGUOUS.",)
        assert found.counts == {word: 1}


def test_a_plan_asks_for_the_same_cases(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(make_plan([CASE]), timeout_seconds=12.5)
    odd = collective(size_bytes=1 << 20, root=0, share=0.5, inplace=True, note='a "b" \\ c')
    file = tmp_path / "plan.json"
    file.write_bytes(encode_json(plan_file([CASE, odd], plan)))
    read = read_plan_file(file)
    assert (read.preset, read.nproc, read.backend, read.device, read.timeout) == ("node", 4, "gloo", "cpu", 12.5)
    assert (read.launches, read.budget) == (None, None)
    assert [(case.name, case.set) for case in read.case] == [(one.name, one.params) for one in (CASE, odd)]
    assert plan_file([CASE], msgspec.structs.replace(plan, preset="imported")).preset is None


def test_ranks_over_nodes_are_asked_for_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = make_plan([CASE])
    assert run_words(file, plan) == ("--plan", str(file))
    assert run_words(file, msgspec.structs.replace(plan, nproc=1)) == ("--plan", str(file), "--allow-single")
    plan = msgspec.structs.replace(plan, nproc=8, spread=NodeLayout(nodes=4, ntasks_per_node=2, placement="cyclic"))
    asked = run_words(file, plan)
    assert " ".join(asked[2:]) == "--launcher srun --nodes 4 --ntasks-per-node 2 --placement cyclic"
    file.write_bytes(encode_json(plan_file([CASE], plan)))
    assert read_plan_file(file).nproc is None, "with srun parbench run refuses it"


def meant(base: dict[str, Any], new: dict[str, Any], *across: str) -> Comparison:
    return compare(run_of(launches(), base), run_of(launches(factor=1.2), new), Rule(), across)


def threads(count: int) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": str(count)}
    return {**ENVIRONMENT, "variables": variables, "torch": {"version": "2.13.0", "threads": count}}


def test_bases_python_is_a_side_and_variables_that_differ_are_the_sides_without_one() -> None:
    for found, how, sides in (
        (first(), replace(HOW, new_python="new/python"), ["base: old/python", "new: new/python"]),
        (meant(ALGO, TREE, ANY), Confirming(), ["base: NCCL_ALGO=Ring", "new: NCCL_ALGO=Tree"]),
        (
            meant(threads(1), threads(2), ANY, "torch.threads"),  # which follow the variable
            Confirming(),
            ["base: OMP_NUM_THREADS=1", "new: OMP_NUM_THREADS=2"],
        ),
        (meant(ENVIRONMENT, TREE, ANY), Confirming(), ["base: as it is", "new: NCCL_ALGO=Tree"]),
    ):
        assert [f"{one.name}: {one.text}" for one in sides_of(found, how, {})] == sides


def test_the_same_code_is_not_launched_twice_as_if_it_were_two() -> None:
    newer = {**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "version": "2.14.0"}}  # type: ignore[dict-item]
    torches = meant(ENVIRONMENT, newer, "torch.version")
    algos = meant(ALGO, TREE, ANY)
    info = msgspec.structs.replace(algos.base.info, parbench="0.0.9")
    older = replace(algos, base=msgspec.structs.replace(algos.base, info=info))
    for found, what in (
        (first(), "nothing that can be set here tells it from NEW"),
        (torches, "torch.version: 2.13.0 -> 2.14.0"),
        (older, "parbench: 0.0.9 -> 0.1.0"),
    ):
        told = refusal(sides_of, found, Confirming(), {})
        assert told == f"--confirm cannot launch BASE again: {what}; give the Python of BASE's code, --base-python"
        assert sides_of(found, HOW, {})[0].python == "old/python"
    unset = meant(ENVIRONMENT, TREE, ANY)
    told = refusal(sides_of, unset, Confirming(), {"NCCL_ALGO": "Tree"})
    assert told == "--confirm: NCCL_ALGO is set here, and was not in BASE: unset it first"


def test_the_verdict_is_that_of_the_fresh_launches() -> None:
    noted = replace(first(), notes=("Left out of main:2: 5 records.",))
    found = with_fresh(noted, fresh(1.0))
    assert words(found) == {CASE.id: "SAME", SLOW.id: "SAME", QUIET.id: "SAME"}
    assert (first().code(), found.code()) == (1, 0)
    assert only(found, SLOW).reason == "by 6 fresh launches a side"
    assert len(only(found, SLOW).new_times) == 6
    assert only(found, QUIET).reason == "", "what was no suspect was not launched"
    assert found.notes[0] == "Left out of main:2: 5 records.", "what was noted before stays"
    assert f"{SLOW.label}: SLOWER at first, SAME by the fresh launches." in found.notes
    found = with_fresh(first(), fresh(1.2, cases=(CASE, SLOW, QUIET)))
    assert words(found) == {CASE.id: "SLOWER", SLOW.id: "SLOWER", QUIET.id: "SAME"}, "the last was no suspect"
    assert (found.code(), found.counts) == (1, {"SLOWER": 2, "SAME": 1})


def test_the_whole_runs_verdict_is_that_of_the_fresh_launches_too() -> None:
    both = [*launches(CASE), *launches(SLOW)], [*launches(CASE, 1.2), *launches(SLOW, 1.2)]
    slower = compared(*both)
    assert slower.whole is not None
    assert (slower.whole.word, slower.code()) == ("SLOWER", 1)
    found = with_fresh(slower, fresh(1.0))
    assert found.whole is not None
    assert (found.whole.word, found.code()) == ("SAME", 0)
    assert "The whole run: SLOWER at first, SAME by the fresh launches." in found.notes
    alone = with_fresh(slower, fresh(1.0, cases=(CASE,)))
    assert (alone.whole, alone.code()) == (slower.whole, 1), "one series is no whole run"


def test_fresh_launches_that_tell_nothing_acquit_nobody() -> None:
    few = with_fresh(first(), fresh(1.0, count=3))
    assert (only(few, SLOW).word, few.code()) == ("SLOWER", 1)
    [note] = [note for note in few.notes if note.startswith(SLOW.label)]
    assert "SLOWER stands, as the fresh launches tell nothing: INSUFFICIENT, at least 5 launches" in note
    part = with_fresh(first(), fresh(1.0, cases=(CASE,)))
    assert (only(part, CASE).word, only(part, SLOW).word) == ("SAME", "SLOWER")
    assert f"{SLOW.label}: SLOWER stands, as it was not launched again." in part.notes


def over(comparison: Comparison, nodes: int) -> Comparison:
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
    failed = over(compared(launches(SLOW, count=6), [bad(SLOW, 0, "failed", "no rank came")]), nodes=2)
    assert only(failed, SLOW).world.nodes == 1, "which is not known"
    found = with_fresh(over(first(), nodes=2), Outcome(comparison=failed, launches=6, reason="it is decided"))
    assert only(found, SLOW).word == "FAILED", "what failed to start is a verdict over any nodes"


def runs_of(factor: float) -> Launch:
    count = {"base": 0, "new": 0}

    def launch(side: Side, seconds: float) -> Run:
        i = count[side.name]
        count[side.name] += 1
        records = [launches(case, factor if side.name == "new" else 1.0)[i % 5] for case in (CASE, SLOW)]
        run = run_of([msgspec.structs.replace(record, launch=0) for record in records])
        plan = msgspec.structs.replace(run.info.plan, launches=1)
        return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))

    return launch


def test_suspects_are_confirmed_or_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = iter((1.0, 1.3))
    given: dict[str, Any] = {}
    floors: dict[str, Any] = {"a": None}

    def made_up(sides: tuple[Side, Side], launch: Launch, **more: Any) -> Outcome:
        given.update(more)
        return measure_in_turns(sides, runs_of(next(factors)), **{**more, "floors": None})

    monkeypatch.setattr("parbench.reports.regression.confirm.measure_in_turns", made_up)
    for word in ("SAME", "SLOWER"):
        found = confirm(first(), replace(HOW, out=tmp_path, budget_seconds=77.0), ("versions.*",), floors)
        assert {only(found, case).word for case in (CASE, SLOW)} == {word}
        told = f"Suspects were launched again in turns, {LOOKS[0]} fresh launches a side; it ended because every series"
        assert found.notes[0] == f"{told} is decided."
        asked = json.loads((tmp_path / "suspects.json").read_text())
        assert [case["set"]["size_bytes"] for case in asked["case"]] == [1024, 4096], "only suspects"
        assert given["floors"] is floors
        assert (given["budget_seconds"], given["floor"], given["across"]) == (77.0, 0.03, ("versions.*",))


def test_what_cannot_be_launched_again_is_one_sentence(tmp_path: Path) -> None:
    own = msgspec.structs.replace(CASE, target="mine.step:prepare")
    told = refusal(confirm, compared(launches(own), launches(own, 1.2)), HOW, (), {})
    assert "a plan names no case of mine.step:prepare" in told
    (tmp_path / "file").write_text("")
    told = refusal(confirm, first(), replace(HOW, out=tmp_path / "file"), (), {})
    assert "suspects.json cannot be written" in told


def test_launches_are_parbench_run_with_the_plan_on_each_sides_python(tmp_path: Path) -> None:
    python = fake(tmp_path)
    told: list[str] = []
    how = Confirming(base_python=python, new_python=python, out=tmp_path / "out", tell=told.append)
    found = confirm(compared(launches(), launches(factor=1.2)), how, (), {})
    assert told[0] == "1 suspect is launched again, within 10 min 0 s"
    assert [line.split(":")[0] for line in told[1:5]] == ["BASE", "NEW", "NEW", "BASE"]
    [run, *_] = sorted((tmp_path / "out" / "base").iterdir())
    said = (run / "told").read_text().splitlines()
    assert said[said.index("--plan") + 1] == str(tmp_path / "out" / "suspects.json")
    assert said[said.index("--budget") + 1] == "40s", "a twelfth of eight of the ten minutes"
    assert only(found).word == "SAME", "the made-up launches are alike"
