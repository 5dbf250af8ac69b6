"""The commands that show what was measured."""

from pathlib import Path

import click


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
