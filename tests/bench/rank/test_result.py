"""The metrics of a case, and the ranks that arrive last."""

import numpy as np
import pytest

from parbench.bench.rank.result import compute_metrics
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import find_stragglers
from parbench.bench.results.stats import MIN_ITERATIONS_FOR_P99
from parbench.bench.world.benchmark import Description, Work


def metrics_of(
    times: list[float], *work: Work, headline: str = "time", **parts: list[float]
) -> dict[str, MetricValue]:
    description = Description(headline=headline, work=work)
    return compute_metrics({"time": times, **parts}, [1] * len(times), description)


def test_time_is_the_median_and_rate_is_work_over_time() -> None:
    seconds = [0.001 * number for number in range(1, 22)]
    metrics = metrics_of(seconds, Work(name="algbw", amount=4e6))
    time = metrics["time"]
    rate = metrics["algbw"]
    assert time.value == pytest.approx(0.011)
    assert rate.value == pytest.approx(4e6 / 0.011)
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.011 < time.high
    assert rate.low == pytest.approx(4e6 / time.high)
    assert rate.high == pytest.approx(4e6 / time.low)


def test_percentiles_require_enough_iterations() -> None:
    seconds = np.random.default_rng(0).exponential(1e-3, MIN_ITERATIONS_FOR_P99).tolist()
    metrics = metrics_of(seconds, headline="step_time")
    assert metrics["step_time_p99"].value == pytest.approx(np.quantile(seconds, 0.99))
    assert list(metrics_of(seconds[1:])) == ["time"]


def test_parts_are_medians_and_unknown_rates_are_none() -> None:
    metrics = metrics_of([1e-3] * 3, Work(name="algbw", amount=0.0), skew=[1e-6, 2e-6, 9e-6])
    assert metrics["skew"].value == pytest.approx(2e-6)
    assert metrics["algbw"].value is None
    assert metrics_of([0.0] * 3, Work(name="algbw", amount=4e6))["algbw"].value is None


@pytest.mark.parametrize(
    ("last_in", "late_rank", "share"),
    [
        ([1, 1, 0, 1], 1, 0.75),
        ([0, 0, 1, 1], 0, 0.5),
    ],
)
def test_blame_names_the_rank_most_often_last(
    last_in: list[int], late_rank: int, share: float
) -> None:
    arrival = find_stragglers(last_in, [0] * 4, [1e-3] * 4, "ping-pong", 5e-6)
    assert (arrival.late_rank, arrival.share) == (late_rank, share)
    assert (arrival.last_out_rank, arrival.last_out_share) == (0, 1.0)


def test_blame_ignores_skews_below_the_clock_uncertainty() -> None:
    arrival = find_stragglers(
        [1, 1, 1, 0], [0] * 4, [5e-6, 5e-6, 5e-6, 6e-6], "ping-pong", 5e-6
    )
    assert (arrival.late_rank, arrival.share) == (0, 0.25)
    assert find_stragglers([1], [0], [1e-6], "ping-pong", 5e-6).late_rank is None
