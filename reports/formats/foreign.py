"""What another tool measured, in our convention (nccl-tests'): S in bytes, seconds, bytes per second. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.plan.catalogue import busbw_factor
from bench.plan.params import Value
from bench.results.metrics import MetricValue, value
from bench.results.records import Check
from bench.text import UserError, listed

MICRO, GIGA, GIBI = 1e-6, 1e9, 1 << 30
UNKNOWN = "unknown"

_DIGITS_ENOUGH = 100  # steps of its last decimal: three significant digits


@dataclass(frozen=True, kw_only=True)
class Found:
    """One result: ``name`` and ``params`` are the case's, ``time`` and the rates are None where unknown.

    ``group_ranks`` is the size of its group, None where that is the whole world. ``samples`` are seconds, one an
    iteration, the maximum over ranks.
    """

    name: str
    params: Mapping[str, Value]
    metrics: Mapping[str, MetricValue]
    check: Check = field(default_factory=Check)
    group_ranks: int | None = None
    samples: Sequence[float] = ()
    iterations: int | None = None
    printed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What one file says; ``nodes`` is None if it does not tell, ``left_out`` says what could not be taken over."""

    tool: str
    version: str | None
    ranks: int
    nodes: int | None
    backend: str
    device: str
    found: tuple[Found, ...]
    hosts: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def world_size(told: int | None, given: int | None, where: str) -> int:
    """Return the number of ranks, by the file or by ``--nproc``; ``UserError`` if neither tells, or they disagree."""
    if told is None and given is None:
        raise UserError(f"{where} does not say on how many ranks it ran, which its bandwidths depend on: add --nproc N")
    if told is not None and given is not None and told != given:
        raise UserError(f"{where} was measured on {told} ranks, and --nproc says {given}; leave --nproc out")
    return told if told is not None else given or 0


def time_and_rates(
    operation: str,
    ranks: int,
    size_bytes: int,
    seconds: float | None,
    *,
    method: str,
    algbw: float | None = None,
    busbw: float | None = None,
    last_decimal: float = 0.0,
) -> dict[str, MetricValue]:
    """Return the metrics of a result: the rates as printed, or of size and time where too few digits were printed.

    ``algbw`` and ``busbw`` are B/s as printed, ``last_decimal`` what a step of their last decimal is worth.
    """
    factor = busbw_factor(operation, ranks)
    computed = size_bytes / seconds if seconds else None
    of_algbw, how = _rate(algbw, computed, last_decimal)
    scaled = None if computed is None or factor is None else computed * factor
    of_busbw, how_bus = _rate(busbw, scaled, last_decimal)
    return {
        "time": value("time", seconds, method),
        "algbw": value("algbw", of_algbw, f"{how}; {method}"),
        "busbw": value("busbw", of_busbw, f"{how_bus}; {method}"),
    }


def _rate(printed: float | None, computed: float | None, last_decimal: float) -> tuple[float | None, str]:
    if printed is not None and (printed >= _DIGITS_ENOUGH * last_decimal or computed is None):
        return printed, "as printed"
    return computed, "size over time" if computed is not None else "unknown"


def fields(words: Sequence[str], names: Sequence[str], needed: Sequence[str], where: str) -> dict[str, str]:
    """Return a row's words by column; ``UserError`` if a needed column was not named, or the row was cut short."""
    if missing := [name for name in needed if name not in names]:
        raise UserError(f"{where}: the heading before this row names no column {listed(missing)}")
    if len(words) < len(names):
        raise UserError(f"{where}: {len(words)} of {len(names)} values, so the file seems to be cut short")
    return dict(zip(names, words, strict=False))


def number(word: str, where: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: {word!r} is not a number")
    return value


def whole(word: str, where: str) -> int:
    if not word.isdecimal():
        raise UserError(f"{where}: {word!r} is not a whole number from 0 up")
    return int(word)


def only(values: Iterable[int]) -> int | None:
    """Return the one value that all agree on, None if there is none or they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
