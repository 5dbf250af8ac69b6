"""The command line: a table of commands, each imported when it is first used.

``parbench --help`` has to answer within 0.2 s, so this module imports nothing heavy.
"""

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import click

if TYPE_CHECKING:
    from parbench.bench.results.tables import Document
    from parbench.reports.run_data import RunData

COMMANDS = {
    "run": "parbench.bench.commands:run",
    "list": "parbench.bench.commands:list_cases",
    "doctor": "parbench.bench.commands:doctor",
    "check": "parbench.bench.commands:check",
    "report": "parbench.reports.commands:report",
    "show": "parbench.reports.commands:show",
    "compare": "parbench.reports.commands:compare",
    "explain": "parbench.reports.commands:explain",
    "plan": "parbench.workloads.commands:plan",
    "history": "parbench.reports.history.commands:history",
    "ab": "parbench.reports.compare.commands:ab",
    "aa": "parbench.reports.compare.commands:aa",
    "slurm": "parbench.slurm.commands:slurm",
    "import": "parbench.reports.commands:import_files",
    "export": "parbench.reports.commands:export",
}
DEFINITIONS = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, and ends a user's error with one sentence and code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if there is none of the name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; ``UsageError`` with the nearest name if there is none."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and near and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. A ``UserError`` prints one message and exits with 2, any other error exits with 4."""
        try:
            from parbench.bench.text import UserError, escape_unprintable

            return super().invoke(ctx)
        except KeyboardInterrupt:  # which may come while the line above is read
            click.echo("parbench: interrupted", err=True)
        except UserError as error:
            message = escape_unprintable(str(error), "\n")
            click.echo(f"parbench: {message}", err=True)
            sys.exit(2)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (
                errno.ENAMETOOLONG,
                errno.ELOOP,
                errno.ENOTDIR,
            ):
                click.echo(f"parbench: {error.filename} cannot be used: {error.strerror}", err=True)
                raise click.exceptions.Exit(2) from error  # whichever option named it
            if is_out_of_memory(error):
                click.echo("parbench: the memory is full", err=True)
            elif is_missing_package(error):
                click.echo(
                    f"parbench: the Python package {error.name!r} is not installed", err=True
                )
            else:
                traceback.print_exc()
        sys.exit(4)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if there is too little memory, also for the dynamic linker to load a library."""
    return isinstance(error, MemoryError) or (
        isinstance(error, ImportError) and "failed to map" in str(error)
    )


def is_missing_package(error: Exception) -> TypeGuard[ModuleNotFoundError]:
    """Return True if a dependency is not installed. A module that is missing inside a package is a defect."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return "." not in error.name and error.name != "parbench"


def run() -> None:
    """Run the command line as the program ``parbench``.

    Processes that parbench starts with ``python -m`` do not import from the current folder, where a module may have the
    name of one of Python's. They inherit the variable that says so.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    main()


_FIRST = """\
parbench measures how this machine communicates, and what that costs a training step.

  parbench run                                        measure this node, in under 2 min
  parbench doctor                                     find what would disturb a measurement
  parbench plan search --model llama3-8b --gpus 64    predict a training step, without GPUs

All commands: parbench --help"""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    epilog="Start with: parbench run",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="parbench", prog_name="parbench")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Measure how this machine communicates, and what that costs a training step."""
    from parbench.bench.commands import AppHooks

    ctx.obj = AppHooks(
        modules=DEFINITIONS,
        show_run=_show,
        compute_exit_code=_exit_code,
        write_report=_report,
        render_document=_render,
    )
    if ctx.invoked_subcommand is None:
        click.echo(_FIRST)


def _show(path: Path, form: str, show_all: bool, limits: Path | None) -> int:
    from parbench.reports.history.baseline import judge_by_history
    from parbench.reports.render.show import show_run
    from parbench.reports.run_data import RunData

    data = RunData.load(path)
    code = show_run(data, judge_by_history(data), form=form, show_all=show_all)
    return _check_limits(data, limits, code)


def _exit_code(path: Path, limits: Path | None) -> int:
    from parbench.reports.run_data import RunData

    data = RunData.load(path)
    return _check_limits(data, limits, data.exit_code)


def _check_limits(data: "RunData", limits: Path | None, code: int) -> int:
    if limits is None:
        return code
    from parbench.reports.limits import check_run

    return check_run(data, limits, code)


def _render(document: "Document", form: str) -> bytes:
    from parbench.reports.render.show import render_report
    from parbench.reports.report import make_report_of_document

    return render_report(make_report_of_document(document), form)


def _report(runs: Sequence[Path], output: Path) -> None:
    from parbench.reports.render.show import write_report

    write_report(runs, output)
