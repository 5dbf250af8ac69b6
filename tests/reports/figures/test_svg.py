"""Drawings as inline SVG, their scales and ticks."""

from xml.etree import ElementTree

from parbench.reports import cells
from parbench.reports.figures.svg import (
    Drawing,
    even_ticks,
    figure,
)


def test_figure_is_accessible_and_escapes_text() -> None:
    drawing = Drawing()
    drawing.text(1, 2, "<script>alert(1)</script> 漢字 🚀\x1b[31m")
    drawing.box(1, 2, 3, 4, "fill:var(--blue)", "a <b> box")
    [html] = figure(drawing, "id", "A <title>", "Cause & effect.")
    caption, svg = html.split("</figcaption>")
    assert "A &lt;title&gt;" in caption
    assert "Cause &amp; effect." in caption
    root = ElementTree.fromstring(svg)
    title, description, text, path = root
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert str(description.text).startswith("Cause & effect.")
    assert text.text == "<script>alert(1)</script> 漢字 🚀\\x1b[31m"
    assert path.findtext("title") == "a <b> box"
    assert "width" not in root.attrib  # it is as wide as its place


def test_even_ticks_are_round() -> None:
    ticks = even_ticks(0.023, cells.duration)
    assert ticks == [
        (0, "0"),
        (0.005, "5 ms"),
        (0.01, "10 ms"),
        (0.015, "15 ms"),
        (0.02, "20 ms"),
    ]
    labels = [label for _, label in even_ticks(5 << 20, cells.num_bytes)]
    assert labels == ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB", "5 MiB"]
