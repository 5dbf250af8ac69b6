"""The commands of what is measured: their options reach the plan, their output can be read, their codes are right."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner, Result
from fakes import FakeGang, FakeRank, outcome

import parbench
from bench import measuring, node_machine
from bench.commands import House, parse_settings, run
from bench.driver import StartGang
from bench.errors import UserError
from bench.machine import Machine
from bench.messages import Bye, Outcome
from bench.options import Joined, Options
from bench.runs import Run, load_run

Call = Callable[..., Result]
ONE_TABLE = ("--set", "mode=blocking", "--launches", "1")
MACHINE = Machine(cores=2, physical_cores=2, memory_bytes=16 << 30, torch_version="2.13.0", torch_has_cuda=False)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Call ``parbench`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(node_machine, "look", lambda environ: MACHINE)
    return lambda *words: CliRunner().invoke(parbench.main, words, prog_name="parbench")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """Let ranks be threads that say these outcomes in turn, the last again."""
    outcomes = [outcome()]

    def act(gang: FakeGang, rank: FakeRank) -> None:
        rank.hello()
        for index in range(len(rank.job().cases)):
            rank.start(index)
            if rank.rank == 0:
                rank.finish(index, outcomes[min(index, len(outcomes) - 1)])
        rank.say(Bye())

    def starter(run: Run, joined: Joined | None, nodelist: str | None) -> StartGang:
        def start(number: int, variables: Mapping[str, str]) -> FakeGang:
            gang = FakeGang()
            gang.run([FakeRank(variables, rank, run.info.plan.nproc) for rank in range(run.info.plan.nproc)], act)
            return gang

        return start

    monkeypatch.setattr(measuring, "_starter", starter)
    return outcomes


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Keep the options that ``run`` was given, and do nothing."""
    kept: list[Options] = []
    monkeypatch.setattr(measuring, "run_options", lambda options, *_, **__: kept.append(options))
    return kept


# --- run ---


def test_every_option_reaches_what_is_asked(call: Call, options: list[Options]) -> None:
    words = "--preset smoke --only all_* --only ddp --set layers=2 --sizes 1K --dtype float16 --nproc 3 --backend gloo"
    more = "--device cpu --launches 2 --budget 9s --timeout 5s --allow-single --target a:b --plan p.toml"
    done = call("run", *words.split(), *more.split())
    assert done.exit_code == 0, done.output
    assert options == [
        Options(
            preset="smoke",
            only=("all_*", "ddp"),
            settings={"layers": "2", "size_bytes": "1K", "dtype": "float16"},
            nproc=3,
            backend="gloo",
            device="cpu",
            launches=2,
            budget="9s",
            timeout="5s",
            allow_single=True,
            target="a:b",
            plan_file=Path("p.toml"),
        )
    ]


def test_without_options_nothing_is_asked_for(call: Call, options: list[Options]) -> None:
    assert call("run").exit_code == 0
    assert options == [Options()]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], {}),
        (["layers=2,4", "mode=pipelined"], {"layers": "2,4", "mode": "pipelined"}),
        ([" layers =2"], {"layers": "2"}),
        (["name=a=b"], {"name": "a=b"}),
        (["name="], {"name": ""}),
    ],
)
def test_settings_are_a_name_and_a_text(texts: list[str], found: dict[str, str]) -> None:
    assert parse_settings(texts) == found


