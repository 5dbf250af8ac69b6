"""From samples to numbers: each with its unit and direction, none without samples, none that is not known."""

import math

import msgspec
import numpy as np
import pytest
from fakes import case, outcome
from hypothesis import given
from hypothesis import strategies as st

from bench.messages import Outcome, Work
from bench.metrics import metrics_of, noise_of
from bench.records import Metric, Record, WorldInfo, encode
from bench.stats import MIN_FOR_INTERVAL, MIN_FOR_P99

BANDWIDTH = Work(name="algbw", amount=4e6, unit="B/s")
WORLD = WorldInfo(size=2, nodes=1, backend="gloo", device="cpu")


def measured(seconds: list[float], *work: Work, headline: str = "time") -> dict[str, Metric]:
    """Return the metrics of samples whose skew is a tenth of each."""
    skew = [value / 10 for value in seconds]
    told = Outcome(status="ok", seconds=seconds, skew_seconds=skew, work=list(work), headline=headline)
    return metrics_of(told)


def test_the_time_is_the_median_with_its_interval_and_lower_is_better() -> None:
    time = measured([0.001 * number for number in range(1, 22)])["time"]
    assert time.value == pytest.approx(0.011)
    assert (time.unit, time.better) == ("s", "lower")
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.011 < time.high
    assert "median of 21 iterations" in time.method


def test_a_rate_is_the_work_over_the_time_and_its_ends_are_swapped() -> None:
    metrics = measured([0.001 * number for number in range(1, 22)], BANDWIDTH)
    time, rate = metrics["time"], metrics["algbw"]
    assert rate.value == pytest.approx(4e6 / 0.011)
    assert (rate.unit, rate.better) == ("B/s", "higher")
    assert time.low is not None
    assert time.high is not None
    assert rate.low == pytest.approx(4e6 / time.high)
    assert rate.high == pytest.approx(4e6 / time.low)
    assert rate.method.startswith("4000000 over the median of 21 iterations")


@given(
    st.lists(st.floats(min_value=1e-9, max_value=1e3), min_size=1, max_size=200),
    st.floats(min_value=1.0, max_value=1e12),
)
def test_an_interval_holds_its_value_whatever_the_samples(seconds: list[float], amount: float) -> None:
    for metric in measured(seconds, Work(name="rate", amount=amount, unit="x/s")).values():
        if metric.value is not None and metric.low is not None and metric.high is not None:
            assert metric.low <= metric.value <= metric.high


def test_the_p99_is_numpys_and_only_given_with_enough_iterations() -> None:
    values = np.random.default_rng(0).exponential(1e-3, MIN_FOR_P99).tolist()
    p99 = measured(values)["time_p99"]
    assert p99.value == pytest.approx(np.quantile(values, 0.99))
    assert p99.method == f"99th percentile of {MIN_FOR_P99} iterations"
    assert "time_p99" not in measured(values[1:])


def test_a_headline_of_another_name_names_its_p99_too() -> None:
    metrics = measured([1e-3] * MIN_FOR_P99, headline="step_time")
    assert list(metrics) == ["step_time", "step_time_p99", "skew"]


def test_too_few_samples_have_a_value_and_no_interval() -> None:
    metrics = measured([1e-3] * (MIN_FOR_INTERVAL - 1), BANDWIDTH)
    for name in ("time", "algbw", "skew"):
        assert metrics[name].value is not None
        assert (metrics[name].low, metrics[name].high) == (None, None)
    assert "too few for an interval" in metrics["time"].method


def test_the_skew_is_the_median_of_how_late_the_last_one_came() -> None:
    skew = metrics_of(outcome(seconds=1e-3, skew_seconds=[1e-6, 2e-6, 9e-6]))["skew"]
    assert (skew.value, skew.unit, skew.better) == (2e-6, "s", "lower")
    assert skew.method.startswith("last arrival - first, ")


EXPLAINED = {
    "compute": Metric(value=4e-4, unit="s", better="lower", method="the slowest rank's"),
    "memory.parameters": Metric(value=None, unit="B", better="lower", method="measured"),
}


def test_what_explains_a_step_comes_after_its_own_numbers_as_it_is() -> None:
    plain = outcome(seconds=1e-3, work=[BANDWIDTH])
    metrics = metrics_of(msgspec.structs.replace(plain, explained=EXPLAINED))
    assert list(metrics) == [*metrics_of(plain), "compute", "memory.parameters"]
    assert {name: metrics[name] for name in EXPLAINED} == EXPLAINED
    assert {name: metrics[name] for name in metrics_of(plain)} == metrics_of(plain)


def test_an_explanation_is_neither_a_sample_nor_noise() -> None:
    plain = outcome(seconds=1e-3)
    assert noise_of(msgspec.structs.replace(plain, explained=EXPLAINED)) == noise_of(plain)


def test_what_has_no_time_has_no_explanation() -> None:
    assert metrics_of(Outcome(status="ok", explained=EXPLAINED)) == {}


@pytest.mark.parametrize("status", ["failed", "skipped", "wrong", "ok"])
def test_without_samples_there_is_no_number(status: str) -> None:
    told = msgspec.convert({"status": status, "work": [{"name": "algbw", "amount": 1.0, "unit": "B/s"}]}, Outcome)
    assert metrics_of(told) == {}
    assert noise_of(told) is None


def test_a_time_of_zero_has_no_rate() -> None:
    metrics = measured([0.0] * 10, BANDWIDTH)
    assert metrics["time"].value == 0.0
    rate = metrics["algbw"]
    assert (rate.value, rate.low, rate.high) == (None, None, None)


def test_an_interval_that_touches_zero_leaves_that_end_of_the_rate_unknown() -> None:
    rate = measured([0.0] * 9 + [1.0] * 11, BANDWIDTH)["algbw"]
    assert (rate.low, rate.high) == (4e6, None)


def test_noise_is_graded_and_says_whether_samples_were_steady() -> None:
    quiet = noise_of(outcome(seconds=1e-3))
    wild = noise_of(Outcome(status="ok", seconds=[1.0, 100.0] * 20))
    drifting = noise_of(Outcome(status="ok", seconds=[float(number) for number in range(1, 41)]))
    assert quiet is not None
    assert wild is not None
    assert drifting is not None
    assert (quiet.grade, quiet.spread, quiet.steady) == ("quiet", 0.0, "flat")
    assert wild.grade == "wild"
    assert drifting.steady == "drifting"


def test_work_that_is_no_number_is_unknown_in_the_record() -> None:
    metrics = measured([1e-3] * 10, Work(name="loss", amount=math.nan, unit="1"))
    line = encode(
        Record(
            case=case(),
            world=WORLD,
            launch=0,
            status="ok",
            metrics=metrics,
            started="2026-01-02T03:04:05.678Z",
            seconds=0.1,
        )
    )
    read = msgspec.json.decode(line, type=Record).metrics["loss"]
    assert (read.value, read.low, read.high) == (None, None, None)
    assert b"NaN" not in line
