"""A schedule is a name and an order: its rules are equations, its CSV is torch's, every one passes the check."""

from itertools import product
from pathlib import Path

import pytest
import torch_orders
from refusals import refusal

from bench.results.details import Action
from bench.text import UserError
from workloads.pipeline_parallel.actions import format_csv, parse_csv
from workloads.pipeline_parallel.schedule_check import check
from workloads.pipeline_parallel.schedules import (
    NAMES,
    default_chunks,
    make_schedule,
    schedule_from_csv,
    splits_backward,
)
from workloads.pipeline_parallel.split import layers_of_stages

ONE_STAGE = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")
SPLITTING = ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v")


def assert_all_can_run(all_ranks: range | tuple[int, ...]) -> None:
    for name, ranks in product(NAMES, all_ranks):
        made = 0
        for microbatches, chunks in product(sorted({1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks}), (0, 1, 2, 3)):
            try:
                schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
            except UserError:
                continue
            check(schedule)
            made += 1
        assert made >= 2, (name, ranks)


def test_a_schedule_has_its_own_chunks_and_says_where_its_stages_lie() -> None:
    assert set(NAMES) == {*ONE_STAGE, *SPLITTING, "interleaved", "looped_bfs"}
    for name in NAMES:
        schedule = make_schedule(name, ranks=3, microbatches=6)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 3, 6)
        assert schedule.chunks == default_chunks(name) == (1 if name in ONE_STAGE else 2), name
        assert schedule == make_schedule(name, ranks=3, microbatches=6, chunks=schedule.chunks), name
        assert splits_backward(name) == schedule.splits_backward == (name in SPLITTING), name
        places = [0, 1, 2, 2, 1, 0] if name in ("zb_v", "dualpipe_v") else [0, 1, 2] * schedule.chunks
        assert [schedule.rank_of(stage) for stage in range(schedule.num_stages)] == places, name
        held = [tuple(stage for stage, of in enumerate(places) if of == rank) for rank in range(3)]
        assert [schedule.stages_of(rank) for rank in range(3)] == held, name


def test_every_schedule_that_is_made_can_run() -> None:
    assert_all_can_run((2, 3, 4))


@pytest.mark.full
def test_every_schedule_of_many_ranks_can_run() -> None:
    assert_all_can_run(range(5, 9))


def test_what_does_not_exist_is_refused_by_the_equation() -> None:
    rounds = "needs microbatches({0}) % rounds(2) == 0, where rounds = microbatches({0}) // ranks({1})"
    for name, asked, told in (
        ("1f1b", (1, 4, 0), "needs ranks(1) >= 2: one rank is no pipeline"),
        ("gpipe", (2, 0, 0), "needs microbatches(0) >= 1"),
        *((one, (2, 4, 2), "needs chunks(2) == 1") for one in ONE_STAGE),
        *((one, (2, 4, chunks), f"needs chunks({chunks}) == 2") for one in ("zb_v", "dualpipe_v") for chunks in (1, 3)),
        ("interleaved", (2, 4, 1), "needs chunks(1) >= 2"),
        ("looped_bfs", (2, 4, 1), "needs chunks(1) >= 2"),
        ("interleaved_zb", (2, 4, -1), "needs chunks(-1) >= 1"),
        ("dualpipe_v", (4, 7, 0), "needs microbatches(7) >= stages(8)"),
        ("interleaved", (4, 9, 2), rounds.format(9, 4)),
        ("interleaved_zb", (2, 5, 2), rounds.format(5, 2)),
    ):
        ranks, microbatches, chunks = asked
        words = refusal(make_schedule, name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert words == f"{name} {told}"


def test_a_name_misspelt_is_corrected() -> None:
    for ask in (default_chunks, splits_backward):
        with pytest.raises(UserError, match="did you mean 'interleaved'"):
            ask("interleave")
    with pytest.raises(UserError, match="schedule\\(1f2b\\) is not naive, gpipe"):
        make_schedule("1f2b", ranks=2, microbatches=2)


def test_torch_loads_every_schedule_and_writes_the_same(tmp_path: Path) -> None:
    """Its loader checks the order too, and gives it sends and receives without a deadlock."""
    for name, ranks in product(NAMES, (2, 4)):
        schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
        assert schedule_from_csv(format_csv(schedule.order), name) == schedule
        (tmp_path / "ours.csv").write_text(format_csv(schedule.order))
        loaded = torch_orders.load(tmp_path / "ours.csv", ranks, schedule.microbatches, schedule.chunks)
        held = {stage: schedule.rank_of(stage) for stage in range(schedule.num_stages)}
        assert loaded.stage_index_to_group_rank == held, name
        loaded._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
        assert parse_csv((tmp_path / "theirs.csv").read_text()) == schedule.order, name


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
    told = refusal(schedule_from_csv, "0F0,3F0,3B0,0B0\n1F0,1B0\n", "mine")
    assert told == "mine needs as many stages on every rank: stages of rank 1(1) != stages of rank 0(2)"


def test_layers_are_as_many_on_each_stage_or_as_a_split_says_or_it_is_said_why_not() -> None:
    for layers, stages, split, counts in ((4, 2, "", (2, 2)), (12, 4, "", (3,) * 4), (7, 4, "2+1+1+3", (2, 1, 1, 3))):
        assert layers_of_stages(layers, stages, split) == counts
    for layers, stages, split, words in (
        (4, 3, "", r"layers\(4\) % stages\(3\) != 0"),
        (2, 4, "", r"layers\(2\) % stages\(4\) != 0"),
        (4, 3, "2+2", "is for 2 stages, and there are 3"),
        (5, 2, "2+2", r"holds 4 layers, and the model has layers\(5\)"),
        *((4, 2, split, "is not understood") for split in ("4+0", "2,2", "two+2")),
    ):
        with pytest.raises(UserError, match=words):
            layers_of_stages(layers, stages, split)
