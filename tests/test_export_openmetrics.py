"""OpenMetrics text, as prometheus_client's own parser reads it."""

import pytest
from compare_fixtures import CASE, OTHER, launches, run_of
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from reports_fixtures import HOSTILE, bad, collective, sample_run

from bench.runs import Run
from reports.exchange.export_openmetrics import render_openmetrics


def parsed(run: Run) -> dict[str, Metric]:
    text = render_openmetrics(run).decode()
    return {one.name: one for one in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]


def test_its_parser_reads_a_run_of_everything() -> None:
    found = parsed(sample_run())
    assert {"parbench_run", "parbench_case_ok", "parbench_time_seconds", "parbench_busbw_bytes_per_second"} <= set(
        found
    )
    assert all(one.samples for one in found.values())
    assert found["parbench_time_seconds"].unit == "seconds"
    assert found["parbench_time_seconds"].type == "gauge"


def test_values_and_labels_are_the_runs() -> None:
    found = parsed(run_of(launches()))
    [time] = found["parbench_time_seconds"].samples
    assert time.value == pytest.approx(1e-3, rel=1e-3)
    assert time.labels["case"] == "collective.all_reduce"
    assert (time.labels["param_size_bytes"], time.labels["ranks"], time.labels["backend"]) == ("1024", "4", "gloo")
    [low], [high] = (found[f"parbench_time_{name}_seconds"].samples for name in ("low", "high"))
    assert low.value < time.value < high.value
    [info] = found["parbench_run"].samples
    assert info.labels == {"run": "run-1", "host": "node-a", "parbench": "0.1.0"}


def test_a_wrong_result_is_not_ok_and_has_no_time() -> None:
    found = parsed(run_of([*launches(count=4), bad(CASE, 4, "wrong"), *launches(OTHER)]))
    assert {one.labels["case"]: one.value for one in found["parbench_case_ok"].samples} == {
        "collective.all_reduce": 0.0,
        "collective.broadcast": 1.0,
    }
    assert len(found["parbench_time_seconds"].samples) == 1


def test_hostile_text_stays_a_label() -> None:
    text = HOSTILE + ' "quoted" C:\\name\nnew line'
    [time] = parsed(run_of(launches(collective(odd=text))))["parbench_time_seconds"].samples
    assert '"quoted" C:\\name new line' in time.labels["param_odd"]


def test_values_are_rounded_and_the_end_is_marked() -> None:
    lines = render_openmetrics(run_of(launches())).decode().splitlines()
    assert lines[-1] == "# EOF"
    values = [line.rpartition(" ")[2] for line in lines if not line.startswith("#")]
    assert max(len(value.replace(".", "").lstrip("0")) for value in values) <= 12
