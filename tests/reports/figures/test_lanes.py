"""Few boxes for many spans."""

from parbench.reports.figures.lanes import merge_spans


def test_bins_have_the_category_that_fills_most() -> None:
    few = {"a": [(0.0, 6.0)], "b": [(6.0, 9.0)]}
    assert merge_spans(few, 20.0) == few
    # A bin is 10 seconds, of which the long spans fill 7 in the first half.
    many = {
        "long": [(10.0 * i, 10.0 * i + 7.0) for i in range(125)],
        "short": [(10.0 * i + 7.0, 10.0 * i + 10.0) for i in range(126)],
    }
    assert merge_spans(many, 2500.0) == {"long": [(0.0, 1250.0)], "short": []}
