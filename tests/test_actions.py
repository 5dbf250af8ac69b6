"""An action prints as torch's does and reads back; an order is torch's CSV; what an action needs is the pipeline."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from bench.errors import UserError
from workloads.pipeline.actions import Action, Kind, Order, format_csv, message, needs, parse_csv, result

KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 999))
ROWS = st.lists(st.one_of(st.none(), ACTIONS), min_size=1, max_size=6).map(tuple)
ORDERS = st.lists(ROWS, min_size=1, max_size=5).map(tuple)


def test_an_action_prints_as_torchs() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert f"{Action(10, 'W', 31)}" == "10W31"


@given(ACTIONS)
def test_an_action_reads_back_here_and_in_torch(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert str(theirs._Action.from_str(str(action))) == str(action)


def test_spaces_around_an_action_are_none_of_it() -> None:
    assert Action.parse(" 2F0 ") == Action(2, "F", 0)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2SEND_F0", "2f0", "-1F0", "2F0 3F0", "1UNSHARD", "२F0"])
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        Action.parse(text)
    assert str(refusal.value) == (
        f"{text!r} is no action: it is a stage, F, B, I or W, and a microbatch, such as 2F0, or empty"
    )


def test_actions_sort_by_stage() -> None:
    assert sorted([Action(1, "B", 0), Action(0, "W", 5), Action(0, "F", 9)])[0] == Action(0, "F", 9)


@given(ORDERS)
def test_an_order_reads_back_from_its_csv(order: Order) -> None:
    if any(action is not None for row in order for action in row):
        assert parse_csv(format_csv(order)) == order


def test_a_csv_is_a_row_per_rank_and_a_cell_per_step() -> None:
    order: Order = ((Action(0, "F", 0), None, Action(0, "B", 0)), (None, Action(1, "F", 0), Action(1, "B", 0)))
    assert format_csv(order) == "0F0,,0B0\n,1F0,1B0\n"
    assert parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n") == order


def test_torchs_overlapped_pair_is_two_actions_in_sequence() -> None:
    row = (Action(1, "F", 0), Action(2, "B", 3), Action(1, "F", 1))
    assert parse_csv("(1F0;2B3)OVERLAP_F_B,1F1") == (row,)


def test_a_blank_end_of_a_file_is_no_rank() -> None:
    assert len(parse_csv("0F0,0B0\n1F0,1B0\n\n\n")) == 2


def test_a_blank_row_between_is_a_rank_that_does_nothing() -> None:
    assert parse_csv("0F0\n\n1F0\n")[1] == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0B0\n1F0,1SEND_B0\n", "rank 1, step 1: '1SEND_B0' is no action"),
        ("0F0,(1F0;2Q3)OVERLAP_F_B", "rank 0, step 1: '2Q3' is no action"),
        ("(1F0;2B3)OVERLAP", "rank 0, step 0: '(1F0;2B3)OVERLAP' is no action"),
        ("", "the schedule is empty"),
        ("\n\n", "the schedule is empty"),
        (",,\n,,", "the schedule is empty"),
    ],
)
def test_a_csv_that_cannot_be_read_is_refused_by_rank_and_step(text: str, told: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_csv(text)
    assert str(refusal.value).startswith(told)
    assert "\n" not in str(refusal.value)


def test_a_full_backward_leaves_an_input_gradient_behind() -> None:
    assert result(Action(1, "B", 2)) == result(Action(1, "I", 2)) == (1, "I", 2)
    assert result(Action(1, "F", 2)) == (1, "F", 2)
    assert result(Action(1, "W", 2)) == (1, "W", 2)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F0", None),
        ("1F0", (0, "F", 0)),
        ("3F2", (2, "F", 2)),
        ("3B2", None),
        ("3I2", None),
        ("2B1", (3, "I", 1)),
        ("0I1", (1, "I", 1)),
        ("0W1", None),
        ("2W1", None),
    ],
)
def test_a_message_comes_from_the_stage_beside(action: str, expected: object) -> None:
    assert message(Action.parse(action), 4) == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F0", ()),
        ("1F0", ((0, "F", 0),)),
        ("3B2", ((3, "F", 2),)),
        ("2I1", ((2, "F", 1), (3, "I", 1))),
        ("2B1", ((2, "F", 1), (3, "I", 1))),
        ("2W1", ((2, "I", 1),)),
    ],
)
def test_an_action_needs_its_own_stages_work_and_the_message(action: str, expected: object) -> None:
    assert needs(Action.parse(action), 4) == expected
