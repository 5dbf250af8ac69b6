"""A step on a mesh tells bytes, exposed time and memory by axis, and the bubble where cores are each rank's own."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from mesh_steps import EXPERTS, Params, small_hybrid
from ranks import Ranks

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

BOTH = [{"recipe": "gpt"}, {"recipe": "llama"}]
MIXTURE = {**EXPERTS, "routing": "balanced"}


def test_bytes_are_those_of_the_rank_that_sends_most_and_the_ratio_of_the_one_that_differs_most() -> None:
    found = SentBytes.summarise(
        [
            (Tally(by_axis={"pp": 4.0, "tp": 8.0, "other": 5.0, "ep": 4.0}), {"pp": 4.0, "tp": 8.0, "ep": 0.0}),
            (Tally(by_axis={"pp": 8.0, "tp": 3.0, "dp": 2.0}), {"pp": 8.0, "tp": 4.0, "dp": 2.0}),
        ]
    )
    # bytes that no form expects are not right
    table = {"pp": (8.0, 8.0, 1.0), "tp": (8.0, 8.0, 0.75), "dp": (2.0, 2.0, 1.0), "ep": (4.0, 0.0, 0.0)}
    names = ("bytes_sent", "bytes_expected", "bytes_ratio")
    expected = {f"{name}.{axis}": value for axis, row in table.items() for name, value in zip(names, row, strict=True)}
    sent = {name: metric.value for name, metric in found.metrics.items() if not name.startswith("calls.")}
    assert sent == {**expected, "bytes_sent.other": 5.0}


def explained(world: World, params: Params, shared: bool = False) -> Explanation:
    """Return what a step tells where every rank has a core of its own, or ``shared`` ones."""
    step = small_hybrid(world, params)
    step.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_probe, "cores_shared", lambda world: shared)
        found = step.explain(step.reset, 0.0)
    step.close()
    return found


def assert_told(found: Explanation, axes: set[str]) -> None:
    for axis in axes:
        assert found.metrics[f"bytes_ratio.{axis}"].value == pytest.approx(1.0, rel=1e-12), axis
        exposed = found.metrics[f"exposed_comm.{axis}"].value
        assert (-1.0 if exposed is None else exposed) >= 0, axis
    assert {name.removeprefix("bytes_sent.") for name in found.metrics if name.startswith("bytes_sent.")} == axes
    assert {"ect", "residual"} <= found.metrics.keys()
    for source in ("memory", "memory_counted", "memory_formula"):
        assert (found.metrics[f"{source}.parameters"].value or 0) > 0


def test_each_axis_is_told_of(two_ranks: Ranks) -> None:
    [found, _] = two_ranks.call("test_mesh_probe:explained", params={"mesh": "fsdp=2,ep=2", **EXPERTS})
    assert_told(found, {"fsdp", "ep"})
    assert found.metrics["imbalance.rank"].value >= 1
    assert len(found.details["bytes_sent_by_rank"]) == 2
    assert "bubble_fraction" not in found.metrics


def test_a_pipeline_tells_its_bubble_where_cores_are_each_rank_s_own(two_ranks: Ranks) -> None:
    params = {"mesh": "pp=2", "microbatches": 4}
    [found, _] = two_ranks.call("test_mesh_probe:explained", params=params)
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
    [found, _] = two_ranks.call("test_mesh_probe:explained", params=params, shared=True)
    assert "bubble_fraction" not in found.metrics
    assert any("functional only" in note for note in found.notes)
    assert "measured" not in found.details["pipeline"]


@pytest.mark.full
@pytest.mark.measures
def test_pipelines_beside_one_another_tell_the_slowest_s_bubble(four_ranks: Ranks) -> None:
    for mesh, axes in (("pp=2,tp=2", {"pp", "tp"}), ("dp=2,pp=2", {"pp", "dp"})):
        params = {"mesh": mesh, "microbatches": 4, "compute": "timed:40ms"}
        [found, *_] = four_ranks.call("test_mesh_probe:explained", params=params, shared=True)
        assert_told(found, axes)
        assert abs(found.metrics["residual"].value or 0.0) < 0.5
        assert found.metrics["bubble_fraction_formula"].value == pytest.approx(1 / 5)
        assert 0 < found.metrics["bubble_fraction"].value < 1
    assert found.metrics["bubble_fraction"].value == pytest.approx(1 / 5, rel=0.35)


def looked_at(world: World, params: Params) -> tuple[dict[str, float | None], tuple[str, ...], int]:
    """Return the metrics of a step's memory and its notes, and how many ranks it tells of."""
    step = small_hybrid(world, params)
    step.step()
    probe = MeshMemory(step.look())
    found = probe.summarise(world.gather(probe.observe(step.step, step.reset)))
    step.close()
    metrics = {name: metric.value for name, metric in found.metrics.items()}
    return metrics, found.notes, len(found.details["memory_by_rank"]["parameters"])


