"""What another tool measured, in our convention (nccl-tests'): S in bytes, seconds, bytes per second. Pure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parbench.bench.plan.catalogue import OPERATIONS, OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list

MICRO, GIGA = 1e-6, 1e9
UNKNOWN = "unknown"
NO_CASE = "no case of ours measures the same"
NCCL_TESTS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "alltoallv_perf": "all_to_all_v",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "gather_perf": "gather",
    "scatter_perf": "scatter",
    "sendrecv_perf": "sendrecv",
}
"""The operations by the names of nccl-tests' programs."""
OSU = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather_v",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "alltoall": "all_to_all",
    "all-to-all personalized exchange": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "latency": "pingpong",
}
"""The operations by the names in the titles of OSU micro-benchmarks."""


def operations_by_name(names: Mapping[str, str]) -> dict[str, OperationSpec]:
    """Return the operations by another tool's names."""
    specs = {spec.short_name: spec for spec in OPERATIONS}
    return {name: specs[operation] for name, operation in names.items()}


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
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
class ImportedRun:
    """What one file says; ``nodes`` is None if it does not tell, ``left_out`` says what could not be taken over."""

    tool: str
    version: str | None = None
    ranks: int
    nodes: int | None = None
    backend: str = UNKNOWN
    device: str = UNKNOWN
    found: tuple[ImportedResult, ...]
    hosts: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


class PrintedRow(dict[str, str]):
    """The words of a line by their columns; ``UserError`` if one of ``needed`` was not named, or the line is cut."""

    def __init__(
        self, words: Sequence[str], names: Sequence[str], needed: Sequence[str], where: str
    ) -> None:
        if missing := [name for name in needed if name not in names]:
            raise UserError(
                f"{where}: the heading before this row names no column {format_list(missing)}"
            )
        if len(words) < len(names):
            raise UserError(
                f"{where}: {len(words)} of {len(names)} values, so the file seems to be cut short"
            )
        super().__init__(zip(names, words, strict=False))
        self.where = where

    def number(self, name: str) -> float:
        return number(self[name], self.where)

    def whole(self, name: str) -> int:
        if not self[name].isdecimal():
            raise UserError(f"{self.where}: {self[name]!r} is not a whole number from 0 up")
        return int(self[name])


def number(word: str, where: str) -> float:
    with suppress(ValueError):
        if math.isfinite(found := float(word)):
            return found
    raise UserError(f"{where}: {word!r} is not a number")


def lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    return ((line, f"{where}, line {at}") for at, line in enumerate(text.splitlines(), start=1))


def world_size(told: int | None, given: int | None, where: str) -> int:
    """Return the number of ranks, by the file or by ``--nproc``; ``UserError`` if neither tells, or they disagree."""
    ranks = given if told is None else told
    if ranks is None:
        raise UserError(
            f"{where} does not say on how many ranks it ran, which its bandwidths depend on: add --nproc N"
        )
    if given not in (None, ranks):
        raise UserError(
            f"{where} was measured on {told} ranks, and --nproc says {given}; leave --nproc out"
        )
    return ranks


def refuse_several(worlds: Collection[int | None], where: str) -> None:
    """Raise ``UserError`` if a file's tables differ in their number of ranks: a run of ours has one world."""
    if len(worlds) > 1:
        told = sorted(map(str, worlds), key=lambda word: (len(word), word))
        raise UserError(
            f"{where} holds tables of {format_list(told)} ranks: import them one by one"
        )


def time_and_rates(
    operation: OperationSpec,
    ranks: int,
    size_bytes: int,
    seconds: float | None,
    method: str,
    printed: tuple[float | None, float | None] = (None, None),
    last_decimal: float = 0.0,
) -> dict[str, MetricValue]:
    """Return the metrics of a result: the rates as printed, or of size and time where too few digits were printed.

    ``printed`` are algbw and busbw in B/s, ``last_decimal`` what a step of their last decimal is worth.
    """
    metrics = {"time": make_value("time", seconds, method)}
    algbw = size_bytes / seconds if seconds else None
    busbw = (
        algbw * operation.busbw.compute(ranks) if algbw is not None and operation.busbw else None
    )
    for name, rate, computed in zip(("algbw", "busbw"), printed, (algbw, busbw), strict=True):
        # a hundred steps of the last decimal are three significant digits
        if rate is not None and (rate >= 100 * last_decimal or computed is None):
            metrics[name] = make_value(name, rate, f"as printed; {method}")
        else:
            metrics[name] = make_value(
                name, computed, f"{'unknown' if computed is None else 'size over time'}; {method}"
            )
    return metrics
