"""Drawings as inline SVG in the page's colours; scales, ticks and places; with which table they stand."""

import re
from random import Random
from xml.etree import ElementTree

import pytest

from parbench.reports import cells
from parbench.reports.figures.svg import (
    WIDE,
    Drawing,
    Scale,
    even_ticks,
    figure,
    log_ticks,
    time_ticks,
)
from tests.support.report_rows import analysis_tables, analyze_records
from tests.support.reports_fixtures import context_record, expert_record


def test_a_figure_says_what_it_shows_under_its_caption_and_what_is_wide_can_be_scrolled() -> None:
    drawing = Drawing()
    drawing.text(1, 2, "<script>alert(1)</script> 漢字 🚀\x1b[31m")
    drawing.box(1, 2, 3, 4, "fill:var(--blue)", "told <b>")
    (made,) = figure(drawing, "one", "A <title>", "What & why.")
    caption, svg = made.split("</figcaption>")
    assert caption == "<figcaption><strong>A &lt;title&gt;</strong> What &amp; why."
    root = ElementTree.fromstring(svg)
    assert (root.tag, root.attrib["role"]) == ("svg", "img")
    assert [(one.tag, one.attrib["id"]) for one in root[:2]] == [
        ("title", "one-title"),
        ("desc", "one-desc"),
    ]
    assert root[1].text == "What & why. The table beside it holds the same numbers."
    assert root.attrib["aria-labelledby"] == "one-title one-desc"
    assert root[2].text == "<script>alert(1)</script> 漢字 🚀\\x1b[31m"
    assert root[3][0].text == "told <b>"
    assert not {"width", "height"} & set(root.attrib)
    (wide,) = figure(Drawing(WIDE), "two", "W")
    assert '<div class="chart" role="group" tabindex="0" aria-label="W"><svg' in wide
    assert figure(None, "three", "T") == []


def test_scales_put_values_between_their_ends() -> None:
    even = Scale(low=0, high=4, first=10, last=90)
    log = Scale(low=1, high=16, first=90, last=10, is_log=True)
    assert [even(value) for value in (0, 1, 4)] == [10, 30, 90]
    assert [log(value) for value in (1, 4, 16)] == pytest.approx([90, 50, 10])


def test_ticks_are_few_and_round() -> None:
    assert even_ticks(0.023, cells.duration) == [
        (0.0, "0"),
        (0.005, "5 ms"),
        (0.01, "10 ms"),
        (0.015, "15 ms"),
        (0.02, "20 ms"),
    ]
    assert [told for _, told in even_ticks(5 << 20, cells.num_bytes)] == [
        "0",
        "1 MiB",
        "2 MiB",
        "3 MiB",
        "4 MiB",
        "5 MiB",
    ]
    assert [told for _, told in log_ticks(0.0011, 0.09, cells.duration)] == [
        "2 ms",
        "5 ms",
        "10 ms",
        "20 ms",
        "50 ms",
    ]
    assert [told for _, told in log_ticks(0.001, 20, cells.significant)] == [
        "0.001",
        "0.01",
        "0.1",
        "1",
        "10",
    ]
    assert len(log_ticks(1e-12, 1e12, str)) <= 8
    assert time_ticks(0.03) == ("ms", [(i * 0.005, str(5 * i)) for i in range(7)])
    assert time_ticks(20e-6)[0] == "us"
    rng = Random(1)
    for longest in (rng.uniform(1, 10) * 10 ** rng.randint(-9, 6) for _ in range(200)):
        for ticks in (even_ticks(longest, str), time_ticks(longest)[1]):
            assert 3 <= len(ticks) <= 9
            assert ticks[-1][0] <= longest * (1 + 1e-9)


def test_figures_stand_in_the_page_the_same_bytes_each_time() -> None:
    methods = [
        context_record(method, 0.01, length)
        for method in ("ring", "zigzag")
        for length in (64, 128)
    ]
    found = analyze_records(
        *methods, *(expert_record("ep_layer", routing) for routing in ("balanced", "zipf"))
    )
    one, other = (
        {table.id: list(table.figures()) for table in analysis_tables(found)} for _ in range(2)
    )
    assert one == other
    assert [len(one[name]) for name in ("context-table", "experts-load")] == [3, 0]
    assert (
        "<strong>Methods compared: cp = 2, causal mask: step time</strong>"
        in one["context-table"][0]
    )
    assert "zigzag" in one["context-table"][0]
    ids = re.findall(
        r' id="([^"]*)"', "".join(chart for charts in one.values() for chart in charts)
    )
    assert len(ids) == len(set(ids))
