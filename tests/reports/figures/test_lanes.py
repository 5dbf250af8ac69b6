"""Few boxes for many spans."""

import pytest

from parbench.reports.figures.lanes import choose_num_bins, merge_spans

ALTERNATING = {
    "long": [(10.0 * i, 10.0 * i + 7.0) for i in range(1000)],
    "short": [(10.0 * i + 7.0, 10.0 * i + 10.0) for i in range(1000)],
}


def test_bins_have_the_category_that_fills_most() -> None:
    merged = merge_spans({"a": [(0.0, 6.0)], "b": [(6.0, 9.0)]}, 20.0, 4)
    assert merged == {"a": [(0.0, 5.0)], "b": [(5.0, 10.0)]}
    assert merge_spans(ALTERNATING, 10_000.0, 100) == {
        "long": [(0.0, 10_000.0)],
        "short": [],
    }


@pytest.mark.parametrize("max_boxes", [2000, 300, 50])
def test_number_of_boxes_is_limited(max_boxes: int) -> None:
    num_bins = choose_num_bins([ALTERNATING], 10_000.0, max_boxes)
    merged = merge_spans(ALTERNATING, 10_000.0, num_bins)
    assert sum(map(len, merged.values())) <= max_boxes
