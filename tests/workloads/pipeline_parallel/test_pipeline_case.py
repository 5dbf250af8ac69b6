"""A pipeline as it is asked for, what passes its boundaries, and the rule that forbids it."""

from collections.abc import Mapping

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.params import Value
from parbench.workloads.costs.communication_pattern import calls
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.pipeline_parallel.pipeline_case import each_schedule, pipeline_of
from parbench.workloads.pipeline_parallel.schedules import NAMES
from tests.support.mesh_steps import PIPELINE

SHAPE = SHAPES["tiny"]
DEADLOCK = "0F0,0B0,0F1,0B1;1F1,1B1,1F0,1B0"
SHORT = "0F0,0B0;1F0,1B0"
ALONE: dict[str, Value] = {"order": SHORT, "microbatches": 1}


def spec(ranks: int) -> WorldSpec:
    return WorldSpec(nproc=ranks, backend="gloo", device="cpu")


def test_a_pipeline_is_a_named_schedule_and_its_split_or_an_order_of_ones_own() -> None:
    pipeline = pipeline_of({"schedule": "interleaved", "microbatches": 4}, SHAPE, 2)
    assert (pipeline.schedule.name, pipeline.schedule.chunks) == ("interleaved", 2)
    assert pipeline.layers_by_stage == (1, 1, 1, 1)
    assert pipeline_of(
        {"schedule": "gpipe", "microbatches": 4, "split": "2+1+1"}, SHAPE, 3
    ).layers_by_stage == (
        2,
        1,
        1,
    )
    for order in ("0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1", "0F0,0F1,0B0,0B1;1F0,1F1,1B0,1B1"):
        pipeline = pipeline_of({"schedule": "1f1b", "microbatches": 2, "order": order}, SHAPE, 2)
        assert [
            ",".join(map(str, pipeline.schedule.actions_of(r))) for r in range(2)
        ] == order.split(";")


def test_what_cannot_run_is_refused_before_any_rank_starts() -> None:
    cases: tuple[tuple[Mapping[str, object], int, str], ...] = (
        (
            {"schedule": "dualpipe_v", "microbatches": 2},
            2,
            "dualpipe_v needs microbatches(2) >= stages(4)",
        ),
        ({"schedule": "1f1b", "chunks": 2}, 2, "1f1b needs chunks(2) == 1"),
        (
            {"schedule": "gpipe"},
            3,
            "layers(4) % stages(3) != 0: split = 2+1+... says how many each stage takes",
        ),
        ({"split": "2+2"}, 3, "split = '2+2' is for 2 stages, and there are 3"),
        ({"split": "1+2"}, 2, "split = '1+2' holds 3 layers, and the model has layers(4)"),
        *(
            ({"split": split}, 2, f"split = {split!r} is not understood")
            for split in ("4+0", "2,2", "two+2")
        ),
        ({"order": DEADLOCK, "microbatches": 2}, 2, "deadlock"),
        ({"order": SHORT}, 2, "order has 1 microbatches != microbatches(8)"),
        (ALONE, 4, "order has rows for 2 ranks != ranks(4)"),
        ({"order": "0F0,0X0;1F0,1B0", "microbatches": 1}, 2, "'0X0' is no action"),
        (
            {**ALONE, "schedule": "gpipe"},
            2,
            "schedule = gpipe is not allowed with order, which is a schedule of your own",
        ),
    )
    for params, ranks, words in cases:
        assert words in str(PIPELINE.refuse(PIPELINE.whole(params), spec(ranks))), params
    assert PIPELINE.refuse(PIPELINE.whole({"schedule": "1f1b", "microbatches": 8}), spec(2)) is None


def test_checkpointing_is_allowed_where_the_backward_pass_is_whole() -> None:
    for name in NAMES:
        for how in ("full", "selective"):
            given = {"schedule": name, "microbatches": 8, "checkpointing": how}
            refused = PIPELINE.refuse(PIPELINE.whole(given), spec(2))
            if name in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v"):
                told = f"checkpointing = {how!r} is not allowed with {name}, which splits the backward pass"
                assert str(refused).startswith(told)
            else:
                assert refused is None, name


def test_all_makes_a_case_for_each_schedule_that_exists() -> None:
    def named(**given: Value) -> list[Value]:
        return [case["schedule"] for case in each_schedule({"schedule": "all", **given}, spec(2))]

    assert named(microbatches=8) == list(NAMES)
    assert named(microbatches=2) == [name for name in NAMES if name != "dualpipe_v"]
    assert named(chunks=4) == ["interleaved", "looped_bfs", "interleaved_zb"]
    assert all(
        case["shape"] == "tiny"
        for case in each_schedule({"schedule": "all", "shape": "tiny"}, spec(2))
    )
    # beside an order it is that order once, not the same order under ten names
    given = {"schedule": "all", **ALONE}
    assert list(each_schedule(given, spec(2))) == [ALONE]
    assert PIPELINE.refuse(PIPELINE.whole(ALONE), spec(2)) is None
    assert len(list(each_schedule({**given, "order": ""}, spec(2)))) > 1
    for one in ({"schedule": "zb_v"}, {}):
        assert list(each_schedule(one, spec(2))) == [one]


SMALL = SHAPES["small"]
EACH = 3 * 128 * 192 * 4  # b s h e
LINE = ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))


def links(**params: int | str) -> dict[tuple[int, int], float]:
    pipeline = pipeline_of({"microbatches": 8, **params}, SMALL, 4)
    spec = StepSpec(
        shape=SMALL,
        mesh={"pp": 4},
        microbatch=3,
        microbatches=8,
        element_bytes=4,
        pipeline=pipeline,
    )
    made = [(rank, call) for rank in range(4) for call in calls(spec.at(rank))]
    return {
        (rank, call.peer): call.sent / (8 * EACH) for rank, call in made if call.peer is not None
    }


def test_a_boundary_between_ranks_is_passed_once_each_way_by_every_microbatch() -> None:
    assert links(schedule="1f1b") == dict.fromkeys(LINE, 1)
    # loops pass them again and go from the last rank to the first, a V turns within the last rank
    assert links(schedule="interleaved", chunks=2) == {
        **dict.fromkeys(LINE, 2),
        (3, 0): 1,
        (0, 3): 1,
    }
    assert links(schedule="zb_v") == dict.fromkeys(LINE, 2)
