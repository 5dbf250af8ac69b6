"""The commands that show what was measured."""

from pathlib import Path

import click

# spelt out here too, so that --help imports nothing; a test compares them
TOOLS = ("nccl-tests", "param", "osu", "gloo")
EXPORTS = ("nccl-tests", "nccl-tests-json")


@click.command(epilog="Example: parbench report runs/20260102T030405Z-node1-1a2b3c -o report.html")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, instead of report.html in the run's folder.",
)
def report(run: Path, output: Path | None) -> None:
    """Build the HTML report of RUN, a run's folder, and print where it is."""
    from reports.show import build_report

    click.echo(str(build_report(run, output)))


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
    from reports.imports import import_file

    for file in files:
        click.echo(str(import_file(file, out, nproc=nproc, tool=tool)))


@click.command(epilog="Example: parbench export runs/20260102T030405Z-node1-1a2b3c --format nccl-tests -o run.txt")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(EXPORTS), required=True, help="The format to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, instead of standard output.",
)
def export(run: Path, form: str, output: Path | None) -> None:
    """Write the collectives of RUN, a run's folder, as another tool would: a table for each series."""
    from bench.errors import UserError
    from bench.runs import load_run
    from reports.show import export_run

    content = export_run(load_run(run), form)
    if output is None:
        click.echo(content, nl=False)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from error
