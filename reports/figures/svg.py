"""Charts as inline SVG for the page, and as PNG, SVG or PDF files."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from markupsafe import Markup

from parbench.bench.files import convert_write_errors
from parbench.bench.results.formatting import to_single_line
from parbench.bench.text import escape_unprintable
from parbench.reports.figures import style
from parbench.reports.figures.chart import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+")
_FONT_FAMILY = re.compile(r"font-family: [^;]*;? ?")
_DROPPED_ATTRIBUTES = ("clip-path", "id")


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
        figure = draw(chart)
        for suffix in formats:
            file = folder / f"{chart.name}.{suffix}"
            file.write_bytes(encode(figure, suffix))
            files.append(file)
    return files


def save_chart(chart: Chart, file: Path) -> None:
    """Write a chart to a file, in the format of its suffix: ``.png``, ``.svg`` or ``.pdf``."""
    with convert_write_errors(file):
        file.write_bytes(encode(draw(chart), file.suffix[1:]))


def encode(figure: "Figure", suffix: str) -> bytes:
    """Return the content of a ``png``, ``svg`` or ``pdf`` file of a figure on white.

    The content has no date, so that equal figures have equal bytes.
    """
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    return _save(figure, suffix, dates[suffix], facecolor=style.color("back"))


class Figures(Mapping[str, "Figure"]):
    """The figures of a report, keyed by the name of the chart.

    A figure is drawn when it is read for the first time.
    """

    def __init__(self, charts: Iterable[Chart]) -> None:
        """Keep the charts by name without drawing them."""
        self._charts = {chart.name: chart for chart in charts}
        self._drawn: dict[str, Figure] = {}

    def __getitem__(self, name: str) -> "Figure":
        """Return the figure of a chart, which is drawn at the first call."""
        if name not in self._drawn:
            self._drawn[name] = draw(self._charts[name])
        return self._drawn[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the charts in order."""
        return iter(self._charts)

    def __len__(self) -> int:
        """Return the number of charts."""
        return len(self._charts)

    def __repr__(self) -> str:
        """Return the names of the charts as text, without drawing any."""
        return f"Figures({', '.join(self._charts)})"


def _save(
    figure: "Figure", suffix: str, metadata: Mapping[str, Any], salt: str = "", **options: Any
) -> bytes:
    """Return a figure as the bytes of a file in the format ``suffix``.

    ``metadata`` and ``options`` are passed to ``savefig``. The ids inside an SVG depend only on
    ``salt``.
    """
    import matplotlib as mpl

    content = io.BytesIO()
    with style.use_style(), mpl.rc_context({"svg.hashsalt": salt or "parbench"}):
        figure.savefig(content, format=suffix, metadata=dict(metadata), **options)
    return content.getvalue()


def _render_svg(chart: Chart) -> str:
    """Return the SVG element of a chart as text, with its title and description for screen readers.

    All ids start with the name of the chart, because a page has several charts.
    """
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    content = _save(draw(chart), "svg", none, salt=chart.name, transparent=True)
    root = ElementTree.fromstring(escape_unprintable(content.decode(), "\n\t"))
    parts = "".join(_write(child) for child in root if child.tag != f"{SVG}metadata")
    description = f"{chart.caption} The table next to it contains the same numbers.".lstrip()
    title_id = f"{chart.name}-title"
    description_id = f"{chart.name}-desc"
    return (
        f'<svg viewBox="{root.get("viewBox")}" role="img" '
        f'aria-labelledby="{title_id} {description_id}">'
        f'<title id="{title_id}">{_escape(chart.title)}</title>'
        f'<desc id="{description_id}">{_escape(description)}</desc>{parts}</svg>'
    )


def _write(element: ElementTree.Element) -> str:
    """Return an SVG element and its children as text for the page.

    Clip paths, styles and invisible shapes are left out. The id ``title:TEXT`` of a group becomes a
    ``title`` element, which browsers show as a tooltip.
    """
    tag = element.tag.removeprefix(SVG)
    if tag == "style" or "fill: none; opacity: 0" in element.get("style", ""):
        return ""
    identifier = element.get("id", "")
    content = "".join(map(_write, element))
    if tag == "g":
        if not content:
            return ""
        if identifier.startswith("title:"):
            title = _escape(identifier.removeprefix("title:"))
            return f"<g><title>{title}</title>{content}</g>"
    if tag == "clipPath" or (tag == "defs" and not content):
        return ""
    attributes = _write_attributes(tag, element)
    if tag == "g" and not attributes:
        return content
    text = _escape(element.text or "") if tag == "text" else ""
    return f"<{tag}{attributes}>{text}{content}</{tag}>"


def _write_attributes(tag: str, element: ElementTree.Element) -> str:
    """Return the attributes of an SVG element as text, with numbers rounded to one decimal.

    Ids and clip paths that nothing refers to are left out. ``tag`` is the name of the element.
    """
    written = []
    for name, value in element.attrib.items():
        is_target = name == "id" and tag in ("path", "pattern")
        if name in _DROPPED_ATTRIBUTES and not is_target:
            continue
        if name == "fill":
            # The background of a hatch. Only a style takes variables in every browser.
            name = "style"
            value = f"fill: {value}"
        if name == "style":
            value = _write_style(value)
        elif name == "d":
            value = _write_path(value)
        elif name != "id":
            value = _NUMBER.sub(_round, value)
        if name == "transform" and value.startswith(("rotate(-0 ", "rotate(0 ")):
            continue
        written.append(f" {'href' if name == LINK else name}={quoteattr(value)}")
    return "".join(written)


def _write_style(text: str) -> str:
    """Return a CSS style with the color variables of the page and without a font family."""
    text = _FONT_FAMILY.sub("", text)
    for light, variable in style.variables_by_color().items():
        text = text.replace(light, variable)
    return text.replace(": ", ":").replace("; ", ";")


def _write_path(text: str) -> str:
    """Return the data of an SVG path with one decimal and without needless spaces."""
    return "".join(line.replace(" ", "", 1) for line in _NUMBER.sub(_round, text).splitlines())


def _round(match: re.Match[str]) -> str:
    """Return the matched number rounded to one decimal, as text."""
    return f"{round(float(match[0]), 1) + 0.0:g}"


def _escape(text: str) -> str:
    """Return text on one line with XML's special characters escaped."""
    return escape(to_single_line(text))
