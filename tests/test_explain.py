"""An explanation's parts add up to the wall of a traced step, its bytes to the closed form, and a late rank is seen."""

import time
from typing import Any

import pytest
from ranks import Ranks
from test_communication import EXPECTED, trained
from torch.distributed import distributed_c10d

from bench.subject import Explanation
from bench.world import World
from workloads.trace import Trace, trace_step

pytestmark = pytest.mark.measures

LATE_SECONDS = 0.01
ONCE = {
    "compute",
    "exposed_copy",
    "idle",
    "residual",
    "ect",
    "comm_wait",
    "comm_skew",
    "contention",
    "tracing_overhead",
}
BY_AXIS = {"bytes_sent", "bytes_expected", "bytes_ratio", "exposed_comm", "comm_transfer"}
TWO_AXES = {"tp:tp_fsdp": ("dp", "tp"), "fsdp:hsdp": ("replicate", "shard")}


def made(world: World, name: str) -> Any:
    return trained(world, name, **({"tp": 2} if name == "tp:tp_fsdp" else {}))


def explained(world: World, name: str, late_seconds: float = 0.0) -> tuple[Explanation, list[float]]:
    """Return the explanation, and the walls of this rank's traced steps with communication; the last rank is late."""
    step, traces = made(world, name), []

    def remember(*args: Any) -> Trace:
        traces.append(trace_step(*args))
        return traces[-1]

    def begin() -> None:
        step.reset()
        world.barrier()
        if world.rank == world.size - 1:
            time.sleep(late_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workloads.explain.trace_step", remember)
        explanation = step.explain(begin, 1e-6)
    step.close()
    return explanation, [trace.wall_seconds for trace in traces[::3]]


def groups_left_by_a_step_that_fails(world: World) -> int:
    """Return how many more groups there are after an explanation that was broken off while taking steps."""
    step = made(world, "ddp:prepare")
    before, beginnings = len(distributed_c10d._world.pg_map), []

    def begin() -> None:
        step.reset()
        world.barrier()

    def fail(*_: object) -> Trace:
        beginnings.append(len(distributed_c10d._world.pg_map))
        raise ArithmeticError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workloads.explain.trace_step", fail)
        with pytest.raises(ArithmeticError):
            step.explain(begin, 0.0)
    assert beginnings == [before + 1]
    step.close()
    return len(distributed_c10d._world.pg_map) - before


def value(explanation: Explanation, name: str) -> float:
    found = explanation.metrics[name].value
    assert found is not None
    return found


def assert_parts_add_up(told: list[tuple[Explanation, list[float]]]) -> None:
    """The wall is the slowest rank's, in the iteration of median wall."""
    slowest = sorted(max(walls) for walls in zip(*(walls for _, walls in told), strict=True))
    wall = slowest[(len(slowest) - 1) // 2]
    for explanation, _ in told:
        exposed = [name for name in explanation.metrics if name.startswith("exposed_comm.")]
        parts = [value(explanation, name) for name in ("compute", *exposed, "exposed_copy", "idle", "residual")]
        assert sum(parts) == pytest.approx(wall, abs=1e-6)
        assert min(parts[:-1]) >= 0
        assert parts[0] > 0
        assert abs(parts[-1]) < 0.2 * wall


def test_one_axis_has_a_metric_of_each_kind(two_ranks: Ranks) -> None:
    for explanation, walls in two_ranks.call("test_explain:explained", name="ddp:prepare"):
        assert len(walls) == 3
        assert explanation.metrics.keys() >= ONCE | {f"{kind}.dp" for kind in BY_AXIS}
        assert {name.partition(".")[2] for name in explanation.metrics if name.partition(".")[0] in BY_AXIS} == {"dp"}


@pytest.mark.parametrize("name", TWO_AXES)
def test_two_axes_have_a_metric_of_each_kind_each(two_ranks: Ranks, name: str) -> None:
    for explanation, _ in two_ranks.call("test_explain:explained", name=name):
        found = {name for name in explanation.metrics if name.partition(".")[0] in BY_AXIS}
        assert found == {f"{kind}.{axis}" for kind in BY_AXIS for axis in TWO_AXES[name]}
        assert explanation.metrics.keys() >= ONCE


@pytest.mark.parametrize("name", ["ddp:prepare", "fsdp:zero3", "tp:tp", "tp:tp_fsdp"])
def test_the_parts_of_a_traced_step_add_up_to_its_wall(two_ranks: Ranks, name: str) -> None:
    assert_parts_add_up(two_ranks.call("test_explain:explained", name=name))


@pytest.mark.parametrize("name", EXPECTED)
def test_counted_bytes_are_those_of_the_closed_form_and_calls_are_summed_by_kind(two_ranks: Ranks, name: str) -> None:
    [axis] = {axis for axis, _, _, _ in EXPECTED[name]}
    for explanation, _ in two_ranks.call("test_explain:explained", name=name):
        assert value(explanation, f"bytes_ratio.{axis}") == 1
        assert value(explanation, f"bytes_sent.{axis}") == value(explanation, f"bytes_expected.{axis}") > 0
        calls = explanation.details["comm_calls"]
        found = {(call["axis"], call["op"], call["bytes"], call["ranks"]): call["count"] for call in calls}
        assert len(calls) == len(found)
        assert found == EXPECTED[name]


def test_a_late_rank_is_waited_for_and_makes_communication_no_slower(two_ranks: Ranks) -> None:
    """In the best of a few tries: others use this machine too."""
    tries = []
    for _ in range(4):
        [(punctual, _), _] = two_ranks.call("test_explain:explained", name="ddp:prepare")
        [(late, _), _] = two_ranks.call("test_explain:explained", name="ddp:prepare", late_seconds=LATE_SECONDS)
        more = value(late, "comm_skew") - value(punctual, "comm_skew")
        tries.append((more, value(late, "comm_transfer.dp"), value(late, "comm_wait")))
        if _is_as_late(*tries[-1]):
            break
    assert _is_as_late(*tries[-1]), tries


def _is_as_late(more_skew: float, transfer: float, wait: float) -> bool:
    return 0.5 * LATE_SECONDS < more_skew < 2 * LATE_SECONDS and transfer < 0.5 * LATE_SECONDS < wait


def test_every_rank_tells_the_same_of_time(two_ranks: Ranks) -> None:
    first, second = (explanation for explanation, _ in two_ranks.call("test_explain:explained", name="ddp:prepare"))
    names = ONCE | {"exposed_comm.dp", "comm_transfer.dp"}
    assert {name: first.metrics[name] for name in names} == {name: second.metrics[name] for name in names}


def test_silent_groups_are_given_back_where_a_step_fails(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_explain:groups_left_by_a_step_that_fails") == [0, 0]


@pytest.mark.slow
def test_four_ranks_on_two_axes_add_up_and_send_as_the_closed_forms_say() -> None:
    with Ranks(4) as ranks:
        for name, axes in TWO_AXES.items():
            told = ranks.call("test_explain:explained", name=name)
            assert_parts_add_up(told)
            for explanation, _ in told:
                for axis in axes:
                    assert value(explanation, f"bytes_ratio.{axis}") == pytest.approx(1)
                    assert value(explanation, f"comm_transfer.{axis}") > 0
