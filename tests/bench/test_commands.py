"""The commands ``run``, ``list`` and ``doctor``: options, output and exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.bench.commands import parse_settings
from parbench.bench.launch import measure as measuring
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import PRESETS, Entry
from parbench.reports.render import show
from tests.support.fake_runs import FakeRanks, isolate_driver
from tests.support.fakes import make_outcome
from tests.support.refusals import usage_error

CallParbench = Callable[..., Result]

TWO_CASES = ("run", "--preset", "smoke", "all_reduce", "--sizes", "1K,4K")
ONE_TABLE = ("run", "all_reduce", "--set", "mode=blocking", "--repetitions", "1")


@pytest.fixture
def call_parbench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CallParbench:
    """Call ``parbench`` in this process, in an empty folder."""
    isolate_driver(monkeypatch, tmp_path)
    return lambda *args: CliRunner().invoke(cli.main, args, prog_name="parbench")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake_ranks = FakeRanks()
    monkeypatch.setattr(measuring, "choose_launcher", fake_ranks.choose_launcher)
    return fake_ranks


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page, which takes seconds and has its own tests."""
    monkeypatch.setattr(show, "render_report", lambda report, form: b"")


@pytest.fixture
def run_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Options, dict[str, Any]]]:
    """The arguments of each call of ``run_options``, which does nothing."""
    calls: list[tuple[Options, dict[str, Any]]] = []
    monkeypatch.setattr(
        measuring, "run_options", lambda options, _, **kwargs: calls.append((options, kwargs))
    )
    return calls


# --- options of run ---

PLAN_OPTIONS: dict[str, Any] = {
    "preset": "smoke",
    "nproc": 3,
    "backend": "gloo",
    "device": "cpu",
    "repetitions": 2,
    "budget": "9s",
    "timeout": "5s",
    "inject": "corrupt:1",
    "link": "9Gbit",
    "launcher": "srun",
    "distribution": "cyclic",
}
CASES = ("all_*", "ddp", "a:b")


def test_every_option_of_run_reaches_the_plan(
    call_parbench: CallParbench, run_calls: list[Any]
) -> None:
    line = (
        "--set layers=2 --sizes 1K --mesh dp=2 --group dp=2,tp=2:tp,node --env NCCL_ALGO=Ring"
    )
    line += " --nodes n[1-4] --out o --limits b --format json"
    args = [*CASES, *line.split()]
    for name, value in PLAN_OPTIONS.items():
        args += [f"--{name}", str(value)]
    result = call_parbench("run", *args)
    assert result.exit_code == 0, result.output
    expected = Options(
        names=("all_*", "ddp"),
        targets=("a:b",),
        settings={
            "layers": "2",
            "NCCL_ALGO": "Ring",
            "size_bytes": "1K",
            "mesh": "dp=2",
            "group": "dp=2 tp=2:tp,node",
        },
        nodes=4,
        nodelist="n[1-4]",
        **PLAN_OPTIONS,
    )
    others = {"out": Path("o"), "limits": Path("b"), "as_json": True}
    others |= {"resume_path": None, "report_modules": ()}
    assert run_calls == [(expected, others)]


def test_cases_are_in_a_file(call_parbench: CallParbench, run_calls: list[Any]) -> None:
    Path("p.toml").write_text("case = [{ name = 'ddp' }]")
    call_parbench("run", "a:b", "--cases", "p.toml")
    [(options, _)] = run_calls
    assert options.targets == ("a:b",)
    assert options.entries == (Entry(name="ddp"),)
    assert "leave out one" in call_parbench("run", "ddp", "--cases", "p.toml").stderr


def test_resume_takes_options_that_may_differ(
    call_parbench: CallParbench, run_calls: list[Any]
) -> None:
    line = "--resume r --budget 9s --nodes n[1-4]"
    call_parbench("run", *line.split())
    [(options, others)] = run_calls
    assert options == Options(budget="9s", nodes=4, nodelist="n[1-4]")
    assert others["resume_path"] == Path("r")


def test_parse_settings() -> None:
    texts = ["layers=2,4", " mode =pipelined", "name=a=b", "empty="]
    settings = {"layers": "2,4", "mode": "pipelined", "name": "a=b", "empty": ""}
    assert parse_settings(texts) == settings
    assert "'layers'" in usage_error(parse_settings, ["layers"])
    assert "'=2'" in usage_error(parse_settings, ["=2"])


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("--sizes 1K --set size_bytes=1M", "size_bytes is given twice"),
        ("--resume r ddp", "CASE is not allowed with --resume"),
        ("--resume r --sizes 1K", "--sizes is not allowed"),
        ("--resume r --link 9Gbit", "--link is not allowed"),
        ("--resume r --out o", "--out is not allowed"),
        ("ddp --repetitions 0", "0 is not in the range x>=1"),
    ],
)
def test_run_refuses_options(
    call_parbench: CallParbench, run_calls: list[Any], line: str, fact: str
) -> None:
    result = call_parbench("run", *line.split())
    assert result.exit_code == 2
    assert fact in result.stderr
    assert run_calls == []


