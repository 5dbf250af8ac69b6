"""Each rank's order is torch's, where it has one, and the papers' elsewhere; the rules of when it exists; its CSV."""

from itertools import product
from pathlib import Path

import pytest
import torch_orders
from refusals import refusal
from torch.distributed.pipelining.schedules import _Action

from parbench.bench.results.details import Action
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
    Order,
    default_chunks,
    make_schedule,
    message,
    needs,
    parse_csv,
    result,
    schedule_from_csv,
    splits_backward,
)
from parbench.workloads.pipeline_parallel.simulation import check

ONE_STAGE = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")
SPLITTING = ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v")
SIZES = (2, 3, 4, 5, 8)


def test_an_action_prints_as_torchs_reads_back_and_sorts_by_stage() -> None:
    written = {"2F0": Action(2, "F", 0), "10W31": Action(10, "W", 31), "3I999": Action(3, "I", 999)}
    for text, action in written.items():
        assert str(action) == f"{action}" == str(_Action.from_str(text)) == text
        assert Action.parse(f" {text} ") == action
    assert sorted([Action(1, "B", 0), Action(0, "W", 5), Action(0, "F", 9)])[0] == Action(0, "F", 9)
    for text in ("", "F0", "2F", "2X0", "2SEND_F0", "2f0", "-1F0", "2F0 3F0", "1UNSHARD", "२F0"):
        assert refusal(Action.parse, text) == (
            f"{text!r} is no action: it is a stage, F, B, I or W, and a microbatch, such as 2F0, or empty"
        )


def test_an_action_needs_the_message_of_the_stage_beside_and_its_own_stages_work() -> None:
    table = {  # of four stages: what others wait for of it, what comes from the stage beside, all that it needs
        "0F0": ((0, "F", 0), None, ()),
        "1F0": ((1, "F", 0), (0, "F", 0), ((0, "F", 0),)),
        "3B2": ((3, "I", 2), None, ((3, "F", 2),)),
        "3I2": ((3, "I", 2), None, ((3, "F", 2),)),
        "2B1": ((2, "I", 1), (3, "I", 1), ((2, "F", 1), (3, "I", 1))),
        "0I1": ((0, "I", 1), (1, "I", 1), ((0, "F", 1), (1, "I", 1))),
        "2W1": ((2, "W", 1), None, ((2, "I", 1),)),
    }
    for text, expected in table.items():
        action = Action.parse(text)
        assert (result(action), message(action, 4), needs(action, 4)) == expected, text


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_looped_orders_are_those_of_torchs_classes_where_those_exist(name: str) -> None:
    compared = 0
    for ranks, microbatches, chunks in product(SIZES, (1, 2, 3, 5, 7, 8, 9, 12, 16, 17), (2, 3)):
        asked = (ranks, microbatches, chunks)
        try:
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        except UserError:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_orders.order(name, *asked)
            continue
        assert ours.order == torch_orders.order(name, *asked), asked
        compared += 1
    assert compared > 50


def test_the_vs_are_torchs_with_few_microbatches_and_overlapped_pairs_in_sequence() -> None:
    for ranks in SIZES:
        asked = [("zb_v", count) for count in range(1, 3 * ranks)]
        asked += [("dualpipe_v", count) for count in range(2 * ranks, 3 * ranks + 2)]
        for name, microbatches in asked:
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches)
            assert ours.order == torch_orders.order(name, ranks, microbatches, 2), (name, ranks, microbatches)


