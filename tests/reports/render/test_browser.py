"""The report in Chromium: it asks for nothing, complains of nothing, and sorts, filters and downloads for everyone."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench import cli as command_line
from parbench.bench.results.runs import load_run
from parbench.reports.render.data import embedded_json
from parbench.reports.render.show import build
from parbench.reports.sections.one_run import report_of
from tests.support.axe import axe_source
from tests.support.browser import Browser
from tests.support.late import late_record, samples
from tests.support.nodes_fixtures import sample_node_run, sample_sweep
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    failed_record,
    ok_record,
    pipeline_record,
    sample_run,
    step_case,
    training_metrics,
    write_run,
)
from tests.support.traced import make_timeline, traced_record, write_traced_run

pytestmark = pytest.mark.full

EVIL = (
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(2)>",
    "\u202eevil\u2066",
    "x" * 10_000,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with something of everything, and hostile words wherever a person's words go."""
    trained = ok_record(
        step_case("fsdp", note=EVIL[0]), metrics=training_metrics(), notes=[HOSTILE_TEXT, *EVIL]
    )
    failed = [failed_record(step_case("tp", label=evil), reason=evil) for evil in EVIL]
    late = late_record(4096)
    records = [*sample_run().records, trained, *failed, pipeline_record(), late]
    run = write_traced_run(
        tmp_path_factory.mktemp("run"),
        [*((one, None) for one in records), (traced_record(), make_timeline())],
    )
    info = msgspec.structs.replace(
        run.info, host=EVIL[1], environment={EVIL[0]: EVIL[2], "pairs": {"0-1": EVIL[1]}}
    )
    (run.path / "run.json").write_bytes(msgspec.json.encode(info))
    (run.path / "samples" / f"{late.case.id}-0.npz").write_bytes(samples([[0, 0], [3000, 7000]]))
    (run.path / "report.html").write_bytes(build([run.path], "html")[0])
    return run.path


@pytest.fixture(scope="module")
def several(folder: Path) -> Path:
    target = folder / "several.html"
    target.write_bytes(build([folder, folder], "html")[0])
    return target


@pytest.fixture(scope="module")
def over_nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("nodes")
    run, sweep = write_run(out, sample_node_run("cyclic")), sample_sweep(out / "links")
    for path in (run, sweep):
        (path / "report.html").write_bytes(build([path], "html")[0])
    return run / "report.html", sweep / "report.html"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("planned")
    pages = {"plan.html": "--model llama3-8b --gpus 16", "guide.html": "--guide --gpus 16"}
    for name, words in pages.items():
        command_line.main(["plan", *words.split(), "-o", str(out / name)], standalone_mode=False)
    return out / "plan.html", out / "guide.html"


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    browser.open(folder / "report.html")
    return browser


def assert_quiet(browser: Browser, file: Path) -> None:
    assert browser.requests == [file.resolve().as_uri()]
    assert browser.complaints == []


def too_wide(browser: Browser) -> int:
    found: int = browser.run("document.documentElement.scrollWidth - innerWidth")
    return found


def first_cells(browser: Browser, table: str) -> list[str]:
    script = f"[...document.querySelectorAll('{table} tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].innerText)"
    found: list[str] = browser.run(script)
    return found


def test_pages_ask_for_nothing_complain_of_nothing_and_are_no_wider_than_the_window(
    browser: Browser, folder: Path, several: Path, over_nodes: tuple[Path, Path]
) -> None:
    for file in (folder / "report.html", several, *over_nodes):
        for size in ((1200, 900), (400, 800)):
            browser.open(file, size=size)
            assert_quiet(browser, file)
            assert too_wide(browser) <= 0, (file, size)
    assert all(file.stat().st_size < 1_000_000 for file in over_nodes)


CUT = """[...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const all = svg.viewBox.baseVal;
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBBox();
    return box.x < -1 || box.y < -1 || box.x + box.width > all.width + 1 || box.y + box.height > all.height + 1;
  }).map(text => `${svg.querySelector('title').textContent}: ${text.textContent}`);
})"""
MET = """[...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const ends = [...svg.querySelectorAll('.end')].map(text => text.getBBox());
  const met = (a, b) => Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
  return ends.flatMap((a, i) => ends.slice(i + 1).map(b => met(a, b)));
})"""


def test_no_words_of_a_figure_are_cut_and_names_at_the_ends_of_lines_do_not_meet(
    browser: Browser, folder: Path, several: Path, over_nodes: tuple[Path, Path]
) -> None:
    for file in (folder / "report.html", several, *over_nodes):
        browser.open(file)
        assert browser.run("document.querySelectorAll('svg[role=img]').length") > 0
        assert browser.run(CUT) == [], file
        assert max(browser.run(MET), default=0.0) < 3, file  # letters are lower than their boxes
    assert browser.run("document.querySelectorAll('.end').length") > 2


