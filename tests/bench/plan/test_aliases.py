"""Former names in files and scripts mean the same as ever: records, histories, options, plan files."""

import json
import shutil
from pathlib import Path

import pytest
from fake_runs import MODULES, be_alone
from paths import TESTS, Command
from refusals import refusal

from parbench.bench.plan.aliases import CASES, METRICS, PARAMS, TARGETS
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import SCHEMA
from parbench.bench.results.runs import load_run
from parbench.reports.regression.compare import compare
from parbench.reports.regression.rule import Rule

FORMER = TESTS / "golden" / "runs" / "former"
"""Groups, background load, rounds of pairs, a matrix product and a copy, as 0.1 wrote them."""


def test_a_run_of_0_1_is_read_by_present_names_and_keeps_its_ids() -> None:
    definitions = {definition.name: definition for definition in load_catalogue(MODULES)}
    for path in (FORMER.with_name("steps"), FORMER):
        raw = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
        assert {one["schema"] for one in raw} == {1}
        run = load_run(path)
        for was, record in zip(raw, run.records, strict=True):
            case = record.case
            assert case.id == was["case"]["id"]
            today = definitions[case.name].case(case.params)
            assert (today.id, today.target, today.params) == (case.id, case.target, case.params), case.label
            assert case.defaults.items() <= today.defaults.items()
    names = {name for record in run.records for name in record.case.params}
    assert names >= {"background", "group_index", "concurrent", "direction"}
    assert not names & PARAMS.keys()
    assert {record.case.name for record in run.records} >= {"p2p.pairwise", "compute.gemm", "memory.copy"}
    assert {record.noise.grade for record in run.records if record.noise} <= {"stable", "fair", "noisy", "very noisy"}
    assert {case.id for case in run.info.plan.cases} == {record.case.id for record in run.records}
    assert not any(case.target.startswith(tuple(TARGETS)) for case in run.info.plan.cases)


def test_metrics_of_0_1_have_their_present_names() -> None:
    steps = FORMER.with_name("steps")
    written = {
        name for line in (steps / "records.jsonl").read_text().splitlines() for name in json.loads(line)["metrics"]
    }
    found = {name for record in load_run(steps).records for name in record.metrics}
    former = written & METRICS.keys()
    assert len(former) >= 4
    assert not found & former
    assert found >= {METRICS[name] for name in former}


def test_a_run_of_0_1_is_compared_with_one_of_today(tmp_path: Path) -> None:
    today = tmp_path / "today"
    shutil.copytree(FORMER, today)
    for name in ("run.json", "records.jsonl"):
        text = (today / name).read_text()
        names = {old: former.name for old, former in CASES.items()}
        for table in (PARAMS, names, TARGETS, {'"wild"': '"very noisy"', '"quiet"': '"stable"'}):
            for old, new in table.items():
                text = text.replace(old, new)
        (today / name).write_text(
            text.replace('"schema":1', f'"schema":{SCHEMA}').replace('"schema": 1', f'"schema": {SCHEMA}')
        )
    former, present = load_run(FORMER), load_run(today)
    assert [one.case for one in present.records] == [one.case for one in former.records]
    assert len(compare(former, present, Rule()).series) == len(former.info.plan.cases)


def planned(**options: object) -> Plan:
    return plan_run(Options(preset="smoke", nproc=2, **options), MODULES, None)  # type: ignore[arg-type]


def test_former_names_of_cases_and_parameters_are_taken_by_options_and_plan_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be_alone(monkeypatch, tmp_path)
    asked = {"only": ("all_reduce",), "settings": {"size_bytes": "1K", "beside": "gemm"}}
    assert planned(**asked) == planned(**{**asked, "settings": {"size_bytes": "1K", "background": "gemm"}})
    for old, new in (("round", "pairwise"), ("p2p.round", "p2p.pairwise")):
        assert planned(only=(old,), settings={"ways": "in_turn"}) == planned(
            only=(new,), settings={"direction": "in_turn"}
        )
    case = '[[case]]\nname = "{}"\nset = {{ size_bytes = "1K", {} = "in_turn" }}\n'
    files = [tmp_path / "former.toml", tmp_path / "present.toml"]
    for file, words in zip(files, (("round", "ways"), ("pairwise", "direction")), strict=True):
        file.write_text(case.format(*words))
    plans = [planned(plan_file=file) for file in files]
    assert plans[0] == plans[1]
    assert {one.params["direction"] for one in plans[0].cases} == {"in_turn"}
    both = {"size_bytes": "1K", "beside": "gemm", "background": "gemm"}
    told = refusal(planned, only=("all_reduce",), settings=both)
    assert told == "--set: beside is the former name of background: give one of them"


def test_fsdp_has_the_ids_of_zero2_and_zero3_and_is_found_by_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be_alone(monkeypatch, tmp_path)
    ids = {True: "169d4ddbad8f", False: "f921832f8b16"}  # those of 0.1

    def found(*only: str, **options: object) -> list[str]:
        return [case.id for case in planned(only=only, **options).cases]

    for names, reshard in (
        (("fsdp",), [True]),
        (("zero3",), [True]),
        (("workload.zero3",), [True]),
        (("zero2",), [False]),
        (("zero[23]",), [False, True]),
        (("zero3", "zero2"), [True, False]),
    ):
        assert found(*names) == [ids[each] for each in reshard], names
    assert found("fsdp", settings={"reshard": "false,true"}) == found("zero[23]")
    assert found("zero2", settings={"reshard": "false,true"}) == [ids[False]]
    file = tmp_path / "plan.toml"
    file.write_text('[[case]]\nname = "zero2"\n[[case]]\nname = "zero3"\nset = { prefetch = "explicit" }\n')
    [kept, ahead] = planned(plan_file=file).cases
    assert (kept.id, kept.params["reshard"], ahead.id) == (ids[False], False, "3bd42a8ac1f5")
    assert found("zero2", plan_file=file) == [kept.id]
    assert found("fsdp", plan_file=file, settings={"reshard": "false"}) == [kept.id]
    told = refusal(planned, only=("zero2",), settings={"reshard": "true"})
    assert told == "workload.fsdp: what is set contradicts the former name by which it is asked for"
    full = plan_run(Options(preset="full", nproc=2, only=("fsdp",)), MODULES, None).cases
    assert [case.id for case in full] == [ids[True], ids[False]]


@pytest.mark.full
@pytest.mark.parametrize(("name", "left"), [("former", 6), ("base", 1)])  # collectives, and a training step
def test_a_run_of_0_1_goes_on_where_it_stopped(parbench: Command, tmp_path: Path, name: str, left: int) -> None:
    path = tmp_path / "run"
    shutil.copytree(FORMER.with_name(name), path)
    lines = (path / "records.jsonl").read_text().splitlines(keepends=True)
    (path / "records.jsonl").write_text("".join(lines[:-left]))
    for folder in ("samples", "traces", "logs"):
        (path / folder).mkdir()
    done = parbench("run", "--resume", str(path))
    assert done.returncode == 0, done.stderr
    records = load_run(path).records
    ids, began = [json.loads(line)["case"]["id"] for line in lines], len(lines) - left
    assert [record.case.id for record in records[:began]] == ids[:began]
    assert sorted(record.case.id for record in records[began:]) == sorted(ids[began:]), "in the launch's order"
    assert {record.status for record in records} == {"ok"}
    assert [record.schema for record in records] == [1] * (len(lines) - left) + [SCHEMA] * left