def test_orders_are_those_of_the_papers_figures() -> None:
    """Of a rank, P, M and v: kind and microbatch, and a prime for the second chunk. arXiv 2401.10241: in figure 2 the
    first rank's weights follow at once, the last one's fill the end; in figure 3 rank 0 makes 2P-1 forwards before the
    first backward, and as many are held on the last."""
    for name, (rank, ranks, microbatches, chunks), expected in (
        ("naive", (1, 2, 2, 1), "F0 B0 F1 B1"),
        ("1f1b", (0, 3, 4, 1), "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", (2, 3, 4, 1), "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("gpipe", (1, 2, 2, 1), "F0 F1 B0 B1"),
        ("zb_h1", (0, 3, 3, 1), "F0 F1 F2 I0 W0 I1 W1 I2 W2"),
        ("zb_h1", (2, 3, 3, 1), "F0 I0 F1 I1 F2 I2 W0 W1 W2"),
        ("zb_h2", (0, 2, 4, 1), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        ("zb_h2", (1, 2, 4, 1), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    ):
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        first = schedule.stages_of(rank)[0]
        written = [f"{a.kind}{a.microbatch}{chr(39) * (a.stage > first)}" for a in schedule.actions_of(rank)]
        assert " ".join(written) == expected


def test_a_schedule_has_its_own_chunks_and_says_where_its_stages_lie() -> None:
    assert set(NAMES) == {*ONE_STAGE, *SPLITTING, "interleaved", "looped_bfs"}
    for name in NAMES:
        schedule = make_schedule(name, ranks=3, microbatches=6)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 3, 6)
        assert schedule.chunks == default_chunks(name) == (1 if name in ONE_STAGE else 2), name
        assert schedule == make_schedule(name, ranks=3, microbatches=6, chunks=schedule.chunks), name
        assert splits_backward(name) == schedule.splits_backward == (name in SPLITTING), name
        places = [0, 1, 2, 2, 1, 0] if name in ("zb_v", "dualpipe_v") else [0, 1, 2] * schedule.chunks
        held = [tuple(stage for stage, of in enumerate(places) if of == rank) for rank in range(3)]
        assert [schedule.stages_of(rank) for rank in range(3)] == held, name


def test_every_schedule_that_is_made_can_run() -> None:
    for name, ranks in product(NAMES, (2, 3, 4)):
        made = 0
        for microbatches, chunks in product(sorted({1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks}), (0, 1, 2, 3)):
            try:
                schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
            except UserError:
                continue
            check(schedule)
            made += 1
        assert made >= 2, (name, ranks)


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
    for ask in (default_chunks, splits_backward):
        assert "did you mean 'interleaved'" in refusal(ask, "interleave")
    assert refusal(make_schedule, "1f2b", ranks=2, microbatches=2).startswith("schedule(1f2b) is not naive, gpipe")


def test_torch_loads_every_schedule_and_writes_the_same(tmp_path: Path) -> None:
    """Its loader checks the order too, and gives it sends and receives without a deadlock."""
    for name, ranks in product(NAMES, (2, 4)):
        schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
        text = "\n".join(",".join(map(str, row)) for row in schedule.order)
        assert schedule_from_csv(text, name) == schedule
        (tmp_path / "ours.csv").write_text(text)
        loaded = torch_orders.load(tmp_path / "ours.csv", ranks, schedule.microbatches, schedule.chunks)
        held = {stage: rank for rank in range(ranks) for stage in schedule.stages_of(rank)}
        assert loaded.stage_index_to_group_rank == held, name
        loaded._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
        assert parse_csv((tmp_path / "theirs.csv").read_text()) == schedule.order, name
    # torch's own has idle steps, and overlaps, which are read in sequence
    theirs = torch_orders.CLASSES["dualpipe_v"](torch_orders.fake_stages(2, 2), 4, loss_fn=torch_orders.no_loss)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    text = (tmp_path / "theirs.csv").read_text()
    assert "OVERLAP_F_B" in text
    assert schedule_from_csv(text).order == make_schedule("dualpipe_v", ranks=2, microbatches=4).order


def test_a_csv_is_a_row_per_rank_and_a_cell_per_step() -> None:
    order: Order = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    assert parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n\n\n") == order  # a blank end of a file is no rank
    assert parse_csv("0F0\n\n1F0\n")[1] == ()  # a blank row between is one that does nothing
    # torch's overlapped pair is two actions in sequence
    row = (Action(1, "F", 0), Action(2, "B", 3), Action(1, "F", 1))
    assert parse_csv("(1F0;2B3)OVERLAP_F_B,1F1") == (row,)
    schedule = schedule_from_csv("0F0,,0B0\n,1F0,1B0\n")
    assert (schedule.ranks, schedule.microbatches, schedule.chunks, schedule.splits_backward) == (2, 1, 1, False)


def test_a_csv_that_cannot_be_read_is_refused_by_rank_and_step() -> None:
    for text, told in (
        ("0F0,0B0\n1F0,1SEND_B0\n", "rank 1, step 1: '1SEND_B0' is no action"),
        ("0F0,(1F0;2Q3)OVERLAP_F_B", "rank 0, step 1: '2Q3' is no action"),
        ("(1F0;2B3)OVERLAP", "rank 0, step 0: '(1F0;2B3)OVERLAP' is no action"),
        *((empty, "the schedule is empty") for empty in ("", ",,\n,,\n\n")),
    ):
        words = refusal(parse_csv, text)
        assert words.startswith(told)
        assert "\n" not in words
    told = refusal(schedule_from_csv, "0F0,3F0,3B0,0B0\n1F0,1B0\n", "mine")
    assert told == "mine needs as many stages on every rank: stages of rank 1(1) != stages of rank 0(2)"
