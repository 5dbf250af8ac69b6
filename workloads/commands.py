"""``parbench plan``: predicts the time and memory of a training step on another cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parbench.bench.command_line import (
    CountRange,
    RunPath,
    figure_format_option,
    figures_option,
    format_option,
    output_option,
    print_or_write,
)
from parbench.bench.commands import AppHooks, parse_settings

if TYPE_CHECKING:
    from parbench.bench.results.tables import Document
    from parbench.workloads.planner.plan_command import MachineOptions, StepOptions

Command = TypeVar("Command", bound=Callable[..., Any])
"""A function of a command, to which click options are added."""
# Loops run as often as these options say.
_COUNT = CountRange(1 << 16)
_TOKENS = CountRange(1 << 24)


def _format_examples(*examples: str, settings: str = "") -> str:
    """Return the end of a command's help text: its settings, examples and exit codes.

    ``examples`` are arguments of ``parbench plan``, one command each. ``settings`` is the help of
    ``--set``, empty for commands without it.
    """
    lines = ["\b", "Examples:", *("  parbench plan " + example for example in examples)]
    codes = "0 fine; 2 bad input"
    if settings:
        codes += ", or a step that does not fit into memory"
        lines.insert(0, settings)
    return "\n".join([*lines, "", "\b", f"Exit codes: {codes}."])


def _combine(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several click options to a command, in the order of its help."""

    def decorate(function: Command) -> Command:
        """Return the command with all options."""
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_MODEL_OPTIONS = _combine(
    click.option(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help="Name such as llama3-70b or deepseek-v3, or the config.json of a checkpoint.",
    ),
    click.option(
        "--sequence",
        type=_TOKENS,
        default=None,
        help="Tokens in a sequence; default: that of the model.",
    ),
)
_SETTINGS: dict[str, "click.ParamType[Any]"] = {
    "schedule": click.STRING,
    "virtual_stages": _COUNT,
    "layers_per_stage": click.STRING,
    "microbatches": _COUNT,
    "cp_method": click.STRING,
    "precision": click.STRING,
    "zero": click.IntRange(0, 3),
}
"""The types of the values of ``--set NAME=VALUE``, keyed by name."""
_SETTINGS_HELP = """\b
Names of --set:
  schedule=NAME         order of a pipeline: 1f1b, interleaved, zb_h1, ...
  virtual_stages=N      per pipeline rank; default: those of the schedule
  layers_per_stage=N+N+...
                        such as 5+6+13x5+4; default: as equal as possible
  microbatches=N        per data rank, instead of --global-batch; default: 4
                        per pipeline rank, 1 without a pipeline
  cp_method=NAME        zigzag, allgather_kv, ulysses, usp or ring
  precision=DTYPE       bfloat16 (default, with float32 master weights) or
                        float32
  zero=STAGE            ZeRO: 0 or 1 over dp and cp, 2 or 3 over fsdp; default
                        of plan mesh: 0, with fsdp 3
"""


