"""The page as text: well formed, one file that fetches nothing, all in its place, and no record's words are markup."""

import base64
import hashlib
import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import msgspec

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.render.data import render_json
from parbench.reports.render.page import render_page
from parbench.reports.sections.one_run import report_of
from tests.support import reports_fixtures as fixtures
from tests.support.nodes_fixtures import EMULATION
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
)

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page as nested elements: refuses what is not closed in order, gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [""]
        self.starts: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [""]
        self.ids = [identity for _, attributes in self.starts if (identity := attributes.get("id"))]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1], data))

    def texts(self, tag: str) -> list[str]:
        return [data for inside, data in self.words if inside == tag]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.starts if name == tag]

    @property
    def visible(self) -> str:
        return " ".join(
            " ".join(data for tag, data in self.words if tag not in ("script", "style")).split()
        )


def html_of(run: Run) -> str:
    return render_page(report_of(run))


def told(*records: Record) -> str:
    return html_of(run_from_records(*records))


@cache
def sample() -> str:
    return html_of(fixtures.sample_run())


def part_of(html: str, anchor: str, end: str = "</section>") -> str:
    return html.split(f'id="{anchor}"')[1].split(end)[0]


def assert_in_order(html: str, *anchors: str) -> None:
    places = [html.index(f'id="{anchor}"') for anchor in anchors]
    assert places == sorted(places)


