"""GitHub's action without GitHub: its steps' own scripts in bash, in a clone of a repository, as an event runs them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

ACTION = ROOT / ".github" / "actions" / "parbench" / "action.yml"
_CONDITIONS = {"github.base_ref == ''": False, "github.base_ref != ''": True}


@dataclass(frozen=True, kw_only=True)
class Step:
    name: str
    condition: str
    variables: Mapping[str, str]
    script: str


def steps() -> Iterator[Step]:
    """Yield the steps that run in a shell, but for Install."""
    for block in re.split(
        r"^    - name: ", ACTION.read_text().partition("  steps:\n")[2], flags=re.MULTILINE
    )[2:]:
        head, _, script = block.partition("      run: ")
        found = re.search(r"^      if: (.*)$", head, re.MULTILINE)
        variables = dict(re.findall(r"^        ([A-Z_]+): \$\{\{ (\S+) \}\}$", head, re.MULTILINE))
        lines = script.removeprefix("|\n").splitlines()
        if "      shell: bash\n" in head:
            text = "\n".join(line.removeprefix(" " * 8) for line in lines)
            yield Step(
                name=block.splitlines()[0],
                condition=found[1] if found else "",
                variables=variables,
                script=text,
            )


def defaults() -> dict[str, str]:
    inputs = ACTION.read_text().partition("inputs:\n")[2].partition("runs:\n")[0]
    return {
        f"inputs.{k}": v
        for k, v in re.findall(
            r"^  ([a-z-]+):\n    description: .*\n    default: (.*)$", inputs, re.M
        )
    }


def act(
    clone: Path, *, branch: str, base: str = "", shim: str = "", **inputs: str
) -> tuple[list[str], int, str]:
    """Run the action in a clone, on a push to ``branch`` or of a pull request to ``base``.

    Return the names of the steps that ran, the exit code of the first that failed, and the step summary. ``shim`` is
    what bash reads first.
    """
    ref = "12/merge" if base else branch
    known = {**defaults(), **{f"inputs.{k.replace('_', '-')}": v for k, v in inputs.items()}}
    known |= {"github.base_ref": base, "github.ref_name": ref}
    summary, ran, code = clone / "summary.md", [], 0
    github = {
        "GITHUB_SHA": "abc",
        "GITHUB_REF_NAME": ref,
        "GITHUB_HEAD_REF": branch if base else "",
    }
    for step in steps():
        own = step.condition.removeprefix("always()").removeprefix(" && ")
        if (code and not step.condition.startswith("always()")) or (
            own and _CONDITIONS[own] != bool(base)
        ):
            continue
        variables = {**github, "GITHUB_STEP_SUMMARY": str(summary)}
        variables |= {name: known[source] for name, source in step.variables.items()}
        done = shell(f"{shim}\n{step.script}", clone, **variables)
        ran.append(step.name)
        print(f"{step.name}: {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
        code = code or done.returncode
    return ran, code, summary.read_text() if summary.exists() else ""


def shell(script: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as GitHub's bash does, with this checkout's parbench."""
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("GITHUB_", "PARBENCH_"))
    }
    script = f'parbench() {{ "{sys.executable}" -m parbench "$@"; }}\n{script}'
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PATH": tools, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