def test_the_first_screen_holds_verdicts_numbers_and_figures_side_by_side(
    browser: Browser, folder: Path
) -> None:
    places = "[...document.querySelectorAll('header .verdict, header .tiles li, header figure')]"
    boxes = f"{places}.map(one => one.getBoundingClientRect()).map(box => [box.left, box.top, box.right, box.bottom])"
    browser.open(folder / "report.html", size=(1400, 900))
    found = browser.run(boxes)
    assert max(bottom for *_, bottom in found) < 900
    one, other = found[-2:]
    assert one[1] == other[1]
    assert one[2] <= other[0]
    browser.open(folder / "report.html", size=(400, 800))
    one, other = browser.run(boxes)[-2:]
    assert one[3] <= other[1]


def test_the_policy_stops_what_a_page_might_ask_for(page: Browser) -> None:
    refused = "const image = new Image(); image.onerror = () => done(true); image.src = 'x.png'"
    assert page.run(f"new Promise(done => {{ {refused} }})") is True
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_hostile_words_are_words(page: Browser) -> None:
    assert page.run("document.querySelectorAll('img, b, i, iframe').length") == 0
    assert page.run("document.scripts.length") == 2
    text = page.run("document.body.textContent")
    for evil in (EVIL[0], EVIL[1], EVIL[3], "\\x202eevil\\x2066"):
        assert evil in text
    assert not {"\u202e", "\u2066"} & set(page.run("document.querySelector('main').innerText"))


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_hinders_anyone(
    browser: Browser, folder: Path, several: Path, over_nodes: tuple[Path, Path], dark: bool
) -> None:
    for file in (folder / "report.html", several, *over_nodes):
        browser.open(file, dark=dark)
        if file not in over_nodes:
            browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        browser.run(axe_source())
        found: list[dict[str, Any]] = browser.run("axe.run().then(told => told.violations)")
        told = [(one["id"], one["impact"], one["nodes"][0]["failureSummary"]) for one in found]
        grave = ("serious", "critical")
        assert [one for one in told if file in over_nodes or one[1] in grave] == [], file


def test_a_plans_pages_hinder_nobody_and_ask_for_nothing(
    browser: Browser, planned: tuple[Path, Path]
) -> None:
    for file in planned:
        for dark in (False, True):
            browser.open(file, dark=dark)
            assert_quiet(browser, file)
            browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
            browser.run(axe_source())
            assert (
                browser.run("axe.run().then(told => told.violations.map(one => one.id))") == []
            ), file
        browser.open(file, size=(400, 900))
        assert browser.run("document.documentElement.scrollWidth") == 400, file


def test_a_head_sorts_by_keyboard_and_says_so(page: Browser) -> None:
    head = "document.querySelector('#steps-table th:nth-child(2)')"
    page.run(f"{head}.querySelector('button').focus()")
    page.press("Enter", 13, "\r")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    up = first_cells(page, "#steps-table")
    page.press("Enter", 13, "\r")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert first_cells(page, "#steps-table") == up[::-1]
    rows = "[...document.querySelectorAll('#steps-table tbody tr')]"
    seconds = page.run(f"{rows}.map(r => Number(r.cells[1].dataset.sort))")
    assert seconds == sorted(seconds, reverse=True)


def test_filter_keeps_rows_with_all_its_words(page: Browser) -> None:
    told = page.run("""(() => {
      const input = document.querySelector('#communication-1 input');
      input.value = 'ALL_REDUCE 64k';
      input.dispatchEvent(new Event('input'));
      return document.querySelector('#communication-1 [role=status]').textContent;
    })()""")
    assert first_cells(page, "#communication-1") == ["all_reduce"]
    assert told.startswith("1 of ")


def test_download_holds_the_run(page: Browser, folder: Path, tmp_path: Path) -> None:
    page.save_downloads(tmp_path)
    page.run("document.querySelector('[data-download]').click()")
    deadline, target = time.monotonic() + 10, tmp_path / "parbench-run-1.json"
    while not target.is_file() and time.monotonic() < deadline:
        page.run("new Promise(done => setTimeout(done, 50))")
    assert json.loads(target.read_text()) == json.loads(embedded_json(report_of(load_run(folder))))


def test_paper_shows_tables_whole_and_no_buttons_and_dark_differs_from_light(
    browser: Browser, folder: Path
) -> None:
    browser.open(folder / "report.html", media="print", size=(800, 1100))
    hidden = "[...document.querySelectorAll('nav, .filter, [data-download]')].every(one => one.offsetParent === null)"
    assert browser.run(hidden) is True
    assert browser.run("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color].join()"
    browser.open(folder / "report.html")
    light = browser.run(colors)
    browser.open(folder / "report.html", dark=True)
    assert browser.run(colors) != light
