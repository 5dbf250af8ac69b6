"""The simulator is the closed form wherever one holds; idle time is the sum of causes put in; schedules not taken."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from refusals import refusal

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
from parbench.workloads.pipeline_parallel.schedules import NAMES, Schedule, make_schedule, schedule_from_csv
from parbench.workloads.pipeline_parallel.simulation import Ran, Timeline, simulate

EQUAL = (1.0, 1.0, 1.0)
TRIPLES = (EQUAL, (1.0, 1.4, 0.6), (2.0, 1.0, 0.5), (1.0, 0.7, 1.9), (0.5, 3.0, 2.0), (0.3, 0.3, 4.0))
CHUNKS = {"interleaved": (2, 4), "looped_bfs": (2, 3), "interleaved_zb": (1, 2, 4)}  # of others their own


def timed(chunks: int, f: float, i: float, w: float) -> Callable[[Action], float]:
    seconds: dict[str, float] = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "B": (i + w) / chunks}
    return lambda action: seconds[action.kind]


def run(name: str, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(schedule, timed(schedule.chunks, f, i, w))


def test_the_simulator_is_the_closed_form_wherever_one_holds() -> None:
    all_ranks = (2, 3, 4)
    compared: Counter[tuple[str, int]] = Counter()
    for name, ranks in product(NAMES, all_ranks):
        all_microbatches = (1, 2, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks, 5 * ranks)
        for microbatches, chunks, (f, i, w) in product(all_microbatches, CHUNKS.get(name, (0,)), TRIPLES):
            form = closed_form(name, ranks=ranks, microbatches=microbatches, chunks=chunks, f=f, i=i, w=w)
            if form.makespan_bubble_seconds is None:
                continue
            try:
                timeline = run(name, ranks, microbatches, chunks, f, i, w)
            except UserError:
                continue  # a number of microbatches that this schedule does not take
            work = microbatches * (f + i + w)
            spans = [timeline.span(rank) - timeline.busy(rank) for rank in range(ranks)]
            assert timeline.makespan == pytest.approx(work + form.makespan_bubble_seconds, rel=1e-9)
            by_form = fraction_of(form.makespan_bubble_seconds, microbatches, f, i, w)
            assert bubble_fraction(timeline) == pytest.approx(by_form, rel=1e-9, abs=1e-12)
            assert max(spans) == pytest.approx(form.span_bubble_seconds, rel=1e-9, abs=1e-9 * work)
            compared[name, ranks] += 1
    for name, ranks in product(NAMES, all_ranks):
        assert compared[name, ranks] >= (3 if name in ("zb_v", "dualpipe_v") else 3 * len(TRIPLES)), name


def test_bubbles_are_of_the_whole_of_the_work_and_of_a_ranks_own_span() -> None:
    """The papers' ratios of four ranks and eight microbatches."""
    one_stage = (("naive", 1, 3 / 4), ("1f1b", 1, 3 / 11), ("zb_h1", 1, 1 / 9))
    several = (
        ("interleaved", 2, 3 / 19),
        ("interleaved", 4, 3 / 35),
        ("interleaved_zb", 2, 1 / 17),
        ("zb_v", 2, 1 / 17),
    )
    for name, chunks, fraction in (*one_stage, *several):
        timeline = run(name, 4, 8, chunks, *EQUAL)
        assert bubble_fraction(timeline) == pytest.approx(fraction), name
        assert bubble_overhead(timeline) == pytest.approx(fraction / (1 - fraction)), name
    # of 1f1b rank 0 starts first and ends last; zero bubble is zero in a rank's span, and not in the makespan
    for name, of_span in (("1f1b", 3 / 11), ("zb_h2", 0.0), ("zb_v", 0.0)):
        assert bubble_fraction_span(run(name, 4, 8, 0, *EQUAL)) == pytest.approx(of_span, abs=1e-12)
    empty = Timeline(ran=(), ranks=2)
    assert (bubble_fraction(empty), bubble_overhead(empty), bubble_fraction_span(empty)) == (0, 0, 0)


BASE = (1.0, 1.2, 0.8)
SOME = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


def made(name: str) -> tuple[Schedule, Callable[[Action], float]]:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    return schedule, timed(schedule.chunks, *BASE)


def by_cause(*seconds: float) -> Any:
    return pytest.approx(dict(zip(CAUSES, seconds, strict=True)), abs=1e-9)


def jittered(schedule: Schedule, seconds: Callable[[Action], float], seed: int) -> Timeline:
    """As if measured: jitter on every action, latency on every link, a clock that does not begin at 0."""
    draw = random.Random(seed).uniform
    links = {(one, other): draw(0.0, 0.3) for one in range(4) for other in range(4)}
    timeline = simulate(schedule, lambda action: seconds(action) * draw(0.7, 1.5), links)
    later = (replace(ran, start=ran.start + 12.5, stop=ran.stop + 12.5) for ran in timeline.ran)
    return Timeline(ranks=4, ran=tuple(later))


