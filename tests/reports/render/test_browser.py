"""Pages of reports and plans in Chromium: quiet, accessible, sortable, printable."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.reports.render.show import load_report, render_report
from tests.support.reports.axe import axe_source
from tests.support.reports.browser import Browser
from tests.support.reports.late import late_record
from tests.support.reports.nodes_fixtures import sample_node_run, sample_sweep
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    failed_record,
    ok_record,
    pipeline_record,
    sample_run,
    step_case,
    training_metrics,
    write_run,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run

pytestmark = pytest.mark.full

HOSTILE_TEXTS = [
    HOSTILE_TEXT,
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "\u202eevil\u2066",
    "x" * 10_000,
]
KINDS = ["run", "several", "nodes", "sweep", "plan", "guide"]
Pages = dict[str, Path]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def write_hostile_run(folder: Path) -> Path:
    """Write a run with every kind of record, and hostile text in names, notes and reasons."""
    step = step_case("fsdp", note=HOSTILE_TEXTS[1])
    records = [*sample_run().records, pipeline_record(), late_record(4096)]
    records.append(ok_record(step, metrics=training_metrics(), notes=HOSTILE_TEXTS))
    for text in HOSTILE_TEXTS:
        records.append(failed_record(step_case("tp", label=text), reason=text))
    traces = [*((record, None) for record in records), (traced_record(), make_timeline())]
    run = write_traced_run(folder, traces)
    environment = {HOSTILE_TEXTS[1]: HOSTILE_TEXTS[3], "pairs": {"0-1": HOSTILE_TEXTS[2]}}
    info = msgspec.structs.replace(run.info, host=HOSTILE_TEXTS[2], environment=environment)
    (run.path / "run.json").write_bytes(msgspec.json.encode(info))
    return run.path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hostile_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def pages(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("pages")
    folders = {
        "run": [run_folder],
        "several": [run_folder, run_folder],
        "nodes": [write_run(folder, sample_node_run("cyclic"))],
        "sweep": [sample_sweep(folder / "links")],
    }
    for name, paths in folders.items():
        content = render_report(load_report(paths), "html")
        (folder / f"{name}.html").write_bytes(content)
    commands = {"plan": ["search", "--model", "llama3-8b"], "guide": ["guide"]}
    for name, options in commands.items():
        result = CliRunner().invoke(
            cli.main, ["plan", *options, "--gpus", "16", "--format", "html"]
        )
        assert result.exit_code == 0
        (folder / f"{name}.html").write_text(result.stdout)
    return {name: folder / f"{name}.html" for name in KINDS}


@pytest.fixture
def page(browser: Browser, pages: Pages) -> Browser:
    browser.open(pages["run"])
    return browser


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1200, 400])
def test_page_is_quiet_and_fits_the_window(
    kind: str, width: int, browser: Browser, pages: Pages
) -> None:
    browser.open(pages[kind], size=(width, 900))
    assert browser.requests == [pages[kind].resolve().as_uri()]
    assert browser.complaints == []
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dark", [False, True])
def test_page_is_accessible(kind: str, dark: bool, browser: Browser, pages: Pages) -> None:
    browser.open(pages[kind], dark=dark)
    if kind not in ("nodes", "sweep"):
        browser.run("document.querySelectorAll('details').forEach(node => node.open = true)")
    browser.run(axe_source())
    violations = browser.run("axe.run().then(result => result.violations)")
    if kind in ("run", "several"):  # with texts of 10,000 letters
        violations = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
    assert [rule["id"] for rule in violations] == []


CUT_TEXTS = """[...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const view = svg.viewBox.baseVal;
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBBox();
    return box.x < -1 || box.y < -1
      || box.x + box.width > view.width + 1 || box.y + box.height > view.height + 1;
  }).map(text => text.textContent);
})"""
OVERLAPS = """[...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
  const common = (a, b, start, size) =>
    Math.min(a[start] + a[size], b[start] + b[size]) - Math.max(a[start], b[start]);
  return texts.flatMap(([name, a], i) => texts.slice(i + 1)
    .filter(([_, b]) => common(a, b, 'x', 'width') > 0.5 && common(a, b, 'y', 'height') > 2)
    .map(([other]) => `${name} | ${other}`));
})"""


@pytest.mark.parametrize("kind", ["run", "several", "nodes", "sweep"])
def test_figure_texts_are_not_cut(kind: str, browser: Browser, pages: Pages) -> None:
    browser.open(pages[kind])
    assert browser.run("document.querySelectorAll('svg[role=img]').length") > 0
    assert browser.run(CUT_TEXTS) == []
    assert browser.run(OVERLAPS) == []


def test_first_screen_has_verdicts_and_figures(browser: Browser, pages: Pages) -> None:
    browser.open(pages["run"], size=(1400, 900))
    nodes = "document.querySelectorAll('header .verdict, header .tiles li, header figure')"
    bottoms = browser.run(f"[...{nodes}].map(node => node.getBoundingClientRect().bottom)")
    assert len(bottoms) > 3
    assert max(bottoms) < 900


def list_first_cells(browser: Browser, table: str) -> list[str]:
    rows = f"[...document.querySelectorAll('{table} tbody tr')].filter(row => !row.hidden)"
    cells: list[str] = browser.run(f"{rows}.map(row => row.cells[0].innerText)")
    return cells


def test_table_is_sorted_by_keyboard(page: Browser) -> None:
    head = "document.querySelector('#steps-table th:nth-child(2)')"
    page.run(f"{head}.querySelector('button').focus()")
    page.press("Enter", 13, "\r")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    ascending = list_first_cells(page, "#steps-table")
    page.press("Enter", 13, "\r")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert list_first_cells(page, "#steps-table") == ascending[::-1]


def test_filter_keeps_rows_with_all_its_words(page: Browser) -> None:
    status = page.run("""(() => {
      const input = document.querySelector('#communication-1 input');
      input.value = 'ALL_REDUCE 64k';
      input.dispatchEvent(new Event('input'));
      return document.querySelector('#communication-1 [role=status]').textContent;
    })()""")
    assert list_first_cells(page, "#communication-1") == ["all_reduce"]
    assert status.startswith("1 of ")


def test_print_shows_tables_without_buttons(browser: Browser, pages: Pages) -> None:
    browser.open(pages["run"], media="print", size=(800, 1100))
    nodes = "[...document.querySelectorAll('nav, .filter')]"
    assert browser.run(f"{nodes}.every(node => node.offsetParent === null)") is True
    overflow = "getComputedStyle(document.querySelector('.scroll')).overflowX"
    assert browser.run(overflow) == "visible"
