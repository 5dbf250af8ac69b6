"""Run the steps of the GitHub action in bash, in a clone of a repository."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT

ACTION = ROOT / ".github" / "actions" / "parbench" / "action.yml"


@dataclass(frozen=True, kw_only=True)
class ActionResult:
    """The outcome of the steps of the action."""

    steps: list[str]  # names of the steps that ran in a shell
    exit_code: int  # of the first failed step
    summary: str  # the text of the step summary


def load_shell_steps() -> list[dict[str, Any]]:
    """Return the steps that run in a shell, without the installation."""
    steps = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    return [step for step in steps if step.get("shell") == "bash" and step["name"] != "Install"]


def should_run(
    condition: str, *, has_failed: bool, is_pull_request: bool, succeeded: list[str]
) -> bool:
    """Evaluate the ``if`` of a step; only the conditions of the action are supported."""
    if has_failed and "always()" not in condition:
        return False
    if "steps.add.outcome == 'success'" in condition:
        return "add" in succeeded
    if "github.base_ref == ''" in condition:
        return not is_pull_request
    if "github.base_ref != ''" in condition:
        return is_pull_request
    return condition in ("", "always()")


def run_action(
    clone: Path,
    *,
    branch: str,
    base: str = "",
    prologue: str = "",
    options: str = "",
    min_effect: str = "",
) -> ActionResult:
    """Run the action in a clone, for a push to a branch or a pull request to ``base``.

    Every script of a step starts with ``prologue``. ``options`` and ``min_effect`` are inputs of
    the action. Empty ones have their defaults.
    """
    ref = "12/merge" if base else branch
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    expressions = {
        **{f"inputs.{name}": settings["default"] for name, settings in inputs.items()},
        "github.base_ref": base,
        "github.ref_name": ref,
        "github.event.pull_request.number": "12",
    }
    inputs = {"inputs.options": options, "inputs.min-effect": min_effect}
    expressions.update({name: value for name, value in inputs.items() if value})
    summary = clone / "summary.md"
    github = {
        "GITHUB_SHA": "abc",
        "GITHUB_REF_NAME": ref,
        "GITHUB_HEAD_REF": branch if base else "",
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    names = []
    succeeded: list[str] = []
    exit_code = 0
    for step in load_shell_steps():
        condition = step.get("if", "")
        if not should_run(
            condition,
            has_failed=exit_code != 0,
            is_pull_request=base != "",
            succeeded=succeeded,
        ):
            continue
        variables = {
            name: expressions[text.removeprefix("${{").removesuffix("}}").strip()]
            for name, text in step.get("env", {}).items()
        }
        completed = run_script(f"{prologue}\n{step['run']}", clone, **github, **variables)
        print(step["name"], completed.returncode, completed.stdout, completed.stderr)
        names.append(step["name"])
        if completed.returncode == 0:
            succeeded.append(step.get("id", ""))
        exit_code = exit_code or completed.returncode
    text = summary.read_text() if summary.exists() else ""
    return ActionResult(steps=names, exit_code=exit_code, summary=text)


def run_script(
    script: str, folder: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script as GitHub's bash does, with the parbench of this checkout."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GITHUB_", "PARBENCH_"))
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = f'parbench() {{ "{sys.executable}" -m parbench "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
        cwd=folder,
        env={**inherited, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
