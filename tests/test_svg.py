import re
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from reports.svg import FAINT, INK, SERIES, drawing, inline_svg


def figure_of(label: str = "label") -> Figure:
    with drawing():
        figure = Figure(figsize=(3, 2))
        axes = figure.add_subplot()
        axes.plot([1, 2, 3], [1, 3, 2], color=SERIES[0], marker="o")
        axes.fill_between([1, 2, 3], [0, 2, 1], [2, 4, 3], color=SERIES[1], alpha=0.2)
        axes.set_xlabel(label)
    return figure


def svg_of(label: str = "label", name: str = "one") -> str:
    return inline_svg(figure_of(label), name=name, title="A <title>", description="What & why")


def test_it_is_well_formed_and_says_what_it_shows() -> None:
    root = ElementTree.fromstring(svg_of())
    assert root.tag == "svg"
    assert root.attrib["role"] == "img"
    title, description = root[0], root[1]
    assert (title.tag, title.text) == ("title", "A <title>")
    assert (description.tag, description.text) == ("desc", "What & why")
    assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"


def test_it_scales_and_holds_no_style_sheet_metadata_or_namespace() -> None:
    text = svg_of()
    root = ElementTree.fromstring(text)
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & set(root.attrib)
    for word in ("<style", "metadata", "xmlns", "xlink", "<!DOCTYPE", "<?xml", "matplotlib.org"):
        assert word not in text


def test_the_same_figure_is_the_same_bytes() -> None:
    assert svg_of() == svg_of()


def test_every_id_begins_with_the_name_and_every_reference_is_met() -> None:
    text = svg_of(name="fig7")
    ids = re.findall(r' id="([^"]*)"', text)
    references = re.findall(r'href="#([^"]*)"', text) + re.findall(r"url\(#([^)]*)\)", text)
    assert all(identity.startswith("fig7-") for identity in ids)
    assert references
    assert set(references) <= set(ids)


def test_colours_are_the_pages_own() -> None:
    text = svg_of()
    for drawn in (INK, FAINT, *SERIES, "#000000", "#ffffff"):
        assert drawn not in text
    for shown in ("currentColor", "var(--faint)", "var(--series-0)", "var(--series-1)"):
        assert shown in text


def test_text_stays_text_in_the_pages_font_and_colour() -> None:
    (text,) = [element for element in ElementTree.fromstring(svg_of()).iter("text") if element.text == "label"]
    assert "fill: currentColor" in text.attrib["style"]
    assert "font-family" not in text.attrib["style"]


def test_hostile_and_foreign_labels_are_text() -> None:
    for label in ("<script>alert(1)</script>", "$x^2$", "$\\frac{1}{", "漢字 🚀"):
        texts = [element.text for element in ElementTree.fromstring(svg_of(label)).iter("text")]
        assert label in texts


def test_the_users_own_settings_change_nothing_and_are_left_alone() -> None:
    plain = svg_of()
    with mpl.rc_context({"font.size": 31, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert svg_of() == plain
        assert mpl.rcParams["font.size"] == 31
