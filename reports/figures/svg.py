"""A matplotlib figure as SVG text to stand inside a page: the same bytes each time, in the page's own colours."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# drawn in these, shown as the page's text colour and its variables, so that light and dark both fit
INK = "#010203"
FAINT = "#040506"
SERIES = ("#0b62a4", "#c2410c", "#15803d", "#a21caf", "#946200", "#0e7490", "#be123c", "#4d5a6b")
_COLORS = {INK: "currentColor", FAINT: "var(--faint)"} | {c: f"var(--series-{i})" for i, c in enumerate(SERIES)}
_NAMESPACE = re.compile(r"\{[^}]*\}")
_SETTINGS: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "xtick.minor.bottom", "ytick.minor.left"), False),
    **dict.fromkeys(("legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.handlelength": 3.0,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "parbench",
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw and write figures under these settings alone, whatever the user's own matplotlib file says."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def inline_svg(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Return the figure as an ``<svg>`` element; ``name`` must be unique in the page, for it begins every id."""
    buffer = io.StringIO()
    with drawing(), warnings.catch_warnings():
        # the reader's browser has the letters that matplotlib's font lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=unsaid)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        # style sheets would hold for the whole page
        for child in [child for child in parent if child.tag.endswith("}style")]:
            parent.remove(child)
    for element in root.iter():
        _adapt(element, name)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    for tag, text in (("desc", description), ("title", title)):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(0, element)
    return ElementTree.tostring(root, encoding="unicode")


def drawn(figure: Figure | None, name: str, title: str, what: str = "", *, is_captioned: bool = False) -> list[Markup]:
    """Return the figure's ``<svg>``, with its title below as a caption if asked; nothing for None."""
    if figure is None:
        return []
    description = f"{what} The table beside it holds the same numbers.".lstrip()
    svg = Markup(inline_svg(figure, name=name, title=title, description=description))
    return [svg + Markup("<figcaption>{}</figcaption>").format(title) if is_captioned else svg]


def captioned(drawn: str, label: str, words: str) -> Markup:
    """Return a chart below its caption: charts follow each other, and a caption below would read as the next one's."""
    return Markup("<figcaption><strong>{}</strong> {}</figcaption>").format(label, words) + Markup(drawn)


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Take off namespaces, which HTML does not need; make ids the page's own and colours the page's choice."""
    element.tag = _NAMESPACE.sub("", element.tag)
    attributes = {_NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    if "href" in attributes:
        attributes["href"] = f"#{name}-{attributes['href'][1:]}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{name}-")
    if style := attributes.get("style"):
        for drawn, shown in _COLORS.items():
            style = style.replace(drawn, shown)
        if element.tag == "text":
            style = "; ".join(part for part in style.split("; ") if not part.startswith("font-family"))
            style = style if "fill:" in style else f"{style}; fill: currentColor"
        attributes["style"] = style
    element.attrib.clear()
    element.attrib.update(attributes)
