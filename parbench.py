"""The command line, a lazy table of commands; and ``load``, which gives runs as pandas frames.

Nothing heavy is imported before it is needed.
"""

import difflib
import errno
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import pandas as pd

    from bench.results.document import Document
    from bench.world.subject import Subject

COMMANDS = {
    "run": "bench.commands:run",
    "list": "bench.commands:list_cases",
    "doctor": "bench.commands:doctor",
    "check": "bench.commands:check",
    "report": "reports.commands:report",
    "show": "reports.commands:show",
    "compare": "reports.commands:compare",
    "explain": "reports.commands:explain",
    "plan": "workloads.commands:plan",
    "history": "reports.history.commands:history",
    "ab": "reports.regression.commands:ab",
    "aa": "reports.regression.commands:aa",
    "slurm": "slurm.commands:slurm",
    "import": "reports.commands:import_files",
    "export": "reports.commands:export",
    "schema": "bench.commands:schema",
}
DEFINITIONS = ("bench.plan.catalogue", "workloads.catalogue")


def load(*runs: str | Path) -> "pd.DataFrame":
    """Return what runs found, a row for each metric of each launch of each case.

    Each of ``runs`` is a run's folder, a sweep's, or one that holds runs. A parameter of a case is the column
    ``param_NAME``; ``value``, ``low`` and ``high`` are in the row's ``unit``: seconds, bytes, bytes a second. What
    failed, hung, was wrong, was skipped or has no record has one row, its ``metric`` and ``value`` NA.

    ``bench.text.UserError``, a ``ValueError`` of one sentence, where a folder is none of these or cannot be read.
    """
    from reports.analysis.frame import metrics_frame
    from reports.analysis.several import read_runs

    return metrics_frame(read_runs(runs))


def step_of(model: Any, batch: Any, loss: Any, optimizer: Any, reference: Any = None) -> "Subject":
    """Return a training loop's step as a subject, for ``parbench run --target``.

    ``model`` is a module as it trains: plain, in DDP, after ``fully_shard``, with DTensor parameters; or a schedule of
    ``torch.distributed.pipelining``. ``batch`` is what ``loss(model, batch)`` takes, or a function of the step's number
    that returns it; of a schedule, whose ``loss`` is None, it is the arguments of ``step`` on this rank as a tuple, or
    as a mapping by keyword. ``reference`` is the module that a single process would train: every rank's gradients are
    then held against the mean over ranks of its own; without one they are checked to be finite.
    """
    from workloads.step.training_loop import TrainingLoop

    return TrainingLoop(model, batch, loss, optimizer, reference)


def load_samples(*runs: str | Path, by_rank: bool = False) -> "pd.DataFrame":
    """Return the raw samples of runs, a row for each iteration: ``seconds`` of one step, the slowest rank's.

    With ``by_rank``, a row for each iteration and rank, from the runs' ``samples/*.npz``: ``arrival_seconds`` and
    ``exit_seconds`` since the case's first arrival, on rank 0's clock, ``duration_seconds`` and, in mode async,
    ``issue_seconds``, of all ``steps_per_sample`` steps together.

    ``bench.text.UserError`` as of ``load``, and with ``by_rank`` if there are no such files or one is damaged.
    """
    from reports.analysis.frame import rank_samples_frame, samples_frame
    from reports.analysis.several import read_runs

    return (rank_samples_frame if by_rank else samples_frame)(read_runs(runs))


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, and ends a user's error with one sentence and code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, with parbench's own packages: a module of the user's may have the name of one."""
        for name in ("bench", "workloads", "reports", "slurm"):
            found = importlib.util.find_spec(name)
            origin = Path(found.origin if found and found.origin else "nowhere").resolve()
            if origin != Path(__file__).resolve().with_name(name) / "__init__.py":
                told = f"Python imports {name} from {origin}, which is not parbench's"
                click.echo(f"parbench: {told}: take its folder off PYTHONPATH, or start with python -P", err=True)
                raise SystemExit(2)
        return super().main(*args, **kwargs)

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
        """Run the command; what the user can mend is one sentence, and nothing but a finding exits with 1."""
        try:
            from bench.text import UserError, sentence_of

            return super().invoke(ctx)
        except KeyboardInterrupt:  # which may come while the line above is read
            click.echo("parbench: interrupted", err=True)
        except (MemoryError, ImportError) as error:  # too little memory shows in libraries that cannot be mapped
            click.echo(f"parbench: {str(error) or 'the memory is full'}", err=True)
        except UserError as error:
            click.echo(f"parbench: {sentence_of(error)}", err=True)
            sys.exit(2)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
                click.echo(f"parbench: {error.filename} cannot be used: {error.strerror}", err=True)
                raise click.exceptions.Exit(2) from error  # whichever option named it
            traceback.print_exc()
        sys.exit(4)


_FIRST = """\
parbench measures how this machine communicates, and what that costs a training step.

  parbench run                                  measure this node, in under 2 min
  parbench doctor                               find what would disturb a measurement
  parbench plan --model llama3-8b --gpus 64     predict a training step, without GPUs

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
    from bench.commands import AppHooks

    ctx.obj = AppHooks(
        modules=DEFINITIONS, show=_show, exit_code=_exit_code, report=_report, render=_render, judge=_judge
    )
    if ctx.invoked_subcommand is None:
        click.echo(_FIRST)


def _show(path: Path, form: str, whole: bool) -> int:
    from reports.history.baseline import baseline
    from reports.render.show import show_run

    return show_run(path, baseline(path), form=form, whole=whole)


def _exit_code(path: Path) -> int:
    from bench.results.runs import load_run
    from reports.analysis.summary import summarize

    return summarize(load_run(path)).tally.code


def _render(document: "Document", form: str) -> bytes:
    from reports.document import render_document

    return render_document(document, form)


def _judge(path: Path, budgets: Path, code: int) -> int:
    from reports.budgets import judge_run

    return judge_run(path, budgets, code)


def _report(runs: Sequence[Path], output: Path) -> None:
    from reports.render.show import write_report

    write_report(runs, output)


if __name__ == "__main__":
    main()
