"""The noise floor of a machine, measured: the same code launched again and again, and compared with itself (A/A).

A series' floor is the least one under which the gate's rule calls at most 1 % of these comparisons slower; it is kept
in a file under the series' fingerprint, as the history keys it. What is not seen while it is measured is not in it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import stdev

import msgspec

from parbench.bench.files import (
    convert_read_errors,
    convert_write_errors,
    decode_json,
    encode_json,
    read_file,
    replace_file,
)
from parbench.bench.results.formatting import format_percent
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median, quantile
from parbench.bench.text import UserError, format_table
from parbench.reports.analysis.summary import Row
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.rule import Pair, Rule, effects

FILE = Path("runs/floor.json")
SCHEMA_VERSION = 1
FALSE_ALARMS = 0.01
MIN_REPETITIONS = 10  # what two sides of the fewest that are ever compared need


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """What repetitions of a series told; noise (of the medians' logarithms) and floor are fractions, times UTC."""

    series: str
    host: str
    measured: str
    repetitions: int
    noise: float
    floor: float

    @property
    def text(self) -> str:
        day = datetime.fromisoformat(self.measured).date()
        return f"floor {100 * self.floor:.1f} %, measured here on {day} with {self.repetitions} repetitions"


class _File(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int
    floors: dict[str, Threshold]


def measure_floors(runs: Sequence[Run], rule: Rule) -> tuple[dict[str, Threshold], float]:
    """Return by fingerprint the floor of each series that ten of these runs, one repetition each, measured.

    With them, how repetitions correlate with the next.
    """
    times: dict[str, dict[int, float]] = {}
    labels: dict[str, str] = {}
    for repetition, run in enumerate(runs):
        for point in collect_points(run):
            if point.seconds is not None:
                times.setdefault(name := point.series.fingerprint, {})[repetition] = point.seconds
                labels[name] = point.series.case.label
    times = {
        name: repetitions
        for name, repetitions in times.items()
        if len(repetitions) >= MIN_REPETITIONS
    }
    if not times:
        return {}, 0.0
    floors, autocorrelation = floors_of([*times.values()], rule)
    where = {"host": runs[-1].info.host, "measured": runs[-1].info.started}
    found = {}
    for (name, repetitions), floor in zip(times.items(), floors, strict=True):
        noise = stdev(map(math.log, repetitions.values()))
        found[name] = Threshold(
            series=labels[name], repetitions=len(repetitions), noise=noise, floor=floor, **where
        )
    return found, autocorrelation


def floors_of(series: Sequence[Mapping[int, float]], rule: Rule) -> tuple[list[float], float]:
    """Return each series' least floor, the rule's or more, under which at most 1 % of A/A comparisons find a change.

    Compared are neighbouring repetitions with later ones, and such as are dealt in turns, in sides of the fewest
    repetitions
    that decide and of half of all. Rounded up to a tenth of a percent. With them, the comparisons' median
    autocorrelation. Each series holds its seconds by repetition, ten or more, all above zero.
    """
    needed: list[list[float]] = [[] for _ in series]
    correlations = []
    repetitions = sorted({repetition for one in series for repetition in one})
    for sides in _pairs(repetitions, rule.min_repetitions):
        base, new = ([{i: one[i] for i in side if i in one} for one in series] for side in sides)
        each = [Pair(base=ours, new=theirs) for ours, theirs in zip(base, new, strict=True)]
        told = [i for i, pair in enumerate(each) if min(len(pair.base), len(pair.new)) > 1]
        whole, found = effects([[each[i]] for i in told], replace(rule, floor=0.0))
        correlations += [whole.autocorrelation] if whole else []
        for i, (one,) in zip(told, found, strict=True):
            low, high, rank_p_value = one.low, one.high, one.rank_p_value
            # Two repetitions of a side have an interval.
            assert low is not None
            assert high is not None
            assert rank_p_value is not None
            # what the interval does not clear, where the rest finds anything
            needed[i].append(
                max(low, 1 / (1 + high) - 1, 0.0) if rank_p_value <= rule.rank_level else 0.0
            )
    floors = [
        max(rule.floor, math.ceil(1000 * quantile(one, 1 - FALSE_ALARMS) - 1e-9) / 1000)
        for one in needed
    ]
    return floors, median(correlations) if correlations else 0.0


def _pairs(
    repetitions: Sequence[int], fewest: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for size in sorted({fewest, len(repetitions) // 2}):
        for start in range(len(repetitions) - 2 * size + 1):
            for other in range(start + size, len(repetitions) - size + 1):
                yield repetitions[start : start + size], repetitions[other : other + size]
            dealt = repetitions[start : start + 2 * size]
            base = [repetition for i, repetition in enumerate(dealt) if i % 4 in (0, 3)]
            yield base, [repetition for i, repetition in enumerate(dealt) if i % 4 in (1, 2)]


def fingerprints(run: Run, rows: Iterable[Row] | None = None) -> dict[str, str]:
    return {point.series.case.id: point.series.fingerprint for point in collect_points(run, rows)}


def parse_floor(text: str) -> float:
    """Return a floor as a fraction: ``3%`` is 0.03."""
    percent = re.fullmatch(r"\s*(\d*\.?\d+)\s*%\s*", text, re.ASCII)
    if percent is None or float(percent[1]) > 100:
        raise UserError(
            f"--floor {text!r} is not understood: write a percentage from 0% to 100%, such as 3%"
        )
    return float(percent[1]) / 100


def find_thresholds(text: str | None) -> tuple[float, dict[str, Threshold]]:
    """Return the floor, and the measured ones by fingerprint: a percentage stands alone, a file beside 3 %."""
    if text is None:
        return Rule().floor, read_thresholds(FILE) if FILE.exists() else {}
    if text.strip().endswith("%") or not Path(text).exists():
        return parse_floor(text), {}
    return Rule().floor, read_thresholds(Path(text))


def read_thresholds(path: Path) -> dict[str, Threshold]:
    """Return the floors of a file by fingerprint; ``UserError`` if there is no such file or it is none of ours."""
    if not path.exists():
        raise UserError(f"no such file: {path}; parbench aa measures floors")
    with convert_read_errors(path, "holds no floors as parbench aa writes them"):
        found = decode_json(read_file(path), _File)
    if found.schema_version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema {found.schema_version}, which is newer than {SCHEMA_VERSION}"
        )
    return found.floors


def save_thresholds(path: Path, floors: Mapping[str, Threshold]) -> None:
    """Write floors to a file beside those it has of other series, all or nothing."""
    known = read_thresholds(path) if path.exists() else {}
    whole = _File(schema_version=SCHEMA_VERSION, floors={**known, **floors})
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, encode_json(whole))


def as_text(floors: Mapping[str, Threshold]) -> str:
    ordered = sorted(floors.values(), key=lambda one: -one.floor)
    rows = [(format_percent(one.noise), f"{100 * one.floor:.1f} %", one.series) for one in ordered]
    return format_table([("noise", "floor", "series"), *rows], right_aligned=(0, 1)) + "\n"


def told(floors: Sequence[Threshold]) -> list[str]:
    """Return a sentence on the highest floor of each session that measured some of these."""
    found = []
    for session in sorted({(one.measured, one.host) for one in floors}):
        own = [one for one in floors if (one.measured, one.host) == session]
        highest = max(own, key=lambda one: one.floor)
        others = f" for {len(own)} series, the highest of them" if len(own) > 1 else ""
        found.append(f"Measured on {highest.host}{others}: {highest.text}.")
    return found
