"""The commands that show, compare and convert runs."""

from pathlib import Path
from typing import Any

import click

from parbench.bench.command_line import (
    RunPath,
    figure_format_option,
    figures_option,
    format_option,
    output_option,
    print_or_write,
)
from parbench.bench.commands import limits_option
from parbench.reports.formats.registry import EXPORT_FORMATS, IMPORT_FORMATS, describe_imports
from parbench.reports.options import (
    COMPARE_FORMATS,
    EXPLAIN_FORMATS,
    REPORT_FORMATS,
    figure_option,
    history_option,
    min_effect_option,
    runs_option,
    undecided_option,
)

_COMPARE_EXAMPLES = """\b
Examples:
  parbench compare runs/20260102T030405Z-node1-1a2b3c runs/20260109T030405Z-node1-4d5e6f
  parbench compare BASE NEW --format markdown >> $GITHUB_STEP_SUMMARY
  parbench compare BASE NEW --across versions.torch
  parbench compare last:10 runs/20260109T030405Z-node1-4d5e6f

\b
Exit codes: 0 fine; 1 slower, a changed count, a limit that is not met, or a wrong
result; 2 bad input; 3 the metric of a limit is unknown, or a series is undecided (with
--fail-on-undecided); 4 failed or missing, or nothing could be compared.
"""
_REPORT_EXAMPLES = """\b
Examples:
  parbench report runs/20260102T030405Z-node1-1a2b3c -o report.html
  parbench report RUN_ON_2 RUN_ON_4 RUN_ON_8 -o scaling.html
  parbench report sweeps/links
  parbench report RUN --format markdown >> $GITHUB_STEP_SUMMARY
  parbench report RUN --figures figures --figure-format pdf,png
"""
_EXPORT_EXAMPLES = """\b
Examples:
  parbench export runs/20260102T030405Z-node1-1a2b3c --format nccl-tests -o run.txt
  parbench export runs/20260102T030405Z-node1-1a2b3c --format chrome-trace -o trace.json
"""


