"""The simulator is the closed form wherever one holds; a step's idle time is the sum of causes put in on purpose."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch_orders

from bench.errors import UserError
from workloads.pipeline.actions import Action, message, needs, result
from workloads.pipeline.bubbles import (
    IdleSplit,
    bubble_fraction,
    bubble_fraction_span,
    bubble_overhead,
    closed_form,
    fraction_of,
    link_latency,
    predicted,
    shade,
    split_idle,
)
from workloads.pipeline.schedules import NAMES, Schedule, make_schedule, schedule_from_csv
from workloads.pipeline.simulate import Ran, Timeline, simulate

EQUAL = (1.0, 1.0, 1.0)
TRIPLES = (EQUAL, (1.0, 1.4, 0.6), (2.0, 1.0, 0.5), (1.0, 0.7, 1.9), (0.5, 3.0, 2.0), (0.3, 0.3, 4.0))
# chunks to ask of each schedule, and the microbatches from which a form holds, in ranks
FORMS: Mapping[str, tuple[tuple[int, ...], Callable[[int], int]]] = {
    "naive": ((1,), lambda ranks: 1),
    "gpipe": ((1,), lambda ranks: 1),
    "1f1b": ((1,), lambda ranks: 1),
    "interleaved": ((2, 4), lambda ranks: 1),
    "looped_bfs": ((2, 3), lambda ranks: 1),
    "zb_h1": ((1,), lambda ranks: ranks),
    "interleaved_zb": ((1, 2, 4), lambda ranks: ranks),
    "zb_h2": ((1,), lambda ranks: 2 * ranks - 1),
    "zb_v": ((2,), lambda ranks: 2 * ranks - 1),
    "dualpipe_v": ((2,), lambda ranks: 2 * ranks),
}


def timed(chunks: int, f: float, i: float, w: float) -> Callable[[Action], float]:
    seconds: dict[str, float] = {"F": f / chunks, "I": i / chunks, "W": w / chunks, "B": (i + w) / chunks}
    return lambda action: seconds[action.kind]


def run(name: str, ranks: int, microbatches: int, chunks: int, f: float, i: float, w: float) -> Timeline:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(schedule, timed(schedule.chunks, f, i, w))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_simulator_is_the_closed_form_wherever_one_holds(name: str, ranks: int) -> None:
    chunk_counts, least = FORMS[name]
    compared = 0
    for microbatches in (1, 2, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks, 5 * ranks):
        for chunks in chunk_counts:
            for f, i, w in TRIPLES:
                form = closed_form(name, ranks=ranks, microbatches=microbatches, chunks=chunks, f=f, i=i, w=w)
                if form.makespan_bubble_seconds is None:
                    assert microbatches < least(ranks) or name in ("zb_v", "dualpipe_v")
                    continue
                try:
                    timeline = run(name, ranks, microbatches, chunks, f, i, w)
                except UserError:
                    continue  # a number of microbatches that this schedule does not take
                work = microbatches * (f + i + w)
                spans = [timeline.span(rank) - timeline.busy(rank) for rank in range(ranks)]
                assert timeline.makespan == pytest.approx(work + form.makespan_bubble_seconds, rel=1e-9)
                assert max(spans) == pytest.approx(form.span_bubble_seconds, rel=1e-9, abs=1e-9 * work)
                compared += 1
    assert compared >= (3 if name in ("zb_v", "dualpipe_v") else 3 * len(TRIPLES))


@pytest.mark.parametrize(
    ("name", "chunks", "fraction"),
    [
        ("gpipe", 1, 0.2727),
        ("1f1b", 1, 0.2727),
        ("interleaved", 2, 0.1579),
        ("interleaved", 4, 0.0857),
        ("zb_h1", 1, 0.1111),
        ("interleaved_zb", 2, 0.0588),
        ("zb_v", 2, 0.0588),
        ("naive", 1, 0.75),
    ],
)
def test_reference_ratios_of_four_ranks_and_eight_microbatches(name: str, chunks: int, fraction: float) -> None:
    timeline = run(name, 4, 8, chunks, *EQUAL)
    assert bubble_fraction(timeline) == pytest.approx(fraction, abs=5e-5)
    form = closed_form(name, ranks=4, microbatches=8, chunks=chunks, f=1, i=1, w=1)
    assert form.makespan_bubble_seconds is not None
    assert fraction_of(form.makespan_bubble_seconds, 8, 1, 1, 1) == pytest.approx(bubble_fraction(timeline), rel=1e-9)


def test_1f1bs_two_conventions() -> None:
    timeline = run("1f1b", 4, 8, 1, *EQUAL)
    assert bubble_overhead(timeline) == pytest.approx(3 / 8)
    assert bubble_fraction(timeline) == pytest.approx(3 / 11)
    assert bubble_fraction_span(timeline) == pytest.approx(3 / 11)  # rank 0 starts first and ends last


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_zero_bubble_is_zero_in_a_ranks_span_and_not_in_the_makespan(name: str) -> None:
    timeline = run(name, 4, 8, 0, *EQUAL)
    assert bubble_fraction_span(timeline) == pytest.approx(0, abs=1e-12)
    assert bubble_fraction(timeline) > 0.05


def test_zb_v_at_unequal_times_is_not_zero_and_has_no_form() -> None:
    form = closed_form("zb_v", ranks=4, microbatches=8, chunks=2, f=1, i=1.5, w=0.5)
    assert (form.makespan_bubble_seconds, form.span_bubble_seconds) == (None, None)
    assert form.note == "no closed form unless F = I = W"
    assert bubble_fraction_span(run("zb_v", 4, 8, 2, 1, 1.5, 0.5)) > 0.05


def test_zb_h2_is_never_worse_than_zb_h1() -> None:
    for f, i, w in TRIPLES:
        assert run("zb_h2", 4, 8, 1, f, i, w).makespan <= run("zb_h1", 4, 8, 1, f, i, w).makespan + 1e-9


def run_as_one(pairs: torch_orders.Pairs, seconds: Callable[[Action], float], num_stages: int) -> tuple[float, float]:
    """Run torch's order as its class does: both halves of a pair start when both can, and are sent when both end.

    Returns the makespan and the busy time of one rank.
    """
    free, at = [0.0] * len(pairs), [0] * len(pairs)
    came: dict[object, float] = {}
    while any(at[rank] < len(row) for rank, row in enumerate(pairs)):
        for rank, row in enumerate(pairs):
            together = row[at[rank]] if at[rank] < len(row) else ()
            needed = [need for action in together for need in needs(action, num_stages)]
            if together and all(need in came for need in needed):
                free[rank] = max([free[rank], *(came[need] for need in needed)]) + sum(map(seconds, together))
                came.update(dict.fromkeys(map(result, together), free[rank]))
                at[rank] += 1
    return max(free), sum(seconds(action) for step in pairs[0] for action in step)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_dualpipe_v_is_half_the_published_bubble_once_pairs_are_sent_as_they_end(ranks: int, microbatches: int) -> None:
    """The literature's (P-1)(F&B+B-3W) of chunks is that of pairs that start and end as one, as torch's class runs."""
    seconds = timed(2, *EQUAL)
    makespan, busy = run_as_one(torch_orders.pairs("dualpipe_v", ranks, microbatches, 2), seconds, 2 * ranks)
    timeline = run("dualpipe_v", ranks, microbatches, 2, *EQUAL)
    assert makespan - busy == pytest.approx(ranks - 1)
    assert timeline.makespan - busy == pytest.approx((ranks - 1) / 2)
    if ranks == 4:
        assert 1 - busy / makespan == pytest.approx(0.1111, abs=5e-5)
        assert bubble_fraction(timeline) == pytest.approx(0.0588, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "microbatches", "chunks", "note"),
    [
        ("naive", 8, 1, "M(P-1)(F+B)"),
        ("1f1b", 8, 1, "(P-1)(F+B)"),
        ("interleaved", 8, 2, "(P-1)(F+B)/v"),
        ("interleaved", 3, 2, "(P-1 + (v-1)(P-M))(F+B)/v"),
        ("zb_h1", 8, 1, "(P-1)max(F, I, F+I-W); in a rank's span without F"),
        ("interleaved_zb", 8, 2, "(P-1)max(F, I, F+I-W)/v; in a rank's span without F"),
        ("zb_h1", 3, 1, "no closed form at microbatches(3) < ranks(4), which do not fill the pipeline"),
        ("zb_h2", 6, 1, "no closed form at microbatches(6) < 2 ranks - 1(7): they do not fill it"),
        ("zb_v", 6, 2, "no closed form at microbatches(6) < 2 ranks - 1(7): they do not fill it"),
        ("custom", 8, 1, "no closed form of custom"),
    ],
)
def test_a_form_says_which_it_is_or_why_there_is_none(name: str, microbatches: int, chunks: int, note: str) -> None:
    form = closed_form(name, ranks=4, microbatches=microbatches, chunks=chunks, f=1, i=1, w=1)
    assert form.note == note
    assert (form.makespan_bubble_seconds is None) == note.startswith("no closed form")


def test_no_chunks_asked_are_the_schedules_own() -> None:
    asked = [closed_form("interleaved", ranks=4, microbatches=8, chunks=v, f=1, i=1, w=1) for v in (0, 2)]
    assert asked[0] == asked[1]


def test_a_timeline_of_nothing_has_no_bubble() -> None:
    empty = Timeline(ran=(), ranks=2)
    assert (bubble_fraction(empty), bubble_overhead(empty), bubble_fraction_span(empty)) == (0, 0, 0)


BASE = (1.0, 1.2, 0.8)


def no_latency(source: int, target: int) -> float:
    return 0.0


def made(name: str) -> tuple[Schedule, Callable[[Action], float]]:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    return schedule, timed(schedule.chunks, *BASE)


def parts(split: IdleSplit) -> tuple[float, float, float, float]:
    return split.schedule, split.imbalance, split.p2p, split.rest


def jittered(schedule: Schedule, seconds: Callable[[Action], float], seed: int) -> Timeline:
    """As if measured: jitter on every action, latency on every link, a clock that does not begin at 0."""
    draw = random.Random(seed).uniform
    links = {(one, other): draw(0.0, 0.3) for one in range(4) for other in range(4)}
    timeline = simulate(schedule, lambda action: seconds(action) * draw(0.7, 1.5), links)
    return Timeline(
        ranks=4, ran=tuple(replace(ran, start=ran.start + 12.5, stop=ran.stop + 12.5) for ran in timeline.ran)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_causes_sum_to_the_measured_idle_time(name: str, seed: int) -> None:
    schedule, seconds = made(name)
    measured = jittered(schedule, seconds, seed)
    split = split_idle(measured, schedule, link_latency([measured], schedule))
    assert split.idle == pytest.approx(measured.idle / 4, rel=1e-12)
    assert sum(parts(split)) == split.idle


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_run_is_all_schedule(name: str) -> None:
    schedule, seconds = made(name)
    measured = simulate(schedule, seconds)
    split = split_idle(measured, schedule, no_latency)
    assert parts(split) == pytest.approx((measured.idle / 4, 0, 0, 0), abs=1e-9)
    assert {each.cause for each in shade(measured, schedule, no_latency) if each.stop - each.start > 1e-9} == {
        "schedule"
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_a_slow_link_is_p2p_and_nothing_else(name: str) -> None:
    schedule, seconds = made(name)
    slow = {(1, 2): 0.7}
    ideal, measured = simulate(schedule, seconds), simulate(schedule, seconds, slow)
    split = split_idle(measured, schedule, slow)
    assert measured.idle > ideal.idle
    expected = (ideal.idle / 4, 0, (measured.idle - ideal.idle) / 4, 0)
    assert parts(split) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_a_slow_stage_is_imbalance_and_nothing_else(name: str) -> None:
    """One stage is twice as slow as the others, and the mean stays as it was."""
    schedule, seconds = made(name)
    share = schedule.num_stages / (schedule.num_stages + 1)
    ideal = simulate(schedule, seconds)
    measured = simulate(schedule, lambda action: seconds(action) * share * (1 + (action.stage == 1)))
    split = split_idle(measured, schedule, no_latency)
    assert split.schedule == pytest.approx(ideal.idle / 4)
    assert split.imbalance > 0.1 * split.schedule
    assert (split.p2p, split.rest) == pytest.approx((0, 0), abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_jitter_is_rest_and_nothing_else(name: str) -> None:
    """Neighbouring microbatches trade time, so that the means of every stage and kind stay as they were."""
    schedule, seconds = made(name)
    ideal = simulate(schedule, seconds)
    measured = simulate(schedule, lambda action: seconds(action) * (1 + (-1) ** action.microbatch * 0.4))
    split = split_idle(measured, schedule, no_latency)
    assert split.schedule == pytest.approx(ideal.idle / 4)
    assert (split.imbalance, split.p2p) == pytest.approx((0, 0), abs=1e-9)
    assert split.rest == pytest.approx((measured.idle - ideal.idle) / 4)
    assert abs(split.rest) > 0.01


def test_a_late_rank_is_rest() -> None:
    """The host holds one action back: no mean of actions or links explains it."""
    schedule, seconds = made("1f1b")
    ideal = simulate(schedule, seconds)
    late = Action(3, "F", 5)
    measured = simulate(schedule, lambda action: seconds(action) + (0.9 if action == late else 0.0))
    shorter = tuple(replace(ran, start=ran.start + 0.9) if ran.action == late else ran for ran in measured.ran)
    split = split_idle(Timeline(ran=shorter, ranks=4), schedule, no_latency)
    assert parts(split) == pytest.approx((ideal.idle / 4, 0, 0, 0.9), abs=1e-9)
    rest = [each for each in shade(Timeline(ran=shorter, ranks=4), schedule, no_latency) if each.cause == "rest"]
    held_back = [each for each in rest if each.rank == 3 and each.stop - each.start > 0.5]
    assert sum(each.stop - each.start for each in held_back) == pytest.approx(0.9)
    assert held_back[0].stop == next(ran.start for ran in shorter if ran.action == late)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_shades_fill_every_gap_exactly(name: str, seed: int) -> None:
    schedule, seconds = made(name)
    measured = jittered(schedule, seconds, seed)
    shades = shade(measured, schedule, link_latency([measured], schedule))
    end = measured.first_start + measured.makespan
    for rank in range(4):
        spans = [(ran.start, ran.stop) for ran in measured.of(rank) if ran.stop > ran.start]
        spans += [(each.start, each.stop) for each in shades if each.rank == rank]
        tiled = sorted(spans)
        assert tiled[0][0] == measured.first_start
        assert tiled[-1][1] == end
        assert all(one[1] == other[0] for one, other in pairwise(tiled))
    assert sum(each.stop - each.start for each in shades) == pytest.approx(measured.idle)


def test_a_gap_is_cut_in_the_order_of_causes() -> None:
    """Two ranks, one microbatch: rank 1 waits 1 s for the schedule, 0.5 s for a link, 0.25 s for the host."""
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0\n")
    times = {"0F0": (0.0, 1.0), "1F0": (1.75, 2.75), "1B0": (2.75, 4.75), "0B0": (5.25, 7.25)}
    measured = Timeline(
        ranks=2,
        ran=tuple(
            Ran(rank=int(name[0]), action=Action.parse(name), start=start, stop=stop)
            for name, (start, stop) in times.items()
        ),
    )
    shades = shade(measured, schedule, lambda source, target: 0.5)
    assert [(each.rank, each.start, each.stop, each.cause) for each in shades] == [
        (0, 1.0, 4.0, "schedule"),
        (0, 4.0, 5.0, "p2p"),
        (0, 5.0, 5.25, "rest"),
        (1, 0.0, 1.0, "schedule"),
        (1, 1.0, 1.5, "p2p"),
        (1, 1.5, 1.75, "rest"),
        (1, 4.75, 6.75, "schedule"),
        (1, 6.75, 7.25, "p2p"),
    ]
    split = split_idle(measured, schedule, lambda source, target: 0.5)
    assert parts(split) == pytest.approx((3.0, 0.0, 1.0, 0.25))


def test_a_shorter_gap_than_expected_is_schedule_alone() -> None:
    schedule, seconds = made("1f1b")
    measured = simulate(schedule, seconds)
    shades = shade(measured, schedule, lambda source, target: 5.0)
    assert {each.cause for each in shades if each.stop - each.start > 1e-9} == {"schedule"}


def test_latency_of_every_link_is_found_again() -> None:
    """Also where one link's messages always come before they are needed: then it is what they waited at least."""
    schedule, seconds = made("1f1b")
    links = {(0, 1): 0.1, (1, 2): 0.2, (2, 3): 0.3, (1, 0): 0.4, (2, 1): 0.5, (3, 2): 0.6}
    found = link_latency([simulate(schedule, seconds, links)], schedule)
    assert found == pytest.approx(links)