# --- output and exit codes of run ---


def test_run_json_prints_the_records(call_parbench: CallParbench, ranks: FakeRanks) -> None:
    result = call_parbench(*TWO_CASES, "--format=json")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["case"]["params"]["size_bytes"] for record in records] == [1024, 4096]
    [folder] = Path("runs").iterdir()
    assert result.stdout == (folder / "records.jsonl").read_text()
    assert result.stderr.splitlines()[-1] == str(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.usefixtures("no_page")
def test_run_prints_its_folder_last_and_writes_a_page(
    call_parbench: CallParbench, ranks: FakeRanks
) -> None:
    result = call_parbench(*TWO_CASES, "--out", "deep/results")
    assert result.exit_code == 0
    [folder] = Path("deep/results").iterdir()
    assert result.stdout.splitlines()[-1] == str(folder)
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("status", "options", "code"),
    [
        ("ok", (), 0),
        ("skipped", ("--format=json",), 0),
        ("wrong", ("--format=json",), 1),
        ("failed", ("--format=json",), 4),
    ],
)
@pytest.mark.usefixtures("no_page")
def test_run_exit_code(
    call_parbench: CallParbench,
    ranks: FakeRanks,
    status: str,
    options: tuple[str, ...],
    code: int,
) -> None:
    ranks.said = [make_outcome(), make_outcome(status=status)]
    assert call_parbench(*TWO_CASES, *options).exit_code == code


@pytest.mark.usefixtures("no_page")
def test_run_prints_rows_of_nccl_tests(call_parbench: CallParbench, ranks: FakeRanks) -> None:
    result = call_parbench(*ONE_TABLE, "--sizes", "4K,64K", "--format", "nccl-tests")
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert [row[0] for row in rows] == ["4096", "65536"]
    assert [len(row) for row in rows] == [13, 13]
    assert "runs/" not in result.stdout
    assert Path(result.stderr.splitlines()[-1]).is_dir()


# --- limits ---


def test_bad_limit_is_refused_before_a_rank_starts(
    call_parbench: CallParbench, ranks: FakeRanks
) -> None:
    Path("limits.toml").write_text('"workload.ddp" = { time = "<1s" }')
    result = call_parbench(*ONE_TABLE, "--sizes", "4K", "--limits", "limits.toml")
    assert result.exit_code == 2
    assert "'workload.ddp' matches no case" in result.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("limits", "code", "fact"),
    [
        ('{ time = "<1s", skew = "<1s" }', 0, "all are met"),
        ('{ time = "<1s", skew = ">1s" }', 1, "skew of collective.all_reduce"),
        ('{ drop_rate = "<1%" }', 3, "<1%"),
    ],
)
@pytest.mark.usefixtures("no_page")
def test_limit_decides_the_exit_code(
    call_parbench: CallParbench,
    ranks: FakeRanks,
    limits: str,
    code: int,
    fact: str,
) -> None:
    Path("limits.toml").write_text(f'"collective.*" = {limits}')
    args = ("--limits", "limits.toml")
    result = call_parbench(*ONE_TABLE, "--sizes", "4K", "--format=json", *args)
    assert result.exit_code == code
    assert fact in result.stderr
    assert call_parbench("run", "--resume", "latest", *args).exit_code == code


# --- list and doctor ---


def test_list_shows_each_name_and_preset(call_parbench: CallParbench) -> None:
    lines = call_parbench("list").stdout.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    names = [
        definition.name.partition(".")[2] for definition in load_catalogue(cli.DEFINITIONS)
    ]
    assert sorted(listed) == sorted([*names, *PRESETS])


def test_list_of_names_shows_parameters(call_parbench: CallParbench) -> None:
    text = call_parbench("list", "p2p.s*", "broadcast").stdout
    assert "collective.broadcast:" in text
    assert "p2p.sendrecv:" in text
    assert "all_reduce:" not in text
    assert text.count("  size_bytes=1M ") == 1, "a shared parameter is listed once"
    assert "[blocking, pipelined, async or graph]" in " ".join(text.split())


def test_doctor_json_has_the_printed_topics(call_parbench: CallParbench) -> None:
    lines = call_parbench("doctor").stdout.splitlines()
    findings = json.loads(call_parbench("doctor", "--format=json").stdout)
    assert findings
    for finding in findings:
        assert any(line.startswith(f"{finding['topic']} ") for line in lines)