@click.command(epilog=_REPORT_EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@output_option(
    help="File to write. Default for html: report.html in the folder of the run, or in the current "
    "folder for several runs. Other formats go to standard output by default.",
)
@format_option(type=click.Choice(REPORT_FORMATS), default="html")
@figures_option
@figure_format_option
def report(
    runs: tuple[Path, ...],
    output: Path | None,
    form: str,
    figures: Path | None,
    formats: tuple[str, ...],
) -> None:
    """Write the report of a run, or of several runs side by side.

    RUN is the folder of a run, latest, the folder of a sweep, or a folder that contains runs. The
    report is one HTML file of at most a megabyte that needs no network. Its path is printed.
    """
    from parbench.reports.render.show import build_report

    build_report(runs, form, output, figures, formats)


@click.command(epilog="Example: parbench show --all latest")
@click.argument("run", type=RunPath())
@click.option("--all", "show_all", is_flag=True, help="Print all tables with all rows.")
@format_option(type=click.Choice(("tables", "json")), default="tables")
def show(run: Path, show_all: bool, form: str) -> None:
    """Print the results of a run in the terminal.

    RUN is the folder of a run, latest, or the folder of a sweep. The exit code is that of the run:
    0 fine, 1 a wrong result, 4 something did not run.
    """
    from parbench.reports.render.show import build_report, show_again

    if form == "json":
        click.get_current_context().exit(build_report([run], form))
    click.get_current_context().exit(show_again(run, show_all=show_all))


@click.command(epilog="Example: parbench explain traces/ --against latest -o explained.html")
@click.argument(
    "traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--against",
    metavar="RUN",
    type=RunPath(),
    help="A run on the same machine, whose fitted times are the reference for each collective.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(EXPLAIN_FORMATS),
    help="The output format. Default: tables, or html with -o.",
)
@output_option()
def explain(
    traces: tuple[Path, ...], against: Path | None, form: str | None, output: Path | None
) -> None:
    """Explain the traces of a job: why is my step slow?

    TRACE is the trace of a rank that torch.profiler wrote (export_chrome_trace, .json or .json.gz),
    or a folder of traces. The last lines name the largest losses first: late ranks, exposed
    communication, or idle time.
    """
    from parbench.reports.render.show import render_report
    from parbench.reports.render.terminal import print_report
    from parbench.reports.traces.explain import explain_traces

    report = explain_traces(traces, against)
    form = form or ("html" if output else "tables")
    if form == "tables" and output is None:
        # A terminal has a width and colors.
        print_report(report)
    else:
        print_or_write(render_report(report, form), output)


@click.command(epilog=_COMPARE_EXAMPLES)
@click.argument("base", type=RunPath())
@click.argument("new", type=RunPath())
@format_option(type=click.Choice(COMPARE_FORMATS), default="tables")
@output_option()
@min_effect_option
@click.option(
    "--across",
    multiple=True,
    metavar="GLOB",
    help="Declare a difference intentional: in the environment, such as versions.torch, or in "
    "exact counts, such as counts.dp.all_reduce.",
)
@undecided_option
@limits_option
@history_option(help="The history file that main~1 and last:10 refer to.")
@figure_option(help="Also draw each change with its interval to this file (.png, .svg or .pdf).")
def compare(
    base: Path,
    new: Path,
    output: Path | None,
    history: Path,
    **options: Any,
) -> None:
    """Compare two runs: what became slower or faster?

    BASE and NEW are folders of runs, latest, folders that contain runs (pooled into one), or runs
    of the history: main, main~1, last:10 (ten runs, pooled) or an id.

    Exact counts of a training step come first: calls and bytes by axis and operation, memory by
    component, and its schedule. A change is COUNT CHANGED, with its cause. One repetition on a
    busy machine is enough.

    Times are compared by Welch's t-test on the logarithms of at least five repetitions per side. A
    series is SLOWER or FASTER if its change is significantly larger than the threshold among all
    series (false discovery rate), NO CHANGE if the 95 % interval lies within the threshold,
    otherwise UNDECIDED. parbench ab measures more repetitions.

    --limits apply to NEW, as in parbench run.
    """
    from parbench.reports.compare.report import compare_runs
    from parbench.reports.history.runs import find_run

    new_run = find_run(str(new), history)
    base_run = find_run(str(base), history, excluded=new_run.info.id)
    text, code = compare_runs(base_run, new_run, **options)
    print_or_write(text.encode(errors="replace"), output)
    click.get_current_context().exit(code)


@click.command(
    "import",
    epilog="Example: parbench import all_reduce.log osu_allreduce.txt --nproc 8",
    short_help=f"Convert output of {describe_imports()} into runs.",
    help=f"""Convert output of {describe_imports()} into runs.

    Each FILE becomes one run, whose folder is printed. Sizes and bandwidths are converted to
    nccl-tests' convention. The notes of each row describe the conversion.
    """,
)
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--from",
    "tool",
    type=click.Choice(IMPORT_FORMATS),
    help="The tool that wrote the files, if they do not show it.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), help="The number of ranks, if a file does not state it."
)
@click.option("--link", metavar="SPEED", help="Speed of the links, such as 400Gbit.")
@runs_option(default=Path("runs"))
def import_files(files: tuple[Path, ...], link: str | None, **options: Any) -> None:
    """Convert each log of another benchmark tool into a run, and print its folder and notes.

    ``link`` is the value of the option for the speed of the links. ``options`` are the other
    options of the command: tool, number of ranks, and output folder.
    """
    from parbench.bench.results.runs import load_run
    from parbench.bench.text import parse_link
    from parbench.reports.formats.imports import import_file

    for file in files:
        speed = parse_link(link) if link else None
        run = import_file(file, link_bytes_per_second=speed, **options)
        for note in load_run(run).info.plan.notes:
            click.echo(f"parbench: {note}", err=True)
        click.echo(str(run))


@click.command(epilog=_EXPORT_EXAMPLES)
@click.argument("run", type=RunPath())
@click.option(
    "--format",
    "name",
    type=click.Choice(EXPORT_FORMATS),
    required=True,
    help="The format to write.",
)
@output_option()
def export(run: Path, name: str, output: Path | None) -> None:
    """Write a run as nccl-tests text or Chrome traces.

    \b
    nccl-tests    collectives, a table for each operation and mode
    chrome-trace  timelines for Perfetto
    """
    from parbench.reports.formats.registry import render_export
    from parbench.reports.run_data import RunData

    print_or_write(render_export(name, RunData.load(run)), output)
