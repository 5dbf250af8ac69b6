"""Figures as inline SVG and as files."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parbench.reports.figures.chart import Chart
from parbench.reports.figures.lines import chart_lines, make_lines
from parbench.reports.figures.quantities import EFFICIENCY, STEP_TIME, count_of
from parbench.reports.figures.steps import chart_stacks
from parbench.reports.figures.svg import render_inline, save_charts

HOSTILE_LABEL = "<script>alert(1)</script> 漢字 $x_1 \x1b[31m"


def make_chart(name: str = "scaling", label: str = "ddp") -> Chart:
    rows = [{"case": label, "ranks": ranks, "efficiency": 1 / ranks} for ranks in (1, 2, 4)]
    lines = make_lines(rows, "case", "ranks", "efficiency")
    ranks = count_of("ranks")
    chart = chart_lines(name, "A <title>", "Cause & effect.", lines, ranks, EFFICIENCY)
    assert chart is not None
    return chart


def test_inline_svg_is_accessible_and_escapes_text() -> None:
    caption, svg = render_inline(make_chart(label=HOSTILE_LABEL)).split("</figcaption>")
    assert "A &lt;title&gt;" in caption
    assert "Cause &amp; effect." in caption
    root = ElementTree.fromstring(svg)
    title, description, *_ = root
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert str(description.text).startswith("Cause & effect.")
    assert "width" not in root.attrib  # it is as wide as its place
    texts = [text.text for text in root.iter("text")]
    assert "<script>alert(1)</script> 漢字 $x_1 \\x1b[31m" in texts


def test_inline_svg_takes_the_colors_of_the_page() -> None:
    stacks = {"ddp": {"compute": 1.0, "exposed dp": 2.0}}
    chart = chart_stacks("stacks", "", "", stacks, STEP_TIME)
    assert chart is not None
    html = render_inline(chart)
    assert {"blue", "orange"} <= set(re.findall(r"var\(--(\w+)\)", html))
    assert re.findall(r"#[0-9a-f]{6}\b", html) == []
    assert "<style" not in html
    assert "font-family" not in html


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_equal_charts_have_equal_bytes(suffix: str, start: bytes, tmp_path: Path) -> None:
    [file] = save_charts([make_chart()], tmp_path, [suffix])
    assert file == tmp_path / f"scaling.{suffix}"
    content = file.read_bytes()
    assert content.startswith(start)
    [file] = save_charts([make_chart()], tmp_path, [suffix])
    assert file.read_bytes() == content
