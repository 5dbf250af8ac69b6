"""Golden files: what parbench prints of stored runs and plans, as text with a readable diff.

``make golden`` writes them. ``runs/steps`` is one
repetition of every kind of benchmark. ``runs/base`` and ``runs/new`` are five repetitions before
and after a rank became late. They are real runs on two ranks.
"""

from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser

from click.testing import CliRunner

from parbench import cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.results.runs import load_run
from parbench.bench.text import format_size
from parbench.reports.render.page import render_page
from tests.support.paths import TESTS
from tests.support.reports.report_rows import report_of

GOLDEN = TESTS / "golden"
STEPS = GOLDEN / "runs" / "steps"
BASE = GOLDEN / "runs" / "base"
NEW = GOLDEN / "runs" / "new"
PLANS = (
    "--model gpt-175b --mesh dp=8,pp=8,tp=8 --set schedule=interleaved",
    "--model llama3-8b --mesh fsdp=4,cp=4 --sequence 32768 --set cp_method=ulysses",
    "--model mixtral-8x7b --mesh fsdp=8,tp=2,ep=8",
)
OUTLINE_TAGS = ("h1", "h2", "h3", "h4", "caption", "summary", "th")


def run_parbench(*args: str) -> str:
    """Return the standard output of a command on a terminal with 160 columns."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(cli.main, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout.replace(f"{GOLDEN}/", "")


def run_plans() -> str:
    """Return the output of ``parbench plan mesh`` for each plan."""
    return "\n".join(run_parbench("plan", "mesh", *options.split()) for options in PLANS)


def describe_presets() -> str:
    """Return the cases of the small presets; cases that differ only in size share a line."""
    catalogue = load_catalogue(cli.DEFINITIONS)
    spec = WorldSpec(nproc=2, backend="gloo", device="cpu")
    sizes_by_line: dict[str, list[str]] = defaultdict(list)
    for preset in ("smoke", "node"):
        for case in make_plan(Options(preset=preset), catalogue, spec).cases:
            num_bytes = int(case.params.get("size_bytes", 0))
            label = case.label.replace(f" size_bytes={num_bytes}", "")
            sizes_by_line[f"{preset}: {label}"].append(format_size(num_bytes))
    return "".join(f"{line}: {' '.join(sizes)}\n" for line, sizes in sizes_by_line.items())


class OutlineParser(HTMLParser):
    """Collects headings, tables with their columns and rows, and figures of a page in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._text: list[str] | None = None
        self._columns: list[str] | None = None
        self._num_rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in OUTLINE_TAGS:
            self._text = []
        elif tag == "table":
            self._columns = []
            self._num_rows = 0
        elif tag == "tr":
            self._num_rows += 1
        elif tag in ("svg", "img"):
            label = dict(attrs).get("aria-label") or dict(attrs).get("alt") or ""
            self.lines.append(f"    {tag} {label}".rstrip())

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in OUTLINE_TAGS and self._text is not None:
            text = " ".join("".join(self._text).split())
            self._text = None
            if tag != "th":
                self.lines.append(f"{tag} {text}")
            elif self._columns is not None:
                self._columns.append(text)
        elif tag == "table" and self._columns is not None:
            columns = " | ".join(self._columns)
            self.lines.append(f"    table of {self._num_rows} rows: {columns}")
            self._columns = None


def page_outline(page: str) -> str:
    parser = OutlineParser()
    parser.feed(page)
    return "".join(f"{line}\n" for line in parser.lines)


FILES: dict[str, Callable[[], str]] = {
    "steps.first.txt": lambda: run_parbench("show", str(STEPS)),
    "steps.page.txt": lambda: page_outline(render_page(report_of(load_run(STEPS)))),
    "compare.txt": lambda: run_parbench("compare", str(BASE), str(NEW)),
    "plans.txt": run_plans,
    "presets.txt": describe_presets,
}
"""The function that makes each golden file."""


def renew() -> None:
    """Write the golden files."""
    for name, make_text in FILES.items():
        (GOLDEN / name).write_text(make_text())


if __name__ == "__main__":
    renew()
