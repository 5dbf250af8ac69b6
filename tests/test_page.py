import base64
import hashlib
import json
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from reports_fixtures import (
    HOSTILE,
    bad,
    collective,
    collective_metrics,
    comm_call,
    curve_records,
    hang,
    make_plan,
    make_run,
    ok,
    pipeline_record,
    sample_run,
    simulated,
    step,
    training_metrics,
)

from bench.cases import make_case
from bench.plan import Skipped
from bench.records import Record
from bench.runs import Run
from reports.data import as_json
from reports.page import render_page
from reports.summary import summarize

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page as nested elements: refuses what is not closed in order, gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.starts: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        return [data for inside, data in self.words if inside == tag]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.starts if name == tag]

    @property
    def ids(self) -> list[str]:
        return [identity for _, attributes in self.starts if (identity := attributes.get("id"))]


def run_of(*records: Record, launches: int = 1) -> Run:
    return make_run(make_plan({record.case.id: record.case for record in records}.values(), launches=launches), records)


def html_of(run: Run) -> str:
    return render_page(run, summarize(run))


@cache
def sample() -> str:
    return html_of(sample_run())


def visible(html: str) -> str:
    page = Page(html)
    return " ".join(" ".join(data for tag, data in page.words if tag not in ("script", "style")).split())


def test_the_page_is_well_formed_and_in_one_file() -> None:
    page = Page(sample())
    assert len(page.ids) == len(set(page.ids))
    assert not page.all("link")
    assert not page.all("img")
    assert not [attributes for _, attributes in page.starts if "src" in attributes]


def test_the_same_run_is_the_same_bytes() -> None:
    assert html_of(sample_run()) == sample()


def test_it_stays_under_a_megabyte() -> None:
    assert len(sample().encode()) < 1_000_000


def test_every_link_leads_to_a_place_in_the_page() -> None:
    page = Page(sample())
    targets = [str(attributes["href"]) for attributes in page.all("a")]
    assert targets
    assert {target.removeprefix("#") for target in targets} <= set(page.ids)
    assert {"#not-measured", "#problems", "#communication", "#steps", "#environment", "#method", "#data"} <= {*targets}


def test_nothing_is_fetched() -> None:
    assert "http:" not in sample()
    assert "https:" not in sample()
    assert "@import" not in sample()


def test_the_policy_allows_our_script_alone_and_no_network() -> None:
    (policy,) = [meta["content"] for meta in Page(sample()).all("meta") if "http-equiv" in meta]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    script = re.findall(r"<script>(.*?)</script>", sample(), re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert directives == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_no_element_has_a_handler_of_its_own() -> None:
    handlers = [name for _, attributes in Page(sample()).starts for name in attributes if name.startswith("on")]
    assert handlers == []


def test_the_top_says_what_was_run_and_with_what_verdict() -> None:
    header = sample().split("<main>")[0]
    for expected in ("run-1", "preset node", "4 ranks on 1 node", "host node-a", "2026-01-02T03:04:05", "Example CPU"):
        assert expected in header
    assert "a result is wrong: 53 ok" in header
    assert 'class="verdict bad"' in header
    assert 'class="verdict fine"' in html_of(run_of(ok(collective())))


def test_the_top_says_what_the_whole_run_cannot_show() -> None:
    plan = msgspec.structs.replace(make_plan([collective()]), notes=("4 ranks on 2 cores: functional only",))
    header = html_of(make_run(plan, [ok(collective())])).split("<main>")[0]
    assert "cannot show:</strong> 4 ranks on 2 cores: functional only</p>" in header
    assert "cannot show" not in sample()


def test_what_is_wrong_slow_and_not_measured_comes_before_any_result_in_this_order() -> None:
    html = sample()
    places = [
        html.index(f'id="{name}"') for name in ("problems", "slow", "not-measured", "environment", "communication")
    ]
    assert places == sorted(places)
    assert "Wild scatter, the interquartile range over 40 %" in html_of(run_of(ok(collective(), grade="wild")))
    assert "Nothing stands out" in html_of(run_of(ok(collective())))
    part = html.split('id="not-measured"')[1].split("</section>")[0]
    assert "size 1001 B is not a multiple of 4 ranks x 4 B" in part
    assert "no record: the run ended before" in part
    assert "Nothing: every planned case ran" in html_of(run_of(ok(collective())))


def test_there_is_a_panel_for_each_mode_and_dtype_with_two_figures_and_a_table() -> None:
    page = Page(sample())
    assert [title.strip() for title in page.texts("h3") if "float32" in title and "," in title] == [
        "blocking, float32",
        "pipelined, float32",
    ]
    names = [str(svg["aria-labelledby"]).split()[0] for svg in page.all("svg")]
    assert names == [
        "communication-1-busbw-title",
        "communication-1-time-title",
        "communication-2-busbw-title",
        "communication-2-time-title",
        "steps-time-title",
    ]
    heads = [text for text in page.texts("th") if text in ("operation", "mode", "dtype", "size")]
    assert heads == [*["operation", "size"] * 2, "operation", "mode", "dtype"]
    half = html_of(run_of(ok(collective()), ok(collective(dtype="float16"))))
    assert "blocking, float16" in half


def test_every_table_has_a_caption_and_scoped_heads() -> None:
    page = Page(sample())
    assert len(page.all("caption")) == len(page.all("table")) == 6
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
    regions = [one for one in page.all("div") if one.get("role") == "region"]
    assert len(regions) == 6
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)


