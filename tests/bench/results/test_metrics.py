"""A declared metric: its column, glossary entry, part of the schema and line of the README."""

import jsonschema
import msgspec
import pytest

from parbench.bench.results.metrics import METRICS, MetricValue, find_metric, make_values
from parbench.bench.results.records import encode_record, json_schema
from tests.support.paths import ROOT
from tests.support.reports_fixtures import ok_record, step_case, step_metrics


@pytest.mark.parametrize("name", ["mine", "step_time", "exposed_comm.dp"])
def test_schema_refuses_a_bad_metric(name: str) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    own_metric = {"mine": MetricValue(value=1.0, unit="cycles")}
    record = ok_record(step_case(), metrics=step_metrics(1.0) | own_metric)
    document = msgspec.json.decode(encode_record(record))
    assert list(validator.iter_errors(document)) == []
    document["metrics"][name] = {"value": 1.0, "better": "bigger"}
    assert list(validator.iter_errors(document)) != []


def test_declared_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert find_metric(metric.name) is metric
        assert metric.help
        assert metric.title


def test_undeclared_metric_is_refused() -> None:
    with pytest.raises(LookupError, match="mine"):
        make_values({"mine": 1.0})


def test_readme_lists_all_metrics() -> None:
    readme = (ROOT / "bench" / "README.md").read_text()
    for metric in METRICS:
        formula = f" ({metric.formula})" if metric.formula else ""
        cells = [f"`{metric.name}`", metric.unit or "-", metric.better or "-"]
        row = f"| {' | '.join(cells)} | {metric.help}{formula} |"
        assert row in readme, row
