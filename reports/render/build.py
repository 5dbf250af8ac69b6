"""A report in any of its formats, of one run or of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.results.runs import Run, load_run
from bench.text import UserError
from reports.analysis.problems import warnings_of, write_whole
from reports.analysis.several import Several, gather, is_sweep
from reports.analysis.summary import summarize
from reports.render.data import as_csv, as_json, embedded_json, several_csv, several_json
from reports.render.markdown import render_markdown, render_several_markdown
from reports.sections.several_sections import several_sections

DID_NOT_RUN = 4


@dataclass(frozen=True, kw_only=True)
class Built:
    """A report's content, and the exit code: 4 if it can only say that the run cannot be read."""

    content: bytes
    code: int = 0


def build(paths: Sequence[Path], form: str) -> Built:
    """Return the report of the runs' folders, or a sweep's, as ``html``, ``markdown``, ``csv`` or ``json``.

    ``UserError`` where a folder is no run; one that holds a run which cannot be read has a page that says why.
    """
    if len(paths) > 1 or is_sweep(paths[0]):
        return Built(content=_several(gather(paths, whole=True), form).encode(errors="replace"))
    (path,) = paths
    try:
        run = load_run(path)
    except UserError as error:
        if form != "html" or not (path / "run.json").is_file():
            raise
        # matplotlib takes a second to import, which only pages wait for
        from reports.render.page import render_refusal

        return Built(content=render_refusal(path.resolve().name, str(error)).encode(errors="replace"), code=DID_NOT_RUN)
    return Built(content=_one(run, form).encode(errors="replace"))


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page of these runs, or of a sweep's folder, whole or not at all.

    A run that cannot be read is told in it; ``UserError`` if none can, or the file cannot be written.
    """
    one = len(runs) == 1 and not is_sweep(runs[0])
    built = build(runs, "html").content if one else _several(gather(runs), "html").encode(errors="replace")
    write_whole(output, built)


def _one(run: Run, form: str) -> str:
    summary = summarize(run)
    if form == "markdown":
        return render_markdown(run, summary)
    if form == "csv":
        return as_csv(summary)
    if form == "json":
        return as_json(run, summary) + "\n"
    from reports.render.page import render_page

    return render_page(run, summary, warnings_of(run))


def _several(found: Several, form: str) -> str:
    both = [(one.run, one.summary) for one in found.runs]
    if form == "csv":
        return several_csv(both)
    if form == "json":
        return several_json(both) + "\n"
    if form == "markdown":
        return render_several_markdown(found, several_sections(found))
    from reports.render.page import render_several

    return render_several(found, several_sections(found), embedded_json(both))
