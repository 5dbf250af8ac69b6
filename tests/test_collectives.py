"""Every operation is right in every type, and its check sees every kind of wrong."""

import inspect
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.cases import Definition
from bench.definitions import DEFINITIONS
from bench.dtypes import DTYPES, supports
from bench.operation import Operation
from bench.runner import load_target
from bench.world import World

OPERATIONS = {definition.name: definition for definition in DEFINITIONS}
GLOO_DTYPES = [dtype for dtype in DTYPES if supports("gloo", dtype)]
CONTRACT = {
    # name: (busbw factor, sent / size, received / size) for two ranks
    "collective.all_reduce": (1.0, 1.0, 1.0),
    "collective.all_gather": (0.5, 0.5, 1.0),
    "collective.reduce_scatter": (0.5, 1.0, 0.5),
    "collective.all_to_all": (0.5, 1.0, 1.0),
    "collective.broadcast": (1.0, 1.0, 1.0),
    "p2p.sendrecv": (1.0, 1.0, 1.0),
}


def prepared(world: World, name: str, **params: Any) -> Operation:
    case = OPERATIONS[name].case(params)
    given = {key: value for key, value in case.params.items() if key != "mode"}
    return cast(Operation, load_target(case.target)(world, **given))


def check_around_step(world: World, name: str, params: dict[str, Any]) -> tuple[int, int]:
    """Return how much is wrong before a step and after it."""
    operation = prepared(world, name, **params)
    operation.reset()
    before = operation.check()
    operation.step()
    return before, operation.check()


def check_mutant(world: World, name: str, mutation: str, dtype: str) -> int:
    """Return how much is wrong after a step that goes wrong on purpose."""
    operation = prepared(world, name, size_bytes=4096, dtype=dtype)
    mutant = replace(operation, call=MUTATIONS[mutation](operation, world))
    mutant.reset()
    mutant.step()
    return mutant.check()


def _swapped(operation: Operation, world: World) -> Any:
    def call() -> None:
        operation.call()
        first, second = operation.output.chunk(2)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    return call


def _stale(operation: Operation, world: World) -> Any:
    return lambda: None


def _dropped(operation: Operation, world: World) -> Any:
    """Rank 1's contribution is lost: the others get zeros from it."""

    def call() -> None:
        if world.rank == 1:
            for tensor in tensors_of(operation):
                tensor.zero_()
        operation.call()

    return call


def _one_late_element(operation: Operation, world: World) -> Any:
    def call() -> None:
        operation.call()
        operation.output[-1] = 0

    return call


MUTATIONS = {"swapped": _swapped, "stale": _stale, "dropped": _dropped, "one element": _one_late_element}


def tensors_of(operation: Operation) -> list[torch.Tensor]:
    """Return every tensor that the operation's call closes over: its inputs and outputs."""
    cells = inspect.getclosurevars(operation.call).nonlocals.values()
    return [value for value in cells if isinstance(value, torch.Tensor)]


def broadcast_from_another_root(world: World) -> int:
    operation = prepared(world, "collective.broadcast", size_bytes=4096, root=0)
    operation.reset()
    dist.broadcast(operation.output, group=world.group, group_src=1)
    return operation.check()


def sent_the_wrong_way(world: World) -> int:
    """With two ranks both ways are one: what comes from oneself instead of the neighbour is the wrong rank's data."""
    operation = prepared(world, "p2p.sendrecv", size_bytes=4096)
    operation.reset()
    mine = next(tensor for tensor in tensors_of(operation) if tensor is not operation.output)
    operation.output.copy_(mine)
    return operation.check()


def described(world: World, name: str) -> dict[str, Any]:
    description = prepared(world, name, size_bytes=1 << 20).describe()
    return {**description.details, **{work.name: work.amount for work in description.work}}


@pytest.mark.parametrize("dtype", GLOO_DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_is_right_and_nothing_is_right_before_it(two_ranks: Ranks, name: str, dtype: str) -> None:
    for before, after in two_ranks.call(
        "test_collectives:check_around_step", name=name, params={"size_bytes": 48_000, "dtype": dtype}
    ):
        assert after == 0
        # a broadcast's root has nothing to receive, so nothing of its own to get wrong
        assert before > 0 or name == "collective.broadcast"


@pytest.mark.parametrize("size_bytes", [16, 24, 8 * 65_521, 8 * 100_003])
@pytest.mark.parametrize("name", OPERATIONS)
def test_small_odd_and_prime_sizes_are_right(two_ranks: Ranks, name: str, size_bytes: int) -> None:
    answers = two_ranks.call("test_collectives:check_around_step", name=name, params={"size_bytes": size_bytes})
    assert [after for _, after in answers] == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_mutation_is_caught(two_ranks: Ranks, name: str, mutation: str, dtype: str) -> None:
    wrong = two_ranks.call("test_collectives:check_mutant", name=name, mutation=mutation, dtype=dtype)
    if name == "collective.broadcast" and mutation == "dropped":
        assert wrong == [0, 0]  # rank 1 is not the root: nothing of it is needed
    else:
        assert sum(wrong) > 0


def test_a_wrong_root_is_caught(two_ranks: Ranks) -> None:
    assert sum(two_ranks.call("test_collectives:broadcast_from_another_root")) > 0


@pytest.mark.parametrize("root", [0, 1])
def test_either_root_is_right(two_ranks: Ranks, root: int) -> None:
    answers = two_ranks.call(
        "test_collectives:check_around_step", name="collective.broadcast", params={"size_bytes": 4096, "root": root}
    )
    assert [after for _, after in answers] == [0, 0]
    assert answers[1 - root][0] > 0


def test_data_of_the_wrong_rank_is_caught(two_ranks: Ranks) -> None:
    assert min(two_ranks.call("test_collectives:sent_the_wrong_way")) > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_and_bus_bandwidth_follow_the_convention(two_ranks: Ranks, name: str) -> None:
    factor, sent, received = CONTRACT[name]
    for facts in two_ranks.call("test_collectives:described", name=name):
        assert facts["convention"] == "nccl-tests"
        assert facts["algbw"] == facts["size_bytes"] == 1 << 20
        assert facts["busbw"] == factor * (1 << 20)
        assert (facts["send_bytes"], facts["recv_bytes"]) == (sent * (1 << 20), received * (1 << 20))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_the_function_takes_exactly_the_declared_parameters(definition: Definition) -> None:
    taken = list(inspect.signature(load_target(definition.target)).parameters)
    assert taken == ["world", *(param.name for param in definition.params if param.name != "mode")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_are_right_too(size: int) -> None:
    with Ranks(size) as ranks:
        for name in OPERATIONS:
            answers = ranks.call(
                "test_collectives:check_around_step", name=name, params={"size_bytes": 24 * 1001, "dtype": "int8"}
            )
            assert [after for _, after in answers] == [0] * size, name
