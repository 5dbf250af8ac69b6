"""A pipeline as it is asked for, or the rule that forbids it."""

import pytest

from bench.cases import Setting
from bench.params import Value
from workloads.definitions import DEFINITIONS
from workloads.pipeline.pipeline_case import each_schedule, pipeline_of, refuse_pipeline
from workloads.pipeline.schedules import NAMES
from workloads.shapes import SHAPES

SHAPE = SHAPES["tiny"]
DEADLOCK = "0F0,0B0,0F1,0B1;1F1,1B1,1F0,1B0"
[DEFINITION] = [one for one in DEFINITIONS if one.name == "workload.pp"]


def setting(ranks: int) -> Setting:
    return Setting(nproc=ranks, backend="gloo", device="cpu")


def test_a_named_schedule_and_its_split() -> None:
    pipeline = pipeline_of({"schedule": "interleaved", "microbatches": 4}, SHAPE, 2)
    assert (pipeline.schedule.name, pipeline.schedule.chunks) == ("interleaved", 2)
    assert (pipeline.layers_by_stage, pipeline.first_layers) == ((1, 1, 1, 1), (0, 1, 2, 3))


def test_an_order_of_ones_own_is_taken_as_it_is() -> None:
    rows = "0F0,0F1,0B1,0B0;1F0,1B0,1F1,1B1"
    swapped = "0F0,0F1,0B0,0B1;1F0,1F1,1B0,1B1"
    for order in (rows, swapped):
        pipeline = pipeline_of({"schedule": "1f1b", "microbatches": 2, "order": order}, SHAPE, 2)
        assert [",".join(map(str, pipeline.schedule.actions_of(r))) for r in range(2)] == order.split(";")


@pytest.mark.parametrize(
    ("params", "ranks", "words"),
    [
        ({"schedule": "dualpipe_v", "microbatches": 2}, 2, "dualpipe_v needs microbatches(2) >= stages(4)"),
        ({"schedule": "1f1b", "chunks": 2}, 2, "1f1b needs chunks(2) == 1"),
        ({"schedule": "zb_v", "chunks": 3}, 2, "zb_v needs chunks(3) == 2"),
        ({"schedule": "gpipe"}, 3, "layers(4) % stages(3) != 0"),
        ({"schedule": "gpipe"}, 1, "gpipe needs ranks(1) >= 2"),
        ({"split": "1+2"}, 2, "holds 3 layers, and the model has layers(4)"),
        ({"order": DEADLOCK, "microbatches": 2}, 2, "deadlock"),
        ({"order": "0F0,0B0;1F0,1B0"}, 2, "order has 1 microbatches != microbatches(8)"),
        ({"order": "0F0,0B0;1F0,1B0", "microbatches": 1}, 4, "order has rows for 2 ranks != ranks(4)"),
        ({"order": "0F0,0X0;1F0,1B0", "microbatches": 1}, 2, "'0X0' is no action"),
        (
            {"order": "0F0,0B0;1F0,1B0", "microbatches": 1, "schedule": "gpipe"},
            2,
            "schedule = gpipe is not allowed with order, which is a schedule of your own",
        ),
        ({"schedule": "zb_h1", "checkpointing": "full"}, 2, "checkpointing = 'full' is not allowed with zb_h1"),
        ({"schedule": "zb_v", "checkpointing": "selective"}, 2, "splits the backward pass"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_any_rank_starts(params: dict[str, object], ranks: int, words: str) -> None:
    case = DEFINITION.case(params)
    assert words in str(DEFINITION.refuse(case.params, setting(ranks)))


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_is_allowed_where_the_backward_pass_is_whole(name: str) -> None:
    case = DEFINITION.case({"schedule": name, "microbatches": 8, "checkpointing": "full"})
    refused = DEFINITION.refuse(case.params, setting(2))
    assert (refused is not None) == (name in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v"))


def test_all_makes_a_case_for_each_schedule_that_exists() -> None:
    made = list(each_schedule({"schedule": "all", "microbatches": 8, "shape": "tiny"}, setting(2)))
    assert [case["schedule"] for case in made] == list(NAMES)
    assert all(case["shape"] == "tiny" for case in made)
    few = [case["schedule"] for case in each_schedule({"schedule": "all", "microbatches": 2}, setting(2))]
    assert few == [name for name in NAMES if name != "dualpipe_v"]
    looped = [case["schedule"] for case in each_schedule({"schedule": "all", "chunks": 4}, setting(2))]
    assert looped == ["interleaved", "looped_bfs", "interleaved_zb"]


def test_all_beside_an_order_is_that_order_once() -> None:
    """Not the same order under ten names."""
    given: dict[str, Value] = {"schedule": "all", "microbatches": 1, "order": "0F0,0B0;1F0,1B0"}
    [case] = each_schedule(given, setting(2))
    assert case == {"microbatches": 1, "order": given["order"]}
    assert DEFINITION.refuse(DEFINITION.case(case).params, setting(2)) is None
    assert len(list(each_schedule({**given, "order": ""}, setting(2)))) > 1


def test_one_schedule_is_one_case() -> None:
    given = {"schedule": "zb_v"}
    assert list(each_schedule(given, setting(2))) == [given]
    assert list(each_schedule({}, setting(2))) == [{}]


def test_a_plain_case_is_not_refused() -> None:
    assert refuse_pipeline(SHAPE, {"schedule": "1f1b", "microbatches": 8}, 2) is None
