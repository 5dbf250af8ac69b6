"""A step on a mesh matches one process, sends the analytical bytes, and reports each axis."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.results.details import STATE_COMPONENTS
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.expert_parallel.moe_layer import mixtures
from parbench.workloads.mesh.mesh_step import HybridStep, MeshBytes, MeshMemory
from parbench.workloads.pipeline_parallel import pipeline_probe
from parbench.workloads.step.layout import local
from parbench.workloads.step.sent_bytes import counted
from tests.support.ep_steps import BFLOAT16, misroute_token
from tests.support.mesh_steps import EXPERT_PARAMS, Params, build_small_hybrid
from tests.support.ranks import Ranks
from tests.support.training_steps import count_wrong_after_step, metric_value

LLAMA: Params = {"recipe": "llama"}
ODD: Params = {"vocabulary": 65}  # FSDP pads the embedding and the head
ZB_V: Params = {"schedule": "zb_v", "layers": 4}
INTERLEAVED: Params = {"schedule": "interleaved", "layers": 4}
UNEVEN_STAGES: Params = {"schedule": "gpipe", "split": "1+2", "layers": 3}
ZIPF: Params = {**EXPERT_PARAMS, "routing": "zipf"}


def measure_step(
    world: World, params: Params
) -> tuple[list[int], dict[str, tuple[float, float]]]:
    """Return wrong elements of two batches, and sent and expected bytes by axis."""
    step = build_small_hybrid(world, params)
    wrong = [count_wrong_after_step(step) for _ in range(2)]
    probe = MeshBytes(step.look(), step.expected_bytes())
    records = world.gather(probe.observe(step.step, step.reset))
    tally, expected = probe.sent_and_expected(records)[world.rank]
    step.close()
    sent = tally.by_axis
    return wrong, {axis: (sent[axis], expected[axis]) for axis in {**sent, **expected}}


def assert_right(ranks: Ranks, mesh: str, axes: str, overrides: Params) -> None:
    """Two steps are right, and exactly the given axes send the analytical bytes."""
    params = {"mesh": mesh, **overrides}
    for wrong, by_axis in ranks.call(f"{__name__}:measure_step", params=params):
        assert wrong == [0, 0]
        assert by_axis.keys() == set(axes.split())
        for axis, (sent, expected) in by_axis.items():
            assert sent == pytest.approx(expected, rel=1e-12), axis
            assert sent > 0, axis


@pytest.mark.parametrize(
    ("mesh", "axes", "params"),
    [
        ("dp=2", "dp", {}),
        ("fsdp=2", "fsdp", ODD),
        ("pp=2", "pp", ZB_V),
        ("dp=1,tp=2", "tp", {**LLAMA, **BFLOAT16}),
        ("cp=2", "cp dp", {}),
        ("dp=2,ep=2", "dp ep", EXPERT_PARAMS),
        ("fsdp=2", "fsdp edp", EXPERT_PARAMS),
        ("tp=2,etp=2", "tp etp", EXPERT_PARAMS),
    ],
)
def test_single_axis_matches_one_process(
    two_ranks: Ranks, mesh: str, axes: str, params: Params
) -> None:
    assert_right(two_ranks, mesh, axes, params)


def test_sharded_pipeline_matches_one_process(four_ranks: Ranks) -> None:
    assert_right(four_ranks, "fsdp=2,pp=2", "fsdp pp", ODD)


def test_split_sequence_matches_one_process(four_ranks: Ranks) -> None:
    assert_right(four_ranks, "cp=2,tp=2", "cp tp dp", {"cp_method": "zigzag"})


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "axes", "params"),
    [
        ("dp=2,tp=2", "dp tp", {}),
        ("dp=2,fsdp=2", "dp fsdp", ODD),
        ("fsdp=2,cp=2", "fsdp cp dp", {}),
        ("fsdp=2,tp=2", "fsdp tp", ODD),
        ("cp=2,pp=2", "pp cp dp", {"schedule": "zb_h1"}),
        ("pp=2,tp=2", "pp tp", ZB_V),
        ("pp=2,fsdp=2", "pp fsdp", INTERLEAVED),
        ("pp=2,dp=2", "pp dp", UNEVEN_STAGES),
    ],
)
def test_two_axes_match_one_process(
    four_ranks: Ranks, mesh: str, axes: str, params: Params
) -> None:
    assert_right(four_ranks, mesh, axes, params)


@pytest.mark.full
@pytest.mark.parametrize("method", ["ulysses", "striped", "allgather_kv"])
def test_context_method_matches_one_process(four_ranks: Ranks, method: str) -> None:
    assert_right(four_ranks, "cp=2,tp=2", "cp tp dp", {"cp_method": method, **LLAMA})


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "axes", "params"),
    [
        ("dp=4,ep=2", "dp ep edp", EXPERT_PARAMS),
        ("fsdp=4,ep=4", "fsdp ep", EXPERT_PARAMS),
        ("dp=2,pp=2,ep=2", "dp pp ep", EXPERT_PARAMS),
        ("fsdp=2,cp=2,ep=4", "fsdp cp dp ep", EXPERT_PARAMS),
        ("dp=2,tp=2,ep=2", "dp tp ep edp", ZIPF),
        ("tp=2,fsdp=2,etp=2,ep=2", "fsdp tp ep etp", {**ZIPF, **LLAMA}),
        ("pp=2,tp=2,etp=2", "pp tp etp", EXPERT_PARAMS),
    ],
)
def test_experts_on_mesh_match_one_process(
    four_ranks: Ranks, mesh: str, axes: str, params: Params
) -> None:
    assert_right(four_ranks, mesh, axes, params)


def count_wrong_fills(world: World, params: Params) -> tuple[int, int]:
    """Return wrong timed gradients with sums over ranks, and without."""
    step = build_small_hybrid(world, {"compute": "timed:1ms", **params})
    right = count_wrong_after_step(step)
    step._sums = replace(step._sums, groups={})
    wrong = count_wrong_after_step(step)
    step.close()
    return right, wrong


@pytest.mark.parametrize("params", [{"mesh": "cp=2"}, {"mesh": "tp=2,etp=2", **EXPERT_PARAMS}])
def test_timed_gradients_are_summed(two_ranks: Ranks, params: Params) -> None:
    for right, wrong in two_ranks.call(f"{__name__}:count_wrong_fills", params=params):
        assert right == 0
        assert wrong > 0


def measure_without_sum(world: World, params: Params, axis: str) -> tuple[int, float, float]:
    """Return wrong elements, and sent and expected bytes, if an axis is not summed over."""
    step = build_small_hybrid(world, params)
    groups = dict(step._sums.groups)
    del groups[axis]
    step._sums = replace(step._sums, groups=groups)
    wrong = count_wrong_after_step(step)
    sent = bytes_by_axis(counted(step.step, step.layout.axes), [axis])[axis]
    step.close()
    return wrong, sent, step.expected_bytes()[axis]


@pytest.mark.parametrize(
    ("axis", "params"),
    [
        ("tp", {"mesh": "tp=2"}),
        ("dp", {"mesh": "cp=2"}),
        ("edp", {"mesh": "dp=2", "experts": 4}),
    ],
)
def test_missing_sum_is_detected(two_ranks: Ranks, axis: str, params: Params) -> None:
    arguments = {"params": params, "axis": axis}
    for wrong, sent, expected in two_ranks.call(f"{__name__}:measure_without_sum", **arguments):
        assert wrong > 0
        assert sent < expected


def shift_targets(step: HybridStep) -> None:
    step._places = step._places.roll(-1)


def change_weight(step: HybridStep) -> None:
    parameter = next(iter(step.layout.model.parameters()))
    local(parameter).data.view(-1)[0] += 0.5


def double_expert(step: HybridStep) -> None:
    mixture = mixtures(step.layout.model)[0]
    local(mixture.experts.up).data.mul_(2)


CORRUPTIONS: dict[str, Callable[[HybridStep], object]] = {
    "targets": shift_targets,
    "weight": change_weight,
    "expert": double_expert,
    "routes": lambda step: misroute_token(mixtures(step.layout.model)),
}


def count_wrong_of_corruption(world: World, params: Params, corruption: str) -> int:
    """Return wrong elements of all ranks after the last rank's corruption."""
    step = build_small_hybrid(world, params)
    if world.rank == world.size - 1:
        CORRUPTIONS[corruption](step)
    wrong = sum(world.gather(count_wrong_after_step(step)))
    step.close()
    return wrong


