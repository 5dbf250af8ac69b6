"""The templates for GitHub and GitLab use existing commands, and their scripts run."""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
import yaml

from parbench import cli
from parbench.reports.history.database import open_history
from tests.support.ci_action import ACTION, ActionResult, run_action, run_script
from tests.support.paths import ROOT
from tests.support.reports.history_fixtures import fill_history, write_history_run

GITLAB = ROOT / ".github" / "templates" / "gitlab-ci.yml"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
USE_MEASURED_RUNS = """
eval "real_$(declare -f parbench)"
parbench() {{
  if [ "$1" = run ]; then mkdir -p runs; cp -r {runs}/* runs; else real_parbench "$@"; fi
}}
"""
"""A shell function that copies stored runs where the script would measure."""


def find_commands(path: Path) -> list[list[str]]:
    """Return the arguments of each parbench command in a template."""
    pattern = r"^\s*(?:run: |- )?(?:test .* \|\| |report=\$\()?parbench ((?:run|history) .*)$"
    lines = re.findall(pattern, path.read_text(), re.MULTILINE)
    return [shlex.split(re.split(r">>|\)", line)[0]) for line in lines]


def find_options(args: list[str]) -> set[str]:
    command = cli.main.get_command(click.Context(cli.main), args[0])
    if isinstance(command, click.Group):
        command = command.commands[args[1]]
    assert command is not None
    return {option for param in command.params for option in param.opts}


@pytest.mark.parametrize("path", [ACTION, GITLAB], ids=["github", "gitlab"])
def test_commands_and_options_exist(path: Path) -> None:
    commands = find_commands(path)
    assert len(commands) == (6 if path == ACTION else 5)
    for args in commands:
        used = {arg for arg in args if arg.startswith("--")}
        assert used <= find_options(args), args