def assert_state_agrees(ranks: Ranks, params: Params) -> tuple[dict[str, float | None], tuple[str, ...]]:
    [(metrics, notes, count), *_] = ranks.call("test_mesh_probe:looked_at", params=params)
    assert count == ranks.size
    for name in STATE:
        expected = metrics[f"memory_formula.{name}"]
        assert expected is not None
        # AdamW counts its steps in 4 bytes of each parameter
        counted_bytes = metrics[f"memory_counted.{name}"]
        assert counted_bytes == pytest.approx(expected, abs=200 if name == "optimizer" else 0), (params, name)
        assert metrics[f"memory.{name}"] == pytest.approx(expected, rel=0.15), (params, name)
    return metrics, notes


def test_state_agrees_on_each_axis(two_ranks: Ranks) -> None:
    for mesh in ("dp=2", "fsdp=2", "pp=2", "tp=2", "cp=2"):
        metrics, notes = assert_state_agrees(two_ranks, {"mesh": mesh})
        assert notes == (), mesh
        assert metrics["memory_counted.activations"] == metrics["memory_formula.activations"], mesh


def test_state_of_experts_agrees_and_their_activations_are_of_even_routes(two_ranks: Ranks) -> None:
    assert_state_agrees(two_ranks, {"mesh": "tp=2", **EXPERTS})
    metrics, notes = assert_state_agrees(two_ranks, {"mesh": "fsdp=2,ep=2", **EXPERTS})
    even = "memory: the closed form of activations is of even routes, what is counted of those that were taken"
    assert notes == (even,)
    # a router's routes are not even: the fullest rank has more than its part
    saved, closed = (metrics[f"{source}.activations"] or 0.0 for source in ("memory_counted", "memory_formula"))
    assert 0 < 0.95 * closed < saved < 1.2 * closed


def test_where_compute_is_timed_activations_have_no_closed_form_and_a_note_says_so(two_ranks: Ranks) -> None:
    for params, timed in (({"mesh": "cp=2", "checkpointing": "selective"}, False), ({"compute": "timed:1ms"}, True)):
        [(metrics, notes, _), _] = two_ranks.call("test_mesh_probe:looked_at", params=params)
        assert "memory_counted.activations" in metrics
        assert ("memory_formula.activations" in metrics) == (not timed), params
        assert any("timed compute" in one for one in notes) == timed, params
        assert timed or metrics["memory_formula.activations"] == metrics["memory_counted.activations"]


def activations(world: World, params: Params) -> list[float]:
    step = small_hybrid(world, {"microbatch": 2, **params})
    step.step()
    look = step.look()
    found = [counted_memory(look, as_routed)["activations"], activations_of(look.at)]
    step.close()
    return found


def assert_activations_agree(ranks: Ranks, cases: list[Params]) -> None:
    for case in cases:
        for saved, closed in ranks.call("test_mesh_probe:activations", params=case):
            assert saved == closed > 0, case


