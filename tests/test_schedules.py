"""A schedule is a name and an order: its rules are equations, its CSV is torch's, every one passes the check."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch_orders

from bench.errors import UserError
from workloads.pipeline.actions import Action, format_csv, parse_csv
from workloads.pipeline.schedule_check import check
from workloads.pipeline.schedules import (
    NAMES,
    Schedule,
    default_chunks,
    make_schedule,
    schedule_from_csv,
    splits_backward,
)

V_SHAPED = ("zb_v", "dualpipe_v")
ONE_STAGE = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")
MANY_CHUNKS = ("interleaved", "looped_bfs", "interleaved_zb")


def test_the_names_are_those_promised() -> None:
    assert NAMES == (
        "naive", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v"
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_schedule_that_is_made_can_run(name: str, ranks: int) -> None:
    made = 0
    for microbatches, chunks in product(sorted({1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks}), (0, 1, 2, 3)):
        try:
            schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        except UserError:
            continue
        check(schedule)
        made += 1
    assert made >= 2


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_the_schedules_own_unless_asked(name: str) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    assert schedule.chunks == default_chunks(name) == (1 if name in ONE_STAGE else 2)
    assert schedule == make_schedule(name, ranks=2, microbatches=4, chunks=schedule.chunks)
    assert schedule.num_stages == 2 * schedule.chunks
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_knows_whether_its_backwards_are_split(name: str) -> None:
    expected = name.startswith("zb") or name in ("interleaved_zb", "dualpipe_v")
    assert splits_backward(name) == expected
    assert make_schedule(name, ranks=4, microbatches=8).splits_backward == expected


@pytest.mark.parametrize("name", [*ONE_STAGE, *MANY_CHUNKS])
def test_looped_stages_go_round_the_ranks(name: str) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6)
    assert [schedule.rank_of(stage) for stage in range(schedule.num_stages)] == [0, 1, 2] * schedule.chunks
    assert schedule.stages_of(1) == tuple(range(1, schedule.num_stages, 3))


@pytest.mark.parametrize("name", V_SHAPED)
def test_the_v_comes_back_to_rank_0(name: str) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6)
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("name", MANY_CHUNKS)
def test_a_rank_may_have_many_chunks(name: str, chunks: int) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=chunks)
    assert len(schedule.stages_of(0)) == chunks
    check(schedule)


def test_interleaved_zero_bubble_with_one_chunk_is_zb_h1() -> None:
    made = make_schedule("interleaved_zb", ranks=4, microbatches=8, chunks=1)
    assert made.order == make_schedule("zb_h1", ranks=4, microbatches=8).order


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("1f1b", (1, 4, 0), "1f1b needs ranks(1) >= 2: one rank is no pipeline"),
        ("gpipe", (2, 0, 0), "gpipe needs microbatches(0) >= 1"),
        ("naive", (2, 4, 2), "naive needs chunks(2) == 1"),
        ("gpipe", (2, 4, 2), "gpipe needs chunks(2) == 1"),
        ("1f1b", (2, 4, 2), "1f1b needs chunks(2) == 1"),
        ("zb_h1", (2, 4, 2), "zb_h1 needs chunks(2) == 1"),
        ("zb_h2", (2, 4, 3), "zb_h2 needs chunks(3) == 1"),
        ("zb_v", (2, 4, 1), "zb_v needs chunks(1) == 2"),
        ("zb_v", (2, 4, 3), "zb_v needs chunks(3) == 2"),
        ("dualpipe_v", (2, 4, 1), "dualpipe_v needs chunks(1) == 2"),
        ("interleaved", (2, 4, 1), "interleaved needs chunks(1) >= 2"),
        ("looped_bfs", (2, 4, 1), "looped_bfs needs chunks(1) >= 2"),
        ("interleaved_zb", (2, 4, -1), "interleaved_zb needs chunks(-1) >= 1"),
        ("dualpipe_v", (4, 4, 0), "dualpipe_v needs microbatches(4) >= stages(8)"),
        (
            "interleaved",
            (4, 9, 2),
            "interleaved needs microbatches(9) % rounds(2) == 0, where rounds = microbatches(9) // ranks(4)",
        ),
        (
            "interleaved_zb",
            (2, 5, 2),
            "interleaved_zb needs microbatches(5) % rounds(2) == 0, where rounds = microbatches(5) // ranks(2)",
        ),
    ],
)
def test_what_does_not_exist_is_refused_by_the_equation(name: str, asked: tuple[int, int, int], told: str) -> None:
    ranks, microbatches, chunks = asked
    with pytest.raises(UserError) as refusal:
        make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert str(refusal.value) == told


@pytest.mark.parametrize("ask", [default_chunks, splits_backward])
def test_a_name_misspelt_is_corrected(ask: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match="did you mean 'interleaved'"):
        ask("interleave")
    with pytest.raises(UserError, match="schedule\\(1f2b\\) is not naive, gpipe"):
        make_schedule("1f2b", ranks=2, microbatches=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_loads_every_schedule_and_writes_the_same(name: str, ranks: int, tmp_path: Path) -> None:
    """Its loader checks the order too, and gives it sends and receives without a deadlock."""
    schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
    (tmp_path / "ours.csv").write_text(format_csv(schedule.order))
    loaded = torch_orders.load(tmp_path / "ours.csv", ranks, schedule.microbatches, schedule.chunks)
    assert loaded.stage_index_to_group_rank == {stage: schedule.rank_of(stage) for stage in range(schedule.num_stages)}
    loaded._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    assert parse_csv((tmp_path / "theirs.csv").read_text()) == schedule.order


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_reads_back_from_its_csv(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    assert schedule_from_csv(format_csv(schedule.order), name) == schedule


def test_torchs_own_csv_with_idle_steps_and_overlaps_can_run(tmp_path: Path) -> None:
    make = torch_orders.CLASSES["dualpipe_v"]
    theirs = make(torch_orders.fake_stages(2, 2), 4, loss_fn=torch_orders.no_loss)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    text = (tmp_path / "theirs.csv").read_text()
    assert "OVERLAP_F_B" in text
    schedule = schedule_from_csv(text)
    check(schedule)
    assert schedule.name == "custom"
    assert schedule.order == make_schedule("dualpipe_v", ranks=2, microbatches=4).order


def test_a_step_without_work_stays_in_the_order_and_out_of_the_actions() -> None:
    schedule = schedule_from_csv("0F0,,0B0\n,1F0,1B0\n")
    assert schedule.order[0] == (Action(0, "F", 0), None, Action(0, "B", 0))
    assert schedule.actions_of(0) == (Action(0, "F", 0), Action(0, "B", 0))
    assert (schedule.ranks, schedule.microbatches, schedule.chunks) == (2, 1, 1)
    assert not schedule.splits_backward


def test_ranks_of_unequal_stages_are_refused() -> None:
    with pytest.raises(UserError) as refusal:
        schedule_from_csv("0F0,3F0,3B0,0B0\n1F0,1B0\n", "mine")
    assert str(refusal.value) == ("mine needs as many stages on every rank: stages of rank 1(1) != stages of rank 0(2)")


def test_a_schedule_is_a_value() -> None:
    made = make_schedule("1f1b", ranks=2, microbatches=2)
    again = Schedule(name="1f1b", order=made.order, ranks=2, microbatches=2, chunks=1)
    assert made == again
    assert len({made, again}) == 1
