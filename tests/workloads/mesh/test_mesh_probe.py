"""A step on a mesh reports bytes, exposed time and memory by axis, and a pipeline's bubble."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from parbench.bench.results.details import STATE
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import Clock, World
from parbench.workloads.costs.memory import activations_of
from parbench.workloads.mesh.mesh_step import MeshBubble, MeshMemory, as_routed
from parbench.workloads.pipeline_parallel import pipeline_probe
from parbench.workloads.pipeline_parallel.pipeline_probe import Look, Taken, counted_memory
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import simulate
from parbench.workloads.step.sent_bytes import SentBytes, Tally
from tests.support.mesh_steps import EXPERT_PARAMS, Params, build_small_hybrid
from tests.support.ranks import Ranks

BALANCED = {**EXPERT_PARAMS, "routing": "balanced"}


def test_bytes_are_of_the_rank_that_sends_most() -> None:
    """The ratio is of the rank that differs most. Unexpected bytes have a ratio of 0."""
    explanation = SentBytes.summarise(
        [
            (Tally(by_axis={"pp": 4.0, "tp": 8.0, "ep": 4.0}), {"pp": 4.0, "tp": 8.0, "ep": 0.0}),
            (Tally(by_axis={"pp": 8.0, "tp": 3.0, "dp": 2.0}), {"pp": 8.0, "tp": 4.0, "dp": 2.0}),
        ]
    )
    value = {name: metric.value for name, metric in explanation.metrics.items()}
    table = {"pp": (8, 8, 1), "tp": (8, 8, 0.75), "dp": (2, 2, 1), "ep": (4, 0, 0)}
    for axis, (sent, expected, ratio) in table.items():
        assert value[f"bytes_sent.{axis}"] == sent
        assert value[f"bytes_expected.{axis}"] == expected
        assert value[f"bytes_ratio.{axis}"] == ratio


def explain(world: World, params: Params, shared_cores: bool = False) -> Explanation:
    step = build_small_hybrid(world, params)
    step.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_probe, "cores_shared", lambda world: shared_cores)
        explanation = step.explain(step.reset, 0.0)
    step.close()
    return explanation


def assert_reports_axes(explanation: Explanation, axes: set[str]) -> None:
    metrics = explanation.metrics
    sent = {name.removeprefix("bytes_sent.") for name in metrics if name.startswith("bytes_sent.")}
    assert sent == axes
    for axis in axes:
        assert metrics[f"bytes_ratio.{axis}"].value == pytest.approx(1.0, rel=1e-12), axis
        assert (metrics[f"exposed_comm.{axis}"].value or 0.0) >= 0, axis
    assert {"ect", "residual"} <= metrics.keys()
    for source in ("memory", "memory_counted", "memory_formula"):
        assert (metrics[f"{source}.parameters"].value or 0) > 0


def test_explanation_reports_each_axis(two_ranks: Ranks) -> None:
    params = {"mesh": "fsdp=2,ep=2", **EXPERT_PARAMS}
    [explanation, _] = two_ranks.call("tests.workloads.mesh.test_mesh_probe:explain", params=params)
    assert_reports_axes(explanation, {"fsdp", "ep"})
    assert explanation.metrics["imbalance.rank"].value >= 1
    assert "bubble_fraction" not in explanation.metrics


def test_explanation_of_pipeline_has_bubble(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    [explanation, _] = two_ranks.call("tests.workloads.mesh.test_mesh_probe:explain", params=params)
    assert_reports_axes(explanation, {"pp"})
    assert 0 < explanation.metrics["bubble_fraction"].value < 1
    assert explanation.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5)
    details = explanation.details["pipeline"]
    assert (details["schedule"], details["stages_by_rank"]) == ("1f1b", [[0], [1]])
    assert [len(actions) for actions in details["measured"]] == [8, 8]
    for name in ("compute", "idle"):  # those of the traced step, not of the pipeline's clock
        assert "traced step" in explanation.metrics[name].method


def test_explanation_on_shared_cores_has_no_bubble(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    arguments = {"params": params, "shared_cores": True}
    [explanation, _] = two_ranks.call("tests.workloads.mesh.test_mesh_probe:explain", **arguments)
    assert "bubble_fraction" not in explanation.metrics
    assert "measured" not in explanation.details["pipeline"]
    assert any("functional only" in note for note in explanation.notes)


def test_bubble_pipeline_is_chosen_by_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines take turns at being slow, so that neither is the slower one."""
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    fast = simulate(schedule, lambda action: 1.0)
    slow = simulate(schedule, lambda action: 3.0)
    records = []
    for timelines in ([slow, fast, slow, fast], [fast, slow, fast, slow]):
        for rank in range(2):
            stamps = [
                [(str(ran.action), round(ran.start * 1e9), round(ran.stop * 1e9)) for ran in rows]
                for rows in (timeline.of(rank) for timeline in timelines)
            ]
            walls = [timeline.makespan for timeline in timelines]
            records.append(Taken(stamps=stamps, walls=walls))
    monkeypatch.setattr(
        "parbench.workloads.mesh.mesh_step.groups_along", lambda *_: [[0, 1], [2, 3]]
    )
    none: Any = None
    pipeline = SimpleNamespace(schedule=schedule)
    at: Any = SimpleNamespace(
        spec=SimpleNamespace(mesh=None, timed_seconds=None, pipeline=pipeline)
    )
    clock = Clock(offsets_ns=(0,) * 4, uncertainty_ns=500, method="ping-pong")
    world: Any = SimpleNamespace(clock=clock)
    look = Look(world=world, at=at, layout=none, chunks={}, tokens=0, recorder=none, train=none)
    explanation = MeshBubble(look).summarise(records)
    assert explanation.metrics["makespan"].value == pytest.approx(fast.makespan)
    assert explanation.details["pipeline"]["clock_uncertainty_seconds"] == 5e-7


