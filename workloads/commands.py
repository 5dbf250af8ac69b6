"""``parbench plan``: predicts the time and memory of a training step on another cluster."""

from pathlib import Path
from typing import Any

import click

from parbench.bench.commands import AppHooks, RunPath

# Loops run as often as these options say.
_COUNT = click.IntRange(max=1 << 16)
_TOKENS = click.IntRange(max=1 << 24)
_FORMATS = {".html": "html", ".md": "markdown", ".json": "json"}
_EXAMPLES = """\b
Examples:
  parbench plan --model llama3-70b --gpus 64                    fastest meshes
  parbench plan --model llama3-70b --gpus 1024 --mesh dp=8,fsdp=4,pp=4,tp=8
  parbench plan --model llama3-70b --gpus 1024 --mesh fsdp=128,tp=8 --hardware a100 --explain
  parbench plan --model llama3-70b --gpus 64 --global-batch 512 --explain
  parbench plan --model Qwen3-32B/config.json --gpus 64 --sequence 4096     or model.toml
  parbench plan --model tiny --mesh dp=2,tp=4 --precision float32 --fits runs/20260101T000000Z-host-1a2b3c
  parbench plan --validate runs/20260101T000000Z-host-1a2b3c
  parbench plan --validate runs/20260101T000000Z-n4-1a2b3c --fits runs/20260101T000000Z-n2-5d6e7f
  parbench plan --model llama3-70b --gpus 64 -o plan.html       a page with a timeline
  parbench plan --guide --model llama3-70b --gpus 256           bytes and memory of each strategy
\b
Exit codes: 0 fine; 2 bad input, or a step that does not fit into memory.
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--model",
    metavar="NAME|FILE",
    help="Name such as llama3-70b or deepseek-v3, a .toml file or a config.json.",
)
@click.option(
    "--gpus", type=int, default=0, metavar="N", help="Number of GPUs; default: that of the mesh."
)
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="Predict one mesh: dp, fsdp, pp, cp, tp, outermost first, and ep.",
)
@click.option(
    "--microbatch",
    type=_COUNT,
    help="Sequences in a microbatch; default: 1, or several in a search.",
)
@click.option(
    "--microbatches",
    type=_COUNT,
    default=0,
    help="Microbatches per data rank; default: 1, or 4 for each stage with pp.",
)
@click.option(
    "--global-batch",
    type=_COUNT,
    default=0,
    help="Sequences in a step, instead of --microbatches.",
)
@click.option(
    "--sequence", type=_TOKENS, default=0, help="Tokens in a sequence; default: that of the model."
)
@click.option(
    "--precision",
    default="bfloat16",
    show_default=True,
    help="bfloat16 (with float32 master weights) or float32.",
)
@click.option(
    "--schedule",
    default="",
    help="Pipeline schedule: 1f1b (the default), interleaved, zb_h1, ...",
)
@click.option(
    "--chunks",
    type=_COUNT,
    default=0,
    help="Pipeline stages per rank; default: that of the schedule.",
)
@click.option(
    "--split", default="", metavar="N+N+...", help="Layers of each stage; default: equal."
)
@click.option(
    "--checkpointing",
    default="",
    metavar="HOW",
    help="Activation recomputation: none (the default), selective, full or full:K.",
)
@click.option(
    "--cp-method",
    default="",
    help="Context-parallel method: zigzag (the default), ring, allgather_kv or ulysses.",
)
@click.option(
    "--zero", type=click.IntRange(0, 3), help="ZeRO stage: 0 or 1 over dp, 2 or 3 over fsdp."
)
@click.option(
    "--state",
    default="",
    metavar="KIND=DTYPE,...",
    help="Dtypes of parameters, gradients, moments, master; default: 16 bytes per parameter.",
)
@click.option(
    "--hardware", metavar="NAME|FILE", help="a100, h100 (the default), h200, b200, or a .toml file."
)
@click.option(
    "--fits",
    metavar="RUN",
    type=RunPath(),
    help="Take the speed of links from the collectives that a run measured.",
)
@click.option(
    "--calibrate",
    metavar="RUN",
    type=RunPath(),
    multiple=True,
    help="Take the efficiency of GEMMs and overlap from the steps of a run, and its links without "
    "--hardware.",
)
@click.option(
    "--top",
    type=_COUNT,
    default=10,
    show_default=True,
    help="Number of meshes that a search shows.",
)
@click.option("--explain", is_flag=True, help="Print each formula with its numbers and source.")
@click.option(
    "--validate",
    metavar="RUN",
    type=RunPath(),
    help="Compare predictions with the measured steps of a run, and write RUN/plan.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.option(
    "--guide", is_flag=True, help="Print the bytes and memory of each strategy for the model."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page (.html), Markdown (.md) or tables (.json) to this file.",
)
@click.pass_context
def plan(context: click.Context, /, **options: Any) -> None:
    """Predict the time and memory of a training step, without GPUs.

    Show the fastest meshes for --gpus, the prediction for one --mesh, or predictions next to the
    measured steps of --validate RUN. Nothing is measured. Every assumption is printed, and
    --hardware FILE.toml changes it.
    """
    from parbench.bench.files import write_output
    from parbench.bench.text import UserError, format_list
    from parbench.workloads.planner.plan_command import Given, answer

    output = options["output"]
    if output and output.suffix not in _FORMATS:
        raise UserError(f"{output} does not end in {format_list(_FORMATS)}")
    result = answer(Given(**options))
    if result.document is None:
        click.echo(result.text)
    else:
        form = "json" if options["as_json"] else "tables"
        if output:
            form = _FORMATS[output.suffix]
        content = context.ensure_object(AppHooks).render_document(result.document, form)
        if output:
            write_output(output, content)
            click.echo(str(output))
        else:
            click.echo(content, nl=False)
    if result.problem:
        click.echo(f"parbench: {result.problem}", err=True)
        context.exit(2)
