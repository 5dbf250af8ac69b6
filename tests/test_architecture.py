"""Imports point one way, light commands import nothing heavy, and every command is documented."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from parbench import cli
from tests.support.paths import ROOT

LAYER_BY_PACKAGE = {
    "bench": 0,
    "workloads": 1,
    "reports": 1,
    "slurm": 1,
    "parbench": 2,
}
PARALLELISMS = {"pipeline_parallel", "context_parallel", "expert_parallel"}
COMPOSING_PACKAGES = {"parallel", "layers", "step", "planner", "costs"}
"""Packages of workloads that may import several parallelisms."""

SOURCES = sorted(
    path for package in LAYER_BY_PACKAGE for path in (ROOT / package).rglob("*.py")
)
CONTEXT = click.Context(cli.main)


def parse_imports(path: Path) -> set[str]:
    """Return the modules and names that a file imports, without the prefix ``parbench.``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {strip_prefix(name) for name in names}


def strip_prefix(name: str) -> str:
    short_name = name.removeprefix("parbench.")
    package = short_name.partition(".")[0]
    return short_name if package in LAYER_BY_PACKAGE else name


IMPORTS = {path.relative_to(ROOT): parse_imports(path) for path in SOURCES}


def test_imports_point_one_way() -> None:
    for path, names in IMPORTS.items():
        package = path.parts[0]
        imported_packages = {name.partition(".")[0] for name in names} & LAYER_BY_PACKAGE.keys()
        for imported in imported_packages - {package}:
            assert LAYER_BY_PACKAGE[imported] < LAYER_BY_PACKAGE[package], (path, imported)


def test_calls_of_accelerators_are_in_one_module() -> None:
    files = []
    for path in SOURCES:
        if re.search(r"\btorch\.cuda\.", path.read_text()):
            files.append(str(path.relative_to(ROOT)))
    assert files == ["bench/world/accelerator.py"]


@pytest.mark.parametrize("package", ["reports", "slurm"])
def test_package_does_not_import_torch(package: str) -> None:
    for path, names in IMPORTS.items():
        if path.parts[0] == package:
            assert not any(name.partition(".")[0] == "torch" for name in names), path


def test_parallelisms_do_not_import_each_other() -> None:
    for path, names in IMPORTS.items():
        package, *folders = path.parent.parts
        if package == "workloads" and folders and folders[0] not in COMPOSING_PACKAGES:
            forbidden = tuple(f"workloads.{name}." for name in PARALLELISMS - {folders[0]})
            assert not any(name.startswith(forbidden) for name in names), path


def check_acyclic(graph: dict[str, set[str]]) -> None:
    """Assert that following imports never returns to a module or folder, keyed by name."""
    finished: set[str] = set()

    def visit(name: str, ancestors: tuple[str, ...]) -> None:
        assert name not in ancestors, " -> ".join([*ancestors, name])
        if name in finished:
            return
        for imported in graph[name] & graph.keys():
            visit(imported, (*ancestors, name))
        finished.add(name)

    for name in graph:
        visit(name, ())


def test_modules_have_no_import_cycle() -> None:
    check_acyclic(
        {".".join(path.with_suffix("").parts): names for path, names in IMPORTS.items()}
    )


def test_folders_of_a_package_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path, names in IMPORTS.items():
        if len(path.parts) > 2:
            folder = ".".join(path.parts[:2])
            imported = {".".join(name.split(".")[:2]) for name in names}
            graph.setdefault(folder, set()).update(imported - {folder})
    check_acyclic(graph)


def find_loaded(code: str, modules: tuple[str, ...]) -> set[str]:
    """Return the modules of a list that code loads in a new process."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = completed.stdout.splitlines()[-1].split()
    return set(loaded) & set(modules)


def test_help_imports_nothing_heavy() -> None:
    code = "from parbench import cli\ncli.main(['run', '--help'], standalone_mode=False)"
    modules = ("torch", "pandas", "scipy", "numpy", "rich", "jinja2")
    assert find_loaded(code, modules) == set()


def test_driver_and_reports_import_nothing_heavy() -> None:
    modules = (
        "parbench.bench.launch.measure",
        "parbench.workloads.catalogue",
        "parbench.reports.commands",
        "parbench.reports.formats.chrome_trace",
        "parbench.reports.render.page",
        "parbench.reports.render.show",
        "parbench.reports.run_data",
        "parbench.reports.frames",
    )
    code = f"import {', '.join(modules)}"
    assert find_loaded(code, ("torch", "pandas", "scipy")) == set()


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["pytest"] + extras["test"]
    names = {re.split(r"[><=]", requirement)[0].lower() for requirement in requirements}
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    assert names <= {line.partition("==")[0] for line in lines}


def list_commands() -> list[tuple[str, click.Command]]:
    """Return every command and subcommand with its name."""
    commands = []
    for name in cli.COMMANDS:
        command = cli.main.get_command(CONTEXT, name)
        assert command is not None
        commands.append((name, command))
        if isinstance(command, click.Group):
            commands += [
                (f"{name} {child}", inner) for child, inner in command.commands.items()
            ]
    return commands


@pytest.mark.parametrize(("name", "command"), list_commands())
def test_command_has_help_and_example(name: str, command: click.Command) -> None:
    assert command.help
    assert f"parbench {name}" in (command.epilog or "")
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.opts
