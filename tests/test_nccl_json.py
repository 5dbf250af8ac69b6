import json
from typing import Any

import pytest
from reports_fixtures import ENVIRONMENT, bad, collective, make_plan, make_run, ok, sample_run, step

from bench.errors import UserError
from bench.records import Check, Metric, Record
from reports.exchange.nccl_json import render_json


def document(*records: Record, environment: dict[str, Any] | None = None) -> dict[str, Any]:
    run = make_run(make_plan([record.case for record in records]), records, environment)
    found: dict[str, Any] = json.loads(render_json(run))
    return found


BOTH = (
    ok(collective(placement="out_of_place"), seconds=2e-6),
    ok(collective(placement="in_place"), seconds=4e-6),
)


def test_keys_stand_in_nccl_tests_order() -> None:
    found = document(*BOTH)
    assert list(found) == [
        "version",
        "start_time",
        "args",
        "env",
        "nccl_version",
        "config",
        "results",
        "out_of_bounds",
        "average_bus_bandwidth",
        "errors",
        "end_time",
    ]
    assert list(found["config"]) == [
        "nthreads",
        "ngpus",
        "minimum_bytes",
        "maximum_bytes",
        "step_bytes",
        "warmup_iters",
        "iterations",
        "aggregated_iterations",
        "validation",
        "graph",
        "blocking_collectives",
        "per_iter_timing",
        "per_iter_skip",
        "parallel_init",
        "devices",
    ]
    assert list(found["config"]["devices"][0]) == [
        "rank",
        "group",
        "pid",
        "hostname",
        "device",
        "device_hex",
        "device_info",
    ]
    (result,) = found["results"]
    assert list(result) == [
        "size",
        "count",
        "type",
        "redop",
        "root",
        "out_of_place",
        "in_place",
        "actual_iterations",
        "experiment_name",
    ]
    assert list(result["in_place"]) == ["time", "alg_bw", "bus_bw", "nwrong"]


def test_its_quirks_are_kept() -> None:
    found = document(*BOTH)
    assert found["version"] == 3
    assert found["start_time"] == "2026-01-02 03:04:05"
    assert found["config"]["blocking_collectives"] == "true"
    assert found["config"]["parallel_init"] == "false"
    assert found["results"][0]["root"] == "    -1"
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert found["average_bus_bandwidth"] == {"bandwidth": pytest.approx(0.576), "okay": "unchecked"}
    assert found["args"][0] == "all_reduce_perf"


def test_numbers_are_microseconds_and_gigabytes() -> None:
    result = document(*BOTH)["results"][0]
    assert result["out_of_place"] == {
        "time": pytest.approx(2),
        "alg_bw": pytest.approx(0.512),
        "bus_bw": pytest.approx(0.768),
        "nwrong": 0,
    }
    assert result["in_place"]["time"] == pytest.approx(4)
    assert (result["size"], result["count"], result["actual_iterations"]) == (1024, 256, 120)


def test_what_was_not_measured_or_checked_is_null() -> None:
    result = document(ok(collective(), check=Check()))["results"][0]
    assert result["out_of_place"] is None
    assert result["in_place"]["nwrong"] is None


def test_there_is_never_nan() -> None:
    metrics = {
        "time": Metric(value=1e-6, unit="s", better="lower"),
        "busbw": Metric(value=float("nan"), unit="B/s", better="higher"),
    }
    run = make_run(make_plan([collective()]), [ok(collective(), metrics=metrics)])
    content = render_json(run)
    assert b"NaN" not in content
    assert b"nan" not in content
    assert json.loads(content)["results"][0]["in_place"]["bus_bw"] is None


def test_only_allowed_variables_are_told() -> None:
    environment = {"variables": {"NCCL_ALGO": "Ring", "HOME": "/root", "NCCL_TOKEN": "s3cret"}}
    assert document(*BOTH, environment=environment)["env"] == ["NCCL_ALGO=Ring"]
    assert document(*BOTH)["env"] == []
    assert document(*BOTH, environment={"variables": "none"})["env"] == []


def test_the_ranks_are_the_devices() -> None:
    found = document(*BOTH, environment=ENVIRONMENT)["config"]["devices"]
    assert [device["rank"] for device in found] == [0, 1, 2, 3]
    assert found[0]["hostname"] == "node-a"
    assert found[0]["device_info"] == "Example CPU"
    assert found[0]["pid"] is None


def test_steps_by_a_factor_are_told_as_one() -> None:
    config = document(ok(collective(size_bytes=1024)), ok(collective(size_bytes=4096)))["config"]
    assert config["step_factor"] == 4
    assert "step_bytes" not in config


def test_a_wrong_result_is_counted_and_told() -> None:
    found = document(bad(collective(), 0, "wrong", "2 differ", check=Check(passed=False, wrong=2)))
    assert found["out_of_bounds"] == {"count": 2, "okay": "false"}
    assert found["results"] == []
    assert found["errors"][0].endswith(": wrong: 2 differ")
    assert found["average_bus_bandwidth"]["bandwidth"] is None


def test_each_series_is_a_document_on_its_line() -> None:
    lines = render_json(sample_run()).splitlines()
    programs = [json.loads(line)["args"][0] for line in lines]
    assert len(programs) == 12
    assert len(set(programs)) == 6


def test_a_run_without_collectives_is_refused() -> None:
    run = make_run(make_plan([step()]), [ok(step())])
    with pytest.raises(UserError, match=r"holds no collective .*: step.ddp layers=4: nccl-tests measures no"):
        render_json(run)
