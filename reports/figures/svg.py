"""Charts as inline SVG for the page, and as PNG, SVG or PDF files."""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from parbench.bench.files import convert_write_errors
from parbench.bench.results.formatting import to_single_line
from parbench.bench.text import escape_unprintable
from parbench.reports.figures import style
from parbench.reports.figures.chart import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ATTRIBUTE = re.compile(r'"[^"]*"')
_SURPLUS_DIGITS = re.compile(r"(\.\d)\d+")
_UNUSED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>| ?font-family: [^;]*;", re.DOTALL)
"""Matches the parts of an SVG file that the page does not need, or that would change the page."""


def render_inline(chart: Chart) -> Markup:
    """Return the HTML of a chart for the page: its caption and its SVG.

    The colors are CSS variables, so that they follow the light or dark theme of the page.
    """
    title = to_single_line(chart.title)
    caption = Markup("<figcaption><strong>{}</strong> {}</figcaption>").format(title, chart.caption)
    svg = Markup(_render_svg(chart))
    if chart.is_wide:
        # A small window scrolls a wide figure, also by keys.
        region = Markup('<div class="chart" role="group" tabindex="0" aria-label="{}">')
        svg = region.format(title) + svg + Markup("</div>")
    return caption + svg


def draw(chart: Chart) -> "Figure":
    """Draw a chart in the style of the project and return its matplotlib figure."""
    with style.use_style():
        return chart.draw()


def save_charts(charts: Iterable[Chart], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each chart as ``NAME.FORMAT`` in a folder, and return the paths of the files.

    Equal charts give files with equal bytes.
    """
    files = []
    for chart in charts:
        for suffix in formats:
            file = folder / f"{chart.name}.{suffix}"
            save_chart(chart, file)
            files.append(file)
    return files


def save_chart(chart: Chart, file: Path) -> None:
    """Write a chart on white to a file, in the format of its suffix: png, svg or pdf.

    The file has no date, so that equal charts give equal bytes.
    """
    suffix = file.suffix[1:]
    dates: dict[str, Any] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    content = _encode(
        chart, format=suffix, metadata=dates.get(suffix), facecolor=style.color("back")
    )
    with convert_write_errors(file):
        file.write_bytes(content)


def _encode(chart: Chart, **options: Any) -> bytes:
    """Draw a chart and return the bytes of its file. ``options`` are arguments of ``savefig``.

    The ids inside an SVG are derived from the name of the chart, so that equal charts have equal
    bytes.
    """
    import matplotlib as mpl

    content = io.BytesIO()
    figure = draw(chart)
    with style.use_style(), mpl.rc_context({"svg.hashsalt": chart.name}):
        figure.savefig(content, **options)
    return content.getvalue()


def _render_svg(chart: Chart) -> str:
    """Return the SVG element of a chart as text, with its title and description for screen readers.

    Ids inside the SVG are derived from the name of the chart, so that the ids of several charts on
    one page differ. Ids that nothing refers to are removed.
    """
    svg = escape_unprintable(_encode(chart, format="svg", transparent=True).decode(), "\n\t")
    svg = _UNUSED.sub("", svg[svg.index("<svg") :]).replace("xlink:href", "href")
    # A group that is called title:TEXT has a tooltip. Other groups are not referred to.
    svg = re.sub(r'<g id="title:([^"]*)"', r"<g><title>\1</title", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = _ATTRIBUTE.sub(lambda attribute: _SURPLUS_DIGITS.sub(r"\1", attribute[0]), svg)
    # Browsers replace variables only in styles.
    svg = re.sub(r' fill="(#[0-9a-f]{6})"', r' style="fill: \1"', svg)
    for light, variable in style.variables_by_color().items():
        svg = svg.replace(light, variable)
    view_box = re.findall('viewBox="[^"]*"', svg)[0]
    parts = svg[svg.index(">") + 1 :]
    ids = f"{chart.name}-title", f"{chart.name}-desc"
    title = escape(to_single_line(chart.title))
    description = escape(to_single_line(chart.caption))
    return (
        f'<svg {view_box} role="img" aria-labelledby="{ids[0]} {ids[1]}">'
        f'<title id="{ids[0]}">{title}</title><desc id="{ids[1]}">{description}</desc>{parts}'
    )
