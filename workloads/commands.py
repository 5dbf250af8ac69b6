"""``parbench plan``: what a training step would take on machines that are not here."""

from pathlib import Path
from typing import Any

import click

from parbench.bench.commands import AppHooks, RunPath

_BOUNDED, _TOKENS = click.IntRange(max=1 << 16), click.IntRange(max=1 << 24)  # they size loops
_FORMS = {".html": "html", ".md": "markdown", ".json": "json"}
_EXAMPLES = """\b
Examples:
  parbench plan --model llama3-70b --gpus 64                    the fastest meshes
  parbench plan --model llama3-70b --gpus 1024 --mesh dp=8,fsdp=4,pp=4,tp=8
  parbench plan --model llama3-70b --gpus 1024 --mesh fsdp=128,tp=8 --hardware a100 --explain
  parbench plan --model llama3-70b --gpus 64 --global-batch 512 --explain
  parbench plan --model Qwen3-32B/config.json --gpus 64 --sequence 4096     a checkpoint's, or mine.toml
  parbench plan --model tiny --mesh dp=2,tp=4 --precision float32 --fits runs/20260101T000000Z-host-1a2b3c
  parbench plan --validate runs/20260101T000000Z-host-1a2b3c
  parbench plan --validate runs/20260101T000000Z-n4-1a2b3c --fits runs/20260101T000000Z-n2-5d6e7f
  parbench plan --model llama3-70b --gpus 64 -o plan.html       a page: candidates, the step over time, what if
  parbench plan --guide --model llama3-70b --gpus 256           what each strategy sends and holds
\b
Exit codes: 0 fine; 2 bad input, or a step that does not fit into memory.
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--model",
    metavar="NAME|FILE",
    help="Such as llama3-70b or deepseek-v3; a .toml, or a config.json.",
)
@click.option(
    "--gpus", type=int, default=0, metavar="N", help="Number of GPUs; default: the mesh's."
)
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="One mesh: dp, fsdp, pp, cp, tp, outermost first; and ep.",
)
@click.option(
    "--microbatch",
    type=_BOUNDED,
    help="Sequences of a microbatch; default: 1; a search tries several.",
)
@click.option(
    "--microbatches",
    type=_BOUNDED,
    default=0,
    help="Per data rank; default: 1, or with pp 4 for each stage.",
)
@click.option(
    "--global-batch",
    type=_BOUNDED,
    default=0,
    help="Sequences of a step, instead of --microbatches.",
)
@click.option(
    "--sequence", type=_TOKENS, default=0, help="Tokens of a sequence; default: the model's."
)
@click.option(
    "--precision",
    default="bfloat16",
    show_default=True,
    help="bfloat16 (float32 masters) or float32.",
)
@click.option(
    "--schedule",
    default="",
    help="1f1b (the default; a search tries several), interleaved, zb_h1, ...",
)
@click.option(
    "--chunks", type=_BOUNDED, default=0, help="Pipeline stages per rank; default: the schedule's."
)
@click.option(
    "--split", default="", metavar="N+N+...", help="Layers of each stage; default: equal."
)
@click.option(
    "--checkpointing",
    default="",
    metavar="HOW",
    help="none (the default), selective, full, or full:K.",
)
@click.option(
    "--cp-method", default="", help="zigzag (the default), ring, striped, allgather_kv, ulysses."
)
@click.option(
    "--zero", type=click.IntRange(0, 3), help="ZeRO's stage: 0 or 1 over dp, 2 or 3 over fsdp."
)
@click.option(
    "--state",
    default="",
    metavar="KIND=DTYPE,...",
    help="Dtypes of parameters, gradients, moments, master; default: 16 bytes a parameter.",
)
@click.option(
    "--hardware", metavar="NAME|FILE", help="a100, h100 (the default), h200, b200, or a .toml file."
)
@click.option(
    "--fits",
    metavar="RUN",
    type=RunPath(),
    help="Take the links' speed from the collectives that a run measured.",
)
@click.option(
    "--calibrate",
    metavar="RUN",
    type=RunPath(),
    multiple=True,
    help="Take what matrix products and overlap reach from a run's steps, and without --hardware its links.",
)
@click.option(
    "--top", type=_BOUNDED, default=10, show_default=True, help="Meshes that a search shows."
)
@click.option("--explain", is_flag=True, help="Print every formula with its numbers and source.")
@click.option(
    "--validate",
    metavar="RUN",
    type=RunPath(),
    help="Compare predictions with a run's measured steps; writes RUN/plan.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.option(
    "--guide", is_flag=True, help="Print what each strategy alone sends and holds on the model."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page (.html), Markdown (.md) or its tables (.json) instead.",
)
@click.pass_context
def plan(context: click.Context, /, **given: Any) -> None:
    """Predict a training step's time and memory, without GPUs.

    With --gpus alone the fastest meshes, with --mesh that one, with --validate the predictions beside a run. Nothing
    is measured; every assumption is printed, and --hardware FILE.toml changes it.
    """
    from parbench.bench.files import write_output
    from parbench.bench.text import UserError, format_list
    from parbench.workloads.planner.plan_command import Given, answer

    output = given["output"]
    if output and output.suffix not in _FORMS:
        raise UserError(f"{output} ends in none of {format_list(_FORMS)}")
    found = answer(Given(**given))
    if found.document is None:
        click.echo(found.text)
    else:
        form = _FORMS[output.suffix] if output else "json" if given["as_json"] else "tables"
        content = context.ensure_object(AppHooks).render_document(found.document, form)
        if output:
            write_output(output, content)
        click.echo(str(output) if output else content, nl=bool(output))
    if found.problem:
        click.echo(f"parbench: {found.problem}", err=True)
        context.exit(2)
