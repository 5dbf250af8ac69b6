"""The calls of a dispatcher have the analytical bytes of balanced routing."""

import pytest

from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.expert_parallel.dispatchers import DISPATCHERS

SYMBOLS = {
    "tokens": 6,
    "ranks": 4,
    "experts": 8,
    "top_k": 2,
    "hidden": 10,
    "bytes_per_element": 4,
}
ROW = 10 * 4


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("all_to_all", 8 * 8 + 2 * (6 * 2 * ROW), 2 * (6 * 2 * ROW)),
        ("allgather", 4 * (6 * 2 * 4 + 2 * 6 * ROW + 6 * 2 * 4), 4 * (2 * 6 * ROW + 6 * 2 * 4)),
    ],
)
def test_bytes_of_passes(name: str, forward: float, backward: float) -> None:
    """Each of four ranks keeps a quarter."""
    totals = [0.0, 0.0]
    for call in DISPATCHERS[name]("tokens", "ranks"):
        sent = sent_bytes(call.op, Equation(text=call.size, symbols=SYMBOLS).value, 4)
        totals[0] += call.forward * sent
        totals[1] += call.backward * sent
    assert totals == pytest.approx([forward * 3 / 4, backward * 3 / 4])