@pytest.mark.parametrize(
    ("params", "corruption"),
    [
        ({"mesh": "cp=2"}, "targets"),
        ({"mesh": "dp=2"}, "weight"),
        ({"mesh": "pp=2"}, "weight"),
        ({"mesh": "dp=2,ep=2", "experts": 4}, "expert"),
        ({"mesh": "dp=2,ep=2", "experts": 4}, "routes"),
    ],
)
def test_corruption_of_one_rank_is_detected(
    two_ranks: Ranks, params: Params, corruption: str
) -> None:
    arguments = {"params": params, "corruption": corruption}
    wrong, _ = two_ranks.call(f"{__name__}:count_wrong_of_corruption", **arguments)
    assert wrong > 0


def describe(world: World, params: Params) -> dict[str, Any]:
    step = build_small_hybrid(world, params)
    step.close()
    return step.describe().details


def test_description_of_mesh(two_ranks: Ranks) -> None:
    params = {"mesh": "dp=2,pp=1,ep=2", **EXPERT_PARAMS}
    details, _ = two_ranks.call(f"{__name__}:describe", params=params)
    assert details["mesh"] == {"dp": 2, "pp": 1, "ep": 2}
    assert details["axes"] == {"dp": {"ranks": 2}, "ep": {"ranks": 2}}


