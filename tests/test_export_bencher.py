"""The Bencher Metric Format: latency in nanoseconds, rates by their names, limits around the value."""

import json

import pytest
from compare_fixtures import CASE, launches, run_of
from jsonschema import Draft202012Validator
from reports_fixtures import bad, ok, sample_run, step

from reports.exchange.export_bencher import render_bencher

MEASURE = {
    "type": "object",
    "required": ["value"],
    "properties": {name: {"type": "number"} for name in ("value", "lower_value", "upper_value")},
    "additionalProperties": False,
}
FORMAT = {
    "type": "object",
    "additionalProperties": {"type": "object", "minProperties": 1, "additionalProperties": MEASURE},
}


def test_a_run_of_everything_is_of_the_format() -> None:
    whole = json.loads(render_bencher(sample_run()))
    Draft202012Validator(FORMAT).validate(whole)
    assert len(whole) > 10


def test_latency_is_in_nanoseconds_with_its_interval() -> None:
    [measures] = json.loads(render_bencher(run_of(launches()))).values()
    assert measures["latency"]["value"] == pytest.approx(1e6, rel=1e-3)
    assert measures["latency"]["lower_value"] < measures["latency"]["value"] < measures["latency"]["upper_value"]
    assert measures["busbw"]["value"] == pytest.approx(1024 / 1e-3 * 1.5, rel=1e-2)
    assert set(measures) == {"latency", "algbw", "busbw"}


def test_a_step_has_its_step_time() -> None:
    [measures] = json.loads(render_bencher(run_of([ok(step("ddp"), seconds=0.01)]))).values()
    assert measures["latency"]["value"] == pytest.approx(1e7)


def test_a_wrong_result_is_left_out() -> None:
    assert json.loads(render_bencher(run_of([*launches(count=4), bad(CASE, 4, "wrong")]))) == {}