def embedded(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert "<" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_page_is_one_small_well_formed_file() -> None:
    page = Page(sample())
    assert len(sample().encode()) < 1_000_000
    assert len(page.ids) == len(set(page.ids))
    targets = [str(attributes["href"]) for attributes in page.all("a")]
    assert {target.removeprefix("#") for target in targets} <= set(page.ids)
    assert {
        "#not-measured",
        "#problems",
        "#communication",
        "#steps",
        "#environment",
        "#method",
        "#data",
    } <= {*targets}
    assert page.all("link") == page.all("img") == []
    assert not [
        name
        for _, attributes in page.starts
        for name in attributes
        if name == "src" or name.startswith("on")
    ]
    for word in ("http:", "https:", "@import"):
        assert word not in sample()
    [button] = page.all("button")
    assert "hidden" in button, "it does nothing without scripts"


def test_page_is_accessible_and_colors_are_defined() -> None:
    page = Page(sample())
    regions = [one for one in page.all("div") if one.get("role") == "region"]
    assert len(page.all("caption")) == len(page.all("table")) == len(regions) == 7
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    (style,) = page.texts("style")
    for expected in (
        "prefers-color-scheme: dark",
        "@media print",
        "overflow-x: auto",
        "prefers-reduced-motion",
    ):
        assert expected in style
    assert set(re.findall(r"var\((--[\w-]+)\)", sample())) <= set(re.findall(r"(--[\w-]+):", style))


def test_page_policy_allows_one_script() -> None:
    (policy,) = [meta["content"] for meta in Page(sample()).all("meta") if "http-equiv" in meta]
    (script,) = re.findall(r"<script>(.*?)</script>", sample(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert dict(part.strip().split(" ", 1) for part in str(policy).split(";")) == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_page_header_has_setup_verdict_and_limits() -> None:
    header = sample().split("<main>")[0]
    for expected in (
        "run-1",
        "preset node",
        "4 ranks on 1 node",
        "host node-a",
        "2026-01-02T03:04:05",
        "Example CPU",
    ):
        assert expected in header
    assert "<strong>WRONG</strong> 1 of 54 results differ from the reference" in header
    assert 'class="verdict bad"' in header
    assert "cannot show" not in sample()
    plan = msgspec.structs.replace(
        make_plan([collective_case()]), notes=("4 ranks on 2 cores: functional only",)
    )
    shared = html_of(make_run(plan, [ok_record(collective_case(), notes=[EMULATION])])).split(
        "<main>"
    )[0]
    assert shared.index(EMULATION) < shared.index("<nav")
    assert 'class="verdict good"' in shared
    assert "cannot show:</strong> 4 ranks on 2 cores: functional only</p>" in shared


def test_page_of_a_cut_run_claims_no_completeness() -> None:
    cut = failed_record(collective_case(), 1, "skipped", LEFT_OUT)
    for record, every in ((ok_record(collective_case(), 1), True), (cut, False)):
        page = html_of(
            make_run(
                make_plan([collective_case()], launches=2), [ok_record(collective_case()), record]
            )
        )
        assert ("every planned case ran in every launch" in part_of(page, "not-measured")) is every


def test_page_has_problems_before_results() -> None:
    assert_in_order(
        sample(), "slow", "problems", "communication", "not-measured", "data", "environment"
    )
    header = sample().split("</header>")[0]
    assert header.index('id="slow"') < header.index("<nav")
    assert header.count("<figure>") == 1
    part = part_of(sample(), "not-measured")
    assert "size 1001 B is not a multiple of 4 ranks x 4 B" in part
    assert "no record: the run ended before" in part
    part = part_of(sample(), "problems")
    assert "Launch 1: where each of 2 ranks was" in part
    assert "rank 1 on node-b, process 42: did not arrive" in part
    assert "File b.py, line 9, in &lt;listcomp&gt;" in part
    fine = told(ok_record(collective_case()))
    assert "Nothing stands out" in fine
    assert "Nothing: every planned case ran" in fine


def test_page_cells_carry_sort_values() -> None:
    metrics = {"time": fixtures.collective_metrics(collective_case(), 0.25)["time"]}
    html = told(ok_record(collective_case(), metrics=metrics))
    assert 'data-sort="0.25" class="number">250 ms [225, 275]</td>' in html
    assert 'data-sort="1024" class="number">1K</td>' in html
    assert html.count('data-sort="" class="number">-</td>') == 3
    assert 'id="fits"' not in html


def test_page_escapes_hostile_text() -> None:
    case = make_case(
        "step.<script>alert(1)</script>", "m:f", {"p": "</script><script>alert(2)</script>"}
    )
    end = "</script><!--<script>"
    run = run_from_records(
        ok_record(case, notes=[HOSTILE_TEXT]),
        failed_record(step_case(), reason=HOSTILE_TEXT),
        failed_record(step_case("tp"), reason=end),
        ok_record(step_case("<b>a</b>")),
    )
    evil = {"</style><script>": "<img src=x onerror=alert(3)>"}
    html = html_of(
        msgspec.structs.replace(
            run, info=msgspec.structs.replace(run.info, environment=evil, host="<i>host</i>")
        )
    )
    page = Page(html)
    assert len(page.all("script")) == 2
    assert page.all("b") == page.all("i") == page.all("img") == []
    for expected in (
        "<script>alert('x')</script> [bold]$x$ &",
        "<img src=x onerror=alert(3)>",
        "<i>host</i>",
    ):
        assert expected in page.visible
    assert [end] in [row["reasons"] for row in embedded(html)["rows"]]


def test_page_embeds_data_and_environment() -> None:
    run = fixtures.sample_run()
    assert embedded(sample()) == json.loads(render_json(report_of(run)))
    assert (
        '<th scope="row" class="words">host.cpu_model</th><td class="words">Example CPU</td>'
        in sample()
    )
    assert '<th scope="row" class="words">host.governor</th><td class="words">-</td>' in sample()


def test_page_of_an_empty_run_reports_it() -> None:
    for records in (
        (),
        (failed_record(collective_case()),),
        (failed_record(collective_case(), 0, "skipped", "no float8"),),
    ):
        html = html_of(make_run(make_plan([collective_case()]), records))
        words = Page(html).visible
        assert "None: no case has a valid measurement." in words
        assert "Unknown: no rank lived long enough to tell." in words
        assert 'id="communication"' not in html
        assert "NaN" not in words
    skipped = Skipped(case=collective_case(), reason="gloo carries no float8")
    words = Page(html_of(make_run(make_plan([], skipped=[skipped]), []))).visible
    assert "gloo carries no float8" in words
    assert "NOTHING MEASURED" in words
