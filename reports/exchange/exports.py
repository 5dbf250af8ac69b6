"""What other tools read of a run: the table of formats, one function each."""

from collections.abc import Callable, Mapping

from bench.results.runs import Run
from reports.exchange.export_action import render_action
from reports.exchange.export_bencher import render_bencher
from reports.exchange.export_openmetrics import render_openmetrics
from reports.exchange.export_pytest import render_pytest

FORMATS: Mapping[str, Callable[[Run], bytes]] = {
    "pytest-benchmark": render_pytest,
    "bencher": render_bencher,
    "openmetrics": render_openmetrics,
}
FOLDERS: Mapping[str, Callable[[Run], dict[str, bytes]]] = {"github-action-benchmark": render_action}
"""The formats of several files."""
