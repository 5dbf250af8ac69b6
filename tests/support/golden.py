"""Golden files: what parbench prints of stored runs and plans, as text with a readable diff.

``make golden`` writes them. ``runs/steps`` is one
repetition of every kind of benchmark. ``runs/base`` and ``runs/new`` are five repetitions before
and after a rank became late. They are real runs on two ranks.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any

from click.testing import CliRunner

from parbench import cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.results.runs import load_run
from parbench.bench.text import format_size
from parbench.reports.render.page import render_page
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.plan_command import StepOptions, build_step_on_mesh
from tests.support.paths import TESTS
from tests.support.reports.report_rows import report_of

GOLDEN = TESTS / "golden"
STEPS = GOLDEN / "runs" / "steps"
BASE = GOLDEN / "runs" / "base"
NEW = GOLDEN / "runs" / "new"
PLANS = (
    "gpt-175b dp=8,pp=8,tp=8 schedule=interleaved checkpointing=selective",
    "llama3-8b fsdp=8",
    "llama3-8b fsdp=4,cp=4 sequence=32768 cp_method=ulysses",
    "llama3-70b dp=8,fsdp=4,pp=4,tp=8",
    "mixtral-8x7b fsdp=8,tp=2,ep=8",
)
OUTLINE_TAGS = ("h1", "h2", "h3", "h4", "caption", "summary", "th")


def run_parbench(*args: str) -> str:
    """Return the standard output of a command on a terminal with 160 columns."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(cli.main, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout.replace(f"{GOLDEN}/", "")


def describe_plans() -> str:
    """Return the peak memory, the parts of a step and the bytes of each axis for each plan."""
    return "\n\n".join(describe_plan(line) for line in PLANS) + "\n"


def describe_plan(line: str) -> str:
    model, mesh, *settings = line.split()
    options: dict[str, Any] = dict(setting.split("=") for setting in settings)
    if "sequence" in options:
        options["sequence"] = int(options["sequence"])
    spec, _ = build_step_on_mesh(StepOptions(model=model, **options), mesh)
    run = dry_run(spec, PRESETS["h100"])
    memory = {**asdict(run.fullest.memory), "total": run.fullest.memory.total}
    lines = [
        f"# {line}",
        f"fits {run.fits}, mfu {run.mfu:.6g}",
        f"bytes {format_values(memory)}",
        f"seconds {format_values({**run.parts, 'step': run.seconds})}",
    ]
    for axis in run.axes:
        exposed = f"exposed {axis.exposed_seconds:.6g} s"
        lines.append(f"{axis.name} sends {axis.sent_bytes:.6g} B, {exposed}")
    return "\n".join(lines)


def describe_presets() -> str:
    """Return the cases of the small presets; cases that differ only in size share a line."""
    catalogue = load_catalogue(cli.DEFINITIONS)
    defaults = {
        definition.name: {param.name: param.default for param in definition.params}
        for definition in catalogue
    }
    spec = WorldSpec(nproc=2, backend="gloo", device="cpu")
    sizes_by_line: dict[str, list[str]] = defaultdict(list)
    for preset in ("smoke", "node"):
        for case in make_plan(Options(preset=preset), catalogue, spec).cases:
            params = dict(case.params)
            size = format_size(int(params.pop("size_bytes", 0)))
            settings = [
                f"{name}={value}"
                for name, value in params.items()
                if value != defaults[case.name][name]
            ]
            line = " ".join([f"{preset}:", case.name, *settings])
            sizes_by_line[line].append(size)
    return "".join(f"{line}: {' '.join(sizes)}\n" for line, sizes in sizes_by_line.items())


def format_values(values: dict[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        if name != "rank":
            parts.append(f"{name.removesuffix('_seconds')} {text}")
    return ", ".join(parts)


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
    "plans.txt": describe_plans,
    "presets.txt": describe_presets,
}
"""The function that makes each golden file."""


def renew() -> None:
    """Write the golden files."""
    for name, make_text in FILES.items():
        (GOLDEN / name).write_text(make_text())


if __name__ == "__main__":
    renew()
