"""The schedules that could have been taken, with the times of the one that was."""

import pytest

from workloads.pipeline.bubbles import bubble_fraction
from workloads.pipeline.pp_compare import Setting, Shares, compare, mean_latency, shares_of
from workloads.pipeline.schedules import NAMES, make_schedule
from workloads.pipeline.simulate import simulate

EQUAL = Shares(f=1.0, i=1.0, w=1.0, assumed_halves=False)
SETTING = Setting(ranks=4, microbatches=8, layers=8, layer_bytes=100.0, latency_seconds=0.0, outside_seconds=0.5)


def lines(shares: Shares = EQUAL, **changed: float) -> dict[str, dict[str, object]]:
    setting = Setting(**{**SETTING.__dict__, **changed})
    return {str(line["schedule"]): line for line in compare(shares, setting)}


def test_every_schedule_has_a_line_the_fastest_first() -> None:
    told = compare(EQUAL, SETTING)
    assert {line["schedule"] for line in told} == set(NAMES)
    seconds = [float(str(line["step_seconds"])) for line in told]
    assert seconds == sorted(seconds)
    assert not any(line["measured"] for line in told)


def test_a_line_is_the_simulation_and_the_time_around_it() -> None:
    line = lines()["1f1b"]
    timeline = simulate(make_schedule("1f1b", ranks=4, microbatches=8), lambda a: 2.0 if a.kind == "B" else 1.0)
    assert line["step_seconds"] == pytest.approx(timeline.makespan + 0.5)
    assert line["bubble_fraction"] == pytest.approx(bubble_fraction(timeline)) == pytest.approx(3 / 11)
    assert (line["in_flight"], line["activation_bytes"]) == (4.0, 4 * 2 * 100.0)


def test_chunks_take_their_part_of_the_time_and_hold_their_part_of_the_layers() -> None:
    line = lines()["interleaved"]
    assert line["chunks"] == 2
    assert line["bubble_fraction"] == pytest.approx(3 / 19)
    assert line["activation_bytes"] == pytest.approx(float(str(line["in_flight"])) * 2 * 100.0)


def test_layers_without_a_closed_form_have_no_bytes_in_any_line() -> None:
    told = compare(EQUAL, Setting(**{**SETTING.__dict__, "layer_bytes": None}))
    assert len(told) == len(NAMES)
    assert {line["activation_bytes"] for line in told if "why_not" not in line} == {None}


def test_latency_makes_all_of_them_slower() -> None:
    near, far = lines(), lines(latency_seconds=0.1)
    assert all(float(str(far[name]["step_seconds"])) > float(str(near[name]["step_seconds"])) for name in NAMES)


def test_what_cannot_run_says_why_and_stands_last() -> None:
    told = compare(EQUAL, Setting(**{**SETTING.__dict__, "layers": 4}))
    refused = [line for line in told if "why_not" in line]
    assert told[-len(refused) :] == refused
    assert {line["schedule"] for line in refused} == {
        "interleaved",
        "looped_bfs",
        "interleaved_zb",
        "zb_v",
        "dualpipe_v",
    }
    assert all("layers(4) % stages(8) != 0" in str(line["why_not"]) for line in refused)
    assert all("step_seconds" not in line for line in refused)


def test_shares_are_means_over_all_stages_times_the_chunks() -> None:
    schedule = make_schedule("interleaved_zb", ranks=2, microbatches=4, chunks=2)
    times = {"F": 1.0, "I": 2.0, "W": 3.0, "B": 5.0}
    timeline = simulate(schedule, lambda action: times[action.kind] * (1 + action.stage % 2))
    shares = shares_of((timeline, timeline), 2)
    assert (shares.f, shares.i, shares.w) == pytest.approx((3.0, 6.0, 9.0))
    assert not shares.assumed_halves


def test_a_whole_backward_is_taken_for_two_halves_and_says_so() -> None:
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=2), lambda a: 4.0 if a.kind == "B" else 1.5)
    assert shares_of((timeline,), 1) == Shares(f=1.5, i=2.0, w=2.0, assumed_halves=True)


def test_the_mean_latency_is_over_links_and_none_is_none() -> None:
    assert mean_latency({(0, 1): 0.25, (1, 0): 0.75}) == 0.5
    assert mean_latency({}) == 0.0
