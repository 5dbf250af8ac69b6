"""Planned bytes and memory are those that real ranks count."""

import pytest

from tests.studies import planned_components
from tests.studies.planned_components import BALANCED_EXPERTS, POINTS, Point, make_point
from tests.support.ranks import Ranks


def assert_planned(step: Point, ranks: Ranks) -> None:
    missed = [row for row in planned_components.compare(step, ranks) if row.is_missed]
    assert missed == [], step.label


def test_dry_run_matches_counts_of_real_ranks(two_ranks: Ranks) -> None:
    assert_planned(make_point(2, "tp_sp", "tiny-llama", "selective"), two_ranks)


@pytest.mark.full
def test_dry_run_matches_counts_of_all_strategies(two_ranks: Ranks, four_ranks: Ranks) -> None:
    """The study planned_components compares the other steps, also on 8 ranks."""
    mesh = "dp=2,fsdp=2,ep=2"
    experts = make_point(4, "hybrid", "tiny", "full", mesh=mesh, **BALANCED_EXPERTS)
    assert_planned(experts, four_ranks)
    last_of_strategy = {step.name: step for step in POINTS if step.num_ranks == 2}
    for step in last_of_strategy.values():
        assert_planned(step, two_ranks)
    for step in POINTS:
        if step.num_ranks == 4 and step.checkpointing == "none":
            assert_planned(step, four_ranks)
