"""The metrics of an outcome, and the ranks that arrive last."""

from typing import Any

import numpy as np
import pytest

from parbench.bench.launch.messages import Outcome, Work
from parbench.bench.launch.recorder import compute_metrics
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import find_stragglers
from parbench.bench.results.stats import MIN_ITERATIONS_FOR_P99, MIN_ITERATIONS_FOR_Q10


def metrics_of(seconds: list[float], *work: Work, **fields: Any) -> dict[str, MetricValue]:
    visits = [1] * len(seconds)
    outcome = Outcome(status="ok", seconds=seconds, visits=visits, work=list(work), **fields)
    return compute_metrics(outcome)


def test_time_is_the_median_and_rate_is_work_over_time() -> None:
    seconds = [0.001 * number for number in range(1, 22)]
    metrics = metrics_of(seconds, Work(name="algbw", amount=4e6, unit="B/s"))
    time = metrics["time"]
    rate = metrics["algbw"]
    assert time.unit == "s"
    assert rate.better == "higher"
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
    assert metrics["step_time_q10"].value == pytest.approx(np.quantile(seconds, 0.10))
    assert list(metrics_of(seconds[1:])) == ["time", "time_q10"]
    assert list(metrics_of(seconds[: MIN_ITERATIONS_FOR_Q10 - 1])) == ["time"]


def test_issue_wait_skew_and_transfer_are_medians() -> None:
    metrics = metrics_of(
        [1e-3] * 3,
        issue_seconds=[3e-4] * 3,
        skew_seconds=[1e-6, 2e-6, 9e-6],
        transfer_seconds=[5e-4, 4e-4, 1e-4],
    )
    values = {name: metric.value for name, metric in metrics.items()}
    expected = {
        "time": 1e-3,
        "issue_time": 3e-4,
        "wait_time": 7e-4,
        "skew": 2e-6,
        "transfer": 4e-4,
    }
    assert values == pytest.approx(expected)


def test_metrics_require_samples() -> None:
    metric = MetricValue(value=4e-4, unit="s", better="lower", method="maximum over ranks")
    work = Work(name="algbw", amount=1.0, unit="B/s")
    assert metrics_of([], work, explained={"compute": metric}) == {}
    assert metrics_of([1e-3], explained={"compute": metric})["compute"] == metric


@pytest.mark.parametrize(("seconds", "amount"), [(0.0, 4e6), (1e-3, 0.0)])
def test_rate_of_no_time_or_no_work_is_unknown(seconds: float, amount: float) -> None:
    metrics = metrics_of([seconds] * 10, Work(name="algbw", amount=amount))
    assert metrics["algbw"].value is None


# --- arrivals ---


@pytest.mark.parametrize(
    ("last_in", "late_rank", "share"), [([1, 1, 0, 1], 1, 0.75), ([0, 0, 1, 1], 0, 0.5)]
)
def test_blame_names_the_rank_most_often_last(
    last_in: list[int], late_rank: int, share: float
) -> None:
    arrival = find_stragglers(last_in, [0] * 4, [1e-3] * 4, "ping-pong", 5e-6)
    assert arrival.late_rank == late_rank
    assert arrival.share == share
    assert arrival.last_out_rank == 0
    assert arrival.last_out_share == 1.0


def test_blame_ignores_skews_below_the_clock_uncertainty() -> None:
    nobody = find_stragglers([1, 1], [0, 0], [1e-6, 2e-6], "ping-pong", 5e-6)
    assert nobody.late_rank is None
    arrival = find_stragglers(
        [1, 1, 1, 0], [0] * 4, [5e-6, 5e-6, 5e-6, 6e-6], "ping-pong", 5e-6
    )
    assert arrival.late_rank == 0
    assert arrival.share == 0.25
