"""An operation restores, calls, checks, and says what it moves."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from bench.errors import UserError
from bench.operation import Operation, describe
from bench.subject import Description

WORK = cast(dist.Work, object())


def doubling(found: float = 2.0, count: int = 4, **more: Any) -> Operation:
    """Return what fills its output with ``found`` where 2 is expected."""
    output = torch.empty(count)
    return Operation(
        call=lambda: output.fill_(found),
        restore=lambda: output.fill_(float("nan")),
        output=output,
        expected=lambda: torch.full((count,), 2.0),
        description=Description(headline="here"),
        **more,
    )


def issuing(answer: object) -> Operation:
    def call(*, async_op: bool = False) -> object:
        return answer if async_op else None

    empty = torch.empty(0)
    return Operation(
        call=call,
        restore=lambda: None,
        output=empty,
        expected=lambda: empty,
        description=Description(),
        asynchronous=True,
    )


def test_a_step_is_right_after_the_call_and_wrong_before_it() -> None:
    operation = doubling()
    operation.reset()
    assert operation.check() == 4
    operation.step()
    assert operation.check() == 0
    assert operation.describe().headline == "here"


def test_a_small_difference_is_wrong_unless_it_is_within_the_tolerance() -> None:
    for tolerance, wrong in ((0.0, 4), (0.004, 4), (0.006, 0)):
        operation = doubling(2.01, tolerance=tolerance)
        operation.step()
        assert operation.check() == wrong


def test_no_tolerance_lets_poison_pass() -> None:
    operation = doubling(tolerance=0.5)
    operation.reset()
    assert operation.check() == 4


def test_a_corrupt_result_has_one_wrong_element() -> None:
    operation = doubling()
    operation.step()
    operation.corrupt()
    assert operation.check() == 1


def test_nothing_can_be_corrupted_where_nothing_is_received() -> None:
    operation = doubling(count=0)
    operation.step()
    operation.corrupt()
    assert operation.check() == 0


@pytest.mark.parametrize(("answer", "works"), [(WORK, [WORK]), ([WORK, WORK], [WORK, WORK]), (None, []), ([], [])])
def test_what_was_issued_is_what_to_wait_for(answer: object, works: list[object]) -> None:
    assert issuing(answer).issue() == works


def test_an_operation_without_an_asynchronous_form_cannot_be_issued() -> None:
    with pytest.raises(UserError, match="mode async"):
        doubling().issue()


def test_algorithm_bandwidth_is_of_the_size_and_bus_bandwidth_that_times_the_factor() -> None:
    description = describe(1000, 1.75, 600, 700, notes=("a note",), hops=2)
    assert {work.name: (work.amount, work.unit) for work in description.work} == {
        "algbw": (1000, "B/s"),
        "busbw": (1750, "B/s"),
    }
    assert description.details == {
        "size_bytes": 1000,
        "send_bytes": 600,
        "recv_bytes": 700,
        "busbw_factor": 1.75,
        "convention": "nccl-tests",
    }
    assert (description.notes, description.hops) == (("a note",), 2)
