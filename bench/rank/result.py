"""The result of a case on rank 0: its metrics, its stragglers and the archive of its samples."""

import io
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from parbench.bench.launch.messages import Outcome
from parbench.bench.rank.device_timer import HOST_NS
from parbench.bench.rank.timing import ARRIVAL, EXIT, TimedSamples
from parbench.bench.results.metrics import MetricValue, find_metric, make_value, make_values
from parbench.bench.results.records import MIN_HIDDEN, Samples, find_stragglers
from parbench.bench.results.stats import (
    MIN_ITERATIONS_FOR_P99,
    Estimate,
    estimate_median,
    quantile,
)
from parbench.bench.world.benchmark import Description, Work
from parbench.bench.world.world import World


def add_samples(
    outcome: Outcome,
    timed: TimedSamples,
    description: Description,
    world: World,
    ranks: list[int],
) -> Outcome:
    """Return the outcome of a case with its samples, their metrics, stragglers and details added.

    Args:
        outcome: the outcome of the case so far, without samples.
        timed: the samples: the time of each on every measured rank.
        description: the work of one step, and facts that the benchmark states about itself.
        world: all ranks of the run, with their clocks.
        ranks: the global ranks that are measured, in the order of the arrays in ``timed``.
    """
    seconds = timed.compute_seconds(description.hops)
    details = dict(description.details)
    if len(ranks) < len(world.hosts):
        details |= {"group_size": len(ranks), "group_ranks": ranks}
    details |= {"warmup": timed.warmup, "steps_per_sample": timed.steps_per_sample}
    notes = list(description.notes)
    uncertainty_ns = world.clock.uncertainty_ns
    if timed.hidden is not None:
        details["launch_hidden"] = timed.hidden
        uncertainty_ns += HOST_NS
        if timed.hidden < MIN_HIDDEN and "issue_time" not in seconds:
            share = f"{100 * (1 - timed.hidden):.0f} %"
            notes.append(f"in {share} of iterations, the time includes the launch by the host")
    arrival = None
    if timed.has_arrivals:
        arrivals, exits = timed.stamps[[ARRIVAL, EXIT]]
        arrival = find_stragglers(
            [ranks[index] for index in arrivals.argmax(axis=0)],
            [ranks[index] for index in exits.argmax(axis=0)],
            seconds["skew"],
            world.clock.method,
            uncertainty_ns / 1e9,
        )
    return replace(
        outcome,
        stop=timed.stop,
        samples=Samples(values=seconds["time"], samples_per_block=list(timed.samples_per_block)),
        metrics=compute_metrics(seconds, timed.samples_per_block, description),
        arrival=arrival,
        details=details,
        notes=notes,
        raw=b"" if outcome.more else _pack_samples(timed, ranks),
    )


def compute_metrics(
    seconds: dict[str, list[float]], samples_per_block: Sequence[int], description: Description
) -> dict[str, MetricValue]:
    """Return the metrics of a case by name, each with its 95 % interval where that is known.

    They are the median time of a step, its 99th percentile if there are at least 100 samples,
    the rates of the described work (such as bytes per second), and the medians of ``skew``,
    ``transfer`` and the other times.

    Args:
        seconds: a list with one number of seconds for each sample, by metric name.
        samples_per_block: the number of samples in each block, in the order of measurement. Between
            two blocks, other cases ran.
        description: the name of the metric of the step's time, and the work of one step.
    """
    headline = description.headline
    medians = {name: estimate_median(values, samples_per_block) for name, values in seconds.items()}
    time = medians.pop("time")
    count = len(seconds["time"])
    metrics = {headline: make_value("time", time)}
    if count >= MIN_ITERATIONS_FOR_P99:
        method = f"99th percentile of {count} iterations"
        p99 = make_value("time_p99", quantile(seconds["time"], 0.99), method)
        metrics[f"{headline}_p99"] = p99
    for work in description.work:
        metrics[work.name] = _compute_rate(work, time)
    return metrics | make_values(medians)


def _compute_rate(work: Work, time: Estimate) -> MetricValue:
    """Return the rate of a kind of work: its amount in one step divided by the time of a step.

    ``time`` is the median over samples in seconds. The bounds of the rate's interval follow from
    the bounds of the time's interval. The rate is None if the time or the amount is 0.
    """
    rate, low, high = (
        work.amount / seconds if seconds and work.amount else None
        for seconds in (time.value, time.high, time.low)  # the slowest time gives the lowest rate
    )
    return MetricValue(
        value=rate,
        low=low,
        high=high,
        unit=(find_metric(work.name) or work).unit,
        better="higher",
        method=f"{work.amount:.12g} over the {time.method}",
    )


def _pack_samples(timed: TimedSamples, ranks: list[int]) -> bytes:
    """Return the times of all samples on the measured ranks as the content of a NumPy archive.

    The archive has these arrays in ns of shape (ranks, samples):

    - ``arrival_ns`` and ``exit_ns``: the start and the end of a sample on rank 0's clock, since the
      earliest start of any sample on any rank in the archive.
    - ``duration_ns``: the time from the start to the end of a sample, for all its steps together.
    - ``issue_ns``: the part of the duration until an asynchronous call returned, 0 in other modes.

    It also has ``ranks``, the global rank of each row, and the number ``steps_per_sample``.
    """
    arrivals, exits, durations, issues, _ = timed.stamps
    first_arrival = arrivals.min()
    file = io.BytesIO()
    np.savez_compressed(
        file,
        ranks=np.array(ranks, dtype=np.int64),
        arrival_ns=arrivals - first_arrival,
        exit_ns=exits - first_arrival,
        duration_ns=durations,
        issue_ns=issues,
        steps_per_sample=np.int64(timed.steps_per_sample),
    )
    return file.getvalue()
