"""The ticks of axes."""

import pytest

from parbench.bench.results.formatting import format_bytes, format_seconds
from parbench.reports.figures.quantities import SIZE, TIME, AxisQuantity, set_x_axis
from parbench.reports.figures.style import new_figure

LINEAR_BYTES = AxisQuantity(title="bytes", text=format_bytes, is_log=False, base=2)
LINEAR_TIME = AxisQuantity(title="time", text=format_seconds, is_log=False)
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("quantity", "low", "high", "expected"),
    [
        (LINEAR_TIME, 0.0, 0.023, ["0", "5 ms", "10 ms", "15 ms", "20 ms"]),
        (LINEAR_BYTES, 0.0, 4.1 * MIB, ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB"]),
        (SIZE, KIB, 64 * MIB, ["1K", "16K", "256K", "4M", "64M"]),
        (TIME, 0.9e-3, 1.1e-2, ["1 ms", "2 ms", "5 ms", "10 ms"]),
        (TIME, 1.09e-3, 1.45e-3, ["1.1 ms", "1.2 ms", "1.3 ms", "1.4 ms"]),
    ],
)
def test_ticks_are_round(
    quantity: AxisQuantity, low: float, high: float, expected: list[str]
) -> None:
    _, [axes] = new_figure(1.0)
    set_x_axis(axes, quantity, low, high)
    texts = axes.xaxis.get_major_formatter().format_ticks(list(axes.get_xticks()))
    ticks = zip(axes.get_xticks(), texts, strict=True)
    assert [text for tick, text in ticks if low <= tick <= high] == expected
