"""Limits of the metrics of cases, from the file of ``--limits``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path

from parbench.bench.files import read_toml
from parbench.bench.plan.cases import Case, matches
from parbench.bench.results.metrics import METRICS, find_metric
from parbench.bench.text import UserError, format_list, suggest_similar

_LIMIT = re.compile(
    r"\s*(<=|<|>=|>|==)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*([A-Za-z%/]*)\s*", re.ASCII
)
"""Matches a limit such as ``<= 10%``. Its groups are the operator, the number and the unit."""
_UNIT_FACTORS: Mapping[str, Mapping[str, float]] = {
    "": {"%": 0.01, "": 1.0},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "B": {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "B/s": {"GB/s": 1e9},
}
"""The units that a limit may have, with their size, by the unit of the metric.

Where an empty unit is listed, a limit may have no unit.
"""
_EXAMPLE = """"workload.ddp" = { exposed_fraction = "<10%", bytes_ratio = "==1" }"""


@dataclass(frozen=True, kw_only=True)
class MetricLimit:
    """A user's limit for a metric of some benchmarks, such as ``exposed_fraction <= 10%``."""

    cases: str
    """A glob such as ``workload.ddp``, which selects cases by their name or label.

    The label of a case is its name with its parameters.
    """
    metric: str
    """The name of the metric. Without axis or component, all axes or components are limited.

    For example, ``bytes_ratio`` limits ``bytes_ratio.dp`` and ``bytes_ratio.tp``.
    """
    text: str
    """The limit as it is written in the file, such as ``<10%``."""
    operator: str
    """``<=``, ``<``, ``>=``, ``>`` or ``==``."""
    number: float
    """The limit in the unit of the metric, such as seconds or bytes."""

    def applies_to(self, case: Case) -> bool:
        """Return True if the glob ``cases`` matches the name or the label of the case."""
        return matches(case.name, self.cases) or fnmatchcase(case.label, self.cases)

    def is_met(self, value: float) -> bool:
        """Return True if a value of the metric, in its unit, is within the limit.

        A value that differs from the limit by less than a relative 1e-9 counts as equal to it.
        """
        if isclose(value, self.number, rel_tol=1e-9):
            return "=" in self.operator
        return self.operator.startswith("<" if value < self.number else ">")


def read_limits(path: Path, cases: Sequence[Case]) -> tuple[MetricLimit, ...]:
    """Read and return the limits in the file of ``--limits``.

    ``cases`` are the cases of the run. Raises ``UserError`` if the file has no limits, if a metric
    or a limit is not valid, or if a glob matches none of the ``cases``.
    """
    limits = []
    for pattern, texts in read_toml(path, "limits", dict[str, dict[str, str]]).items():
        for metric, text in texts.items():
            limit = _parse_limit(f"limits {path}", pattern, metric, text)
            if not any(limit.applies_to(case) for case in cases):
                names = dict.fromkeys(case.name for case in cases)
                raise UserError(
                    f"limits {path}: {pattern!r} matches no case of the run. "
                    f"It has {format_list(names, 'and')}"
                )
            limits.append(limit)
    if not limits:
        raise UserError(f"limits {path}: the file has no limit. Write, for example, {_EXAMPLE}")
    return tuple(limits)


def _parse_limit(place: str, cases: str, name: str, text: str) -> MetricLimit:
    """Return the limit that ``text``, such as ``<10%``, sets for the metric ``name``.

    ``cases`` is the glob of the cases that must meet it. ``place`` is the start of error messages,
    with the file. Raises ``UserError`` if the metric is unknown or the text is not valid.
    """
    families = {metric.name.partition(".")[0]: metric for metric in METRICS}
    metric = find_metric(name) or families.get(name)
    if metric is None:
        hint = suggest_similar(name, families)
        raise UserError(
            f"{place}: {name} of {cases!r} is not a metric{hint} "
            "(docs/reference/metrics.md lists them)"
        )
    factors = _UNIT_FACTORS.get(metric.unit, {metric.unit: 1.0, "": 1.0})
    match = _LIMIT.fullmatch(text)
    if match is None or match[3] not in factors:
        units = [unit or "without a unit" for unit in factors]
        raise UserError(
            f"{place}: {name} of {cases!r} has the invalid limit {text!r}. "
            f"Write <, <=, ==, >= or > and a number in {format_list(units)}"
        )
    operator, digits, unit = match.groups()
    number = float(digits) * factors[unit]
    return MetricLimit(
        cases=cases, metric=name, text=text.strip(), operator=operator, number=number
    )
