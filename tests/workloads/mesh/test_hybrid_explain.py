"""A step on a mesh tells bytes, exposed time and memory by axis, and the bubble where cores are each rank's own."""

import pytest
from mesh_steps import EXPERTS, Params, small_hybrid
from ranks import Ranks

from bench.world.subject import Explanation
from bench.world.world import World
from workloads.pipeline_parallel import pipeline_probe as pp_explain
from workloads.step.sent_bytes import SentBytes


def test_bytes_are_those_of_the_rank_that_sends_most_and_the_ratio_of_the_one_that_differs_most() -> None:
    found = SentBytes.summarise(
        [
            ({"pp": 4.0, "tp": 8.0, "other": 5.0, "ep": 4.0}, {"pp": 4.0, "tp": 8.0, "ep": 0.0}),
            ({"pp": 8.0, "tp": 3.0, "dp": 2.0}, {"pp": 8.0, "tp": 4.0, "dp": 2.0}),
        ]
    )
    # bytes that no form expects are not right
    table = {"pp": (8.0, 8.0, 1.0), "tp": (8.0, 8.0, 0.75), "dp": (2.0, 2.0, 1.0), "ep": (4.0, 0.0, 0.0)}
    names = ("bytes_sent", "bytes_expected", "bytes_ratio")
    expected = {f"{name}.{axis}": value for axis, row in table.items() for name, value in zip(names, row, strict=True)}
    assert {name: metric.value for name, metric in found.metrics.items()} == {**expected, "bytes_sent.other": 5.0}


def explained(world: World, params: Params, shared: bool = False) -> Explanation:
    """Return what a step tells where every rank has a core of its own, or ``shared`` ones."""
    step = small_hybrid(world, params)
    step.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pp_explain, "cores_shared", lambda world: shared)
        found = step.explain(step.reset, 0.0)
    step.close()
    return found


def assert_told(found: Explanation, axes: set[str]) -> None:
    for axis in axes:
        assert found.metrics[f"bytes_ratio.{axis}"].value == pytest.approx(1.0, rel=1e-12), axis
        exposed = found.metrics[f"exposed_comm.{axis}"].value
        assert exposed is not None
        assert exposed >= 0
    assert {name.removeprefix("bytes_sent.") for name in found.metrics if name.startswith("bytes_sent.")} == axes
    assert {"ect", "residual"} <= found.metrics.keys()
    for source in ("memory", "memory_counted", "memory_formula"):
        assert (found.metrics[f"{source}.parameters"].value or 0) > 0


def test_each_axis_is_told_of(two_ranks: Ranks) -> None:
    [found, _] = two_ranks.call("test_hybrid_explain:explained", params={"mesh": "fsdp=2,ep=2", **EXPERTS})
    assert_told(found, {"fsdp", "ep"})
    assert found.metrics["imbalance.rank"].value >= 1
    assert len(found.details["bytes_sent_by_rank"]) == 2
    assert "bubble_fraction" not in found.metrics


def test_a_pipeline_tells_its_bubble_where_cores_are_each_rank_s_own(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    [found, _] = two_ranks.call("test_hybrid_explain:explained", params=params)
    assert_told(found, {"pp"})
    assert 0 < found.metrics["bubble_fraction"].value < 1
    assert found.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5)
    assert not any("functional only" in note for note in found.notes)
    assert any("slowest pipeline's own" in note for note in found.notes)
    facts = found.details["pipeline"]
    assert (facts["schedule"], facts["ranks"], facts["stages_by_rank"]) == ("1f1b", 2, [[0], [1]])
    assert [len(actions) for actions in facts["measured"]] == [8, 8]
    # what the traced wall is made of is not overwritten by what a pipeline's own clock says
    for name in ("compute", "idle"):
        assert "traced step" in found.metrics[name].method
    # and none is claimed of real compute on shared cores
    [found, _] = two_ranks.call("test_hybrid_explain:explained", params=params, shared=True)
    assert "bubble_fraction" not in found.metrics
    assert any("functional only" in note for note in found.notes)
    assert "measured" not in found.details["pipeline"]


@pytest.mark.full
@pytest.mark.measures
def test_pipelines_beside_one_another_tell_the_slowest_s_bubble(four_ranks: Ranks) -> None:
    for mesh, axes in (("pp=2,tp=2", {"pp", "tp"}), ("dp=2,pp=2", {"pp", "dp"})):
        params = {"mesh": mesh, "microbatches": 4, "compute": "timed:40ms"}
        [found, *_] = four_ranks.call("test_hybrid_explain:explained", params=params, shared=True)
        assert_told(found, axes)
        assert abs(found.metrics["residual"].value or 0.0) < 0.5
        assert found.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5)
        assert 0 < found.metrics["bubble_fraction"].value < 1
    assert found.metrics["bubble_fraction"].value == pytest.approx(1 / 5, rel=0.35)
