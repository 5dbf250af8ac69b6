"""The templates for GitHub and GitLab: every command of parbench in them exists, and the action's own steps run."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from parbench import cli
from parbench.reports.history.database import open_history
from tests.support.ci_action import ACTION, act, shell
from tests.support.history_fixtures import fill_history, write_history_run
from tests.support.paths import ROOT

GITHUB = ROOT / ".github"
GITLAB = GITHUB / "templates" / "gitlab-ci.yml"
WORKFLOW = GITHUB / "workflows" / "ci.yml"


def commands(path: Path) -> list[list[str]]:
    found = re.findall(
        r"^\s*(?:run: |- )?(?:test .* \|\| )?(parbench (?:run|history) .*)$",
        path.read_text(),
        re.MULTILINE,
    )
    return [shlex.split(line.partition(">>")[0]) for line in found]


def known(words: list[str]) -> set[str]:
    command: click.Command | None = cli.main
    for word in words[1:3]:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
    assert command is not None, words
    return {opt for param in command.params for opt in param.opts}


@pytest.mark.parametrize("path", [ACTION, GITLAB], ids=["github", "gitlab"])
def test_every_command_and_option_exists(path: Path) -> None:
    found = commands(path)
    assert [words[1:3] for words in found if words[1] == "history"] == [
        ["history", "check"],
        ["history", "add"],
        ["history", "check"],
        ["history", "prune"],
    ]
    assert len(found) == 5
    for words in found:
        assert {word for word in words if word.startswith("--")} <= known(words), words


@pytest.mark.parametrize("path", [ACTION, WORKFLOW], ids=["action", "workflow"])
def test_inputs_reach_a_shell_as_variables_alone(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "${{" in line:
            assert re.match(r"\s+([A-Z_]+|default|name): \$\{\{[^}]+\}\}\S*$", line), line


def test_the_workflow_runs_what_is_there() -> None:
    text = WORKFLOW.read_text()
    for found in (
        *re.findall(r"uses: \./(\S+)", text),
        *re.findall(r"(?:run: |python )((?:\.ci|tests)/\S+)", text),
    ):
        assert (ROOT / found).exists(), found


STAND_IN = """
    eval "real_$(declare -f parbench)"
    parbench() {{ if [ "$1" = run ]; then mkdir -p runs; cp -r {measured}/* runs; else real_parbench "$@"; fi; }}
"""


def test_gitlabs_script_holds_a_merge_request_against_its_target_and_keeps_a_branch(
    tmp_path: Path,
) -> None:
    script = "branch=main\n" + "\n".join(
        line.removeprefix("    - ").removeprefix("|").removeprefix(" " * 6)
        for line in GITLAB.read_text()
        .partition("  script:\n")[2]
        .partition("  after_script:")[0]
        .splitlines()
    )
    write_history_run(tmp_path / "slower", 20, 1.5)
    with open_history(tmp_path / "runs" / "history.sqlite", create=True) as history:
        fill_history(history, tmp_path, [1.0] * 8)
    given = {"PARBENCH_FLOOR": "3%", "CI_COMMIT_REF_NAME": "topic"}
    shim = STAND_IN.format(measured=tmp_path / "slower")
    asked = shell(
        f"{shim}\n{script}", tmp_path, **given, CI_MERGE_REQUEST_TARGET_BRANCH_NAME="main"
    )
    assert asked.returncode == 1, asked.stderr
    assert asked.stdout.startswith("FAIL: 2 SLOWER of 2 series, against the last 8 runs of main")
    pushed = shell(f"{shim}\n{script}", tmp_path, **given)
    assert pushed.returncode == 0, pushed.stderr
    assert "added run-020\nPASS: " in pushed.stdout


def job(tmp_path: Path, measured: Path, branch: str, base: str = "") -> tuple[list[str], int, str]:
    """Run the action in a fresh clone; what it measures are the runs in a folder."""
    clone = tmp_path / f"clone-of-{measured.name}"
    subprocess.run(
        ["git", "clone", "--quiet", "origin", clone], cwd=tmp_path, check=True, capture_output=True
    )
    if os.geteuid() == 0:  # as in a container, where the checkout is the runner's
        os.chown(clone, 12345, -1)
    return act(clone, branch=branch, base=base, shim=STAND_IN.format(measured=measured))


@pytest.mark.full
def test_a_pull_request_is_held_against_main_which_keeps_its_history_in_a_remote(
    tmp_path: Path,
) -> None:
    subprocess.run(["git", "init", "--quiet", "--bare", "origin"], cwd=tmp_path, check=True)
    for night, factor, name in (
        (0, 1.0, "first"),
        (20, 1.0, "equal"),
        (20, 1.5, "slower"),
        (21, 1.5, "night"),
    ):
        write_history_run(tmp_path / name, night, factor)
    for night in range(1, 8):
        write_history_run(tmp_path / "week", night)

    def kept() -> str:
        told = ["git", "rev-parse", "parbench-history"]
        return subprocess.run(
            told, cwd=tmp_path / "origin", check=True, capture_output=True, text=True
        ).stdout

    push = ["Fetch the history", "Measure", "Add to the history", "Check", "Keep the history"]
    ran, code, summary = job(tmp_path, tmp_path / "first", "main")
    assert (ran, code) == (push, 0)
    assert summary.startswith("## Not enough history: 1 of 8 runs of main\n")
    ran, code, summary = job(tmp_path, tmp_path / "slower", "topic", "main")
    assert (ran, code) == (["Fetch the history", "Measure", "Check against the base branch"], 0)
    assert summary.startswith("## Not enough history: 1 of 8 runs of main\n")
    ran, code, summary = job(tmp_path, tmp_path / "week", "main")
    assert (code, summary.splitlines()[0]) == (
        0,
        "## PASS: none of 2 series is slower, over the last 8 runs of main",
    )
    before = kept()
    (tmp_path / "clone-of-slower").rename(tmp_path / "early")
    ran, code, summary = job(tmp_path, tmp_path / "slower", "topic", "main")
    assert (ran[-1], code) == ("Check against the base branch", 1)
    assert summary.startswith(
        "## FAIL: 2 SLOWER of 2 series, against the last 8 runs of main: all_reduce 1K +"
    )
    ran, code, summary = job(tmp_path, tmp_path / "equal", "topic", "main")
    assert (code, summary.splitlines()[0]) == (
        0,
        "## PASS: none of 2 series is slower, against the last 8 runs of main",
    )
    assert kept() == before, "a pull request's run is not kept"
    (tmp_path / "origin").rename(tmp_path / "away")
    ran, code, _ = act(tmp_path / "early", branch="main")
    assert (ran, code) == (["Fetch the history", "Keep the history"], 128), (
        "no new history where the remote is away"
    )
    (tmp_path / "away").rename(tmp_path / "origin")
    assert kept() == before
    assert job(tmp_path, tmp_path / "night", "main")[1] == 0
    assert kept() != before
    listed = shell("parbench history list", tmp_path / "clone-of-night").stdout
    assert "9 runs" in listed
    assert "topic" not in listed
