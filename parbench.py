"""The command line: a lazy table of commands. Nothing heavy is imported before a command needs it."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import click

COMMANDS = {
    "run": "bench.commands:run",
    "list": "bench.commands:list_cases",
    "doctor": "bench.commands:doctor",
    "report": "reports.commands:report",
    "show": "reports.commands:show",
    "compare": "reports.commands:compare",
    "plan": "workloads.commands:plan",
    "history": "reports.comparing.history_commands:history",
    "ab": "reports.comparing.ab_commands:ab",
    "aa": "reports.comparing.ab_commands:aa",
    "slurm": "slurm.commands:slurm",
    "import": "reports.commands:import_files",
    "export": "reports.commands:export",
    "schema": "bench.commands:schema",
}
DEFINITIONS = ("bench.plan.catalogue", "workloads.definitions")


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

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what the user can mend is one sentence."""
        from bench.text import UserError

        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"parbench: {error}", err=True)
            sys.exit(2)


@click.group(cls=LazyGroup, epilog="Start with: parbench run")
@click.version_option(version("parbench"), prog_name="parbench")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Measure how this machine communicates and what that costs a training step, with proof and honest numbers."""
    from bench.commands import AppHooks

    ctx.obj = AppHooks(modules=DEFINITIONS, show=_show, exit_code=_exit_code, report=_report)


def _show(path: Path, form: str) -> int:
    from reports.show import show_run

    return show_run(path, form)


def _exit_code(path: Path) -> int:
    from bench.results.runs import load_run
    from reports.summary import verdict

    return verdict(load_run(path)).code


def _report(paths: Sequence[Path], output: Path) -> None:
    from reports.build import write_report

    write_report(paths, output)


if __name__ == "__main__":
    main()