@pytest.mark.parametrize("name", NAMES)
def test_links_are_those_between_neighbouring_stages_on_two_ranks(name: str) -> None:
    schedule, seconds = made(name)
    expected = set()
    for rank in range(4):
        for action in schedule.actions_of(rank):
            received = message(action, schedule.num_stages)
            if received is not None and schedule.rank_of(received[0]) != rank:
                expected.add((schedule.rank_of(received[0]), rank))
    assert link_latency([simulate(schedule, seconds)], schedule).keys() == expected


def small(times: Mapping[str, tuple[float, float]]) -> Timeline:
    return Timeline(
        ranks=2,
        ran=tuple(
            Ran(rank=int(name[0]), action=Action.parse(name), start=start, stop=stop)
            for name, (start, stop) in times.items()
        ),
    )


TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
RAN = {
    "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 5), "0B1": (7, 8),
    "1F0": (1.5, 2.5), "1B0": (2.5, 3.5), "1F1": (3.5, 4.5), "1B1": (4.5, 5.5),
}  # fmt: skip


def test_latency_is_the_median_of_messages_that_were_waited_for() -> None:
    """Rank 1 waited 0.5 for 0F0 and had 0F1 long before; rank 0 waited 0.5 for 1B0 and 1.5 for 1B1."""
    assert link_latency([small(RAN)], schedule_from_csv(TWO)) == {(0, 1): 0.5, (1, 0): 1.0}


