"""The result of a case on rank 0: the metrics, the stragglers and the archive of its samples."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from parbench.bench.launch.messages import Outcome
from parbench.bench.rank.device_timer import HOST_NS
from parbench.bench.rank.timing import TimedSamples
from parbench.bench.results.metrics import MetricValue, find_metric, make_value, make_values
from parbench.bench.results.records import Samples, find_stragglers
from parbench.bench.results.stats import (
    MIN_ITERATIONS_FOR_P99,
    MIN_ITERATIONS_FOR_Q10,
    Estimate,
    estimate_median,
    quantile,
)
from parbench.bench.world.benchmark import Description, Work
from parbench.bench.world.world import World

_PERCENTILES = (("q10", 0.1, MIN_ITERATIONS_FOR_Q10), ("p99", 0.99, MIN_ITERATIONS_FOR_P99))


def add_samples(
    outcome: Outcome,
    timed: TimedSamples,
    description: Description,
    world: World,
    ranks: list[int],
) -> Outcome:
    """Add the samples, their metrics and the description of a step to the outcome."""
    seconds = timed.compute_seconds(description.hops)
    details = dict(description.details)
    if len(ranks) < len(world.hosts):
        details |= {"group_size": len(ranks), "group_ranks": ranks}
    details |= {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    method = world.clock.method
    uncertainty_ns = world.clock.uncertainty_ns
    if timed.hidden is not None:
        details["launch_hidden"] = round(timed.hidden, 4)
        method = f"{method}; a device's events by its host"
        uncertainty_ns += HOST_NS
    arrival = None
    if timed.has_arrivals:
        arrivals, exits, _, _ = timed.stamps
        arrival = find_stragglers(
            [ranks[index] for index in arrivals.argmax(axis=0)],
            [ranks[index] for index in exits.argmax(axis=0)],
            seconds["skew"],
            method,
            uncertainty_ns / 1e9,
        )
    return replace(
        outcome,
        stop=timed.stop,
        samples=Samples(values=seconds["time"], samples_per_block=list(timed.samples_per_block)),
        metrics=compute_metrics(seconds, timed.samples_per_block, description),
        arrival=arrival,
        details=details,
        notes=list(description.notes),
        raw=b"" if outcome.more else _pack_samples(timed, world, ranks),
    )


def compute_metrics(
    seconds: dict[str, list[float]], samples_per_block: Sequence[int], description: Description
) -> dict[str, MetricValue]:
    """Return metrics by name: the time with its percentiles, rates, and parts of the time.

    ``seconds`` are the samples in seconds by metric name.
    """
    headline = description.headline
    medians = {name: estimate_median(values, samples_per_block) for name, values in seconds.items()}
    time = medians.pop("time")
    count = len(seconds["time"])
    metrics = {headline: make_value("time", time)}
    for name, share, min_count in _PERCENTILES:
        if count >= min_count:
            method = f"{100 * share:.0f}th percentile of {count} iterations"
            percentile = make_value(f"time_{name}", quantile(seconds["time"], share), method)
            metrics[f"{headline}_{name}"] = percentile
    for work in description.work:
        metrics[work.name] = _compute_rate(work, time)
    return metrics | make_values(medians)


def _compute_rate(work: Work, time: Estimate) -> MetricValue:
    """Return work per time, with an unknown value if the work or the time is 0."""
    rates = []
    for seconds in (time.value, time.high, time.low):  # the slowest time gives the lowest rate
        rates.append(work.amount / seconds if seconds and work.amount else None)
    metric = find_metric(work.name)
    return MetricValue(
        value=rates[0],
        low=rates[1],
        high=rates[2],
        unit=metric.unit if metric else work.unit,
        better=metric.better if metric else "higher",
        method=f"{work.amount:.12g} over the {time.method}",
    )


def _pack_samples(timed: TimedSamples, world: World, ranks: list[int]) -> bytes:
    """Return the stamps of all measured ranks as a NumPy archive.

    Arrivals and exits are on rank 0's clock, in ns since the first arrival.
    """
    arrivals, exits, durations, issues = timed.stamps
    first_arrival = arrivals.min()
    arrays: dict[str, Any] = {
        "ranks": np.array(ranks, dtype=np.int64),
        "arrival_ns": arrivals - first_arrival,
        "exit_ns": exits - first_arrival,
        "duration_ns": durations,
        "issue_ns": issues,
        "steps_per_sample": np.int64(timed.steps_per_sample),
        "clock_offsets_ns": np.array(world.clock.offsets_ns),
    }
    with io.BytesIO() as file:
        np.savez_compressed(file, **arrays)
        return file.getvalue()
