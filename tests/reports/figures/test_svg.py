"""Figures as inline SVG that is text, in the page's colours, and below which table they stand."""

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
from late import late_record, samples
from matplotlib.figure import Figure
from report_rows import found_in, found_of, table_of, tables_of
from reports_fixtures import context_record, mixture_record, step
from traced import run_with, timeline, traced_record

from bench.results.runs import load_run
from reports.figures.svg import FAINT, INK, SERIES, drawing, inline_svg


def svg_of(label: str = "label", name: str = "one") -> str:
    with drawing():
        figure = Figure(figsize=(3, 2))
        axes = figure.add_subplot()
        axes.plot([1, 2, 3], [1, 3, 2], color=SERIES[0], marker="o")
        axes.fill_between([1, 2, 3], [0, 2, 1], [2, 4, 3], color=SERIES[1], alpha=0.2)
        axes.set_xlabel(label)
    return inline_svg(figure, name=name, title="A <title>", description="What & why")


def test_an_svg_says_what_it_shows_and_holds_no_style_sheet_metadata_or_namespace() -> None:
    text = svg_of()
    root = ElementTree.fromstring(text)
    assert (root.tag, root.attrib["role"]) == ("svg", "img")
    assert [(one.tag, one.text) for one in root[:2]] == [("title", "A <title>"), ("desc", "What & why")]
    assert root.attrib["aria-labelledby"] == f"{root[0].attrib['id']} {root[1].attrib['id']}"
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & set(root.attrib)
    for word in ("<style", "metadata", "xmlns", "xlink", "<!DOCTYPE", "<?xml", "matplotlib.org"):
        assert word not in text
    for drawn in (INK, FAINT, *SERIES, "#000000", "#ffffff"):
        assert drawn not in text
    for shown in ("currentColor", "var(--faint)", "var(--series-0)", "var(--series-1)"):
        assert shown in text


def test_every_id_begins_with_the_name_and_every_reference_is_met() -> None:
    text = svg_of(name="fig7")
    ids = re.findall(r' id="([^"]*)"', text)
    references = re.findall(r'href="#([^"]*)"', text) + re.findall(r"url\(#([^)]*)\)", text)
    assert all(identity.startswith("fig7-") for identity in ids)
    assert set() < set(references) <= set(ids)


def test_text_stays_text_in_the_pages_font_and_colour_however_foreign() -> None:
    for label in ("<script>alert(1)</script>", "$x^2$", "$\\frac{1}{", "漢字 🚀"):
        (text,) = [one for one in ElementTree.fromstring(svg_of(label)).iter("text") if one.text == label]
        assert "fill: currentColor" in text.attrib["style"]
        assert "font-family" not in text.attrib["style"]


def test_the_users_own_settings_change_nothing_and_are_left_alone() -> None:
    told = svg_of()
    with mpl.rc_context({"font.size": 31, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert svg_of() == told
        assert mpl.rcParams["font.size"] == 31


def test_timelines_and_late_ranks_are_drawn_from_the_folder(tmp_path: Path) -> None:
    record = late_record()
    traces = [(traced_record(), timeline()), (traced_record(step("tp")), timeline(clock="")), (record, None)]
    run = run_with(tmp_path, traces)
    (chart,) = table_of(found_of(run), "step-timelines").figures()
    caption = re.findall(r"<figcaption>(.*?)</figcaption>", chart)[0]
    assert chart.index("<figcaption>") < chart.index("<svg")
    assert caption.startswith("<strong>ddp</strong> Launch 1. One traced step on one clock (one host, one monotonic")
    assert list(table_of(found_of(run), "arrivals-table").figures()) == []
    (run.path / "samples" / f"{record.case.id}-0.npz").write_bytes(samples([[0, 0], [3000, 7000]]))
    (strip,) = table_of(found_of(load_run(run.path)), "arrivals-table").figures()
    assert "5.00 us" in strip


def test_figures_stand_in_the_page_the_same_bytes_each_time() -> None:
    methods = [context_record(method, 0.01, length) for method in ("ring", "zigzag") for length in (64, 128)]
    found = found_in(*methods, *(mixture_record("ep_layer", routing) for routing in ("balanced", "zipf")))
    one, other = ({table.id: list(table.figures()) for table in tables_of(found)} for _ in range(2))
    assert one == other
    assert [len(one[name]) for name in ("context-table", "experts-atlas-1", "experts-load")] == [1, 1, 1]
    (chart,) = one["context-table"]
    assert "<figcaption>Methods compared: cp = 2, causal mask</figcaption>" in chart
    assert "zigzag" in chart
