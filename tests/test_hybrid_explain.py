"""A step on a mesh tells bytes, exposed time and memory by axis, and the bubble where cores are each rank's own."""

from typing import Any

import pytest
from ranks import Ranks
from test_hybrid import EXPERTS, small

from bench.subject import Explanation
from bench.world import World
from workloads.hybrid.hybrid_explain import bytes_by_axis
from workloads.pipeline import pp_explain

pytestmark = pytest.mark.measures


def test_bytes_are_those_of_the_rank_that_sends_most() -> None:
    found = bytes_by_axis([({"pp": 4.0}, {"pp": 4.0}), ({"pp": 8.0, "dp": 2.0}, {"pp": 8.0, "dp": 2.0})])
    assert {name: metric.value for name, metric in found.items()} == {
        "bytes_sent.pp": 8.0,
        "bytes_expected.pp": 8.0,
        "bytes_ratio.pp": 1.0,
        "bytes_sent.dp": 2.0,
        "bytes_expected.dp": 2.0,
        "bytes_ratio.dp": 1.0,
    }


def test_the_ratio_is_of_the_rank_that_differs_most() -> None:
    found = bytes_by_axis([({"tp": 8.0}, {"tp": 8.0}), ({"tp": 3.0}, {"tp": 4.0}), ({"tp": 4.0}, {"tp": 4.0})])
    assert found["bytes_sent.tp"].value == 8.0
    assert found["bytes_ratio.tp"].value == 0.75


def test_bytes_that_no_form_expects_are_not_right() -> None:
    found = bytes_by_axis([({"other": 5.0}, {}), ({"tp": 4.0}, {"tp": 0.0})])
    assert found["bytes_sent.other"].value == 5.0
    assert "bytes_ratio.other" not in found
    assert found["bytes_ratio.tp"].value == 0.0


def explained(world: World, params: dict[str, Any], alone: bool = False) -> Explanation:
    """Return what a step tells; with ``alone`` as if every rank had a core of its own."""
    step = small(world, params)
    step.step()
    shared = pp_explain.cores_shared
    if alone:
        pp_explain.cores_shared = lambda world: False
    try:
        found = step.explain(step.reset, 0.0)
    finally:
        pp_explain.cores_shared = shared
    step.close()
    return found


def assert_told(found: Explanation, axes: set[str]) -> None:
    for axis in axes:
        assert found.metrics[f"bytes_ratio.{axis}"].value == pytest.approx(1.0, rel=1e-12), axis
        exposed = found.metrics[f"exposed_comm.{axis}"].value
        assert exposed is not None
        assert exposed >= 0
    assert {name.removeprefix("bytes_sent.") for name in found.metrics if name.startswith("bytes_sent.")} == axes
    assert abs(found.metrics["residual"].value or 0.0) < 0.5
    assert "ect" in found.metrics
    for source in ("memory", "memory_counted", "memory_formula"):
        assert (found.metrics[f"{source}.parameters"].value or 0) > 0


def test_each_axis_is_told_of(two_ranks: Ranks) -> None:
    params = {"mesh": "fsdp=2,ep=2", **EXPERTS}
    [found, _] = two_ranks.call("test_hybrid_explain:explained", params=params)
    assert_told(found, {"fsdp", "ep"})
    assert found.metrics["imbalance.rank"].value >= 1
    assert len(found.details["bytes_sent_by_rank"]) == 2
    assert "bubble_fraction" not in found.metrics


def test_a_pipeline_tells_its_bubble_where_cores_are_each_rank_s_own(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    [found, _] = two_ranks.call("test_hybrid_explain:explained", params=params, alone=True)
    assert_told(found, {"pp"})
    bubble = found.metrics["bubble_fraction"].value
    assert 0 < bubble < 1
    assert found.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5, rel=0.2)
    assert not any("functional only" in note for note in found.notes)
    assert any("slowest pipeline's own" in note for note in found.notes)
    facts = found.details["pipeline"]
    assert (facts["schedule"], facts["ranks"], facts["stages_by_rank"]) == ("1f1b", 2, [[0], [1]])
    assert [len(actions) for actions in facts["measured"]] == [8, 8]
    # what the traced wall is made of is not overwritten by what a pipeline's own clock says
    assert "traced step" in found.metrics["compute"].method
    assert "traced step" in found.metrics["idle"].method


@pytest.mark.slow
@pytest.mark.measures
def test_timed_compute_tells_its_bubble_on_shared_cores(four_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,pp=2", "microbatches": 4, "compute": "timed:40ms"}
    [found, *_] = four_ranks.call("test_hybrid_explain:explained", params=params)
    assert_told(found, {"pp", "dp"})
    assert found.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5)
    assert found.metrics["bubble_fraction"].value == pytest.approx(1 / 5, rel=0.35)


@pytest.mark.slow
def test_ranks_that_share_cores_claim_no_bubble(four_ranks: Ranks) -> None:
    [shared, *_] = four_ranks.call("test_hybrid_explain:explained", params={"mesh": "pp=2,tp=2"})
    assert_told(shared, {"pp", "tp"})
    several = {"mesh": "dp=2,pp=2"}
    [alone, *_] = four_ranks.call("test_hybrid_explain:explained", params=several, alone=True)
    assert_told(alone, {"pp", "dp"})
    assert 0 < alone.metrics["bubble_fraction"].value < 1
    import os

    if len(os.sched_getaffinity(0)) < 4:
        assert "bubble_fraction" not in shared.metrics
        assert any("functional only" in note for note in shared.notes)
