import math

import pytest
from reports_fixtures import rate_metric, seconds_metric

from bench.records import Metric
from bench.stats import across_launches
from reports.merge import merge_metrics


def test_one_launch_keeps_its_own_metric_with_its_interval_and_method() -> None:
    metric = seconds_metric(0.25)
    assert merge_metrics([{"time": metric}]) == {"time": metric}


def test_launches_are_merged_by_the_geometric_mean_with_a_t_interval() -> None:
    merged = merge_metrics([{"time": seconds_metric(value)} for value in (1.0, 2.0, 4.0)])["time"]
    expected = across_launches([1.0, 2.0, 4.0])
    assert merged.value == pytest.approx(2.0)
    assert (merged.low, merged.high) == (expected.low, expected.high)
    assert merged.method == "geometric mean of 3 launch medians, t interval"
    assert (merged.unit, merged.better) == ("s", "lower")


def test_bandwidths_are_never_averaged_arithmetically() -> None:
    merged = merge_metrics([{"busbw": rate_metric(1e9)}, {"busbw": rate_metric(4e9)}])["busbw"]
    assert merged.value == pytest.approx(2e9)
    assert merged.better == "higher"


def test_bandwidth_and_time_merge_alike() -> None:
    seconds = (1e-3, 1.7e-3, 1.2e-3)
    merged = merge_metrics([{"time": seconds_metric(s), "algbw": rate_metric(1e6 / s)} for s in seconds])
    time, rate = merged["time"].value, merged["algbw"].value
    assert time is not None
    assert rate == pytest.approx(1e6 / time)


def test_a_percentile_is_not_called_a_median() -> None:
    merged = merge_metrics([{"time_p99": seconds_metric(1.0)}, {"time_p99": seconds_metric(2.0)}])["time_p99"]
    assert merged.method == "geometric mean of 2 launch 99th percentiles, t interval"


def test_only_launches_that_have_a_metric_take_part() -> None:
    launches = [{"time": seconds_metric(1.0)}, {"time": seconds_metric(2.0), "time_p99": seconds_metric(9.0)}]
    merged = merge_metrics(launches)
    assert list(merged) == ["time", "time_p99"]
    assert merged["time_p99"].value == 9.0


@pytest.mark.parametrize(("values", "middle"), [((0.0, 2.0, 3.0), 2.0), ((None, 2.0, 4.0), 3.0), ((-1.0, 1.0), 0.0)])
def test_zero_negative_or_unknown_falls_back_to_the_median_without_an_interval(
    values: tuple[float | None, ...], middle: float
) -> None:
    merged = merge_metrics([{"skew": seconds_metric(value)} for value in values])["skew"]
    assert merged.value == middle
    assert (merged.low, merged.high) == (None, None)
    known = sum(value is not None for value in values)
    assert merged.method.startswith(f"median of {known} of {len(values)} launches; no interval")


def test_unknown_everywhere_stays_unknown() -> None:
    unknown = [Metric(value=None, unit="s", better="lower", method=method) for method in ("no clock", "no samples")]
    merged = merge_metrics([{"skew": one} for one in unknown])["skew"]
    assert (merged.value, merged.method) == (None, "unknown in all 2 launches")
    assert merge_metrics([{"skew": unknown[0]}] * 2)["skew"] == unknown[0]


def test_what_does_not_scatter_is_taken_as_it_is() -> None:
    exact = Metric(value=3 << 20, unit="B", better="lower", method="closed form")
    assert merge_metrics([{"bytes_sent.dp": exact}] * 5) == {"bytes_sent.dp": exact}


def test_equal_measured_medians_are_still_a_mean_of_launches() -> None:
    merged = merge_metrics([{"time": seconds_metric(0.5)}] * 3)["time"]
    assert merged.method.startswith("geometric mean of 3")
    assert merged.value is not None
    assert math.isclose(merged.value, 0.5)


def test_nothing_gives_nothing() -> None:
    assert merge_metrics([]) == {}
