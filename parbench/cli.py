"""The command line: a table of commands, each imported when it is first used.

``parbench --help`` has to answer within 0.2 s, so this module imports nothing heavy.
"""

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parbench.bench.commands import AppHooks
from parbench.bench.text import UserError, format_error

if TYPE_CHECKING:
    from parbench.bench.results.tables import Document

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
"""The module and function of each command (``MODULE:FUNCTION``), in the order of ``--help``."""
DEFINITIONS = ("parbench.bench.plan.catalogue", "parbench.workloads.catalogue")
"""The modules that define the benchmarks: collectives, and training steps."""

REPORT_MODULES = (
    "parbench.reports.history.baseline",
    "parbench.reports.render.show",
    "parbench.reports.render.page",
    "pandas",
    "matplotlib.backends.backend_svg",
)
"""The modules that print the results of a run and write its page, which are slow to import.

scipy is not among them, because its library of linear algebra never returns if memory is short.
"""


class CommandLineError(click.ClickException):
    """An error of the user, such as a wrong option, printed as ``error:`` and ``hint:`` lines."""

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        """Set the message, and a hint such as a command to type. An empty hint is not printed."""
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        """Print the message and the hint to standard error, or to ``file`` if it is not None."""
        click.echo(format_error(self.message, self.hint), file=file, err=True)


@contextmanager
def convert_user_errors() -> Iterator[None]:
    """Convert errors of the user in the ``with`` block to ``CommandLineError``.

    These are ``UserError`` and click's ``UsageError``, except for a group without a command.
    """
    try:
        yield
    except UserError as error:
        raise CommandLineError(str(error), error.hint) from error
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        hint = f"{error.ctx.command_path} --help" if error.ctx else ""
        # click writes each choice of a missing option on a line of its own.
        raise CommandLineError(error.format_message().replace("\n\t", " "), hint) from error


class LazyGroup(click.Group):
    """The command group ``parbench``, which imports a command only when it is used.

    Unlike click's group, it converts errors to parbench's messages and exit codes.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of commands in the order of ``COMMANDS`` instead of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command ``cmd_name``, None if ``COMMANDS`` does not have it."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command of the context.

        An error of the user exits with code 2, also if the system cannot open a file. An interrupt
        or any other error exits with code 4.
        """
        try:
            with convert_user_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(format_error("interrupted"), err=True)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
                # Any option may have named the file, and standard output may be a full disk.
                raise CommandLineError(str(error), "") from error
            traceback.print_exc()
        sys.exit(4)


def run() -> None:
    """Run the command line as the program ``parbench``.

    It sets the environment variable ``PYTHONSAFEPATH``, which child processes inherit. Those that
    parbench starts with ``python -m`` then do not import modules from the current folder, which may
    have the name of a standard module.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    main()


_EPILOG = """\b
Start with: parbench run

\b
Defaults of options come from the environment, such as PARBENCH_RUN_OUT=/data/runs.
"""
_FIRST = """\
parbench measures how this machine communicates, and what that costs a training step.

  parbench run                                        measure this node, in under 2 min
  parbench doctor                                     find what would disturb a measurement
  parbench plan search --model llama3-8b --gpus 64    predict a training step, without GPUs

All commands: parbench --help"""


def _show(path: Path, form: str, limits: Path | None) -> int:
    """Print the results of a run, write its HTML page, and return the exit code.

    With the format ``json``, no results are printed and no page is written. The arguments are those
    of ``AppHooks.show_run``.

    Args:
        path: the folder of the run.
        form: the format: ``tables``, ``nccl-tests`` or ``json``.
        limits: a file of limits to check, which may change the exit code. None without limits.
    """
    from parbench.reports.history.baseline import judge_by_history
    from parbench.reports.limits import check_run
    from parbench.reports.render.show import show_run
    from parbench.reports.run_data import RunData

    data = RunData.load(path)
    code = data.exit_code
    if form != "json":
        code = show_run(data, judge_by_history(data), form=form)
    return code if limits is None else check_run(data, limits, code)


def _render(document: "Document", form: str) -> bytes:
    """Return a document with tables and figures as UTF-8 in a format such as ``html``.

    See ``render_report`` for the formats.
    """
    from parbench.reports.render.show import render_report
    from parbench.reports.report import make_report_of_document

    return render_report(make_report_of_document(document), form)


def _write_figures(document: "Document", folder: Path, formats: Sequence[str]) -> None:
    """Write each figure of a document to ``folder`` in all file ``formats``, such as ``png``."""
    from parbench.reports.render.show import write_figures
    from parbench.reports.report import make_report_of_document

    write_figures(make_report_of_document(document), folder, formats)


def _report(runs: Sequence[Path], output: Path) -> None:
    """Write one HTML page about the runs in the folders ``runs`` to the file ``output``."""
    from parbench.reports.render.show import write_report

    write_report(runs, output)


HOOKS = AppHooks(
    modules=DEFINITIONS,
    report_modules=REPORT_MODULES,
    show_run=_show,
    write_report=_report,
    render_document=_render,
    write_figures=_write_figures,
)
"""The functions of other packages that commands of ``parbench.bench`` get by click's context."""


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "PARBENCH",
        "obj": HOOKS,
    },
)
@click.version_option(package_name="parbench", prog_name="parbench", allow_from_autoenv=False)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Measure how this machine communicates, and what that costs a training step."""
    if ctx.invoked_subcommand is None:
        click.echo(_FIRST)
