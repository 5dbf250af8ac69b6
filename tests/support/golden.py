"""The golden files: what parbench says today of what is kept in tests/golden, as text in which a diff can be read.

``make golden`` writes them anew. runs/steps is one launch of every kind of benchmark, runs/base and runs/new are five
launches before and after a rank became late: real runs on two ranks, so that nothing but this code makes the texts.
``records_outline`` is of a fresh run, without what its clock said.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner
from paths import ROOT, TESTS

from parbench import cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.plan import PRESETS
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.text import format_size

GOLDEN = TESTS / "golden"
STEPS, BASE, NEW = (GOLDEN / "runs" / name for name in ("steps", "base", "new"))
EXACT = ("bytes_", "calls.", "sent.", "memory_counted.", "memory_formula.", "in_flight", "bubble_fraction_schedule")
PLANS = (
    "gpt-175b dp=8,pp=4,tp=8",
    "gpt-175b dp=8,pp=8,tp=8 --schedule interleaved --checkpointing selective",
    "gpt-175b fsdp=64,tp=8 --checkpointing full",
    "llama3-8b dp=8",
    "llama3-8b dp=8 --precision float32",
    "llama3-8b fsdp=8",
    "llama3-8b fsdp=16 --microbatches 4 --hardware a100",
    "llama3-8b fsdp=4,cp=4 --sequence 32768",
    "llama3-8b fsdp=4,cp=4 --sequence 32768 --cp-method ring",
    "llama3-8b fsdp=4,cp=4 --sequence 32768 --cp-method ulysses",
    "llama3-8b fsdp=4,cp=4 --sequence 32768 --cp-method allgather_kv",
    "llama3-70b dp=8,fsdp=4,pp=4,tp=8",
    "llama3-70b fsdp=8,tp=8 --checkpointing selective",
    "llama3-70b fsdp=32,tp=8 --hardware h200",
    "llama3-70b pp=8,tp=8 --schedule zb_h1",
    "llama3-70b dp=2,pp=8,tp=8 --schedule interleaved --chunks 2",
    "mixtral-8x7b fsdp=8,tp=2,ep=8",
    "mixtral-8x7b dp=2,pp=4,tp=2,ep=2",
    "mixtral-8x7b fsdp=64,ep=8 --checkpointing full",
    "mixtral-8x7b fsdp=8,cp=2,ep=4 --sequence 8192",
)


def said(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(cli.main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout.replace(f"{GOLDEN}/", "")


def plans() -> str:
    """Return a block for each plan: a line for each number of ``plan --json``, the hardware's own left out."""
    blocks = []
    for line in PLANS:
        model, mesh, *more = line.split()
        told = json.loads(said("plan", "--model", model, "--mesh", mesh, "--json", *more))
        told["hardware"] = told["hardware"]["name"]
        told["formulas"] = {one["name"]: [one["equation"], one["numbers"], one["value"]] for one in told["formulas"]}
        blocks.append("\n".join([f"# {line}", *(f"{path} {value}" for path, value in leaves(told))]))
    return "\n\n".join(blocks) + "\n"


def presets() -> str:
    """Return the cases of each preset on two ranks: a line for those that differ in size alone, defaults left out."""
    catalogue = load_catalogue(cli.DEFINITIONS)
    known = {definition.name: {param.name: param.default for param in definition.params} for definition in catalogue}
    lines: dict[str, list[str]] = {}
    for preset in PRESETS:
        plan = make_plan(Options(preset=preset), catalogue, WorldSpec(nproc=2, backend="gloo", device="cpu"))
        for case, skipped in [*((case, "") for case in plan.cases), *((one.case, "skipped ") for one in plan.skipped)]:
            others = [f" {k}={v}" for k, v in case.params.items() if k != "size_bytes" and v != known[case.name][k]]
            size = format_size(int(case.params["size_bytes"])) if "size_bytes" in case.params else "once"
            lines.setdefault(f"{preset}: {skipped}{case.name}{''.join(others)}:", []).append(size)
    return "".join(f"{line} {' '.join(sizes)}\n" for line, sizes in lines.items())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the places of a JSON value and what stands there, numbers with six digits."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    elif isinstance(value, list):
        yield path, "; ".join(_shown(inner) for inner in value)
    else:
        yield path, _shown(value)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def compared() -> str:
    told = json.loads(said("compare", str(BASE), str(NEW), "--format", "json"))
    return "".join(f"{path} {value}\n" for path, value in leaves(told))


