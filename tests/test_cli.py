"""The command line as a new user meets it: help, completion, errors and exit codes."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from parbench import cli

EXPECTED_COMMANDS = {"run", "check", "doctor", "report", "compare", "history", "plan", "slurm"}


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args)


def test_help_lists_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    listed = set(re.findall(r"^  ([a-z]+) ", result.stdout, re.MULTILINE))
    assert listed >= EXPECTED_COMMANDS


def test_unknown_command_is_refused() -> None:
    result = invoke("rum")
    assert result.exit_code == 2
    assert "'rum'" in result.stderr
    assert "--help" in result.stderr


def test_no_arguments_suggests_commands() -> None:
    result = invoke()
    assert result.exit_code == 0
    for command in ("parbench run", "parbench doctor", "parbench plan"):
        assert f"\n  {command}" in result.stdout


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("parbench history an", "annotate"),
        ("parbench run --preset s", "smoke"),
        ("parbench run all_g", "all_gather"),
    ],
)
def test_bash_completion(typed: str, completions: str, tmp_path: Path) -> None:
    script = """
    eval "$(_PARBENCH_COMPLETE=bash_source parbench)"
    COMP_WORDS=($TYPED)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _parbench_completion parbench
    echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    completed = subprocess.run(
        ["bash", "--norc", "-ec", script],
        env={**os.environ, "PATH": path, "TYPED": typed},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.stdout.splitlines() == [completions], completed.stderr


@pytest.mark.parametrize(
    ("args", "completions"),
    [
        (["list", "p2p.ping"], ["p2p.pingpong"]),
        (["list", "ddp", "all_r"], ["all_reduce"]),
        (["show", ""], ["latest", "runs/20260101T000000Z-n1-1a2b3c"]),
        (["compare", "latest", "runs/2"], ["runs/20260101T000000Z-n1-1a2b3c"]),
        (["explain", "--against", "lat"], ["latest"]),
    ],
)
def test_cases_and_runs_complete(
    args: list[str], completions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs", "20260101T000000Z-n1-1a2b3c")
    run.mkdir(parents=True)
    (run / "run.json").touch()
    shell = ShellComplete(cli.main, {}, "parbench", "_PARBENCH_COMPLETE")
    items = shell.get_completions(args[:-1], args[-1])
    assert [item.value for item in items] == completions


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (KeyboardInterrupt(), "error: interrupted"),
        (KeyError("a defect"), "KeyError: 'a defect'"),
    ],
)
def test_crash_exit_code_is_4(
    error: BaseException, last_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = mock.Mock(side_effect=error)
    monkeypatch.setattr("parbench.bench.plan.listing.render_names", listing)
    result = invoke("list")
    assert result.exit_code == 4
    assert result.stderr.splitlines()[-1] == last_line


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--sizes 1Z", ["1Z", "K, M, G or T"]),
        ("--nproc 0", ["--nproc 0", "1 to 4096 ranks"]),
        ("al_reduce", ["al_reduce", "did you mean 'all_reduce'"]),
        ("--set layer=2", ["'layer'", "layers"]),
        ("tp --nproc 4 --set heads=2", ["heads(2) % tp(4) != 0"]),
        ("--preset nodes", ["nodes", "'node'"]),
        ("--backend mpi", ["mpi", "'gloo', 'nccl'"]),
        ("--budget soon", ["soon", "90s"]),
        ("--resume nope", ["nope"]),
        ("--repetitions 65537", ["65537", "above the limit 65536"]),
        ("sendrecv --nproc 1", ["two ranks", "--nproc 2"]),
        ("--resume . --preset smoke", ["--resume", "--preset"]),
        ("nowhere:prepare", ["nowhere"]),
    ],
)
def test_bad_option_is_one_line_and_starts_nothing(
    options: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("run", *options.split())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert not Path("runs").exists()
    line, *hints = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(hint.startswith("hint: ") for hint in hints)
    for part in parts:
        assert part in result.stderr


def test_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("parbench.bench.plan.listing.render_names", mock.Mock(side_effect=full))
    result = invoke("list")
    assert result.exit_code == 2
    assert result.stderr == "error: [Errno 28] No space left on device\n"


def test_defaults_come_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARBENCH_RUN_NPROC", "0")
    assert "--nproc 0" in invoke("run").stderr


def test_help_has_no_limits_that_nobody_reaches() -> None:
    assert "[x>=1; required]" in invoke("history", "prune", "--help").stdout
    assert "65536" not in invoke("plan", "search", "--help").stdout


@pytest.mark.parametrize(
    "command",
    [
        f"show {'x' * 300}",
        f"history list --history {'x' * 300}",
        "plan mesh --model tiny --mesh dp=99999999999",
        f"plan mesh --model tiny --mesh dp=8 --microbatch {'9' * 26}",
        f"history prune --keep {'9' * 26}",
        f"plan guide --gpus {'9' * 14}",
    ],
)
def test_extreme_argument_is_refused(command: str) -> None:
    result = invoke(*command.split())
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