def test_causes_sum_to_the_measured_idle_time_and_shades_fill_every_gap() -> None:
    for name, seed in product(NAMES, (1, 2)):
        schedule, seconds = made(name)
        measured = jittered(schedule, seconds, seed)
        latency = link_latency([measured], schedule)
        split = split_idle(measured, schedule, latency)
        assert sum(split.values()) == pytest.approx(measured.idle / 4, rel=1e-12)
        shades = shade(measured, schedule, latency)
        end = measured.first_start + measured.makespan
        for rank in range(4):
            spans = [(ran.start, ran.stop) for ran in measured.of(rank) if ran.stop > ran.start]
            tiled = sorted(spans + [(start, stop) for of, start, stop, _ in shades if of == rank])
            assert (tiled[0][0], tiled[-1][1]) == (measured.first_start, end)
            assert all(one[1] == other[0] for one, other in pairwise(tiled)), name


def test_a_perfect_run_is_all_schedule_and_a_slow_link_p2p_and_nothing_else() -> None:
    for name in NAMES:
        schedule, seconds = made(name)
        ideal = simulate(schedule, seconds)
        assert split_idle(ideal, schedule, {}) == by_cause(ideal.idle / 4, 0, 0, 0)
        # links expected to take longer than a gap do not take from its first part
        for latency in (0.0, 5.0):
            shades = shade(ideal, schedule, lambda source, target: latency)  # noqa: B023
            assert {cause for _, start, stop, cause in shades if stop - start > 1e-9} == {"schedule"}, name
        if name in SOME:
            slow = {(1, 2): 0.7}
            measured = simulate(schedule, seconds, slow)
            assert measured.idle > ideal.idle
            expected = by_cause(ideal.idle / 4, 0, (measured.idle - ideal.idle) / 4, 0)
            assert split_idle(measured, schedule, slow) == expected, name


def test_a_slow_stage_is_imbalance_and_jitter_is_rest_and_nothing_else() -> None:
    for name in SOME:
        schedule, seconds = made(name)
        ideal = simulate(schedule, seconds)
        # one stage is twice as slow as the others, and the mean stays as it was
        share = schedule.num_stages / (schedule.num_stages + 1)
        measured = simulate(schedule, lambda action: seconds(action) * share * (1 + (action.stage == 1)))  # noqa: B023
        split = split_idle(measured, schedule, {})
        assert split["schedule"] == pytest.approx(ideal.idle / 4), name
        assert split["imbalance"] > 0.1 * split["schedule"], name
        assert (split["p2p"], split["rest"]) == pytest.approx((0, 0), abs=1e-9), name
        # neighbouring microbatches trade time, so that the means of every stage and kind stay as they were
        measured = simulate(schedule, lambda action: seconds(action) * (1 + (-1) ** action.microbatch * 0.4))  # noqa: B023
        split = split_idle(measured, schedule, {})
        assert split == by_cause(ideal.idle / 4, 0, 0, (measured.idle - ideal.idle) / 4), name
        assert abs(split["rest"]) > 0.01, name


def of_names(times: Mapping[str, tuple[float, float]]) -> Timeline:
    actions = {Action.parse(name): ends for name, ends in times.items()}
    ran = (Ran(rank=one.stage, action=one, start=start, stop=stop) for one, (start, stop) in actions.items())
    return Timeline(ranks=2, ran=tuple(ran))


def test_a_gap_is_cut_in_the_order_of_causes() -> None:
    """Two ranks, one microbatch: rank 1 waits 1 s for the schedule, 0.5 s for a link, 0.25 s for the host."""
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0\n")
    measured = of_names({"0F0": (0.0, 1.0), "1F0": (1.75, 2.75), "1B0": (2.75, 4.75), "0B0": (5.25, 7.25)})
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
    assert split_idle(measured, schedule, lambda source, target: 0.5) == by_cause(3.0, 0.0, 1.0, 0.25)


TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
RAN = {
    "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 5), "0B1": (7, 8),
    "1F0": (1.5, 2.5), "1B0": (2.5, 3.5), "1F1": (3.5, 4.5), "1B1": (4.5, 5.5),
}  # fmt: skip