@pytest.mark.parametrize(
    ("texts", "told"),
    [(["layers"], "write NAME=VALUE"), (["=2"], "write NAME=VALUE"), (["a=1", " a=2"], "--set a is given twice")],
)
def test_settings_that_say_nothing_or_too_much_are_refused(texts: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_settings(texts)


@pytest.mark.parametrize(("short", "name"), [("--sizes", "size_bytes"), ("--dtype", "dtype")])
def test_a_short_option_does_not_silently_replace_a_setting(
    call: Call, options: list[Options], short: str, name: str
) -> None:
    done = call("run", short, "1K", "--set", f"{name}=2K")
    assert done.exit_code == 2
    assert f"{name} is given twice" in done.stderr
    assert options == []


QUICK = ("run", "--preset", "smoke", "--only", "all_reduce", "--sizes", "1K,4K")


def test_json_is_one_valid_record_a_line_on_stdout_and_the_folder_on_stderr(call: Call, said: list[Outcome]) -> None:
    done = call(*QUICK, "--json")
    assert done.exit_code == 0, done.output
    schema = json.loads(call("schema").stdout)
    lines = done.stdout.splitlines()
    assert [json.loads(line)["case"]["params"]["size_bytes"] for line in lines] == [1024, 4096]
    for line in lines:
        jsonschema.validate(json.loads(line), schema)
    [folder] = Path("runs").iterdir()
    assert done.stderr.splitlines()[-1] == str(folder)
    assert not (folder / "report.html").exists()


def test_without_json_tables_are_shown_and_last_the_folder(call: Call, said: list[Outcome]) -> None:
    done = call(*QUICK)
    assert done.exit_code == 0, done.output
    [folder] = Path("runs").iterdir()
    assert done.stdout.splitlines()[-1] == str(folder)
    assert "all_reduce" in done.stdout
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong", 1), ("failed", 4), ("skipped", 0)])
def test_the_exit_code_says_how_the_run_went(
    call: Call, said: list[Outcome], status: Any, code: int, as_json: bool
) -> None:
    said.append(outcome() if status == "ok" else Outcome(status=status, reason="because"))
    assert call(*QUICK, *(["--json"] if as_json else [])).exit_code == code


def test_runs_go_where_they_are_told(call: Call, said: list[Outcome]) -> None:
    assert call(*QUICK, "--out", "deep/results", "--json").exit_code == 0
    assert len(list(Path("deep/results").iterdir())) == 1
    assert not Path("runs").exists()


def test_a_run_with_a_plan_file_measures_its_cases_and_what_the_command_line_says_goes_before(
    call: Call, said: list[Outcome]
) -> None:
    case = '[[case]]\nname = "broadcast"\nset = { size_bytes = ["1K", 2048] }\n'
    Path("plan.toml").write_text(f'preset = "full"\nlaunches = 2\nbudget = "1m"\n\n{case}')
    done = call("run", "--plan", "plan.toml", "--launches", "1", "--dtype", "float64", "--json")
    assert done.exit_code == 0, done.output
    [folder] = Path("runs").iterdir()
    found = load_run(folder)
    assert (found.info.plan.preset, found.info.plan.launches, found.info.plan.budget_seconds) == ("full", 1, 60.0)
    params = [record.case.params for record in found.records]
    assert [(param["size_bytes"], param["dtype"]) for param in params] == [(1024, "float64"), (2048, "float64")]


def test_a_run_is_gone_on_with_by_its_folder(call: Call, said: list[Outcome]) -> None:
    call(*QUICK, "--json")
    [folder] = Path("runs").iterdir()
    before = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(before.splitlines(keepends=True)[0])
    done = call("run", "--resume", str(folder), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["case"]["params"]["size_bytes"] == 4096
    assert len((folder / "records.jsonl").read_bytes().splitlines()) == 2


def test_a_rank_that_only_joins_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(path: Path, form: str = "") -> int:
        raise AssertionError("shown by a rank that only joins")

    monkeypatch.setattr(measuring, "run_options", lambda *_, **__: None)
    house = House(modules=(), show=never, exit_code=never, report=lambda paths, output: None)
    done = CliRunner().invoke(run, [], obj=house)
    assert (done.exit_code, done.output) == (0, "")


def test_a_driver_among_ranks_leaves_at_once_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class LeftError(Exception):
        pass

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(measuring, "run_options", lambda *_, **__: Path("runs/x"))
    house = House(modules=(), show=lambda path, form: 4, exit_code=lambda path: 0, report=lambda paths, output: None)
    assert CliRunner().invoke(run, [], obj=house).exception.args == (4,)  # type: ignore[union-attr]


def test_a_run_can_be_printed_as_nccl_tests_would_with_its_folder_out_of_the_way(
    call: Call, said: list[Outcome]
) -> None:
    done = call("run", "--only", "all_reduce", "--sizes", "4K,64K", *ONE_TABLE, "--format", "nccl-tests")
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert [len(line.split()) for line in lines] == [13, 13]
    assert [line.split()[0] for line in lines] == ["4096", "65536"]
    assert "runs/" not in done.stdout
    assert Path(done.stderr.splitlines()[-1]).is_dir()


def test_a_run_can_be_printed_as_nccl_tests_json(call: Call, said: list[Outcome]) -> None:
    done = call("run", "--only", "all_reduce", "--sizes", "4K", *ONE_TABLE, "--format", "nccl-tests-json")
    assert json.loads(done.stdout)["version"] == 3


def test_two_ways_to_print_are_refused_together(call: Call) -> None:
    refused = call("run", "--json", "--format", "nccl-tests")
    assert (refused.exit_code, Path("runs").exists()) == (2, False)
    assert "--json and --format nccl-tests both say what to print" in refused.stderr


# --- list, doctor, schema ---


def test_list_shows_every_case_with_its_parameters_and_what_is_allowed(call: Call) -> None:
    shown = call("list").stdout
    for name in ("collective.all_reduce", "collective.broadcast", "p2p.sendrecv", "workload.ddp"):
        assert f"{name}\n" in shown
    assert "--set size_bytes=1M" in shown
    assert "(blocking, pipelined, async, coalesced or graph)" in shown


def test_list_narrows_by_globs_and_refuses_what_is_not_there(call: Call) -> None:
    names = [line for line in call("list", "p2p.s*", "broadcast").stdout.splitlines() if not line.startswith(" ")]
    assert names == ["collective.broadcast", "p2p.sendrecv"]
    refused = call("list", "brodcast")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "did you mean 'broadcast'" in refused.stderr


def test_what_list_shows_as_a_default_can_be_set(call: Call, options: list[Options]) -> None:
    lines = [line.split()[1] for line in call("list").stdout.splitlines() if line.lstrip().startswith("--set ")]
    assert len(lines) > 10
    for line in lines:
        assert parse_settings([line])


def test_doctor_is_words_for_people_and_json_for_programs(call: Call) -> None:
    shown = call("doctor")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip()
    told = call("doctor", "--json")
    assert told.exit_code == 0
    assert json.loads(told.stdout)


def test_the_schema_is_one_and_refuses_what_is_no_record(call: Call) -> None:
    schema = json.loads(call("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 1, "status": "splendid"}, schema)


def test_every_option_of_run_is_one_of_the_options_or_is_known_here() -> None:
    names = {param.name for param in run.params if isinstance(param, click.Option)}
    assert names - set(Options.__dataclass_fields__) == {"sizes", "dtype", "out", "resume", "as_json", "form"}
    assert set(Options.__dataclass_fields__) <= names