def explain_step(world: World, params: Params) -> Explanation:
    step = build_small_hybrid(world, params)
    step.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_probe, "has_shared_cores", lambda world: False)
        explanation = step.explain_step(step.reset, 0.0)
    step.close()
    return explanation


def assert_reports_axes(explanation: Explanation, axes: Sequence[str]) -> None:
    for axis in axes:
        assert metric_value(explanation, f"bytes_ratio.{axis}") == pytest.approx(1.0, rel=1e-12)
        assert metric_value(explanation, f"exposed_comm.{axis}") >= 0
    assert {"ect", "residual"} <= explanation.metrics.keys()
    for source in ("memory", "memory_counted", "memory_formula"):
        assert metric_value(explanation, f"{source}.parameters") > 0


@pytest.mark.full
def test_explanation_reports_each_axis(two_ranks: Ranks) -> None:
    params = {"mesh": "fsdp=2,ep=2", **EXPERT_PARAMS}
    explanation, _ = two_ranks.call(f"{__name__}:explain_step", params=params)
    assert_reports_axes(explanation, ["fsdp", "ep"])
    assert metric_value(explanation, "imbalance.rank") >= 1
    assert "bubble_fraction" not in explanation.metrics


def test_explanation_of_pipeline_has_bubble(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    explanation, _ = two_ranks.call(f"{__name__}:explain_step", params=params)
    assert_reports_axes(explanation, ["pp"])
    assert 0 < metric_value(explanation, "bubble_fraction") < 1
    assert metric_value(explanation, "bubble_fraction_formula") == pytest.approx(1 / 5)
    details = explanation.details["pipeline"]
    assert details["schedule"] == "1f1b"
    assert details["stages_by_rank"] == [[0], [1]]
    assert [len(actions) for actions in details["measured"]] == [8, 8]


def measure_memory(world: World, params: Params) -> dict[str, float | None]:
    """Return a step's memory metrics."""
    step = build_small_hybrid(world, params)
    step.step()
    probe = MeshMemory(step.look())
    explanation = probe.summarise(world.gather(probe.observe(step.step, step.reset)))
    step.close()
    assert len(explanation.details["memory_by_rank"]["parameters"]) == world.size
    return {name: metric.value for name, metric in explanation.metrics.items()}


def assert_memory_agrees(ranks: Ranks, params: Params) -> dict[str, Any]:
    """Compare the formula with counted and measured bytes; AdamW counts its steps in 4 bytes."""
    metrics: dict[str, Any] = ranks.call(f"{__name__}:measure_memory", params=params)[0]
    for name in STATE_COMPONENTS:
        expected = metrics[f"memory_formula.{name}"]
        tolerance = 200 if name == "optimizer" else 0
        assert metrics[f"memory_counted.{name}"] == pytest.approx(expected, abs=tolerance), name
        assert metrics[f"memory.{name}"] == pytest.approx(expected, rel=0.15), name
    return metrics


@pytest.mark.parametrize("axis", ["fsdp", "pp", "tp", "cp"])
def test_memory_agrees_on_axis(two_ranks: Ranks, axis: str) -> None:
    checkpointing = "selective" if axis == "cp" else "none"
    params = {"mesh": f"{axis}=2", "checkpointing": checkpointing}
    metrics = assert_memory_agrees(two_ranks, params)
    assert metrics["memory_counted.activations"] == metrics["memory_formula.activations"]


def test_memory_of_experts_agrees(two_ranks: Ranks) -> None:
    """The formula of activations assumes even routes."""
    metrics = assert_memory_agrees(two_ranks, {"mesh": "fsdp=2,ep=2", **EXPERT_PARAMS})
    formula = metrics["memory_formula.activations"]
    assert 0.95 * formula < metrics["memory_counted.activations"] < 1.2 * formula
