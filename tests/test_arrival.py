"""Blame falls on the rank that is last, as often as it is last, and on nobody where the clock cannot tell."""

from bench.arrival import blame


def test_the_rank_most_often_last_is_named_with_its_share() -> None:
    found = blame([1, 1, 0, 1], [0, 0, 0, 1], [1e-3] * 4, "one clock", 0.0)
    assert (found.late_rank, found.share) == (1, 0.75)
    assert (found.last_out_rank, found.last_out_share) == (0, 0.75)
    assert (found.method, found.uncertainty) == ("one clock", 0.0)


def test_skew_within_the_clocks_uncertainty_blames_nobody() -> None:
    found = blame([1, 1], [0, 0], [1e-6, 2e-6], "ping-pong", 5e-6)
    assert (found.late_rank, found.share) == (None, None)


def test_only_iterations_that_the_clock_can_tell_count_towards_the_share() -> None:
    found = blame([1, 1, 0, 0], [0] * 4, [1e-3, 1e-3, 1e-6, 1e-6], "ping-pong", 5e-6)
    assert (found.late_rank, found.share) == (1, 0.5)
