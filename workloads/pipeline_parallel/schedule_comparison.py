"""All schedules at the ranks and microbatches of a measured step, simulated with its times: which one to take. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.results.details import Action, Simulated
from bench.text import UserError
from workloads.pipeline_parallel import schedules
from workloads.pipeline_parallel.bubbles import bubble_fraction
from workloads.pipeline_parallel.in_flight import peak_held
from workloads.pipeline_parallel.schedules import Schedule, make_schedule
from workloads.pipeline_parallel.simulate import Timeline, simulate
from workloads.pipeline_parallel.split import layers_of_stages


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Mean seconds of one rank's whole share of one microbatch: forward, input gradient, weight gradient.

    Where the two gradients were not told apart (``assumed_halves``), each is taken for half of them.
    """

    f: float
    i: float
    w: float
    assumed_halves: bool

    def seconds_of(self, action: Action, chunks: int) -> float:
        """Return what an action takes where a rank has ``chunks`` equal stages."""
        whole = {"F": self.f, "I": self.i, "W": self.w, "B": self.i + self.w}[action.kind]
        return whole / chunks


def shares_of(timelines: tuple[Timeline, ...], chunks: int) -> Shares:
    """Return the mean shares of measured steps."""
    seconds: dict[str, list[float]] = {}
    for timeline in timelines:
        for ran in timeline.ran:
            seconds.setdefault(ran.action.kind, []).append(ran.stop - ran.start)
    means = {kind: chunks * sum(values) / len(values) for kind, values in seconds.items()}
    if "I" in means and "W" in means:
        return Shares(f=means["F"], i=means["I"], w=means["W"], assumed_halves=False)
    return Shares(f=means["F"], i=means["B"] / 2, w=means["B"] / 2, assumed_halves=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the schedules share: the sizes of the step, a layer's activations, a message's way, and the time around.

    ``layer_bytes`` is None where activations have no closed form.
    """

    ranks: int
    microbatches: int
    layers: int
    layer_bytes: float | None
    latency_seconds: float
    outside_seconds: float


def compare(shares: Shares, setting: Setting) -> tuple[Simulated, ...]:
    """Return each schedule with its default chunks, the fastest first, those that cannot run last."""
    found = [_simulated(name, shares, setting) for name in schedules.NAMES]
    return tuple(sorted(found, key=lambda one: math.inf if one.step_seconds is None else one.step_seconds))


def _simulated(name: str, shares: Shares, setting: Setting) -> Simulated:
    chunks = schedules.default_chunks(name)
    try:
        schedule = make_schedule(name, ranks=setting.ranks, microbatches=setting.microbatches, chunks=chunks)
        counts = layers_of_stages(setting.layers, schedule.num_stages)
    except UserError as error:
        return Simulated(schedule=name, chunks=chunks, measured=False, why_not=str(error))
    timeline = simulate(
        schedule,
        lambda action: shares.seconds_of(action, chunks),
        lambda source, target: setting.latency_seconds,
    )
    layers_held = _most_held(schedule, lambda stage: float(counts[stage]))
    return Simulated(
        schedule=name,
        chunks=chunks,
        measured=False,
        step_seconds=timeline.makespan + setting.outside_seconds,
        bubble_fraction=bubble_fraction(timeline),
        in_flight=_most_held(schedule, lambda stage: 1 / chunks),
        activation_bytes=None if setting.layer_bytes is None else setting.layer_bytes * layers_held,
    )


def _most_held(schedule: Schedule, of_stage: Callable[[int], float]) -> float:
    return max(peak_held(schedule, rank, of_stage) for rank in range(schedule.ranks))


def mean_latency(latency: Mapping[tuple[int, int], float]) -> float:
    """Return the mean over links in seconds, 0 where none is known."""
    return sum(latency.values()) / len(latency) if latency else 0.0