def test_latencies_of_several_steps_are_one_sample() -> None:
    slower = small(RAN | {"0B1": (9, 10)})
    found = link_latency([small(RAN), slower, slower], schedule_from_csv(TWO))
    assert found == {(0, 1): 0.5, (1, 0): (0.5 + 1.5) / 2}  # 0.5 0.5 0.5 1.5 3.5 3.5


def test_where_nobody_waited_latency_is_the_least_delay_seen() -> None:
    busy_before = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    times = RAN | {"0F0": (0, 1), "1F0": (3, 5), "1F1": (5, 6), "1B0": (6, 7), "1B1": (7, 8), "0F1": (1, 2),
                   "0B0": (7.25, 9), "0B1": (9, 10)}  # fmt: skip
    assert link_latency([small(times)], busy_before) == {(0, 1): 2.0, (1, 0): 0.25}
    always_late = times | {"0F1": (1, 8.5), "0B0": (8.5, 9), "0B1": (9, 10), "1F1": (5, 6)}
    assert link_latency([small(always_late)], busy_before)[1, 0] == 1.0


def test_clocks_that_disagree_make_no_negative_latency() -> None:
    early = {name: (start - 5 * (name[0] == "1"), stop - 5 * (name[0] == "1")) for name, (start, stop) in RAN.items()}
    assert link_latency([small(early)], schedule_from_csv(TWO))[0, 1] == 0.0


