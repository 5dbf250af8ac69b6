"""A pipeline case has a schedule and layers per stage, or is refused before ranks start."""

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Value
from parbench.workloads.costs.communication_pattern import calls
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.pipeline_parallel.pipeline_case import each_schedule, pipeline_of
from parbench.workloads.pipeline_parallel.schedules import NAMES
from tests.support.mesh_steps import PIPELINE

Params = dict[str, Value]

TINY = SHAPES["tiny"]
TWO_RANKS = WorldSpec(nproc=2, backend="gloo", device="cpu")
ORDER: Params = {"order": "0F0,0B0;1F0,1B0", "microbatches": 1}


def refuse(params: Params, ranks: int = 2) -> str | None:
    world = WorldSpec(nproc=ranks, backend="gloo", device="cpu")
    return PIPELINE.refuse(PIPELINE.whole(params), world)


def test_pipeline_of_named_schedule() -> None:
    pipeline = pipeline_of({"schedule": "interleaved", "microbatches": 4}, TINY, 2)
    assert pipeline.schedule.name == "interleaved"
    assert pipeline.layers_by_stage == (1, 1, 1, 1)


def test_pipeline_of_uneven_split() -> None:
    params: Params = {"schedule": "gpipe", "microbatches": 4, "split": "2+1+1"}
    assert pipeline_of(params, TINY, 3).layers_by_stage == (2, 1, 1)


def test_pipeline_of_custom_order() -> None:
    order = "0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1"
    params: Params = {"schedule": "1f1b", "microbatches": 2, "order": order}
    schedule = pipeline_of(params, TINY, 2).schedule
    rows = [",".join(map(str, schedule.actions_of(rank))) for rank in range(2)]
    assert ";".join(rows) == order
    assert refuse(ORDER) is None


@pytest.mark.parametrize(
    ("params", "ranks", "message"),
    [
        ({"schedule": "dualpipe_v", "microbatches": 2}, 2, "microbatches(2) >= stages(4)"),
        ({"schedule": "gpipe"}, 3, "layers(4) % stages(3) != 0"),
        ({"split": "2+2"}, 3, "'2+2' is for 2 stages"),
        ({"split": "1+2"}, 2, "'1+2' holds 3 layers"),
        ({"split": "2,2"}, 2, "'2,2'"),
        ({"split": "4+0"}, 2, "'4+0'"),
        ({"order": "0F0,0B0,0F1,0B1;1F1,1B1,1F0,1B0", "microbatches": 2}, 2, "deadlock"),
        ({**ORDER, "microbatches": 8}, 2, "microbatches(8)"),
        (ORDER, 4, "ranks(4)"),
        ({"order": "0F0,0X0;1F0,1B0", "microbatches": 1}, 2, "'0X0'"),
        ({**ORDER, "schedule": "gpipe"}, 2, "schedule = gpipe is not allowed with order"),
    ],
)
def test_pipeline_refuses(params: Params, ranks: int, message: str) -> None:
    assert message in str(refuse(params, ranks))


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_needs_joined_backward(name: str) -> None:
    message = refuse({"schedule": name, "microbatches": 8, "checkpointing": "full"})
    splits_backward = name in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v")
    assert (message is not None) == splits_backward


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"microbatches": 8}, set(NAMES)),
        ({"microbatches": 2}, {*NAMES} - {"dualpipe_v"}),
        ({"chunks": 4}, {"interleaved", "looped_bfs", "interleaved_zb"}),
    ],
)
def test_all_selects_existing_schedules(params: Params, names: set[str]) -> None:
    cases = each_schedule({"schedule": "all", **params}, TWO_RANKS)
    assert {case["schedule"] for case in cases} == names


def test_all_runs_custom_order_once() -> None:
    assert list(each_schedule({"schedule": "all", **ORDER}, TWO_RANKS)) == [ORDER]


LINE = dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)], 1.0)
LOOP = {**dict.fromkeys(LINE, 2.0), (3, 0): 1.0, (0, 3): 1.0}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", LINE), ("interleaved", LOOP), ("zb_v", dict.fromkeys(LINE, 2.0))],
)
def test_links_pass_each_microbatch(schedule: str, expected: dict[tuple[int, int], float]) -> None:
    """Looped stages also pass from the last rank to the first. A V turns within the last rank."""
    shape = SHAPES["small"]
    pipeline = pipeline_of({"microbatches": 8, "schedule": schedule}, shape, 4)
    spec = StepSpec(shape=shape, mesh={"pp": 4}, microbatches=8, element_bytes=4, pipeline=pipeline)
    total_bytes = 8 * shape.sequence * shape.hidden * 4
    passes = {}
    for rank in range(4):
        for call in calls(spec.at(rank)):
            if call.peer is not None:
                passes[rank, call.peer] = call.sent / total_bytes
    assert passes == expected