def curve(model_seconds: float = 20e-6) -> list[Record]:
    sizes = [1024 * 4**i for i in range(8)]
    return [ok(collective(size_bytes=size), seconds=model_seconds + size / 3e9) for size in sizes]


def test_fits_stand_after_the_panels_with_their_method_and_terms() -> None:
    html = html_of(run_of(*curve(), ok(step())))
    assert html.index('id="communication-1"') < html.index('id="fits"') < html.index('id="steps"')
    part = html.split('id="fits"')[1].split("</section>")[0]
    assert '<th scope="row" data-sort="all_reduce">all_reduce</th>' in part
    assert ">20.0 us [" in part
    assert "least squares of relative errors" in part
    page = Page(html)
    assert {"fit", "knee", "off the curve"} <= set(page.texts("dt"))
    assert "#fits" in [attributes["href"] for attributes in page.all("a")]


def test_what_has_no_fit_does_not_speak_of_fits() -> None:
    html = html_of(run_of(ok(collective())))
    assert 'id="fits"' not in html
    assert not {"fit", "knee", "off the curve"} & set(Page(html).texts("dt"))


def test_fits_are_drawn_over_times_and_a_declared_link_over_bandwidths() -> None:
    run = run_of(*curve())
    plan = msgspec.structs.replace(run.info.plan, link_bytes_per_second=3e9)
    html = html_of(msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan)))
    bandwidth, time = re.findall(r"<figure>(.*?)</figure>", html, re.DOTALL)
    assert ("link, 3.00 GB/s" in bandwidth, "link, 3.00 GB/s" in time) == (True, False)
    assert (">fit<" in bandwidth, ">fit<" in time) == (False, True)
    assert "150 % (above: see note)" in html
    assert "reduction in the network, caches" in html


def test_each_series_has_its_own_fits() -> None:
    pipelined = [ok(collective(size_bytes=1024, mode="pipelined"))]
    html = html_of(run_of(*curve(), *pipelined))
    figures = re.findall(r"<figure>(.*?)</figure>", html, re.DOTALL)
    assert [">fit<" in figure for figure in figures] == [False, True, False, False]


def test_cells_carry_what_to_sort_them_by() -> None:
    html = html_of(run_of(ok(collective(), seconds=0.25)))
    assert 'data-sort="0.25" class="number">250 ms [225, 275]</td>' in html
    assert 'data-sort="1024" class="number">1K</td>' in html


def test_unknown_sorts_as_nothing_and_reads_as_a_dash() -> None:
    metrics = {"time": collective_metrics(collective(), 1.0)["time"]}
    html = html_of(run_of(ok(collective(), metrics=metrics)))
    assert html.count('data-sort="" class="number">-</td>') == 3


def test_a_row_is_told_in_full() -> None:
    html = html_of(run_of(ok(collective(), details={"send_bytes": 768, "convention": "nccl-tests"})))
    part = html.split(f'id="facts-{collective().id}"')[1].split("</details>")[0]
    for expected in ("<dt>send_bytes</dt><dd>768</dd>", "<dd>nccl-tests</dd>", "order-statistics interval"):
        assert expected in part


def test_a_hang_shows_each_ranks_state_and_stack() -> None:
    html = html_of(run_of(hang(collective())))
    part = html.split('id="problems"')[1].split("</section>")[0]
    assert "Launch 1: where each of 2 ranks was" in part
    assert "rank 1 on node-b, process 42: did not arrive" in part
    assert "File b.py, line 9, in &lt;listcomp&gt;" in part


