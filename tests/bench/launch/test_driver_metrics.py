"""From samples to numbers: each with its unit and direction, none without samples, nobody blamed without proof."""

import math

import msgspec
import numpy as np
import pytest

from parbench.bench.launch.control_channel import Outcome, Work
from parbench.bench.launch.driver import metrics_of
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Samples, blame, noise_of
from parbench.bench.results.stats import MIN_FOR_P99, MIN_FOR_Q10
from tests.support.fakes import make_outcome

BANDWIDTH = Work(name="algbw", amount=4e6, unit="B/s")


def measured(seconds: list[float], *work: Work, headline: str = "time") -> dict[str, MetricValue]:
    """Return the metrics of samples whose skew is a tenth of each."""
    skew = [value / 10 for value in seconds]
    return metrics_of(
        Outcome(
            status="ok",
            seconds=seconds,
            visits=[1] * len(seconds),
            skew_seconds=skew,
            work=list(work),
            headline=headline,
        )
    )


def test_the_time_is_the_median_and_a_rate_the_work_over_it_with_its_ends_swapped() -> None:
    metrics = measured([0.001 * number for number in range(1, 22)], BANDWIDTH)
    time, rate = metrics["time"], metrics["algbw"]
    assert (time.unit, time.better) == ("s", "lower")
    assert (rate.unit, rate.better) == ("B/s", "higher")
    assert time.value == pytest.approx(0.011)
    assert rate.value == pytest.approx(4e6 / 0.011)
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.011 < time.high
    assert (rate.low, rate.high) == pytest.approx((4e6 / time.high, 4e6 / time.low))
    assert time.method.startswith("median of 21 iterations")
    assert rate.method.startswith("4000000 over the median of 21 iterations")


def test_percentiles_are_numpys_by_their_headlines_name_and_only_given_with_enough_iterations() -> (
    None
):
    values = np.random.default_rng(0).exponential(1e-3, MIN_FOR_P99).tolist()
    for name, part in (("time_p99", 0.99), ("time_q10", 0.10)):
        found = measured(values)[name]
        assert found.value == pytest.approx(np.quantile(values, part))
        assert found.method == f"{100 * part:.0f}th percentile of {MIN_FOR_P99} iterations"
    assert "time_p99" not in measured(values[1:])
    assert list(measured(values, headline="step_time")) == [
        "step_time",
        "step_time_q10",
        "step_time_p99",
        "skew",
    ]
    assert list(measured(values[:MIN_FOR_Q10])) == ["time", "time_q10", "skew"]
    assert list(measured(values[1:MIN_FOR_Q10])) == ["time", "skew"]


def test_issue_wait_skew_and_transfer_are_the_medians_of_what_their_methods_say() -> None:
    told = make_outcome(
        seconds=1e-3,
        visits=[],
        issue_seconds=[3e-4] * 20,
        skew_seconds=[1e-6, 2e-6, 9e-6],
        transfer_seconds=[5e-4, 4e-4, 1e-4],
    )
    metrics = metrics_of(told)
    values = {name: metric.value for name, metric in metrics.items()}
    assert values == pytest.approx(
        {
            "time": 1e-3,
            "time_q10": 1e-3,
            "issue_time": 3e-4,
            "wait_time": 7e-4,
            "skew": 2e-6,
            "transfer": 4e-4,
        }
    )
    assert list(values) == ["time", "time_q10", "issue_time", "wait_time", "skew", "transfer"]
    assert {(metric.unit, metric.better) for metric in metrics.values()} == {("s", "lower")}
    assert [metric.method.split(", median")[0] for metric in metrics.values()][2:] == [
        "until every rank has issued",
        "from then to the end",
        "last arrival - first",
        "last exit - last arrival",
    ]


def test_what_explains_a_step_comes_after_its_own_numbers_as_it_is_and_is_no_noise() -> None:
    explained = {
        "compute": MetricValue(value=4e-4, unit="s", better="lower", method="the slowest rank's"),
        "memory.parameters": MetricValue(value=None, unit="B", better="lower", method="measured"),
    }
    plain = make_outcome(seconds=1e-3, work=[BANDWIDTH])
    told = msgspec.structs.replace(plain, explained=explained)
    assert list(metrics_of(told).items()) == [*metrics_of(plain).items(), *explained.items()]
    assert metrics_of(Outcome(status="ok", explained=explained)) == {}, (
        "what has no time has no explanation"
    )


def test_without_samples_there_is_no_number() -> None:
    for status in ("failed", "skipped", "wrong", "ok"):
        told = msgspec.convert(
            {"status": status, "work": [{"name": "a", "amount": 1.0, "unit": "B/s"}]}, Outcome
        )
        assert (metrics_of(told), noise_of(Samples(values=told.seconds))) == ({}, None), status


def test_what_takes_no_time_or_moves_nothing_has_no_rate() -> None:
    metrics = measured([0.0] * 10, BANDWIDTH)
    assert metrics["time"].value == 0.0
    idle = measured([1e-3] * 10, Work(name="algbw", amount=0.0, unit="B/s"))
    for rate in (metrics["algbw"], idle["algbw"]):
        assert (rate.value, rate.low, rate.high) == (None, None, None)
    touching = measured([0.0] * 9 + [1.0] * 11, BANDWIDTH)["algbw"]
    assert (touching.low, touching.high) == (4e6, None), "an interval that touches zero"
    unknown = measured([1e-3] * 10, Work(name="loss", amount=math.nan, unit="1"))["loss"]
    assert b'"value":null' in msgspec.json.encode(unknown)


def test_blame_falls_on_the_rank_most_often_last_with_its_share() -> None:
    found = blame([1, 1, 0, 1], [0, 0, 0, 1], [1e-3] * 4, "one clock", 0.0)
    assert (found.late_rank, found.share) == (1, 0.75)
    assert (found.last_out_rank, found.last_out_share) == (0, 0.75)
    assert (found.method, found.uncertainty) == ("one clock", 0.0)


def test_only_iterations_that_the_clock_can_tell_count_towards_the_blame() -> None:
    for last_in, skews, blamed in (
        ([1, 1], [1e-6, 2e-6], (None, None)),
        ([1, 1, 0, 0], [1e-3, 1e-3, 1e-6, 1e-6], (1, 0.5)),
        ([1, 1, 1, 0], [5e-6, 5e-6, 5e-6, 6e-6], (0, 0.25)),
    ):
        found = blame(last_in, [0] * len(last_in), skews, "ping-pong", 5e-6)
        assert (found.late_rank, found.share) == blamed, skews
        assert (found.last_out_rank, found.last_out_share) == (0, 1.0)
