"""What a drawing holds, for the tests that look at it."""

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

from parbench.reports.figures.svg import Drawing

_NUMBER = r"(-?[\d.]+)"
_BOX = re.compile(f"M{_NUMBER} {_NUMBER}h{_NUMBER}v{_NUMBER}h-{_NUMBER}z")


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    words: str
    css: str


@dataclass(frozen=True)
class Path:
    d: str
    style: str
    told: str

    @property
    def hue(self) -> str:
        return next(iter(re.findall(r"(?:fill|stroke):var\(--(\w+)\)", self.style)), "")

    @property
    def opacity(self) -> float:
        return float(next(iter(re.findall(r"fill-opacity:([\d.]+)", self.style)), 1.0))

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(f"[ML]{_NUMBER} {_NUMBER}", self.d)]


@dataclass(frozen=True)
class Box(Path):
    x: float
    y: float
    width: float
    height: float


@dataclass
class Parts:
    """Texts, paths and boxes in the order in which they are drawn; a path of several boxes is each of them."""

    texts: list[Text] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [text.words for text in self.texts]

    @property
    def ends(self) -> list[str]:
        return [text.words for text in self.texts if text.css == "end"]

    @property
    def lines(self) -> dict[str, Path]:
        """Lines over places by what they tell of themselves: their name, and a value at each place."""
        return {
            path.told: path
            for path in self.paths
            if path.style.startswith("fill:none") and path.told
        }


def parts_of(drawing: Drawing | None) -> Parts:
    assert drawing is not None
    return parts_in(drawing.svg("f", "title", "what"))


def parts_in(svg: str) -> Parts:
    found = Parts()
    for element in ElementTree.fromstring(svg):
        if element.tag == "text":
            place = (float(element.attrib["x"]), float(element.attrib["y"]))
            found.texts.append(Text(*place, element.text or "", element.attrib.get("class", "")))
        elif element.tag == "path":
            title = element.find("title")
            told = (title.text if title is not None else "") or ""
            path = Path(element.attrib["d"], element.attrib["style"], told)
            found.paths.append(path)
            for x, y, width, height, _ in _BOX.findall(path.d):
                found.boxes.append(
                    Box(path.d, path.style, told, *map(float, (x, y, width, height)))
                )
    return found
