"""An action prints as torch's does and reads back; an order is torch's CSV; what an action needs is the pipeline."""

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from torch.distributed.pipelining import schedules as theirs

from bench.results.details import Action, ActionKind
from workloads.pipeline_parallel.actions import Order, format_csv, message, needs, parse_csv, result

KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 999))
ROWS = st.lists(st.one_of(st.none(), ACTIONS), min_size=1, max_size=6).map(tuple)
ORDERS = st.lists(ROWS, min_size=1, max_size=5).map(tuple)


def test_an_action_prints_as_torchs_reads_back_and_sorts_by_stage() -> None:
    written = {"2F0": Action(2, "F", 0), "10W31": Action(10, "W", 31), "3I999": Action(3, "I", 999)}
    for text, action in written.items():
        assert str(action) == f"{action}" == str(theirs._Action.from_str(text)) == text
        assert Action.parse(f" {text} ") == action
    assert sorted([Action(1, "B", 0), Action(0, "W", 5), Action(0, "F", 9)])[0] == Action(0, "F", 9)


def test_what_is_no_action_is_refused_with_an_example() -> None:
    for text in ("", "F0", "2F", "2X0", "2SEND_F0", "2f0", "-1F0", "2F0 3F0", "1UNSHARD", "२F0"):
        assert refusal(Action.parse, text) == (
            f"{text!r} is no action: it is a stage, F, B, I or W, and a microbatch, such as 2F0, or empty"
        )


@settings(max_examples=50)
@given(ORDERS)
def test_an_order_reads_back_from_its_csv(order: Order) -> None:
    if any(action is not None for row in order for action in row):
        assert parse_csv(format_csv(order)) == order


def test_a_csv_is_a_row_per_rank_and_a_cell_per_step() -> None:
    order: Order = ((Action(0, "F", 0), None, Action(0, "B", 0)), (None, Action(1, "F", 0), Action(1, "B", 0)))
    assert format_csv(order) == "0F0,,0B0\n,1F0,1B0\n"
    assert parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n\n\n") == order  # a blank end of a file is no rank
    assert parse_csv("0F0\n\n1F0\n")[1] == ()  # a blank row between is one that does nothing
    # torch's overlapped pair is two actions in sequence
    row = (Action(1, "F", 0), Action(2, "B", 3), Action(1, "F", 1))
    assert parse_csv("(1F0;2B3)OVERLAP_F_B,1F1") == (row,)


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