@pytest.mark.parametrize("path", [ACTION, WORKFLOW], ids=["action", "workflow"])
def test_inputs_reach_scripts_as_variables(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "${{" in line:
            assert re.match(r"\s+([A-Z_]+|default|name): \$\{\{[^}]+\}\}\S*$", line), line


def test_guide_does_not_pass_undecided_times() -> None:
    guide = (ROOT / "docs" / "guides" / "ci.md").read_text()
    times = guide.partition("## Compare times")[2].partition("## Set limits")[0]
    commands = re.findall(r"^(?:\$|.*run:) parbench compare .*$", times, re.MULTILINE)
    assert len(commands) == 2
    assert all("--fail-on-undecided" in command for command in commands)


@pytest.mark.full
def test_gitlab_compares_merge_requests_and_keeps_branches(tmp_path: Path) -> None:
    script = "branch=main\n" + "\n".join(
        yaml.safe_load(GITLAB.read_text())["parbench"]["script"]
    )
    write_history_run(tmp_path / "slower", 20, 1.5)
    with open_history(tmp_path / "runs" / "history.sqlite", create=True) as history:
        fill_history(history, tmp_path, [1.0] * 8)
    script = USE_MEASURED_RUNS.format(runs=tmp_path / "slower") + script
    variables = {"PARBENCH_MIN_EFFECT": "3%", "CI_COMMIT_REF_NAME": "topic"}
    merge_request = run_script(
        script, tmp_path, **variables, CI_MERGE_REQUEST_TARGET_BRANCH_NAME="main"
    )
    assert merge_request.returncode == 1, merge_request.stderr
    assert merge_request.stdout.startswith("FAIL: 2 SLOWER")
    push = run_script(script, tmp_path, **variables)
    assert push.returncode == 0, push.stderr
    assert "added run-020" in push.stdout


def run_job(
    tmp_path: Path, runs: Path, branch: str, base: str = "", prologue: str = ""
) -> ActionResult:
    """Run the action in a new clone where stored runs stand for the measurement."""
    clone = tmp_path / f"clone-of-{runs.name}"
    subprocess.run(["git", "clone", "-q", "origin", clone], cwd=tmp_path, check=True)
    if os.geteuid() == 0:
        # In a container the checkout belongs to the user of the runner.
        os.chown(clone, 12345, -1)
    prologue += USE_MEASURED_RUNS.format(runs=runs)
    return run_action(clone, branch=branch, base=base, prologue=prologue)


MAIN_STEPS = [
    "Fetch the history",
    "Measure",
    "Add to the history",
    "Check",
    "Keep the history",
]


@pytest.mark.full
def test_pull_request_gate_uses_main_history(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    subprocess.run(["git", "init", "-q", "--bare", origin], check=True)
    write_history_run(tmp_path / "first", 0, 1.0)
    write_history_run(tmp_path / "equal", 20, 1.0)
    write_history_run(tmp_path / "slower", 20, 1.5)
    write_history_run(tmp_path / "next", 21, 1.5)
    for day in range(1, 8):
        write_history_run(tmp_path / "week", day)

    def read_history_commit() -> str:
        command = ["git", "rev-parse", "parbench-history"]
        return subprocess.check_output(command, cwd=origin, text=True)

    first = run_job(tmp_path, tmp_path / "first", "main")
    assert first.exit_code == 0
    assert first.steps == MAIN_STEPS
    assert first.summary.startswith(
        "## Not enough history: each series has at most 1 of 8 runs"
    )
    early = run_job(tmp_path, tmp_path / "slower", "topic", "main")
    assert early.exit_code == 0
    assert early.steps == ["Fetch the history", "Measure", "Check against the base branch"]
    week = run_job(tmp_path, tmp_path / "week", "main")
    assert week.exit_code == 0
    assert week.summary.startswith("## PASS")

    history_commit = read_history_commit()
    (tmp_path / "clone-of-slower").rename(tmp_path / "early")
    slower = run_job(tmp_path, tmp_path / "slower", "topic", "main")
    assert slower.exit_code == 1
    assert slower.summary.startswith("## FAIL: 2 SLOWER")
    checkout = "$ git fetch origin pull/12/head && git checkout FETCH_HEAD && parbench run"
    assert f"{checkout} --preset smoke" in slower.summary
    equal = run_job(tmp_path, tmp_path / "equal", "topic", "main")
    assert equal.exit_code == 0
    assert equal.summary.startswith("## PASS")
    assert read_history_commit() == history_commit, "a pull request changed the history"

    failed = run_action(
        tmp_path / "early", branch="topic", base="main", prologue="parbench() { return 4; }"
    )
    assert failed.exit_code == 4
    assert failed.summary.endswith("Reproduce: `parbench run --preset smoke --repetitions 5`\n")

    origin.rename(tmp_path / "away")
    unreachable = run_action(tmp_path / "early", branch="main")
    assert unreachable.exit_code == 128, "a new history replaced one that was unreachable"
    assert unreachable.steps == ["Fetch the history"]
    (tmp_path / "away").rename(origin)
    assert read_history_commit() == history_commit
    assert run_job(tmp_path, tmp_path / "next", "main").exit_code == 0
    assert read_history_commit() != history_commit
    listing = run_script("parbench history list", tmp_path / "clone-of-next").stdout
    assert "9 runs" in listing
    assert "topic" not in listing


@pytest.mark.full
def test_jobs_that_measure_together_keep_the_runs_of_all(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "origin"], check=True)
    (tmp_path / "measuring").mkdir()
    names = ["first", "second", "third"]
    for day, name in enumerate(names):
        write_history_run(tmp_path / name, day)
    # A measurement lasts until each job has fetched the history.
    wait_for_all = f"""
        cp() {{
          touch {tmp_path}/measuring/$(basename $PWD)
          until [ $(ls {tmp_path}/measuring | wc -l) = {len(names)} ]; do sleep 0.05; done
          command cp "$@"
        }}
    """
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run_job, tmp_path, tmp_path / name, "main", "", wait_for_all)
            for name in names
        ]
        assert [job.result().exit_code for job in jobs] == [0, 0, 0]
    show = "git show parbench-history:history.sqlite > kept.sqlite"
    run_script(show, tmp_path / "origin")
    database = tmp_path / "origin" / "kept.sqlite"
    assert (
        "3 runs" in run_script(f"parbench history list --history {database}", tmp_path).stdout
    )