def test_the_prediction_is_the_schedule_with_measured_means_from_0() -> None:
    schedule, seconds = made("zb_h1")
    measured = jittered(schedule, seconds, 3)
    model = predicted(measured, schedule)
    assert model.first_start == 0
    for kind in ("F", "I", "W"):
        lengths = [ran.stop - ran.start for ran in measured.ran if ran.action.kind == kind]
        mean = sum(lengths) / len(lengths)
        assert all(ran.stop - ran.start == pytest.approx(mean) for ran in model.ran if ran.action.kind == kind)
    assert [ran.action for ran in model.of(2)] == list(schedule.actions_of(2))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("1f1b", 2, 8), r"^ranks of the timeline\(4\) != ranks of 1f1b\(2\)$"),
        (("1f1b", 4, 9), r"^rank 0 ran actions\(16\) != actions\(18\) of 1f1b$"),
        (("gpipe", 4, 8), r"^rank 0 ran 0B0 at step 4, where gpipe has 0F4$"),
    ],
)
def test_a_step_is_not_explained_by_another_order(other: tuple[str, int, int], told: str) -> None:
    schedule, seconds = made("1f1b")
    measured = simulate(schedule, seconds)
    name, ranks, microbatches = other
    wrong = make_schedule(name, ranks=ranks, microbatches=microbatches)
    with pytest.raises(UserError, match=told):
        split_idle(measured, wrong, no_latency)
    with pytest.raises(UserError, match=told):
        link_latency([measured], wrong)
