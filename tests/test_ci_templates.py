"""The templates for GitHub and GitLab: every command of parbench in them exists, and the action's own steps run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from history_fixtures import put
from paths import ROOT

import parbench

GITHUB = ROOT / ".github"
ACTION = GITHUB / "actions" / "parbench" / "action.yml"
GITLAB = GITHUB / "templates" / "gitlab-ci.yml"
WORKFLOW = GITHUB / "workflows" / "ci.yml"


def commands(path: Path) -> list[list[str]]:
    found = re.findall(r"^\s*(?:run: |- )?(parbench (?:run|history) .*)$", path.read_text(), re.MULTILINE)
    return [shlex.split(line.partition(">>")[0]) for line in found]


def known(words: list[str]) -> set[str]:
    command: click.Command | None = parbench.main
    for word in words[1:3]:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
    assert command is not None, words
    return {opt for param in command.params for opt in param.opts}


@pytest.mark.parametrize("path", [ACTION, GITLAB], ids=["github", "gitlab"])
def test_every_command_and_option_exists(path: Path) -> None:
    found = commands(path)
    assert [words[1:3] for words in found if words[1] == "history"] == [
        ["history", "add"],
        ["history", "check"],
        ["history", "prune"],
    ]
    assert len(found) == 4
    for words in found:
        assert {word for word in words if word.startswith("--")} <= known(words), words


@pytest.mark.parametrize("path", [ACTION, WORKFLOW], ids=["action", "workflow"])
def test_inputs_reach_a_shell_as_variables_alone(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "${{" in line:
            assert re.match(r"\s+([A-Z_]+|default): \$\{\{[^}]+\}\}\S*$", line), line


def test_the_workflow_runs_what_is_there() -> None:
    text = WORKFLOW.read_text()
    for found in (*re.findall(r"uses: \./(\S+)", text), *re.findall(r"(?:run: |python )((?:\.ci|tests)/\S+)", text)):
        assert (ROOT / found).exists(), found
    assert re.findall(r"-c (\S+) ", text) == ["constraints.txt"]


def test_the_workflow_compares_the_hot_paths_of_two_commits(tmp_path: Path) -> None:
    """Take the step's own script, with a script of ours in place of the comparison."""
    body = (
        WORKFLOW.read_text().partition("- name: Compare with the commit before\n")[2].partition("\n  communication:")[0]
    )
    script = "\n".join(line.removeprefix(" " * 10) for line in body.partition("run: |\n")[2].splitlines())
    assert "/tmp/base" in script
    script = script.replace("/tmp/base", str(tmp_path / "base")).replace("git config --global", "git config")
    git = "git -c user.name=a -c user.email=a@localhost"
    (tmp_path / "tests" / "studies").mkdir(parents=True)
    (tmp_path / "tests" / "studies" / "hot_paths.py").write_text("import sys; print(*sys.argv[1:])")
    made = subprocess.run(
        f"git init --quiet . && {git} commit --quiet --allow-empty -m one && git rev-parse HEAD && "
        f"git add tests && {git} commit --quiet -m two",
        cwd=tmp_path,
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    done = shell(script, tmp_path, BASE=made.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{tmp_path / 'base'} --launches 6"
    assert not (tmp_path / "base" / "tests").exists(), "the commit before has none"


def step(name: str) -> str:
    body = ACTION.read_text().partition(f"- name: {name}\n")[2].partition("    - name:")[0]
    script = body.partition("run: ")[2]
    return "\n".join(line.removeprefix(" " * 8) for line in script.removeprefix("|\n").splitlines())


def shell(script: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": tools, "GITHUB_SHA": "abc", "HISTORY_BRANCH": "parbench-history", **variables}
    script = f'parbench() {{ "{sys.executable}" -P -m parbench "$@"; }}\n{script}'
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_history_goes_to_its_branch_and_comes_back(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", "--bare", "origin"], cwd=tmp_path, check=True)
    summary = str(tmp_path / "summary.md")
    for night in range(2):
        clone = tmp_path / f"clone{night}"
        subprocess.run(["git", "clone", "--quiet", "origin", clone], cwd=tmp_path, check=True, capture_output=True)
        fetched = shell(step("Fetch the history"), clone)
        assert fetched.returncode == 0, fetched.stderr
        put(clone / "runs", night)
        for name in ("Add to the history", "Check", "Keep the history"):
            done = shell(
                step(name), clone, GITHUB_STEP_SUMMARY=summary, FLOOR="3%", BRANCH="main", GITHUB_REF_NAME="main"
            )
            assert done.returncode == 0, (name, done.stderr)
    listed = shell("parbench history list", tmp_path / "clone1")
    assert "2 runs" in listed.stdout
    assert Path(summary).read_text().count("parbench history check of run-00") == 2
