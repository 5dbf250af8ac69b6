"""The house stands as it was drawn: imports point one way, nothing heavy is imported in vain, the README is true."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import parbench as command_line

ROOT = Path(__file__).parent.parent
LAYERS = {"parbench": 2, "slurm": 1, "reports": 1, "workloads": 1, "bench": 0}
INNER = {"workloads": ("pipeline", "context", "experts", "hybrid")}
COMPOSING = (["hybrid"], ["planner"])
"""What alone may import kinds of steps: the step that composes them, and the planner of all."""
TORCH_FREE_PACKAGES = ("reports", "slurm")
HEAVY = ("torch", "pandas", "matplotlib")
SOURCES = sorted([ROOT / "parbench.py", *(path for name in LAYERS for path in (ROOT / name).glob("**/*.py"))])
README = (ROOT / "README.md").read_text()
CONTEXT = click.Context(command_line.main)
COMMANDS = {name: command_line.main.get_command(CONTEXT, name) for name in command_line.COMMANDS}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, at any depth of it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return names


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(path):
        other = top(name)
        if other in LAYERS and other != package:
            assert LAYERS[other] < LAYERS[package], f"{package} imports {name}"
        if package in TORCH_FREE_PACKAGES:
            assert other != "torch", f"{package} imports {name}"


def test_the_direction_test_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def late():\n    from workloads.ddp import prepare\n")
    assert imported(wrong) == {"workloads.ddp"}


def test_no_module_is_in_an_import_cycle() -> None:
    graph = {".".join(path.relative_to(ROOT).with_suffix("").parts): imported(path) for path in SOURCES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        if name in done:
            return
        for other in graph[name] & graph.keys():
            visit(other, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def heavy_imports(code: str) -> set[str]:
    """Return which heavy modules a fresh interpreter has imported after ``code``."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_nothing_heavy() -> None:
    assert heavy_imports("import parbench\ntry:\n  parbench.main(['--help'])\nexcept SystemExit: pass") == set()


def test_planning_and_driving_import_no_torch() -> None:
    modules = "bench.measuring, bench.driver, workloads.definitions, reports.summary, reports.tables"
    assert heavy_imports(f"import {modules}") == set()


def test_the_heavy_test_sees_what_is_heavy() -> None:
    assert heavy_imports("import bench.collectives") == {"torch"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_an_example_and_a_place_in_the_readme(name: str) -> None:
    command = COMMANDS[name]
    assert command is not None
    assert command.help
    assert command.epilog, "an example"
    assert f"parbench {name}" in command.epilog
    assert f"`parbench {name}" in README
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, f"parbench {name} {param.opts[0]} has no help"


def leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that a line of the shell calls, within its groups, and the words after its name."""
    command: click.Command = command_line.main
    rest = words[1:]
    while isinstance(command, click.Group):
        assert rest, words
        assert rest[0].split("|")[0] in command.list_commands(click.Context(command)), words
        command, rest = command.get_command(click.Context(command), rest[0].split("|")[0]) or command, rest[1:]
    return command, rest


def test_every_command_and_option_in_the_readme_exists() -> None:
    lines = re.findall(r"^(?:\$ )?(?:(?:torchrun|salloc) .*?)?(parbench .*)$", README, re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        for part in line.partition("#")[0].split(" -- "):
            if part.startswith("parbench "):
                command, rest = leaf(part.split())
                known = {opt for param in command.params for opt in param.opts}
                assert {word for word in rest if word.startswith("--")} <= known, line


@pytest.mark.parametrize("group", [name for name, command in COMMANDS.items() if isinstance(command, click.Group)])
def test_every_command_of_a_group_has_help_and_an_example(group: str) -> None:
    commands = COMMANDS[group]
    assert isinstance(commands, click.Group)
    for name, command in commands.commands.items():
        assert command.help, name
        assert f"parbench {group} {name}" in (command.epilog or ""), name


def test_the_presets_in_the_readme_are_the_presets() -> None:
    from bench.presets import PRESETS

    assert re.findall(r"`(\w+)` \((?:under|the default|about)", README) == list(PRESETS)


def test_what_is_packaged_is_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in SOURCES}
    assert set(project["tool"]["setuptools"]["packages"]) == folders - {""}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kinds_of_steps_do_not_import_one_another(path: Path) -> None:
    [package, *inner] = path.relative_to(ROOT).parent.parts or [""]
    others = {f"{package}.{name}" for name in INNER.get(package, ()) if [name] != inner}
    if inner and inner not in COMPOSING:
        for name in imported(path):
            assert not any(name == other or name.startswith(f"{other}.") for other in others), f"{path} imports {name}"


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[><=]", requirement)[0].lower() for requirement in wanted}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names <= pinned


def test_every_module_has_a_test_file_of_its_own() -> None:
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    # what a module's only purpose is shown by, where it is not a file of its own name
    shown_by = {"errors": "test_parbench", "plan": "test_planning", "agent": "test_faults", "parent": "test_faults"}
    for path in SOURCES:
        if path.stem != "__init__":
            assert shown_by.get(path.stem, f"test_{path.stem}") in tests, path


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES} - {ROOT}), ids=lambda path: path.name)
def test_every_folder_says_what_lives_in_it(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert "import" in text.lower()
