"""Each rank's order is torch's where it has one, and the papers' otherwise."""

from itertools import product
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action

from parbench.bench.results.details import Action
from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.schedules import (
    NAMES,
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
from tests.support import torch_orders
from tests.support.refusals import usage_error

SPLITTING = {"zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v"}
RANKS = (2, 3, 4, 8)


def test_action_text_is_torchs() -> None:
    for text, action in (("2F0", Action(2, "F", 0)), ("10W31", Action(10, "W", 31))):
        assert str(action) == str(_Action.from_str(text)) == text
        assert Action.parse(f" {text} ") == action
    assert Action(0, "W", 5) < Action(1, "B", 0)


@pytest.mark.parametrize("text", ["F0", "2F", "2X0", "2SEND_F0", "2f0", "-1F0", "2F0 3F0", "२F0"])
def test_action_refuses_other_text(text: str) -> None:
    assert text in usage_error(Action.parse, text)


@pytest.mark.parametrize(
    ("text", "produced", "received", "needed"),
    [
        ("0F0", (0, "F", 0), None, ()),
        ("1F0", (1, "F", 0), (0, "F", 0), ((0, "F", 0),)),
        ("3B2", (3, "I", 2), None, ((3, "F", 2),)),
        ("2B1", (2, "I", 1), (3, "I", 1), ((2, "F", 1), (3, "I", 1))),
        ("0I1", (0, "I", 1), (1, "I", 1), ((0, "F", 1), (1, "I", 1))),
        ("2W1", (2, "W", 1), None, ((2, "I", 1),)),
    ],
)
def test_action_dependencies(text: str, produced: object, received: object, needed: object) -> None:
    """Of four stages."""
    action = Action.parse(text)
    assert result(action) == produced
    assert message(action, 4) == received
    assert needs(action, 4) == needed


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_looped_orders_are_torchs(name: str) -> None:
    compared = 0
    for ranks, microbatches, chunks in product(RANKS, (1, 2, 3, 5, 8, 9, 16), (2, 3)):
        sizes = (ranks, microbatches, chunks)
        try:
            schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        except UserError:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_orders.order(name, *sizes)
            continue
        assert schedule.order == torch_orders.order(name, *sizes), sizes
        compared += 1
    assert compared > 25


@pytest.mark.parametrize("ranks", RANKS)
def test_v_orders_are_torchs(ranks: int) -> None:
    cases = [("zb_v", count) for count in range(1, 3 * ranks)]
    cases += [("dualpipe_v", count) for count in range(2 * ranks, 3 * ranks + 2)]
    for name, microbatches in cases:
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
        assert schedule.order == torch_orders.order(name, ranks, microbatches, 2), microbatches


@pytest.mark.parametrize(
    ("name", "rank", "ranks", "microbatches", "expected"),
    [
        ("naive", 1, 2, 2, "1F0 1B0 1F1 1B1"),
        ("1f1b", 0, 3, 4, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        ("1f1b", 2, 3, 4, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
        ("gpipe", 1, 2, 2, "1F0 1F1 1B0 1B1"),
        # arXiv 2401.10241, figures 2 and 3
        ("zb_h1", 0, 3, 3, "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"),
        ("zb_h1", 2, 3, 3, "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2"),
        ("zb_h2", 0, 2, 4, "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        ("zb_h2", 1, 2, 4, "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"),
    ],
)
def test_orders_of_papers(
    name: str, rank: int, ranks: int, microbatches: int, expected: str
) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    assert " ".join(map(str, schedule.actions_of(rank))) == expected


@pytest.mark.parametrize("name", NAMES)
def test_schedule_properties(name: str) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, 3, 6)
    one_stage = name in ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")
    assert schedule.chunks == default_chunks(name) == (1 if one_stage else 2)
    assert splits_backward(name) == schedule.splits_backward == (name in SPLITTING)
    ranks = [0, 1, 2, 2, 1, 0] if name in ("zb_v", "dualpipe_v") else [0, 1, 2] * schedule.chunks
    for rank in range(3):
        stages = tuple(stage for stage, owner in enumerate(ranks) if owner == rank)
        assert schedule.stages_of(rank) == stages


@pytest.mark.parametrize("name", NAMES)
def test_schedules_can_run(name: str) -> None:
    checked = 0
    for ranks, factor, chunks in product((2, 3, 4), (1, 2, 3), (0, 1, 2, 3)):
        try:
            schedule = make_schedule(name, ranks=ranks, microbatches=factor * ranks, chunks=chunks)
        except UserError:
            continue
        check(schedule)
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "equation"),
    [
        ("1f1b", 1, 4, 0, "ranks(1) >= 2"),
        ("gpipe", 2, 0, 0, "microbatches(0) >= 1"),
        ("1f1b", 2, 4, 2, "chunks(2) == 1"),
        ("zb_v", 2, 4, 3, "chunks(3) == 2"),
        ("interleaved", 2, 4, 1, "chunks(1) >= 2"),
        ("interleaved_zb", 2, 4, -1, "chunks(-1) >= 1"),
        ("dualpipe_v", 4, 7, 0, "microbatches(7) >= stages(8)"),
        ("interleaved", 4, 9, 2, "microbatches(9) % rounds(2) == 0"),
    ],
)
def test_make_schedule_refuses(
    name: str, ranks: int, microbatches: int, chunks: int, equation: str
) -> None:
    error = usage_error(make_schedule, name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert f"{name} needs {equation}" in error


def test_unknown_schedule_has_a_hint() -> None:
    assert "'interleaved'" in usage_error(default_chunks, "interleave")
    assert "gpipe" in usage_error(make_schedule, "1f2b", ranks=2, microbatches=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_loads_csv(tmp_path: Path, name: str, ranks: int) -> None:
    """Its loader checks the order, and adds sends and receives without a deadlock."""
    schedule = make_schedule(name, ranks=ranks, microbatches=2 * ranks)
    text = "\n".join(",".join(map(str, row)) for row in schedule.order)
    assert schedule_from_csv(text, name) == schedule
    path = tmp_path / "order.csv"
    path.write_text(text)
    loaded = torch_orders.load(path, ranks, schedule.microbatches, schedule.chunks)
    owners = {stage: rank for rank in range(ranks) for stage in schedule.stages_of(rank)}
    assert loaded.stage_index_to_group_rank == owners
    loaded._dump_csv(str(path), format="compute_only")
    assert parse_csv(path.read_text()) == schedule.order


def test_schedule_from_csv_of_torch(tmp_path: Path) -> None:
    """Torch writes idle steps and overlapped pairs, which are read in sequence."""
    stages = torch_orders.fake_stages(2, 2)
    schedule = torch_orders.CLASSES["dualpipe_v"](stages, 4, loss_fn=torch_orders.no_loss)
    schedule._dump_csv(str(tmp_path / "order.csv"), format="compute_only")
    text = (tmp_path / "order.csv").read_text()
    assert "OVERLAP_F_B" in text
    expected = make_schedule("dualpipe_v", ranks=2, microbatches=4)
    assert schedule_from_csv(text).order == expected.order


def test_parse_csv_rows_and_cells() -> None:
    rows = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    assert parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n\n\n") == rows
    assert parse_csv("0F0\n\n1F0\n")[1] == ()
    pair = (Action(1, "F", 0), Action(2, "B", 3))
    assert parse_csv("(1F0;2B3)OVERLAP_F_B") == (pair,)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0F0,0B0\n1F0,1SEND_B0\n", "rank 1, step 1: '1SEND_B0'"),
        ("0F0,(1F0;2Q3)OVERLAP_F_B", "rank 0, step 1: '2Q3'"),
        ("(1F0;2B3)OVERLAP", "rank 0, step 0: '(1F0;2B3)OVERLAP'"),
        (",,\n,,\n\n", "empty"),
    ],
)
def test_parse_csv_names_place_of_error(text: str, place: str) -> None:
    assert place in usage_error(parse_csv, text)


def test_schedule_from_csv_needs_equal_stages() -> None:
    error = usage_error(schedule_from_csv, "0F0,3F0,3B0,0B0\n1F0,1B0\n", "mine")
    assert "stages of rank 1(1) != stages of rank 0(2)" in error
