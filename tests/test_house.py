"""The house stands as it was drawn: imports point one way, nothing heavy is imported in vain, the README is true."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from parbench import cli as command_line
from tests.studies import mutation
from tests.support.paths import ROOT

LAYERS = {"parbench": 2, "slurm": 1, "reports": 1, "workloads": 1, "bench": 0}
INNER = {"workloads": ("pipeline_parallel", "context_parallel", "expert_parallel", "mesh")}
COMPOSING = (["mesh"], ["planner"], ["costs"])
"""What alone may import kinds of steps: the step that composes them, the closed forms and the planner of all."""
TORCH_FREE_PACKAGES = ("reports", "slurm")
HEAVY = ("torch", "pandas", "scipy")
NEVER_FOR_HELP = (*HEAVY, "numpy", "rich", "jinja2")
SOURCES = sorted(path for name in LAYERS for path in (ROOT / name).glob("**/*.py"))
CONTEXT = click.Context(command_line.main)
COMMANDS = {name: command_line.main.get_command(CONTEXT, name) for name in command_line.COMMANDS}


def imported(path: Path) -> set[str]:
    """Return the names that a file imports, those of our packages without the prefix ``parbench.``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {without_prefix(name) for name in names}


def without_prefix(name: str) -> str:
    rest = name.removeprefix("parbench.")
    return rest if rest.partition(".")[0] in LAYERS else name


IMPORTED = {path: imported(path) for path in SOURCES}


def test_imports_point_one_way() -> None:
    for path, names in IMPORTED.items():
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in names:
            other = name.partition(".")[0]
            if other in LAYERS and other != package:
                assert LAYERS[other] < LAYERS[package], f"{path} imports {name}"
            if package in TORCH_FREE_PACKAGES:
                assert other != "torch", f"{path} imports {name}"


def test_the_direction_test_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def late():\n    from parbench.workloads.data_parallel.ddp import prepare\n")
    assert "workloads.data_parallel.ddp" in imported(wrong)


def test_no_module_is_in_an_import_cycle() -> None:
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): names
        for path, names in IMPORTED.items()
    }
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


def heavy_imports(code: str, names: Sequence[str] = HEAVY) -> set[str]:
    script = f"import sys\n{code}\nprint(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_nothing_heavy_is_imported_in_vain() -> None:
    for words in ([], ["--help"], ["run", "--help"]):
        code = f"from parbench import cli\ntry:\n  cli.main({words})\nexcept SystemExit: pass"
        assert heavy_imports(code, NEVER_FOR_HELP) == set()
    driving = [
        "bench.launch.measure",
        "bench.launch.driver",
        "workloads.catalogue",
        "reports.analysis.summary",
    ]
    assert heavy_imports("\n".join(f"import parbench.{module}" for module in driving)) == set()
    showing = "import parbench.reports.render.show, parbench.reports.commands, parbench.reports.analysis.frame"
    assert heavy_imports(showing) == set()
    assert heavy_imports("import parbench.bench.operations.collectives") == {"torch"}, (
        "this test sees what is heavy"
    )


def test_pandas_is_imported_by_the_frame_alone() -> None:
    by = {str(path.relative_to(ROOT)) for path, names in IMPORTED.items() if "pandas" in names}
    assert by == {"reports/analysis/frame.py", "parbench/__init__.py"}, (
        "the latter for the types of what it returns"
    )


def test_every_command_has_help_an_example_and_a_place_in_a_readme() -> None:
    readmes = "".join(path.read_text() for path in (ROOT / "README.md", *ROOT.glob("*/README.md")))
    for name, command in COMMANDS.items():
        assert command is not None, name
        assert f"parbench {name}" in readmes
        for words, one in [
            (name, command),
            *((f"{name} {sub}", one) for sub, one in subcommands(command).items()),
        ]:
            assert one.help, words
            assert f"parbench {words}" in (one.epilog or ""), f"{words} has no example"
            for param in one.params:
                assert not isinstance(param, click.Option) or param.help, (
                    f"parbench {words} {param.opts[0]}"
                )


def subcommands(command: click.Command) -> Mapping[str, click.Command]:
    """Return the commands of a group, none of one that is no group."""
    return command.commands if isinstance(command, click.Group) else {}


def test_what_is_packaged_is_what_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in SOURCES}
    assert set(project["tool"]["setuptools"]["packages"]) == {
        "parbench",
        *(f"parbench.{name}" for name in folders - {"parbench"}),
    }


def test_kinds_of_steps_do_not_import_one_another() -> None:
    for path, names in IMPORTED.items():
        [package, *inner] = path.relative_to(ROOT).parent.parts or [""]
        others = {f"{package}.{name}" for name in INNER.get(package, ()) if [name] != inner}
        if inner and inner[:1] not in COMPOSING:
            wrong = {
                name
                for name in names
                for other in others
                if name == other or name.startswith(f"{other}.")
            }
            assert not wrong, f"{path} imports {wrong}"


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[><=]", requirement)[0].lower() for requirement in wanted}
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names <= pinned


def test_every_place_of_the_mutation_study_stands_once_in_its_file() -> None:
    for place in mutation.places():
        assert (ROOT / place.path).read_text().count(place.old) == 1, place.name
        assert place.old != place.new, place.name


def test_every_folder_says_what_lives_in_it() -> None:
    for folder in {path.parent for path in SOURCES} - {ROOT}:
        own = folder / "README.md"
        if own.exists():
            assert "import" in own.read_text().lower(), folder
        else:  # a room
            assert f"`{folder.name}/`" in (folder.parent / "README.md").read_text(), folder
