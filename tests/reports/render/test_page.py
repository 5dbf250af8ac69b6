"""The page as text: well formed, one file that loads nothing, hostile text escaped."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import msgspec
import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.render.page import render_page
from tests.support.reports.nodes_fixtures import EMULATION
from tests.support.reports.report_rows import report_of, run_from_records
from tests.support.reports.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
)

VOID_TAGS = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page, which has to close them in order, and its visible text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open_tags: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.visible = ""
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] not in ("script", "style"):
            self.visible += data

    def find_all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def render(run: Run) -> str:
    return render_page(report_of(run))


@pytest.fixture(scope="module")
def html() -> str:
    """The page of a run with curves, steps and every kind of problem."""
    return render(sample_run())


def find_section(html: str, section_id: str) -> str:
    return html.split(f'id="{section_id}"')[1].split("</section>")[0]


def test_page_loads_nothing(html: str) -> None:
    page = Page(html)
    assert len(html) < 1_000_000
    assert page.find_all("link") == []
    assert page.find_all("img") == []
    for text in ("http:", "https:", "@import"):
        assert text not in html


def test_page_links_lead_to_its_sections(html: str) -> None:
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {str(link["href"]).removeprefix("#") for link in page.find_all("a")}
    assert targets <= set(ids)
    assert {"problems", "communication", "steps", "environment"} <= targets


def test_page_declares_the_colors_it_uses(html: str) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", html))
    declared = set(re.findall(r"(--[\w-]+):", html))
    assert used <= declared
    assert "prefers-color-scheme: dark" in html


def test_page_policy_allows_one_script(html: str) -> None:
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [meta["content"] for meta in Page(html).find_all("meta") if "http-equiv" in meta]
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src" in str(policy)


def test_page_header_has_limits() -> None:
    limit = "oversubscribed: 4 ranks on 2 cores"
    plan = msgspec.structs.replace(make_plan([collective_case()]), notes=(limit,))
    html = render(make_run(plan, [ok_record(collective_case(), emulation=EMULATION)]))
    header = html.split("<main>")[0]
    assert limit in header
    assert EMULATION in header
    assert 'class="verdict good"' in header


def test_page_has_problems_before_results(html: str) -> None:
    ids = ["slow", "problems", "communication", "not-measured", "environment"]
    places = [html.index(f'id="{section_id}"') for section_id in ids]
    assert places == sorted(places)
    problems = find_section(html, "problems")
    assert "rank 1 on node-b, process 42: did not arrive" in problems
    assert "File b.py, line 9, in &lt;listcomp&gt;" in problems
    gaps = find_section(html, "not-measured")
    assert "no record, because the run ended early" in gaps


def test_page_escapes_hostile_text() -> None:
    script = "</script><script>alert(2)</script>"
    case = make_case("step.<script>alert(1)</script>", "m:f", {"p": script})
    run = run_from_records(
        ok_record(case, notes=[HOSTILE_TEXT]),
        failed_record(step_case("tp"), reason="</script><!--<script>"),
        ok_record(step_case("<b>a</b>")),
    )
    environment = {"</style><script>": "<img src=x onerror=alert(3)>"}
    info = msgspec.structs.replace(run.info, environment=environment, host="<i>host</i>")
    html = render(msgspec.structs.replace(run, info=info))
    page = Page(html)
    assert len(page.find_all("script")) == 1
    for tag in ("b", "i", "img"):
        assert page.find_all(tag) == []
    assert "<i>host</i>" in page.visible
    assert "<img src=x onerror=alert(3)>" in page.visible


@pytest.mark.parametrize("records", [[], [failed_record(collective_case())]])
def test_page_of_an_empty_run_reports_it(records: list[Record]) -> None:
    html = render(make_run(make_plan([collective_case()]), records))
    text = Page(html).visible
    assert "No case has a valid measurement" in text
    assert "NaN" not in text
    assert 'id="communication"' not in html


def test_page_is_cut_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbench.reports.render.page.MAX_PAGE_BYTES", 150_000)
    monkeypatch.setattr(
        "parbench.reports.render.page.render_inline", lambda chart: "x" * 20_000
    )
    records = [*sample_run().records]
    records += [ok_record(collective_case(f"op{i}", 1 << 10)) for i in range(300)]
    html = render(run_from_records(*records))
    assert len(html) < 150_000
    assert re.search(r"The first \d+ of \d+ rows", html)
    assert re.search(r"\d+ more figures", html)