def _convert_settings(
    context: click.Context, parameter: click.Parameter, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Return the converted values of ``--set NAME=VALUE`` by name.

    click calls this function with the texts. ``_SETTINGS`` has the type of the value for each name,
    such as an integer for ``virtual_stages``. A text without "=", a name that is unknown or occurs
    twice, and a value of another type are errors of the command line.
    """
    values = {}
    for name, text in parse_settings(settings).items():
        if name not in _SETTINGS:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(_SETTINGS)}.")
        try:
            values[name] = _SETTINGS[name].convert(text, parameter, context)
        except click.BadParameter as error:
            raise click.BadParameter(f"{name}: {error.message}") from error
    return values


_STEP_OPTIONS = _combine(
    click.option("--microbatch", type=_COUNT, help="Sequences in a microbatch."),
    click.option(
        "--global-batch",
        type=_COUNT,
        help="Sequences in a step; default of a search: one per GPU.",
    ),
    click.option(
        "--checkpointing",
        default="",
        metavar="HOW",
        help="Recomputation: none (default), selective, full, or full:K (one layer in K).",
    ),
    click.option(
        "--set",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_convert_settings,
        help="Set another parameter of the step. Names are listed below.",
    ),
)
_HARDWARE_OPTION = click.option(
    "--hardware",
    default="",
    metavar="NAME|FILE",
    help="a100, h100 (the default), h800, h200, b200, or a .toml file.",
)
_MACHINE_OPTIONS = _combine(
    _HARDWARE_OPTION,
    click.option(
        "--links",
        metavar="RUN",
        type=RunPath(),
        help="Take the speed of links from the collectives that a run measured.",
    ),
    click.option(
        "--calibrate",
        metavar="RUN",
        type=RunPath(),
        multiple=True,
        help="Take the efficiency of compute and overlap from the steps of a run.",
    ),
)
_document_format = format_option(
    type=click.Choice(("tables", "html", "markdown", "json")), default="tables", show_default=True
)
_STEP_OUTPUT_OPTIONS = _combine(
    click.option("--explain", is_flag=True, help="Print each formula with its numbers and source."),
    _document_format,
    output_option(),
    figures_option,
    figure_format_option,
)


@click.group(
    epilog=_format_examples(
        "search --model llama3-70b --gpus 64       the fastest meshes",
        "mesh --model llama3-70b --mesh fsdp=64    one mesh",
        "validate latest                           predictions next to measurements",
        "guide --model llama3-70b --gpus 256       strategies and their limits",
        "recipes                                   meshes of trained models",
    )
)
def plan() -> None:
    """Predict the time and memory of a training step, without GPUs.

    Nothing is measured. Every assumption is printed, and --hardware FILE.toml changes it.
    """


@plan.command(
    name="search",
    epilog=_format_examples(
        "search --model llama3-70b --gpus 64 --global-batch 512",
        "search --model llama3-70b --gpus 64 --format html -o plan.html",
        "search --model llama3-70b --gpus 64 --figures figures --figure-format png,pdf",
        "search --model Qwen3-32B/config.json --gpus 64 --sequence 4096",
        settings=_SETTINGS_HELP,
    ),
)
@_MODEL_OPTIONS
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="Number of GPUs.")
@_STEP_OPTIONS
@_MACHINE_OPTIONS
@click.option("--top", type=_COUNT, default=10, show_default=True, help="Meshes to print.")
@_STEP_OUTPUT_OPTIONS
@click.pass_context
def search_meshes(
    context: click.Context,
    /,
    form: str,
    output: Path | None,
    figures: Path | None,
    formats: Sequence[str],
    **options: Any,
) -> None:
    """Rank the practical meshes for a number of GPUs.

    A mesh is practical if tp stays within a node, cp leaves each rank more than 4,096 tokens of a
    sequence, and a pipeline has at least as many microbatches as ranks. If none of these meshes
    fits in memory, cp may leave as few as 2,048 tokens. Print if model state and activations fit in
    the memory of a GPU, and the fastest of the meshes considered.
    """
    from parbench.workloads.planner.plan_command import answer_search

    step, machine = _split_options(options)
    options["explain"] |= form != "tables" or figures is not None
    document = answer_search(step, machine, **options)
    _write_document(context, document, form, output, figures, formats)


@plan.command(
    name="mesh",
    epilog=_format_examples(
        "mesh --model llama3-70b --mesh dp=8,fsdp=4,pp=4,tp=8 --explain",
        "mesh --model tiny --mesh dp=2,tp=4 --set precision=float32 --links latest",
        settings=_SETTINGS_HELP,
    ),
)
@_MODEL_OPTIONS
@click.option(
    "--mesh",
    required=True,
    metavar="AXIS=SIZE,...",
    help="Sizes of dp, fsdp, pp, cp, tp, outermost first, and of ep and etp inside them.",
)
@_STEP_OPTIONS
@_MACHINE_OPTIONS
@_STEP_OUTPUT_OPTIONS
@click.pass_context
def predict_mesh(
    context: click.Context,
    /,
    form: str,
    output: Path | None,
    figures: Path | None,
    formats: Sequence[str],
    **options: Any,
) -> None:
    """Predict the time, communication and memory of one mesh."""
    from parbench.workloads.planner.plan_command import answer_mesh

    step, machine = _split_options(options)
    options["explain"] |= form != "tables" or figures is not None
    document = answer_mesh(step, machine, **options)
    _write_document(context, document, form, output, figures, formats)


@plan.command(epilog=_format_examples("validate latest", "validate RUN4 --links RUN2"))
@click.argument("run", type=RunPath())
@click.option(
    "--links",
    metavar="RUN",
    type=RunPath(),
    help="Take the speed of links from the collectives of another run.",
)
@format_option(type=click.Choice(("tables", "json")), default="tables")
@click.pass_context
def validate(context: click.Context, run: Path, links: Path | None, form: str) -> None:
    """Compare predictions with the measured steps of RUN.

    The speed of links is fitted to the collectives that RUN measured, or to those of another run
    with --links.
    """
    from parbench.bench.files import encode_json
    from parbench.bench.results.runs import load_run
    from parbench.workloads.planner.measured.validate import make_validation_document
    from parbench.workloads.planner.measured.validate import validate as compare_steps

    validation = compare_steps(load_run(run), load_run(links) if links else None)
    content = encode_json(validation)
    if form == "tables":
        document = make_validation_document(validation)
        content = context.ensure_object(AppHooks).render_document(document, "tables")
    click.echo(content, nl=form == "json")


@plan.command(epilog=_format_examples("guide --model llama3-70b --gpus 256"))
@click.option(
    "--model",
    default="llama3-8b",
    show_default=True,
    metavar="NAME|FILE",
    help="Name of a model, or the config.json of a checkpoint.",
)
@click.option(
    "--gpus", type=CountRange(1 << 17), default=64, show_default=True, help="Number of GPUs."
)
@_HARDWARE_OPTION
@_document_format
@click.pass_context
def guide(context: click.Context, model: str, gpus: int, hardware: str, form: str) -> None:
    """Print the bytes, memory and limits of each strategy for a model.

    A strategy is a kind of parallelism, such as FSDP. The bytes are those that a rank sends in a
    step. The memory is that of model state and activations. The limits are the number of ranks, the
    global batch that these ranks require, and the slowest suitable links.
    """
    from parbench.workloads.planner.hardware import load_hardware
    from parbench.workloads.planner.models import load_model
    from parbench.workloads.planner.report.guide import make_guide_document

    document = make_guide_document(load_model(model), gpus, load_hardware(hardware or "h100"))
    _write_document(context, document, form)


@plan.command(epilog=_format_examples("recipes", "recipes --format markdown"))
@_document_format
@click.pass_context
def recipes(context: click.Context, form: str) -> None:
    """Print the meshes with which models were trained, and their sources."""
    from parbench.workloads.planner.report.recipes import make_recipe_document

    _write_document(context, make_recipe_document(), form)


def _split_options(options: dict[str, Any]) -> "tuple[StepOptions, MachineOptions]":
    """Return the options of the training step and those of the hardware, as two objects.

    Both are removed from ``options``, which has the values of the command line by name of the
    option. Its entry ``settings`` has the names and values of ``--set``. An option that the user
    does not set has the default of its class.
    """
    from dataclasses import fields

    from parbench.workloads.planner.plan_command import MachineOptions, StepOptions

    options.update(options.pop("settings"))

    def pop_fields(kind: type[Any]) -> Any:
        """Return an object of the class ``kind`` from the options that are its fields."""
        values = {field.name: options.pop(field.name, None) for field in fields(kind)}
        # Options that are not given have the default of the class.
        return kind(**{name: value for name, value in values.items() if value is not None})

    return pop_fields(StepOptions), pop_fields(MachineOptions)


def _write_document(
    context: click.Context,
    document: "Document",
    form: str,
    output: Path | None = None,
    figures: Path | None = None,
    formats: Sequence[str] = (),
) -> None:
    """Print or write a document in the format ``form``, and write its figures to a folder.

    ``output`` is the file for the document, None for standard output. ``figures`` is the folder for
    figures, None to write none, and ``formats`` are their file formats. A problem of the document,
    such as a step that does not fit into memory, ends the command with exit code 2.
    """
    from parbench.bench.text import format_error

    hooks = context.ensure_object(AppHooks)
    if figures is not None:
        hooks.write_figures(document, figures, formats)
    print_or_write(hooks.render_document(document, form), output)
    if document.problem:
        click.echo(format_error(document.problem), err=True)
        context.exit(2)
