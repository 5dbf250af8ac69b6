"""The golden files: what parbench says today of what is kept in tests/golden, as text in which a diff can be read.

``make golden`` writes them anew. runs/steps is one launch of every kind of benchmark, runs/base and runs/new are five
launches before and after a rank became late: real runs on two ranks, so that nothing but this code makes the texts.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

from click.testing import CliRunner

from parbench import cli
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.plan import PRESETS
from parbench.bench.text import format_size
from tests.support.paths import ROOT, TESTS

GOLDEN = TESTS / "golden"
STEPS, BASE, NEW = (GOLDEN / "runs" / name for name in ("steps", "base", "new"))
EXACT = (
    "bytes_",
    "calls.",
    "sent.",
    "memory_counted.",
    "memory_formula.",
    "in_flight",
    "bubble_fraction_schedule",
)
PLANS = (
    "gpt-175b dp=8,pp=8,tp=8 --schedule interleaved --checkpointing selective",
    "llama3-8b fsdp=8",
    "llama3-8b fsdp=4,cp=4 --sequence 32768 --cp-method ulysses",
    "llama3-70b dp=8,fsdp=4,pp=4,tp=8",
    "mixtral-8x7b fsdp=8,tp=2,ep=8",
)


def said(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(cli.main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout.replace(f"{GOLDEN}/", "")


def plans() -> str:
    """Return the memory of the fullest rank, the parts of a step and the bytes of each axis for each plan."""
    return "\n\n".join(map(_plan, PLANS)) + "\n"


def _plan(line: str) -> str:
    model, mesh, *more = line.split()
    plan = json.loads(said("plan", "--model", model, "--mesh", mesh, "--json", *more))
    memory = max(plan["memory_bytes"], key=lambda rank: float(rank["total"]))
    seconds = {
        name.removesuffix("_seconds"): value
        for name, value in plan.items()
        if name.endswith("_seconds")
    }
    axes = {
        name: f"{axis['sent_bytes']:.6g} B, exposed {axis['exposed_seconds']:.6g} s"
        for name, axis in plan["axes"].items()
    }
    lines = [
        f"# {line}",
        f"fits {plan['fits']}, mfu {plan['mfu']:.6g}",
        "bytes "
        + ", ".join(f"{name} {_shown(value)}" for name, value in memory.items() if name != "rank"),
        "seconds " + ", ".join(f"{name} {_shown(value)}" for name, value in seconds.items()),
        *(f"{name} sends {text}" for name, text in axes.items()),
    ]
    return "\n".join(lines)


def presets() -> str:
    """Return the cases of each preset on two ranks: a line for those that differ in size alone, defaults left out."""
    catalogue = load_catalogue(cli.DEFINITIONS)
    known = {
        definition.name: {param.name: param.default for param in definition.params}
        for definition in catalogue
    }
    lines: dict[str, list[str]] = {}
    for preset in PRESETS:
        plan = make_plan(
            Options(preset=preset), catalogue, WorldSpec(nproc=2, backend="gloo", device="cpu")
        )
        for case, skipped in [
            *((case, "") for case in plan.cases),
            *((one.case, "skipped ") for one in plan.skipped),
        ]:
            others = [
                f" {k}={v}"
                for k, v in case.params.items()
                if k != "size_bytes" and v != known[case.name][k]
            ]
            size = (
                format_size(int(case.params["size_bytes"]))
                if "size_bytes" in case.params
                else "once"
            )
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


FILES: dict[str, Callable[[], str]] = {
    "steps.first.txt": lambda: said("show", str(STEPS)),
    "steps.show.txt": lambda: said("show", "--all", str(STEPS)),
    "steps.page.txt": page,
    "compare.txt": lambda: said("compare", str(BASE), str(NEW)),
    "plans.txt": plans,
    "presets.txt": presets,
}
"""The function that makes each golden file."""


def with_tables(text: str) -> str:
    """Return a README with what ``parbench list --markdown`` prints after each comment that says so."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{said(*shlex.split(found[2])).rstrip()}\n\n<!-- end -->"

    return re.sub(
        r"(<!-- parbench (list --markdown .*?) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL
    )


def renew() -> None:
    for name, make in FILES.items():
        (GOLDEN / name).write_text(make())
    for path in ROOT.glob("*/README.md"):
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    renew()