class _Outline(HTMLParser):
    """Headings, tables with their columns and rows, and figures of a page, in its order."""

    _NAMED = ("h1", "h2", "h3", "h4", "caption", "summary", "th")

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._text: list[str] | None = None
        self._columns: list[str] | None = None
        self._rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._NAMED:
            self._text = []
        elif tag == "table":
            self._columns, self._rows = [], 0
        elif tag == "tr":
            self._rows += 1
        elif tag in ("svg", "img"):
            label = dict(attrs).get("aria-label") or dict(attrs).get("alt") or ""
            self.lines.append(f"    {tag} {label}".rstrip())

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._NAMED and self._text is not None:
            text, self._text = " ".join("".join(self._text).split()), None
            if tag != "th":
                self.lines.append(f"{tag} {text}")
            elif self._columns is not None:
                self._columns.append(text)
        elif tag == "table" and self._columns is not None:
            self.lines.append(f"    table of {self._rows} rows: {' | '.join(self._columns)}")
            self._columns = None


def page_outline(page: str) -> str:
    parser = _Outline()
    parser.feed(page)
    return "".join(f"{line}\n" for line in parser.lines)


def page() -> str:
    from parbench.bench.results.runs import load_run
    from parbench.reports.render.page import render_page
    from parbench.reports.sections.one_run import report_of

    return page_outline(render_page(report_of(load_run(STEPS))))


def records_outline(records: list[Record]) -> str:
    """Return what is in the first record of each name, by label: metrics by unit, details; no clock's values."""
    blocks = []
    for record in {
        one.case.name: one for one in sorted(records, key=lambda one: one.case.label, reverse=True)
    }.values():
        params = " ".join(f"{name}={value}" for name, value in record.case.params.items())
        units: dict[str, list[str]] = {}
        for name, metric in sorted(record.metrics.items()):
            if name.endswith(("_p99", "_q10")):
                continue  # there only where iterations are enough
            units.setdefault(f"{metric.unit or '1'}, {metric.better or 'neither'} is better", []).append(
                _named(record, name, metric)
            )
        lines = [f"{unit}: {' '.join(names)}" for unit, names in sorted(units.items())]
        lines.append(f"details: {' '.join(sorted(_places(msgspec.to_builtins(record.details))))}")
        shown = [textwrap.fill(line, 118, initial_indent="  ", subsequent_indent="    ") for line in lines]
        blocks.append("\n".join([f"{record.case.name} {params}: {record.status}", *shown]))
    return "\n".join(sorted(blocks)) + "\n"


def _named(record: Record, name: str, metric: MetricValue) -> str:
    if record.case.name.startswith("workload.ep_"):
        return name  # a trained router's routes depend on how many steps there was time for
    return f"{name}={_shown(metric.value)}" if name.startswith(EXACT) or name.endswith("_formula") else name


def _places(value: Any, path: str = "") -> set[str]:
    """Return where a JSON value holds something, any item of a list as [], any rank or launch of an object by name."""
    if isinstance(value, dict):
        return set().union(*(_places(inner, f"{path}.{name}" if path else str(name)) for name, inner in value.items()))
    if isinstance(value, list):
        return set().union(*(_places(inner, f"{path}[]") for inner in value)) if value else {f"{path}[]"}
    return {path}


FILES: dict[str, Callable[[], str]] = {
    "steps.first.txt": lambda: said("show", str(STEPS)),
    "steps.show.txt": lambda: said("show", "--all", str(STEPS)),
    "steps.page.txt": page,
    "compare.txt": lambda: said("compare", str(BASE), str(NEW)),
    "compare.json.txt": compared,
    "plans.txt": plans,
    "presets.txt": presets,
}
"""What makes each golden file but records.txt, which takes a run."""


def with_tables(text: str) -> str:
    """Return a README with what ``parbench list --markdown`` prints after each comment that says so."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{said(*shlex.split(found[2])).rstrip()}\n\n<!-- end -->"

    return re.sub(r"(<!-- parbench (list --markdown .*?) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def renew() -> None:
    import tempfile

    from smoke import smoke

    for name, make in FILES.items():
        (GOLDEN / name).write_text(make())
    for path in ROOT.glob("*/README.md"):
        path.write_text(with_tables(path.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        (GOLDEN / "records.txt").write_text(records_outline(list(smoke(Path(folder)).records)))


if __name__ == "__main__":
    renew()