def measure_memory(world: World, params: Params) -> tuple[dict[str, Any], int]:
    """Return a step's memory metrics and the number of ranks that they are of."""
    step = build_small_hybrid(world, params)
    step.step()
    probe = MeshMemory(step.look())
    explanation = probe.summarise(world.gather(probe.observe(step.step, step.reset)))
    step.close()
    metrics = {name: metric.value for name, metric in explanation.metrics.items()}
    return metrics, len(explanation.details["memory_by_rank"]["parameters"])


def assert_state_agrees(ranks: Ranks, params: Params) -> dict[str, Any]:
    """Compare the formula with counted and measured bytes; AdamW counts its steps in 4 bytes."""
    metrics: dict[str, Any]
    [(metrics, num_ranks), *_] = ranks.call(
        "tests.workloads.mesh.test_mesh_probe:measure_memory", params=params
    )
    assert num_ranks == ranks.size
    for name in STATE:
        expected = metrics[f"memory_formula.{name}"]
        tolerance = 200 if name == "optimizer" else 0
        assert metrics[f"memory_counted.{name}"] == pytest.approx(expected, abs=tolerance), params
        assert metrics[f"memory.{name}"] == pytest.approx(expected, rel=0.15), params
    return metrics


@pytest.mark.parametrize("axis", ["dp", "fsdp", "pp", "tp", "cp"])
def test_memory_agrees_on_axis(two_ranks: Ranks, axis: str) -> None:
    checkpointing = "selective" if axis == "cp" else "none"
    params = {"mesh": f"{axis}=2", "checkpointing": checkpointing}
    metrics = assert_state_agrees(two_ranks, params)
    assert metrics["memory_counted.activations"] == metrics["memory_formula.activations"]


def test_memory_of_experts_agrees(two_ranks: Ranks) -> None:
    """The formula of activations assumes even routes."""
    assert_state_agrees(two_ranks, {"mesh": "tp=2", **EXPERT_PARAMS})
    metrics = assert_state_agrees(two_ranks, {"mesh": "fsdp=2,ep=2", **EXPERT_PARAMS})
    formula = metrics["memory_formula.activations"]
    assert 0.95 * formula < metrics["memory_counted.activations"] < 1.2 * formula


def test_memory_of_timed_compute_has_no_formula(two_ranks: Ranks) -> None:
    params = {"compute": "timed:1ms"}
    [(metrics, _), _] = two_ranks.call(
        "tests.workloads.mesh.test_mesh_probe:measure_memory", params=params
    )
    assert "memory_counted.activations" in metrics
    assert "memory_formula.activations" not in metrics


def measure_activations(world: World, params: Params) -> tuple[float, float]:
    """Return the counted and the analytical bytes of activations."""
    step = build_small_hybrid(world, {"microbatch": 2, **params})
    step.step()
    look = step.look()
    counted = counted_memory(look, as_routed)["activations"]
    analytical = activations_of(look.at)
    step.close()
    return counted, analytical


def assert_activations_agree(ranks: Ranks, cases: list[Params]) -> None:
    for params in cases:
        for counted, analytical in ranks.call(
            "tests.workloads.mesh.test_mesh_probe:measure_activations", params=params
        ):
            assert counted == analytical > 0, params


@pytest.mark.full
def test_activations_agree_on_two_ranks(two_ranks: Ranks) -> None:
    cases: list[Params] = []
    for recipe in ("gpt", "llama"):
        for axis in ("dp", "pp", "cp", "tp"):
            cases.append({"mesh": f"{axis}=2", "recipe": recipe, "checkpointing": "full"})
        for mesh in ("dp=2,ep=2", "tp=2", "tp=2,etp=2"):
            cases.append({"mesh": mesh, **BALANCED, "recipe": recipe})
    for method in ("zigzag", "striped", "allgather_kv", "ulysses"):
        cases.append({"mesh": "cp=2", "cp_method": method, "precision": "bfloat16"})
    cases.append({"mesh": "tp=2", "precision": "bfloat16"})
    cases.append({"mesh": "tp=2", "heads": 2, "kv_heads": 2, "recipe": "llama"})
    assert_activations_agree(two_ranks, cases)


@pytest.mark.full
def test_memory_agrees_on_four_ranks(four_ranks: Ranks) -> None:
    pairs = combinations(("dp", "fsdp", "pp", "cp", "tp"), 2)
    cases: list[Params] = [{"mesh": f"{first}=2,{second}=2"} for first, second in pairs]
    cases += [
        {"mesh": "dp=2,pp=2,ep=2", **BALANCED},
        {"mesh": "dp=2,tp=2,ep=2", **BALANCED, "checkpointing": "full"},
        {"mesh": "dp=2,tp=2,ep=2,etp=2", **BALANCED, "precision": "bfloat16"},
        {"mesh": "pp=2,dp=2", "schedule": "interleaved", "layers": 4},
        {"mesh": "pp=2,tp=2", "schedule": "zb_v", "layers": 4},
    ]
    assert_activations_agree(four_ranks, cases)
    for mesh in ("fsdp=2,pp=2", "fsdp=2,tp=2"):
        assert_state_agrees(four_ranks, {"mesh": mesh})
