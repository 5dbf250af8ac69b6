"""A declared metric: its column, glossary entry and line of the README."""

import pytest

from parbench.bench.results.metrics import METRICS, find_metric, make_values


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
