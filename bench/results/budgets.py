"""Budgets: what metrics of cases have to keep, as a file says it; what cannot be meant is refused at once."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path

from parbench.bench.files import read_toml
from parbench.bench.plan.cases import Case, matches
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.metrics import METRICS, Metric, declared
from parbench.bench.text import UserError, did_you_mean, listed

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": lambda value, number: isclose(value, number, rel_tol=1e-9),
    "<": operator.lt,
    ">": operator.gt,
}
_LIMIT = re.compile(rf"\s*({'|'.join(COMPARISONS)})\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*([A-Za-z%/]*)\s*", re.ASCII)
_UNITS: Mapping[str, Mapping[str, float]] = {
    "": {"": 1.0, "%": 0.01},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "B": {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "B/s": {"GB/s": 1e9},
}
_ANY_CASE = re.compile(r"[A-Z]{2,}_")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one metric of the cases that fit a glob has to keep; ``text`` is the comparison as it was written.

    A metric that is known by axis or component, such as ``bytes_ratio``, stands for that of every one.
    """

    cases: str
    metric: str
    text: str
    comparison: str
    number: float

    def fits(self, case: Case) -> bool:
        return matches(case.name, self.cases) or fnmatchcase(case.label, self.cases)

    def is_kept(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.number)


def read_budgets(path: Path, cases: Sequence[Case], skipped: Sequence[Skipped] = ()) -> tuple[Budget, ...]:
    """Return a file's budgets; ``UserError`` where it is none, or names what is no metric or none of the ``cases``."""
    found = [
        _budget(path, pattern, metric, text)
        for pattern, limits in read_toml(path, "budgets", dict[str, dict[str, str]]).items()
        for metric, text in limits.items()
    ]
    if not found:
        raise UserError(f"budgets {path}: it has none; write such as {_EXAMPLE}")
    for one in found:
        if any(one.fits(case) for case in cases):
            continue
        if why := [each.reason for each in skipped if one.fits(each.case)]:
            raise UserError(f"budgets {path}: {one.cases!r} fits only what cannot run here: {why[0]}")
        names = dict.fromkeys(case.name for case in cases)
        hint = did_you_mean(one.cases, names)
        raise UserError(
            f"budgets {path}: {one.cases!r} fits no case of the run, which has {listed(names, 'and')}{hint}"
        )
    return tuple(found)


_EXAMPLE = """"workload.ddp" = { exposed_fraction = "<10%", bytes_ratio = "==1" }"""


def metric_of(name: str) -> Metric | None:
    """Return what is declared of a name, or of each that it stands for; None where nothing is."""
    of_each = (one for one in METRICS if re.fullmatch(rf"{re.escape(name)}\.[A-Z]+", one.name))
    found = declared(name) or next(of_each, None)
    if found and (word := _ANY_CASE.match(found.name)):  # any word may stand there, but it is a metric's
        return found if declared(name.removesuffix(found.name[word.end() - 1 :])) else None
    return found


def _budget(path: Path, cases: str, name: str, text: str) -> Budget:
    where = f"budgets {path}: {name} of {cases!r}"
    metric = metric_of(name)
    if metric is None:
        hint = did_you_mean(name, [one.name.partition(".")[0] for one in METRICS])
        raise UserError(f"{where} is no metric{hint} (bench/README.md lists them)")
    units = _UNITS.get(metric.unit, {"": 1.0, metric.unit: 1.0})
    match = _LIMIT.fullmatch(text)
    if match is None or match[3] not in units:
        allowed = f"one of {listed(COMPARISONS)} and a number"
        unit = f", its unit {listed(filter(None, units))}" if any(units) else ""
        bare = " or none" if "" in units else ""
        raise UserError(f"{where} has to be {text!r}, which is not understood: write {allowed}{unit}{bare}")
    number = float(match[2]) * units[match[3]]
    return Budget(cases=cases, metric=name, text=text.strip(), comparison=match[1], number=number)