def test_latency_is_the_median_of_messages_that_were_waited_for() -> None:
    """Rank 1 waited 0.5 for 0F0 and had 0F1 long before; rank 0 waited 0.5 for 1B0 and 1.5 for 1B1."""
    schedule, slower = schedule_from_csv(TWO), of_names(RAN | {"0B1": (9, 10)})
    assert link_latency([of_names(RAN)], schedule) == {(0, 1): 0.5, (1, 0): 1.0}
    found = link_latency([of_names(RAN), slower, slower], schedule)
    assert found == {(0, 1): 0.5, (1, 0): (0.5 + 1.5) / 2}  # 0.5 0.5 0.5 1.5 3.5 3.5
    # clocks that disagree make none negative
    early = {name: (start - 5 * (name[0] == "1"), stop - 5 * (name[0] == "1")) for name, (start, stop) in RAN.items()}
    assert link_latency([of_names(early)], schedule)[0, 1] == 0.0
    # where nobody waited, it is the least delay seen
    busy_before = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    times = RAN | {"1F0": (3, 5), "1F1": (5, 6), "1B0": (6, 7), "1B1": (7, 8), "0B0": (7.25, 9), "0B1": (9, 10)}
    assert link_latency([of_names(times)], busy_before) == {(0, 1): 2.0, (1, 0): 0.25}
    always_late = times | {"0F1": (1, 8.5), "0B0": (8.5, 9)}
    assert link_latency([of_names(always_late)], busy_before)[1, 0] == 1.0


def test_a_step_is_not_explained_by_another_order() -> None:
    schedule, seconds = made("1f1b")
    measured = simulate(schedule, seconds)
    for name, ranks, microbatches, told in (
        ("1f1b", 2, 8, "ranks of the timeline(4) != ranks of 1f1b(2)"),
        ("1f1b", 4, 9, "rank 0 ran actions(16) != actions(18) of 1f1b"),
        ("gpipe", 4, 8, "rank 0 ran 0B0 at step 4, where gpipe has 0F4"),
    ):
        wrong = make_schedule(name, ranks=ranks, microbatches=microbatches)
        assert refusal(split_idle, measured, wrong, {}) == refusal(link_latency, [measured], wrong) == told


def lines(layers: int = 8, latency: float = 0.0) -> dict[str, Simulated]:
    schedule = make_schedule("gpipe", ranks=4, microbatches=8)
    found = compare(
        schedule, Shares(f=1.0, i=1.0, w=1.0), layers=layers, layer_bytes=100.0, latency=latency, outside=0.5
    )
    return {line.schedule: line for line in found}


def test_compare_lists_every_schedule_fastest_first() -> None:
    told, slower = lines(), lines(latency=0.1)
    assert set(told) == set(NAMES)
    seconds = {name: line.step_seconds or 0.0 for name, line in told.items()}
    assert list(seconds.values()) == sorted(seconds.values())
    assert all((slower[name].step_seconds or 0.0) > seconds[name] for name in NAMES)
    line = told["1f1b"]  # the simulated pipeline and the time around it
    assert line.step_seconds == pytest.approx(run("1f1b", 4, 8, 1, *EQUAL).makespan + 0.5)
    assert line.bubble_fraction == pytest.approx(3 / 11)
    assert (line.in_flight, line.activation_bytes) == (4.0, 4 * 2 * 100.0)
    line = told["interleaved"]  # a chunk takes its part of the time and holds its part of the layers
    assert (line.chunks, line.in_flight, line.activation_bytes) == (2, 5.5, 5.5 * 2 * 100.0)
    told = lines(layers=4)
    refused = [name for name, line in told.items() if line.why_not]
    assert refused == ["interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"] == list(told)[-5:]


def test_closed_form_is_none_where_no_formula_holds() -> None:
    for name, microbatches, times in (
        ("zb_h1", 3, EQUAL),
        ("zb_v", 6, EQUAL),
        ("custom", 8, EQUAL),
        ("zb_v", 8, (1.0, 1.5, 0.5)),
        ("dualpipe_v", 8, (1.0, 1.5, 0.5)),
    ):
        f, i, w = times
        form = closed_form(name, ranks=4, microbatches=microbatches, chunks=0, f=f, i=i, w=w)
        assert form.makespan_bubble_seconds is None, name
        assert form.note.startswith("no closed form"), name


def test_shares_are_means_over_all_stages_times_the_chunks() -> None:
    times = {"F": 1.0, "I": 2.0, "W": 3.0, "B": 5.0}
    schedule = make_schedule("interleaved_zb", ranks=2, microbatches=4, chunks=2)
    timeline = simulate(schedule, lambda action: times[action.kind] * (1 + action.stage % 2))
    assert shares_of((timeline, timeline), 2) == Shares(f=3.0, i=6.0, w=9.0)
    # a whole backward is taken for two halves, and says so
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=2), lambda a: 4.0 if a.kind == "B" else 1.5)
    assert shares_of((timeline,), 1) == Shares(f=1.5, i=2.0, w=2.0, assumed_halves=True)
