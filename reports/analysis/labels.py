"""Names of ``parbench.reports.labels`` for modules that do not import it yet."""

from parbench.reports.case_results import CaseResult
from parbench.reports.labels import (
    AXES,
    MAX_NAMED_PAIRS,
    PAIRS,
    Fact,
    flatten,
)
from parbench.reports.labels import label_communication as _label_communication
from parbench.reports.labels import label_differences as differences
from parbench.reports.labels import label_operation as operation
from parbench.reports.labels import label_results as short_labels
from parbench.reports.labels import list_environment_facts as environment_facts

__all__ = [
    "AXES",
    "MAX_NAMED_PAIRS",
    "PAIRS",
    "Fact",
    "differences",
    "environment_facts",
    "flatten",
    "operation",
    "row_label",
    "short_labels",
]


def row_label(row: CaseResult) -> str:
    return _label_communication(row.case)
