"""The Gantt chart: boxes where the actions were, on one axis, told apart by more than colour, small however many."""

import re
from dataclasses import replace
from typing import Any, NamedTuple
from xml.etree import ElementTree

from parbench.reports.analysis.pipelines import Pipeline, read_pipeline
from parbench.reports.figures.gantt import (
    Detail,
    boxes_of,
    detail_of,
    draw_pipeline,
    gantt_words,
    idle_boxes,
    span_of,
)
from parbench.reports.figures.timeline import Box, TimeChart
from tests.support.report_rows import summarize_row
from tests.support.reports_fixtures import pipeline_record

LEFT, WIDTH = 66.0, 918.0


class Drawn(NamedTuple):
    """A box as drawn: in shares of the axis from left to right, in units from high to low."""

    style: str
    left: float
    right: float
    high: float
    low: float


class Panel(NamedTuple):
    """A timeline of a chart: its title, its boxes, and the words below the title with where they stand."""

    title: str
    boxes: list[Drawn]
    texts: list[tuple[float, float, str]]

    @property
    def words(self) -> list[str]:
        return [text for _, _, text in self.texts]

    def spans(self, row: int, length: float) -> list[tuple[float, float]]:
        """Return where a row's boxes begin and end on an axis of this length."""
        rows: dict[float, list[tuple[float, float]]] = {}
        for box in self.boxes:
            span = (round(box.left * length, 2), round(box.right * length, 2))
            rows.setdefault(round((box.high + box.low) / 2), []).append(span)
        return sorted(rows[sorted(rows)[row]])


def panels_in(svg: str, left: float = LEFT) -> list[Panel]:
    """Return what stands above the first title, such as a legend, and the timelines from the top."""
    root = ElementTree.fromstring(svg)
    texts = [
        (float(text.attrib["x"]), float(text.attrib["y"]), text.text or "")
        for text in root.iter("text")
    ]
    heads = [
        (0.0, ""),
        *((y, words) for _, y, words in texts if words.startswith(("simulated: ", "measured: "))),
    ]
    boxes = []
    for path in root.iter("path"):
        for told in re.findall(r"M(\S+) (\S+?)h(\S+?)v(\S+?)h-\S+?z", path.attrib["d"]):
            x, y, width, height = map(float, told)
            share = (x - left) / (984 - left)
            boxes.append(
                Drawn(path.attrib["style"], share, share + width / (984 - left), y, y + height)
            )
    ends = [y for y, _ in heads[1:]] + [float("inf")]
    return [
        Panel(
            title, [b for b in boxes if top < b.high < end], [t for t in texts if top < t[1] < end]
        )
        for (top, title), end in zip(heads, ends, strict=True)
    ]


def pipeline(schedule: str = "1f1b", **details: Any) -> Pipeline:
    found = read_pipeline(summarize_row(pipeline_record(schedule, **details)))
    assert isinstance(found, Pipeline)
    return found


def svg_of(one: Pipeline, detail: Detail | None = None) -> str:
    detail = detail or detail_of(one)
    chart = draw_pipeline(one, detail, span_of(one))
    assert isinstance(chart, TimeChart)
    return chart.svg("g", "a pipeline", gantt_words(one, detail))


def panels(one: Pipeline, detail: Detail | None = None) -> list[Panel]:
    return panels_in(svg_of(one, detail))


TINY: dict[str, Any] = {
    "microbatches": 1,
    "predicted": [
        [["0F0", 0, 1000], ["0B0", 4000, 6000]],
        [["1F0", 1000, 2000], ["1B0", 2000, 4000]],
    ],
    "measured": [
        [["0F0", 0, 1500], ["0B0", 5000, 8000]],
        [["1F0", 2000, 3000], ["1B0", 3000, 5000]],
    ],
    "idle": [
        [0, 1500, 4500, "schedule"],
        [0, 4500, 5000, "p2p"],
        [1, 0, 2000, "imbalance"],
        [1, 5000, 8000, "rest"],
    ],
}
CHUNKS: dict[str, Any] = {"stages_by_rank": [[0, 2], [1, 3]], "chunks": 2, "idle": None}


def test_actions_are_boxes_simulated_above_measured() -> None:
    _, above, below = panels(pipeline(**TINY))
    assert (above.title, below.title) == ("simulated: 6.00 ms", "measured: 8.00 ms")
    assert [above.spans(rank, 8) for rank in (0, 1)] == [[(0, 1), (4, 6)], [(1, 2), (2, 4)]]
    assert below.spans(0, 8) == [(0, 1.5), (1.5, 4.5), (4.5, 5), (5, 8)]
    assert below.spans(1, 8) == [(0, 2), (2, 3), (3, 5), (5, 8)]
    ranks = [text for text in above.words if text.startswith("rank")]
    assert (ranks, above.words[:4]) == (["rank 0", "rank 1"], ["F0", "B0", "F0", "B0"])
    assert above.texts[1][0] == round(LEFT + WIDTH * 5 / 8, 1)
    assert below.words[-10:] == [*map(str, range(9)), "time since the step's first action (ms)"]


def crowd(schedule: str = "1f1b", ranks: int = 16, microbatches: int = 64) -> Pipeline:
    return pipeline(schedule, ranks=ranks, microbatches=microbatches)


def count(one: Pipeline, detail: Detail) -> int:
    timelines = [timeline for timeline in (one.facts.predicted, one.facts.measured) if timeline]
    assert len(timelines) == 2
    return sum(len(boxes_of(one, timeline, detail)) for timeline in timelines) + len(
        idle_boxes(one, detail)
    )


def test_detail_limits_the_number_of_boxes() -> None:
    for schedule in ("gpipe", "1f1b", "zb"):
        one = crowd(schedule, ranks=8, microbatches=48)
        whole = 2 * sum(map(len, one.facts.measured or ())) + len(one.facts.idle or ())
        for most in (5000, 1000, 300, 60):
            detail = detail_of(one, most)
            assert count(one, detail) <= most, (schedule, most)
            assert (detail.gap == 0.0) == (whole <= most), (schedule, most)
        finer = replace(detail, gap=detail.gap / 2)
        assert count(one, finer) > most, schedule  # no wider gap than the last one needs


def test_joining_keeps_wide_gaps_and_chunks_apart() -> None:
    timeline = [[["0F0", 0, 100], ["0F1", 109, 200], ["0F2", 210, 300], ["0B0", 305, 400]], []]
    one = pipeline(measured=timeline, predicted=None, idle=[[0, 0, 9, "rest"], [1, 0, 11, "p2p"]])
    detail = Detail(gap=10.0, mixed=False, numbered=False, note="")
    joined = boxes_of(one, one.facts.measured or (), detail)
    boxes = [(box.kind, box.start, box.stop, box.text) for box in joined]
    assert boxes == [("F", 0, 200, ""), ("F", 210, 300, "F2"), ("B", 305, 400, "B0")]
    assert idle_boxes(one, detail) == [Box(rank=1, kind="p2p", start=0, stop=11)]
    chunked = pipeline(
        **CHUNKS,
        measured=[[["0F0", 0, 100], ["2F0", 100, 200], ["2F1", 200, 300]], []],
        predicted=None,
    )
    joined = boxes_of(chunked, chunked.facts.measured or (), detail)
    assert [(box.chunk, box.start, box.stop) for box in joined] == [(0, 0, 100), (1, 100, 300)]
