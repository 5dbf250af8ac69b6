"""The commands that show what was measured."""

from pathlib import Path

import click

from bench.commands import RunPath

# spelt out here too, so that --help imports nothing; a test compares them
TOOLS = ("nccl-tests", "param", "osu", "gloo")
EXPORTS = (
    "nccl-tests",
    "nccl-tests-json",
    "csv",
    "chrome-trace",
    "hta",
    "pytest-benchmark",
    "github-action-benchmark",
    "bencher",
    "openmetrics",
)
_FOLDER_FORMATS = {"hta": "a file for each rank", "github-action-benchmark": "a file for each direction"}
REPORTS = ("html", "markdown", "csv", "json")
COMPARISONS = ("table", "markdown", "json", "junit")
_COMPARE_EXAMPLES = """\b
Examples:
  parbench compare runs/20260102T030405Z-node1-1a2b3c runs/20260109T030405Z-node1-4d5e6f
  parbench compare BASE NEW --format markdown >> $GITHUB_STEP_SUMMARY
  parbench compare BASE NEW --across versions.torch
  parbench compare last:10 runs/20260109T030405Z-node1-4d5e6f
  parbench compare BASE NEW --confirm --base-python .venv-base/bin/python --across 'versions.*'

\b
Exit codes: 0 fine; 1 slower (a series or the whole run) or wrong; 2 bad input; 3 nothing could be compared, or cannot
tell where asked to fail on it; 4 failed or missing.
"""
_REPORT_EXAMPLES = """\b
Examples:
  parbench report runs/20260102T030405Z-node1-1a2b3c -o report.html
  parbench report RUN_ON_2 RUN_ON_4 RUN_ON_8 -o scaling.html
  parbench report sweeps/links
  parbench report RUN --format markdown >> $GITHUB_STEP_SUMMARY
"""
_EXPORT_EXAMPLES = """\b
Examples:
  parbench export runs/20260102T030405Z-node1-1a2b3c --format nccl-tests -o run.txt
  parbench export runs/20260102T030405Z-node1-1a2b3c --format csv -o run.csv
  parbench export runs/20260102T030405Z-node1-1a2b3c --format chrome-trace -o trace.json
  parbench export runs/20260102T030405Z-node1-1a2b3c --format hta -o traces
  parbench export runs/20260102T030405Z-node1-1a2b3c --format openmetrics -o parbench.prom
"""


@click.command(epilog=_REPORT_EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, instead of report.html in the run's folder (here, for several runs) or standard output.",
)
@click.option("--format", "form", type=click.Choice(REPORTS), default="html", show_default=True, help="The form.")
def report(runs: tuple[Path, ...], output: Path | None, form: str) -> None:
    """Build the report of RUN, a run's folder, and print where it is; of several, how they scale and differ.

    A sweep's folder stands for all its runs, each under the label of its point.

    One HTML file for offline reading; markdown, csv and json go to standard output.
    """
    from reports.render.show import build_report

    click.get_current_context().exit(build_report(runs, form, output))


@click.command(epilog="Example: parbench show --all latest")
@click.argument("run", type=RunPath())
@click.option("--all", "whole", is_flag=True, help="Print every table and row.")
@click.option("--watch", is_flag=True, help="Follow a run in progress until it ends.")
def show(run: Path, whole: bool, watch: bool) -> None:
    """Print the first page of RUN, a run's folder or latest, with --all every table; of a sweep, its runs' tables.

    The exit code is the run's own: 0 fine, 1 a wrong result, 4 something did not run.
    """
    if watch:
        from reports.render.show import follow

        click.get_current_context().exit(follow(run, whole=whole))
    from reports.render.show import show_again

    click.get_current_context().exit(show_again(run, whole=whole))


