"""The simulator agrees with the analytical bubbles, and idle time is the sum of its causes."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from parbench.bench.results.details import CAUSES, Action, Simulated
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.bubbles import (
    Shares,
    bubble_fraction,
    bubble_fraction_span,
    bubble_overhead,
    closed_form,
    compare,
    fraction_of,
    link_latency,
    shade,
    shares_of,
    split_idle,
)
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    Schedule,
    make_schedule,
    schedule_from_csv,
)
from parbench.workloads.pipeline_parallel.simulation import Ran, Timeline, simulate
from tests.support.refusals import usage_error

Seconds = Callable[[Action], float]

EQUAL = (1.0, 1.0, 1.0)
# Seconds of a forward pass, and of the gradients of inputs and weights.
TIMES = (EQUAL, (1.0, 1.4, 0.6), (0.5, 3.0, 2.0), (0.3, 0.3, 4.0))
CHUNKS = {"interleaved": (2, 4), "looped_bfs": (2, 3), "interleaved_zb": (1, 2, 4)}


def seconds_of(chunks: int, f: float, i: float, w: float) -> Seconds:
    seconds = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "B": (i + w) / chunks}
    return lambda action: seconds[action.kind]


def run(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 0,
    times: tuple[float, float, float] = EQUAL,
) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(schedule, seconds_of(schedule.chunks, *times))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_bubble_equals_closed_form(name: str, ranks: int) -> None:
    compared = 0
    counts = (1, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 5 * ranks)
    for microbatches, chunks, times in product(counts, CHUNKS.get(name, (0,)), TIMES):
        f, i, w = times
        form = closed_form(
            name, ranks=ranks, microbatches=microbatches, chunks=chunks, f=f, i=i, w=w
        )
        bubble = form.makespan_bubble_seconds
        if bubble is None:
            continue
        try:
            timeline = run(name, ranks, microbatches, chunks, times)
        except UserError:
            continue  # the schedule does not take this number of microbatches
        work = microbatches * (f + i + w)
        spans = [timeline.span(rank) - timeline.busy(rank) for rank in range(ranks)]
        assert timeline.makespan == pytest.approx(work + bubble)
        fraction = fraction_of(bubble, microbatches, f, i, w)
        assert bubble_fraction(timeline) == pytest.approx(fraction, abs=1e-12)
        assert max(spans) == pytest.approx(form.span_bubble_seconds, abs=1e-9 * work)
        compared += 1
    assert compared >= (2 if name in ("zb_v", "dualpipe_v") else 2 * len(TIMES))


@pytest.mark.parametrize(
    ("name", "chunks", "fraction"),
    [
        ("naive", 1, 3 / 4),
        ("1f1b", 1, 3 / 11),
        ("zb_h1", 1, 1 / 9),
        ("interleaved", 2, 3 / 19),
        ("interleaved", 4, 3 / 35),
        ("interleaved_zb", 2, 1 / 17),
        ("zb_v", 2, 1 / 17),
    ],
)
def test_bubble_fraction_of_papers(name: str, chunks: int, fraction: float) -> None:
    timeline = run(name, 4, 8, chunks)
    assert bubble_fraction(timeline) == pytest.approx(fraction)
    assert bubble_overhead(timeline) == pytest.approx(fraction / (1 - fraction))


@pytest.mark.parametrize(("name", "fraction"), [("1f1b", 3 / 11), ("zb_h2", 0), ("zb_v", 0)])
def test_bubble_fraction_span(name: str, fraction: float) -> None:
    """Zero-bubble schedules are free of bubbles in the span of a rank, not in the makespan."""
    assert bubble_fraction_span(run(name, 4, 8)) == pytest.approx(fraction, abs=1e-12)


def test_bubbles_of_empty_timeline_are_zero() -> None:
    empty = Timeline(ran=(), ranks=2)
    assert bubble_fraction(empty) == bubble_overhead(empty) == bubble_fraction_span(empty) == 0


def make_case(name: str) -> tuple[Schedule, Seconds]:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    return schedule, seconds_of(schedule.chunks, 1.0, 1.2, 0.8)


def idle_by_cause(*seconds: float) -> Any:
    return pytest.approx(dict(zip(CAUSES, seconds, strict=True)), abs=1e-9)


def simulate_with_jitter(schedule: Schedule, seconds: Seconds) -> Timeline:
    """Return a timeline with jitter, link latencies, and a clock that does not begin at 0."""
    draw = random.Random(1).uniform
    links = {link: draw(0.0, 0.3) for link in product(range(4), range(4))}
    timeline = simulate(schedule, lambda action: seconds(action) * draw(0.7, 1.5), links)
    later = (replace(ran, start=ran.start + 12.5, stop=ran.stop + 12.5) for ran in timeline.ran)
    return Timeline(ranks=4, ran=tuple(later))


@pytest.mark.parametrize("name", NAMES)
def test_causes_sum_to_idle_time(name: str) -> None:
    schedule, seconds = make_case(name)
    measured = simulate_with_jitter(schedule, seconds)
    latency = link_latency([measured], schedule)
    causes = split_idle(measured, schedule, latency)
    assert sum(causes.values()) == pytest.approx(measured.idle / 4)
    shades = shade(measured, schedule, latency)
    for rank in range(4):
        spans = [(ran.start, ran.stop) for ran in measured.of(rank) if ran.stop > ran.start]
        spans += [(start, stop) for shaded, start, stop, _ in shades if shaded == rank]
        spans.sort()
        assert spans[0][0] == measured.first_start
        assert spans[-1][1] == measured.first_start + measured.makespan
        assert all(before[1] == after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("name", NAMES)
def test_ideal_run_idles_for_schedule_only(name: str) -> None:
    schedule, seconds = make_case(name)
    ideal = simulate(schedule, seconds)
    assert split_idle(ideal, schedule, {}) == idle_by_cause(ideal.idle / 4, 0, 0, 0)
    # A latency that is longer than a gap does not take from the schedule's part.
    for _, start, stop, cause in shade(ideal, schedule, lambda source, target: 5.0):
        assert cause == "schedule" or stop - start < 1e-9


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_slow_link_is_p2p_idle(name: str) -> None:
    schedule, seconds = make_case(name)
    ideal = simulate(schedule, seconds)
    measured = simulate(schedule, seconds, {(1, 2): 0.7})
    added = (measured.idle - ideal.idle) / 4
    assert added > 0
    expected = idle_by_cause(ideal.idle / 4, 0, added, 0)
    assert split_idle(measured, schedule, {(1, 2): 0.7}) == expected


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_slow_stage_is_imbalance(name: str) -> None:
    schedule, seconds = make_case(name)
    ideal = simulate(schedule, seconds)
    share = schedule.num_stages / (schedule.num_stages + 1)  # keeps the mean of all stages

    def seconds_with_slow_stage(action: Action) -> float:
        return seconds(action) * share * (2 if action.stage == 1 else 1)

    causes = split_idle(simulate(schedule, seconds_with_slow_stage), schedule, {})
    assert causes["schedule"] == pytest.approx(ideal.idle / 4)
    assert causes["imbalance"] > 0.1 * causes["schedule"]
    assert (causes["p2p"], causes["rest"]) == pytest.approx((0, 0), abs=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_jitter_is_rest(name: str) -> None:
    schedule, seconds = make_case(name)
    ideal = simulate(schedule, seconds)

    def seconds_with_jitter(action: Action) -> float:
        return seconds(action) * (1.4 if action.microbatch % 2 == 0 else 0.6)

    measured = simulate(schedule, seconds_with_jitter)
    added = (measured.idle - ideal.idle) / 4
    assert abs(added) > 0.01
    expected = idle_by_cause(ideal.idle / 4, 0, 0, added)
    assert split_idle(measured, schedule, {}) == expected


def make_timeline(times: Mapping[str, tuple[float, float]]) -> Timeline:
    """Return a timeline of two ranks, each of which has the stage of its number."""
    ran = []
    for name, (start, stop) in times.items():
        action = Action.parse(name)
        ran.append(Ran(rank=action.stage, action=action, start=start, stop=stop))
    return Timeline(ranks=2, ran=tuple(ran))


def test_shade_orders_causes_in_a_gap() -> None:
    """Rank 1 waits 1 s for the schedule, 0.5 s for a link and 0.25 s for the host."""
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0\n")
    measured = make_timeline(
        {"0F0": (0.0, 1.0), "1F0": (1.75, 2.75), "1B0": (2.75, 4.75), "0B0": (5.25, 7.25)}
    )
    assert shade(measured, schedule, lambda source, target: 0.5) == [
        (0, 1.0, 4.0, "schedule"),
        (0, 4.0, 5.0, "p2p"),
        (0, 5.0, 5.25, "rest"),
        (1, 0.0, 1.0, "schedule"),
        (1, 1.0, 1.5, "p2p"),
        (1, 1.5, 1.75, "rest"),
        (1, 4.75, 6.75, "schedule"),
        (1, 6.75, 7.25, "p2p"),
    ]
    causes = split_idle(measured, schedule, lambda source, target: 0.5)
    assert causes == idle_by_cause(3.0, 0.0, 1.0, 0.25)


# Rank 1 waits 0.5 s for 0F0 and not for 0F1. Rank 0 waits 0.5 s for 1B0 and 1.5 s for 1B1.
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
WAITING = {
    "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 5), "0B1": (7, 8),
    "1F0": (1.5, 2.5), "1B0": (2.5, 3.5), "1F1": (3.5, 4.5), "1B1": (4.5, 5.5),
}  # fmt: skip


def test_link_latency_is_median_of_waits() -> None:
    schedule = schedule_from_csv(CSV)
    assert link_latency([make_timeline(WAITING)], schedule) == {(0, 1): 0.5, (1, 0): 1.0}
    slow = make_timeline(WAITING | {"0B1": (9, 10)})
    latency = link_latency([make_timeline(WAITING), slow, slow], schedule)
    assert latency == {(0, 1): 0.5, (1, 0): (0.5 + 1.5) / 2}  # 0.5 0.5 0.5 1.5 3.5 3.5


def test_link_latency_is_not_negative() -> None:
    early = {
        name: (start - 5, stop - 5) if name.startswith("1") else (start, stop)
        for name, (start, stop) in WAITING.items()
    }
    assert link_latency([make_timeline(early)], schedule_from_csv(CSV))[0, 1] == 0.0


def test_link_latency_without_waits_is_least_delay() -> None:
    schedule = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    times = {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (7.25, 9), "0B1": (9, 10),
        "1F0": (3, 5), "1F1": (5, 6), "1B0": (6, 7), "1B1": (7, 8),
    }  # fmt: skip
    assert link_latency([make_timeline(times)], schedule) == {(0, 1): 2.0, (1, 0): 0.25}
    late = times | {"0F1": (1, 8.5), "0B0": (8.5, 9)}
    assert link_latency([make_timeline(late)], schedule)[1, 0] == 1.0


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "numbers"),
    [("1f1b", 2, 8, "(4)"), ("1f1b", 4, 9, "(16)"), ("gpipe", 4, 8, "0B0")],
)
def test_split_idle_refuses_other_schedule(
    name: str, ranks: int, microbatches: int, numbers: str
) -> None:
    schedule, seconds = make_case("1f1b")
    measured = simulate(schedule, seconds)
    other = make_schedule(name, ranks=ranks, microbatches=microbatches)
    assert numbers in usage_error(split_idle, measured, other, {})
    assert numbers in usage_error(link_latency, [measured], other)


def compare_all(layers: int = 8, latency: float = 0.0) -> dict[str, Simulated]:
    lines = compare(
        make_schedule("gpipe", ranks=4, microbatches=8),
        Shares(f=1.0, i=1.0, w=1.0),
        layers=layers,
        layer_bytes=100.0,
        latency=latency,
        outside=0.5,
    )
    return {line.schedule: line for line in lines}


def test_compare_sorts_schedules_by_time() -> None:
    lines, with_latency = compare_all(), compare_all(latency=0.1)
    assert set(lines) == set(NAMES)
    seconds = {name: line.step_seconds or 0.0 for name, line in lines.items()}
    assert list(seconds.values()) == sorted(seconds.values())
    assert all((with_latency[name].step_seconds or 0.0) > seconds[name] for name in NAMES)
    line = lines["1f1b"]
    assert line.step_seconds == pytest.approx(run("1f1b", 4, 8).makespan + 0.5)
    assert line.bubble_fraction == pytest.approx(3 / 11)
    assert (line.in_flight, line.activation_bytes) == (4.0, 4 * 2 * 100.0)
    line = lines["interleaved"]
    assert (line.chunks, line.in_flight, line.activation_bytes) == (2, 5.5, 5.5 * 2 * 100.0)


def test_compare_puts_impossible_schedules_last() -> None:
    lines = compare_all(layers=4)
    impossible = [name for name, line in lines.items() if line.why_not]
    assert impossible == list(lines)[-5:]
    assert set(impossible) == {"interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"}


@pytest.mark.parametrize(
    ("name", "microbatches", "times"),
    [
        ("zb_h1", 3, EQUAL),
        ("zb_v", 6, EQUAL),
        ("custom", 8, EQUAL),
        ("zb_v", 8, (1.0, 1.5, 0.5)),
        ("dualpipe_v", 8, (1.0, 1.5, 0.5)),
    ],
)
def test_closed_form_is_none_without_formula(
    name: str, microbatches: int, times: tuple[float, float, float]
) -> None:
    f, i, w = times
    form = closed_form(name, ranks=4, microbatches=microbatches, chunks=0, f=f, i=i, w=w)
    assert form.makespan_bubble_seconds is None
    assert form.note


def test_shares_are_means_times_chunks() -> None:
    times = {"F": 1.0, "I": 2.0, "W": 3.0, "B": 5.0}
    schedule = make_schedule("interleaved_zb", ranks=2, microbatches=4, chunks=2)
    timeline = simulate(schedule, lambda action: times[action.kind] * (1 + action.stage % 2))
    assert shares_of((timeline, timeline), 2) == Shares(f=3.0, i=6.0, w=9.0)


def test_shares_assume_halves_of_whole_backward() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=2)
    timeline = simulate(schedule, lambda action: 4.0 if action.kind == "B" else 1.5)
    assert shares_of((timeline,), 1) == Shares(f=1.5, i=2.0, w=2.0, assumed_halves=True)
