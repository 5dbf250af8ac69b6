"""A launch's interval under noise whose neighbours resemble each other: a part of tests/studies/launch_coverage.py."""

from launch_coverage import Noise, both


def test_a_launchs_interval_holds_the_median_where_samples_resemble_their_neighbours_and_costs_little_more() -> None:
    table = (
        (Noise(name="independent", sigma=0.1), 0.93, 1.3),
        (Noise(name="AR(1)", sigma=0.05, rho=0.9), 0.90, 1.6),
        (Noise(name="slow for long", sigma=0.05, share=0.4, dwell=100), 0.90, 8.0),
    )
    for noise, least, most in table:
        ours, theirs = both(noise, trials=60, gap=300, seed=5)
        assert ours.printed == 1.0, noise
        assert ours.covered >= least, noise
        assert ours.samples <= most * theirs.samples, noise
    assert theirs.covered < 0.3, "in one go"