@click.command(epilog=_COMPARE_EXAMPLES)
@click.argument("base", type=RunPath())
@click.argument("new", type=RunPath())
@click.option("--format", "form", type=click.Choice(COMPARISONS), default="table", show_default=True, help="The form.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, instead of standard output.",
)
@click.option(
    "--floor",
    envvar="PARBENCH_FLOOR",
    help="The change below which times count as the same, or the file that parbench aa wrote, also $PARBENCH_FLOOR; "
    "default: 3%, and runs/floor.json where it is there.",
)
@click.option(
    "--across",
    multiple=True,
    metavar="GLOB",
    help="A difference of the environment that is what you test, such as versions.torch: it forbids nothing.",
)
@click.option("--fail-on-unknown", is_flag=True, help="Exit with 3 if something cannot be told and all else is fine.")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    envvar="PARBENCH_HISTORY",
    default=Path("runs/history.sqlite"),
    show_default=True,
    help="The file of the history that main~1 and last:10 are runs of, also $PARBENCH_HISTORY.",
)
@click.option("--confirm", is_flag=True, help="Launch what is SLOWER or AMBIGUOUS again, both sides in turns.")
@click.option("--base-python", default="", metavar="PYTHON", help="With --confirm: the Python of BASE's code.")
@click.option("--new-python", default="", metavar="PYTHON", help="That of NEW's code, instead of this one.")
@click.option("--budget", default="10m", show_default=True, metavar="TIME", help="With --confirm: the time for it.")
@click.option(
    "--launches",
    type=click.IntRange(5, 24),
    help="With --confirm: the most a side; default: 24.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/confirm"),
    show_default=True,
    help="With --confirm: for the fresh runs.",
)
def compare(
    base: Path,
    new: Path,
    form: str,
    output: Path | None,
    floor: str | None,
    across: tuple[str, ...],
    fail_on_unknown: bool,
    history: Path,
    confirm: bool,
    base_python: str,
    new_python: str,
    budget: str,
    launches: int | None,
    out: Path,
) -> None:
    """Say of each series of NEW whether it is slower than in BASE, with the effect and what differs around it.

    BASE and NEW are runs' folders or runs of the history: main, main~1, last:10 (ten runs as one, of each case those on
    the ranks of its newest), or an id. One launch is one observation, and five a side are the least that decide. A
    series is SLOWER or FASTER only if the 95 % interval of its change clears the floor, SAME only if it lies within;
    so is the whole run, by what its series share. What is AMBIGUOUS says how many launches would decide it.

    --confirm launches on ranks such as NEW's: what srun spread over nodes needs an allocation of as many.
    """
    from bench.text import UserError, parse_duration
    from reports.regression.compare_show import compare_runs
    from reports.regression.confirm import Confirming

    if not confirm and (base_python or new_python):
        raise UserError("--base-python and --new-python go with --confirm alone: nothing else is launched")
    how = Confirming(
        base_python=base_python,
        new_python=new_python,
        budget_seconds=parse_duration(budget),
        launches=launches,
        out=out,
        tell=lambda text: click.echo(text, err=True),
    )
    text, code = compare_runs(
        str(base),
        str(new),
        floor=floor,
        across=across,
        form=form,
        fail_on_unknown=fail_on_unknown,
        history=history,
        confirming=how if confirm else None,
    )
    _write(text.encode(errors="replace"), output)
    click.get_current_context().exit(code)


@click.command("import", epilog="Example: parbench import all_reduce.log osu_allreduce.txt --nproc 8")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--from",
    "tool",
    type=click.Choice(TOOLS),
    help="The tool that wrote the files, where they do not show it themselves.",
)
@click.option("--nproc", type=click.IntRange(min=1), help="The number of ranks, where a file does not tell it.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder that new runs go to.",
)
def import_files(files: tuple[Path, ...], tool: str | None, nproc: int | None, out: Path) -> None:
    """Turn what other tools printed into runs, one for each FILE, and print where they are.

    Sizes and bandwidths become nccl-tests' convention, which is ours; what was converted stands in each row's notes.
    """
    from reports.formats.imports import import_file

    for file in files:
        click.echo(str(import_file(file, out, nproc=nproc, tool=tool)))


@click.command(epilog=_EXPORT_EXAMPLES)
@click.argument("run", type=RunPath())
@click.option("--format", "form", type=click.Choice(EXPORTS), required=True, help="The format to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write, instead of standard output; or the folder, for hta and a chrome-trace for each case.",
)
def export(run: Path, form: str, output: Path | None) -> None:
    """Write RUN, a run's folder, as another tool would.

    nccl-tests and nccl-tests-json hold its collectives, a table for each series. csv holds a row for each metric of
    each launch, as parbench.load returns them. chrome-trace holds the timelines of
    its training steps for Perfetto or chrome://tracing: each rank of each step is a process on one clock, its streams
    are threads, and a pipeline's prediction stands beside it; all in one file, or in a folder, one that is there or a
    name without a suffix, a file for each step. hta is a folder for HolisticTraceAnalysis: in it one for each step, and
    in that a file for each rank. github-action-benchmark is a folder with a file for what is better smaller, and one
    for what is better bigger. pytest-benchmark, bencher (Bencher Metric Format) and openmetrics hold every case.
    """
    from bench.results.runs import load_run
    from bench.text import UserError
    from reports.formats.exports import FOLDERS, FORMATS
    from reports.render.show import write_files

    is_folder = output is not None and (output.is_dir() or not output.suffix)
    if form in _FOLDER_FORMATS and not is_folder:
        raise UserError(f"--format {form} writes {_FOLDER_FORMATS[form]}: name their folder with -o FOLDER")
    loaded = load_run(run)
    if output is None or not is_folder or form not in FOLDERS:
        _write(FORMATS[form](loaded), output)
        return
    for file in write_files(output, FOLDERS[form](loaded)):
        click.echo(str(file))


def _write(content: bytes, output: Path | None) -> None:
    from bench.text import writing

    if output is None:
        click.echo(content, nl=False)
        return
    with writing(output):
        output.write_bytes(content)
