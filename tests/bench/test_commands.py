"""The commands of what is measured: their options reach the plan, their output can be read, their codes are right."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.bench.commands import AppHooks, parse_settings, run
from parbench.bench.launch import measure as measuring
from parbench.bench.launch.control_channel import Outcome
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import PRESETS
from parbench.reports.render import show
from tests.support.fake_runs import FakeRanks, isolate_driver
from tests.support.fakes import make_outcome
from tests.support.refusals import usage_error

Call = Callable[..., Result]
ONE_TABLE = ("--set", "mode=blocking", "--launches", "1")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Call ``parbench`` in this process, in an empty folder."""
    isolate_driver(monkeypatch, tmp_path)
    return lambda *words: CliRunner().invoke(cli.main, words, prog_name="parbench")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake = FakeRanks()
    monkeypatch.setattr(measuring, "_starter", fake.starter)
    return fake


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the seconds that a page takes, which has its own tests."""
    monkeypatch.setattr(show, "rendered", lambda report, form: b"")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Options, dict[str, Any]]]:
    """Keep the options and the rest that ``run`` was given, and do nothing."""
    kept: list[tuple[Options, dict[str, Any]]] = []
    monkeypatch.setattr(
        measuring, "run_options", lambda options, _, **more: kept.append((options, more))
    )
    return kept


def test_every_option_reaches_what_is_asked_and_without_any_nothing_is(
    call: Call, asked: list[Any]
) -> None:
    words = "--preset smoke --only all_* --only ddp --set layers=2 --sizes 1K --dtype float16 --nproc 3 --backend gloo"
    more = "--device cpu --launches 2 --budget 9s --timeout 5s --allow-single --target a:b --plan p.toml --out o"
    far = "--mesh dp=2 --group dp --inject corrupt:1 --link 9Gbit --launcher srun --nodes 4 --ntasks-per-node 5"
    done = call(
        "run",
        *f"{words} {more} {far} --placement cyclic --nodelist n1 --budgets b --resume r --json".split(),
    )
    assert done.exit_code == 0, done.output
    settings = {"layers": "2", "size_bytes": "1K", "dtype": "float16"}
    what: dict[str, Any] = {
        "preset": "smoke",
        "only": ("all_*", "ddp"),
        "settings": settings,
        "target": "a:b",
    }
    where = {
        "nproc": 3,
        "backend": "gloo",
        "device": "cpu",
        "allow_single": True,
        "mesh": "dp=2",
        "group": "dp",
    }
    how = {
        "launches": 2,
        "budget": "9s",
        "timeout": "5s",
        "plan_file": Path("p.toml"),
        "inject": "corrupt:1",
    }
    spread = {
        "link": "9Gbit",
        "launcher": "srun",
        "nodes": 4,
        "ntasks_per_node": 5,
        "placement": "cyclic",
    }
    given = {**what, **where, **how, **spread, "nodelist": "n1"}
    of_others = {"entries", "usual"}  # a plan file's, a format's
    assert given.keys() == Options.__dataclass_fields__.keys() - of_others
    assert call("run").exit_code == 0
    assert asked == [
        (
            Options(**given),
            {"out": Path("o"), "resume_path": Path("r"), "as_json": True, "budgets": Path("b")},
        ),
        (Options(), {"out": Path("runs"), "resume_path": None, "as_json": False, "budgets": None}),
    ]
    assert call("run", "--format", "nccl-tests").exit_code == 0
    assert asked[-1][0].usual == {"mode": "pipelined", "placement": "out_of_place,in_place"}
    names = {param.name for param in run.params if isinstance(param, click.Option)}
    assert names - given.keys() == {
        "sizes",
        "dtype",
        "budgets",
        "out",
        "resume",
        "as_json",
        "form",
        "whole",
    }


def test_settings_are_a_name_and_a_text_each_given_once(call: Call, asked: list[Any]) -> None:
    texts = ["layers=2,4", " mode =pipelined", "name=a=b", "empty="]
    assert parse_settings(texts) == {
        "layers": "2,4",
        "mode": "pipelined",
        "name": "a=b",
        "empty": "",
    }
    told = {
        ("layers",): "write NAME=VALUE",
        ("=2",): "write NAME=VALUE",
        ("a=1", " a=2"): "--set a is given twice",
    }
    for refused, words in told.items():
        assert words in usage_error(parse_settings, refused)
    for short, name in (("--sizes", "size_bytes"), ("--dtype", "dtype")):
        done = call("run", short, "1K", "--set", f"{name}=2K")
        assert (done.exit_code, asked) == (2, [])
        assert f"{name} is given twice" in done.stderr


QUICK = ("run", "--preset", "smoke", "--only", "all_reduce", "--sizes", "1K,4K")


def test_json_is_one_valid_record_a_line_on_stdout_and_the_folder_on_stderr_and_else_last(
    call: Call, ranks: FakeRanks
) -> None:
    done = call(*QUICK, "--json")
    assert done.exit_code == 0, done.output
    schema = json.loads(call("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"]["params"]["size_bytes"] for line in lines] == [1024, 4096]
    for line in lines:
        jsonschema.validate(line, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 1, "status": "splendid"}, schema)
    [folder] = Path("runs").iterdir()
    assert done.stdout == (folder / "records.jsonl").read_text()
    assert done.stderr.splitlines()[-1] == str(folder)
    assert not (folder / "report.html").exists()
    done = call(*QUICK, "--out", "deep/results")
    [folder] = Path("deep/results").iterdir()
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, str(folder))
    assert (folder / "report.html").exists()


@pytest.mark.usefixtures("without_page")
def test_the_exit_code_says_how_the_run_went(call: Call, ranks: FakeRanks) -> None:
    ends = [
        make_outcome(),
        *(Outcome(status=status, reason="because") for status in ("wrong", "failed", "skipped")),
    ]
    for end, code in zip(ends, [0, 1, 4, 0], strict=True):
        ranks.said = [make_outcome(), end]
        for more in ((), ("--json",)):
            assert call(*QUICK, *more).exit_code == code, (end.status, more)


def test_a_rank_that_only_joins_prints_nothing_and_a_driver_among_ranks_leaves_at_once_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LeftError(Exception):
        pass

    def leave(code: int) -> None:
        raise LeftError(code)

    hooks = AppHooks(
        modules=(),
        show=lambda path, form, whole: 4,
        exit_code=lambda path: 0,
        report=lambda runs, output: None,
        render=lambda document, form: b"",
        judge=lambda path, budgets, code: code,
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(measuring, "run_options", lambda *_, **__: None)
    done = CliRunner().invoke(run, [], obj=hooks)
    assert (done.exit_code, done.output) == (0, "")
    monkeypatch.setattr(measuring, "run_options", lambda *_, **__: Path("runs/x"))
    assert CliRunner().invoke(run, [], obj=hooks).exception.args == (4,)  # type: ignore[union-attr]


@pytest.mark.usefixtures("without_page")
def test_a_bad_budget_is_refused_before_any_rank_starts_and_a_good_one_gives_the_exit_code(
    call: Call, ranks: FakeRanks
) -> None:
    words = (
        "run",
        "--only",
        "all_reduce",
        "--sizes",
        "4K",
        *ONE_TABLE,
        "--budgets",
        "budgets.toml",
    )
    file = Path("budgets.toml")
    for text, told in (
        (
            '"collective.all_reduce" = { tme = "<1s" }',
            "tme of 'collective.all_reduce' is no metric",
        ),
        ('"collective.all_reduce" = { time = "1s" }', "has to be '1s', which is not understood"),
        (
            '"workload.ddp" = { time = "<1s" }',
            "'workload.ddp' fits no case of the run, which has collective.all_reduce",
        ),
    ):
        file.write_text(text)
        done = call(*words)
        assert (done.exit_code, told in done.stderr, Path("runs").exists()) == (2, True, False), (
            done.output
        )
    for text, code, told in (
        ('"collective.*" = { time = "<1s", skew = "<1s" }', 0, "Budgets: all 2 are kept."),
        (
            '"collective.*" = { time = "<1s", skew = ">1s" }',
            1,
            "Budget: skew of collective.all_reduce",
        ),
        (
            '"collective.*" = { drop_rate = "<1%" }',
            3,
            "has to be <1%, which cannot be told: it is not known of it.",
        ),
    ):
        file.write_text(text)
        for more in ((), ("--json",)):
            done = call(*words, *more)
            assert (done.exit_code, told in done.stderr) == (code, True), done.output
    resumed = call("run", "--resume", "latest", "--budgets", "budgets.toml")
    assert (resumed.exit_code, "cannot be told" in resumed.stderr) == (3, True), resumed.output
    file.write_text('"fsdp" = { mfu = ">1" }')
    assert call("run", "--resume", "latest", "--budgets", "budgets.toml").exit_code == 2


def test_a_run_can_be_printed_as_nccl_tests_would_with_its_folder_out_of_the_way(
    call: Call, ranks: FakeRanks
) -> None:
    done = call(
        "run", "--only", "all_reduce", "--sizes", "4K,64K", *ONE_TABLE, "--format", "nccl-tests"
    )
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert [(line.split()[0], len(line.split())) for line in lines] == [("4096", 13), ("65536", 13)]
    assert "runs/" not in done.stdout
    assert Path(done.stderr.splitlines()[-1]).is_dir()


def test_two_ways_to_print_are_refused_together(call: Call) -> None:
    refused = call("run", "--json", "--format", "nccl-tests")
    assert (refused.exit_code, Path("runs").exists()) == (2, False)
    assert "--json and --format nccl-tests both say what to print" in refused.stderr


def test_list_has_a_line_for_each_name_and_preset_within_80_columns(call: Call) -> None:
    lines = call("list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = [line.split()[0] for line in lines if line.startswith("  ")]
    names = [definition.name.partition(".")[2] for definition in load_catalogue(cli.DEFINITIONS)]
    assert sorted(found) == sorted([*names, *PRESETS])


def test_list_of_names_shows_defaults_that_can_be_set_and_what_is_allowed(call: Call) -> None:
    shown = call("list", "p2p.s*", "broadcast").stdout
    names = [
        line.partition(":")[0]
        for line in shown.splitlines()
        if line.startswith(("collective.", "p2p."))
    ]
    assert names == ["collective.broadcast", "p2p.sendrecv"]
    lines = re.findall(r"^  (\w+=\S*)", shown, re.MULTILINE)
    assert lines[:2] == ["size_bytes=1M", "dtype=float32"]
    assert all(parse_settings([line]) for line in lines)
    assert len(lines) == len(set(lines)) > 5, "what both have stands once"
    assert (
        "root=0                  rank in the group that has the data [>=0]; of broadcast" in shown
    )
    assert "[blocking, pipelined, async, coalesced, graph]" in " ".join(shown.split())
    refused = call("list", "brodcast")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "did you mean 'broadcast'" in refused.stderr


def test_doctor_is_words_for_people_and_json_for_programs(call: Call) -> None:
    shown, told = call("doctor"), call("doctor", "--json")
    assert (shown.exit_code, told.exit_code) == (0, 0)
    topics = [finding["topic"] for finding in json.loads(told.stdout)]
    assert topics
    assert all(f"\n{topic} " in f"\n{shown.stdout}" for topic in topics)
