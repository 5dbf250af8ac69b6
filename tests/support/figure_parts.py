"""The texts, paths and boxes of a drawing."""

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

from parbench.reports.figures.svg import Drawing

NUMBER = r"(-?[\d.]+)"
BOX = re.compile(f"M{NUMBER} {NUMBER}h{NUMBER}v{NUMBER}h-{NUMBER}z")


@dataclass(frozen=True)
class Path:
    """A path with its title, which a browser shows under the pointer."""

    d: str
    style: str
    title: str

    @property
    def opacity(self) -> float:
        match = re.search(r"fill-opacity:([\d.]+)", self.style)
        return float(match[1]) if match else 1.0

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(f"[ML]{NUMBER} {NUMBER}", self.d)]


@dataclass(frozen=True)
class Box(Path):
    x: float
    y: float
    width: float
    height: float

    @property
    def center_x(self) -> float:
        return self.x + self.width / 2

    @property
    def center_y(self) -> float:
        return self.y + self.height / 2


@dataclass
class Parts:
    """The parts in the order in which they are drawn; a path of several boxes gives several."""

    texts: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)

    @property
    def titled_boxes(self) -> list[Box]:
        """The boxes without those of a legend."""
        return [box for box in self.boxes if box.title]

    @property
    def lines(self) -> dict[str, Path]:
        """The lines of a chart by title: a name, and the value at each place."""
        lines = [
            path for path in self.paths if path.title and path.style.startswith("fill:none")
        ]
        return {path.title: path for path in lines}


def parse_drawing(drawing: Drawing | None) -> Parts:
    assert drawing is not None
    return parse_svg(drawing.svg("id", "title", "description"))


def parse_svg(svg: str) -> Parts:
    parts = Parts()
    for element in ElementTree.fromstring(svg):
        if element.tag == "text":
            parts.texts.append(element.text or "")
        elif element.tag == "path":
            path = Path(
                element.attrib["d"], element.attrib["style"], element.findtext("title", "")
            )
            parts.paths.append(path)
            for numbers in BOX.findall(path.d):
                x, y, width, height, _ = map(float, numbers)
                parts.boxes.append(Box(path.d, path.style, path.title, x, y, width, height))
    return parts