@pytest.mark.full
def test_activations_agree_on_each_axis(two_ranks: Ranks) -> None:
    axes = ("dp=2", "fsdp=2", "pp=2", "cp=2", "tp=2")
    cases: list[Params] = [{"mesh": mesh, **recipe} for mesh in axes for recipe in BOTH]
    cases += [{**case, "checkpointing": "full"} for case in cases]
    cases += [{"mesh": "cp=2", "cp_method": method} for method in ("zigzag", "striped", "allgather_kv", "ulysses")]
    cases += [{"mesh": mesh, "precision": "bfloat16"} for mesh in ("tp=2", "cp=2")]
    cases += [{"mesh": "cp=2", "cp_method": "ulysses", "precision": "bfloat16"}, {"mesh": "dp=2,ep=2", **MIXTURE}]
    cases += [{"mesh": "tp=2", "heads": 2, "kv_heads": 2, "recipe": "llama"}]
    meshes = ("dp=2,ep=2", "tp=2", "tp=2,etp=2")
    cases += [{"mesh": mesh, **MIXTURE, **recipe} for mesh in meshes for recipe in BOTH]
    assert_activations_agree(two_ranks, cases)


@pytest.mark.full
def test_activations_and_state_agree_where_axes_meet(four_ranks: Ranks) -> None:
    pairs = [f"{one}=2,{other}=2" for one, other in combinations(("dp", "fsdp", "pp", "cp", "tp"), 2)]
    cases: list[Params] = [{"mesh": mesh, **recipe} for mesh in pairs for recipe in BOTH]
    cases += [
        {"mesh": "dp=2,pp=2,ep=2", **MIXTURE},
        {"mesh": "dp=2,tp=2,ep=2", **MIXTURE, "checkpointing": "full"},
        {"mesh": "dp=2,tp=2,ep=2,etp=2", **MIXTURE, "precision": "bfloat16"},
        {"mesh": "pp=2,dp=2", "schedule": "interleaved", "layers": 4},
        {"mesh": "pp=2,tp=2", "schedule": "zb_v", "layers": 4},
    ]
    assert_activations_agree(four_ranks, cases)
    for mesh in ("fsdp=2,pp=2", "fsdp=2,tp=2"):
        assert_state_agrees(four_ranks, {"mesh": mesh})


def test_the_slowest_pipeline_is_chosen_by_other_steps_than_those_that_it_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pipelines that are slow by turns: neither is the slower one."""
    schedule, told = make_schedule("1f1b", ranks=2, microbatches=4), []
    once, slowly = simulate(schedule, lambda action: 1.0), simulate(schedule, lambda action: 3.0)
    for slow in (0, 1):
        timelines = [slowly if turn % 2 == slow else once for turn in range(4)]
        for rank in range(2):
            stamps = [
                [(str(ran.action), round(ran.start * 1e9), round(ran.stop * 1e9)) for ran in of.of(rank)]
                for of in timelines
            ]
            told.append(Taken(stamps=stamps, walls=[of.makespan for of in timelines]))
    monkeypatch.setattr("parbench.workloads.mesh.mesh_step.groups_along", lambda *_: [[0, 1], [2, 3]])
    nothing: Any = None
    spec = SimpleNamespace(mesh=None, timed_seconds=None, pipeline=SimpleNamespace(schedule=schedule))
    clock = Clock(offsets_ns=(0,) * 4, uncertainty_ns=500, method="ping-pong")
    at: Any = SimpleNamespace(spec=spec)
    world: Any = SimpleNamespace(clock=clock)
    look = Look(world=world, at=at, layout=nothing, chunks={}, tokens=0, recorder=nothing, train=nothing)
    found = MeshBubble(look).summarise(told)
    assert found.details["pipeline"]["clock_uncertainty_seconds"] == 5e-7
    assert found.metrics["makespan"].value == pytest.approx(once.makespan)