def test_hostile_text_is_shown_as_text() -> None:
    case = make_case("step.<script>alert(1)</script>", "m:f", {"p": "</script><script>alert(2)</script>"})
    run = run_of(ok(case, notes=[HOSTILE]), bad(step(), reason=HOSTILE), ok(collective("<b>bold</b>")))
    evil = {"</style><script>": "<img src=x onerror=alert(3)>"}
    run = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, environment=evil, host="<i>host</i>"))
    html = html_of(run)
    page = Page(html)
    assert len(page.all("script")) == 2
    for tag in ("b", "i", "img"):
        assert page.all(tag) == []
    words = visible(html)
    assert "<script>alert('x')</script> [bold]$x$ &" in words
    assert "<img src=x onerror=alert(3)>" in words
    assert "<i>host</i>" in words


def embedded(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_data_is_embedded_whole() -> None:
    run = sample_run()
    summary = summarize(run)
    assert embedded(sample()) == json.loads(as_json(run, summary))


def test_embedded_data_cannot_end_its_element() -> None:
    html = html_of(run_of(bad(collective(), reason="</script><!--<script>")))
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert "<" not in text
    assert embedded(html)["rows"][0]["reasons"] == ["</script><!--<script>"]


def test_buttons_are_hidden_from_those_without_scripts() -> None:
    buttons = Page(sample()).all("button")
    assert [button["data-download"] for button in buttons] == ["csv", "json"]
    assert all("hidden" in button for button in buttons)


def test_terms_and_method_are_explained() -> None:
    page = Page(sample())
    assert {"algbw", "busbw", "blocking, pipelined", "interval", "launch", "sample", "noise", "p99"} <= set(
        page.texts("dt")
    )
    words = visible(sample())
    assert "geometric mean of 3 launch medians, t interval" in words
    assert "within 2.5 % of the median" in words
    assert "functional only: 4 processes on 2 cores" in words


def test_the_environment_is_flat_and_unknown_is_a_dash() -> None:
    assert '<th scope="row" class="words">host.cpu_model</th><td class="words">Example CPU</td>' in sample()
    assert '<th scope="row" class="words">host.governor</th><td class="words">-</td>' in sample()
    assert "Unknown: no rank lived long enough to tell." in html_of(run_of(bad(collective())))


@pytest.mark.parametrize("records", [(), (bad(collective()),), (bad(collective(), 0, "skipped", "no float8"),)])
def test_a_run_without_results_says_so(records: tuple[Record, ...]) -> None:
    html = html_of(make_run(make_plan([collective()]), records))
    assert "None: no case has a valid measurement." in visible(html)
    assert 'id="communication"' not in html
    assert "NaN" not in visible(html)


def test_a_plan_that_skipped_everything_says_so() -> None:
    skipped = Skipped(case=collective(), reason="gloo carries no float8")
    words = visible(html_of(make_run(make_plan([], skipped=[skipped]), [])))
    assert "gloo carries no float8" in words
    assert "fine: 1 skipped" in words


def test_dark_print_narrow_and_still_readers_are_served() -> None:
    (style,) = Page(sample()).texts("style")
    for expected in ("prefers-color-scheme: dark", "@media print", "overflow-x: auto", "prefers-reduced-motion"):
        assert expected in style
    used = set(re.findall(r"var\((--[\w-]+)\)", sample()))
    assert used <= set(re.findall(r"(--[\w-]+):", style))


def training_page() -> str:
    trained = ok(step("ddp"), metrics=training_metrics(), details={"comm_calls": [comm_call()]})
    return html_of(run_of(*curve_records(), trained, ok(step("fsdp"))))


def test_steps_tell_where_their_time_and_memory_went() -> None:
    html = training_page()
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert html.index('id="steps-table"') < html.index('id="step-time"') < html.index('id="step-memory"')
    time = html.split('id="step-time"')[1].split("</section>")[0]
    assert '<th scope="row" data-sort="ddp">ddp</th>' in time
    assert 'data-sort="0.006" class="number">6.00 ms</td>' in time
    memory = html.split('id="step-memory"')[1].split("</section>")[0]
    assert f'data-sort="{2 << 20}.0" class="number">2.00 MiB</td>' in memory
    assert {"exposed", "ect"} <= set(page.texts("dt"))
    names = [str(svg["aria-labelledby"]).split()[0] for svg in page.all("svg")]
    assert names[-3:] == ["steps-time-title", "steps-breakdown-title", "steps-memory-title"]
    assert "Each bar is a traced step" in time
    assert "95 % intervals" not in time


def test_the_page_predicts_communication_as_the_terminal_does() -> None:
    html = training_page()
    steps = html.split('id="steps-table"')[1].split("</table>")[0]
    assert ">predicted comm</th>" in steps
    assert 'class="number">370 us</td>' in steps
    assert "axis=dp op=all_reduce bytes=1048576 ranks=4 count=1" in html


def test_steps_that_know_nothing_of_it_have_neither_section() -> None:
    html = html_of(run_of(ok(step())))
    assert 'id="step-time"' not in html
    assert 'id="step-memory"' not in html
    assert "ect" not in Page(html).texts("dt")


@cache
def pipeline_page() -> str:
    others = [simulated("zb_v", 0.018, 2), simulated("dualpipe_v", chunks=2, why_not="it needs <4> microbatches")]
    return html_of(run_of(ok(step("ddp")), pipeline_record(comparison=others), pipeline_record("gpipe", seconds=0.03)))


def test_pipelines_have_a_chart_each_a_table_and_their_schedules() -> None:
    html = pipeline_page()
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    part = html.split('id="pipelines"')[1].split('id="step-memory"')[0]
    assert html.index('id="step-time"') < html.index('id="pipelines"') < html.index('id="step-memory"')
    assert re.findall(r'<title id="pipelines-\d-title">(.*?)</title>', part) == [
        "Pipeline, predicted and measured: 1f1b",
        "Pipeline, predicted and measured: gpipe",
    ]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", part)
    assert [caption.split(" ")[0] for caption in captions] == ["<strong>1f1b</strong>", "<strong>gpipe</strong>"]
    assert all("below, what launch 1 measured, each gap in the colour of its cause." in one for one in captions)
    assert '<th scope="row" data-sort="gpipe">gpipe</th>' in part
    assert 'data-sort="0.263" class="number">26.3 %</td>' in part
    other = part.split('id="schedules-1"')[1]
    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th>', other) == ["zb_v", "1f1b", "gpipe", "dualpipe_v"]
    assert "it needs &lt;4&gt; microbatches" in other
    assert {"bubble fraction, bubble overhead", "F, B, I, W"} <= set(page.texts("dt"))
    assert "#pipelines" in [attributes["href"] for attributes in page.all("a")]


def test_a_page_with_pipelines_is_the_same_bytes_again() -> None:
    again = pipeline_page.__wrapped__()
    assert again == pipeline_page()


def test_timelines_are_drawn_and_not_embedded() -> None:
    html = pipeline_page()
    assert "0F0" not in html
    facts = html.split(f'id="facts-{pipeline_record().case.id}"')[1].split("</details>")[0]
    assert "<dt>pipeline.schedule</dt><dd>1f1b</dd>" in facts
    assert "<dt>pipeline.measured</dt>" not in facts
    (row,) = [one for one in embedded(html)["rows"] if one["case"]["params"].get("schedule") == "1f1b"]
    assert row["details"]["pipeline"]["microbatches"] == 4
    assert "measured" not in row["details"]["pipeline"]


def test_many_pipelines_share_the_pages_room() -> None:
    records = [pipeline_record(f"zb_{i}", ranks=8, microbatches=32) for i in range(12)]
    html = html_of(run_of(*records))
    assert len(re.findall("<figcaption>", html)) == 12
    assert "are drawn as one" in html
    assert len(html.encode()) < 1_000_000


def test_a_pipeline_without_a_timeline_has_a_row_and_no_chart() -> None:
    html = html_of(run_of(pipeline_record(measured=None)))
    assert 'id="pipelines"' in html
    assert "<figcaption>" not in html


def test_pipeline_facts_that_cannot_be_read_are_said_so() -> None:
    html = html_of(run_of(pipeline_record(measured=[[["<nonsense>", 0, 1]], []])))
    assert 'id="pipelines"' not in html
    assert "No pipeline facts: the pipeline of workload.pp" in html
    assert "&lt;nonsense&gt;" in html


def test_runs_without_pipelines_do_not_speak_of_them() -> None:
    html = training_page()
    assert 'id="pipelines"' not in html
    assert "F, B, I, W" not in html
