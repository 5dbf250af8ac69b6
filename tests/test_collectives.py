"""Every operation is right in every type, and its check sees every kind of wrong."""

import inspect
import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from bench.cases import Definition, Setting
from bench.definitions import DEFINITIONS, OF_THE_RUNNER
from bench.dtypes import DTYPES, supports
from bench.groups import groups_of
from bench.operation import Operation
from bench.parts import Parts
from bench.runner import load_target
from bench.world import World

OPERATIONS = {
    definition.name: definition
    for definition in DEFINITIONS
    if definition.name.startswith(("collective", "p2p")) and definition.name != "collective.barrier"  # it has no data
}
JOINING = {name for name, definition in OPERATIONS.items() if "redop" in {param.name for param in definition.params}}
PLACED = [
    (name, placement)
    for name, definition in OPERATIONS.items()
    for param in definition.params
    if param.name == "placement"
    for placement in param.choices
]
NOTHING_OF_RANK_1 = {
    *("collective.broadcast", "collective.scatter"),
    *("p2p.unidirectional", "p2p.matrix", "p2p.pingpong"),
}
ONE_ROOT = {"collective.reduce", "collective.gather"}  # nothing is received elsewhere
GLOO_DTYPES = [dtype for dtype in DTYPES if supports("gloo", dtype)]
CONTRACT = {
    # name: (busbw factor, sent / size, received / size) for two ranks
    "collective.all_reduce": (1.0, 1.0, 1.0),
    "collective.all_gather": (0.5, 0.5, 1.0),
    "collective.reduce_scatter": (0.5, 1.0, 0.5),
    "collective.all_to_all": (0.5, 1.0, 1.0),
    "collective.broadcast": (1.0, 1.0, 1.0),
    "collective.all_to_all_v": (0.5, 1.0, 1.0),
    "collective.reduce": (1.0, 1.0, 1.0),
    "collective.gather": (0.5, 0.5, 1.0),
    "collective.scatter": (0.5, 1.0, 0.5),
    "collective.all_reduce_two_step": (1.0, 1.0, 1.0),
    "p2p.sendrecv": (1.0, 1.0, 1.0),
    "p2p.pingpong": (1.0, 1.0, 1.0),
    "p2p.unidirectional": (1.0, 1.0, 1.0),
    "p2p.bidirectional": (1.0, 1.0, 1.0),
    "p2p.matrix": (1.0, 1.0, 1.0),
    "p2p.round": (1.0, 1.0, 1.0),
}


def prepared(world: World, name: str, **params: Any) -> Operation:
    case = OPERATIONS[name].case(params)
    given = {key: value for key, value in case.params.items() if key not in OF_THE_RUNNER}
    return cast(Operation, load_target(case.target)(world, **given))


def check_around_step(world: World, name: str, params: dict[str, Any]) -> tuple[int, int]:
    """Return how much is wrong before a step and after it."""
    operation = prepared(world, name, **params)
    operation.reset()
    before = operation.check()
    operation.step()
    return before, operation.check()


def check_mutant(world: World, name: str, mutation: str, dtype: str, size_bytes: int = 4096) -> int:
    """Return how much is wrong after a step that goes wrong on purpose."""
    operation = prepared(world, name, size_bytes=size_bytes, dtype=dtype)
    mutant = replace(operation, call=MUTATIONS[mutation](operation, world))
    mutant.reset()
    mutant.step()
    return mutant.check()


def _swapped(operation: Operation, world: World) -> Any:
    def call() -> None:
        operation.call()
        if len(operation.output) < 2:
            return  # nothing is received here
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
        operation.corrupt()

    return call


MUTATIONS = {"swapped": _swapped, "stale": _stale, "dropped": _dropped, "one element": _one_late_element}


def tensors_of(operation: Operation) -> list[torch.Tensor]:
    """Return every tensor that the operation's call holds: its inputs and outputs."""
    call = operation.call
    if isinstance(call, partial):
        held = [*call.args, *call.keywords.values()]
        held += [item for value in held if isinstance(value, list) for item in value]
    else:
        held = list(inspect.getclosurevars(call).nonlocals.values())
    return [value for value in held if isinstance(value, torch.Tensor)]


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


def around_step(ranks: Ranks, name: str, **params: Any) -> tuple[int, list[int]]:
    """Return how much is wrong on all ranks before a step, and on each after it."""
    answers = ranks.call("test_collectives:check_around_step", name=name, params=params)
    return sum(before for before, _ in answers), [after for _, after in answers]


@pytest.mark.parametrize("dtype", GLOO_DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_is_right_and_nothing_is_right_before_it(two_ranks: Ranks, name: str, dtype: str) -> None:
    redop = {"redop": "max"} if dtype == "bool" and name in JOINING else {}
    before, after = around_step(two_ranks, name, size_bytes=48_000, dtype=dtype, **redop)
    assert after == [0, 0]
    assert before > 0


@pytest.mark.parametrize("redop", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("name", sorted(JOINING))
def test_every_reduction_is_right_or_refused(two_ranks: Ranks, name: str, dtype: str, redop: str) -> None:
    definition = OPERATIONS[name]
    case = definition.case({"size_bytes": 48_000, "dtype": dtype, "redop": redop})
    reason = definition.refuse(case.params, Setting(nproc=2, backend="gloo", device="cpu"))
    if reason is None:
        assert around_step(two_ranks, name, size_bytes=48_000, dtype=dtype, redop=redop)[1] == [0, 0]
    else:
        assert reason.startswith(("the average of", "the sum of bool"))


@pytest.mark.parametrize(("name", "placement"), PLACED)
def test_either_placement_is_right(two_ranks: Ranks, name: str, placement: str) -> None:
    before, after = around_step(two_ranks, name, size_bytes=48_000, placement=placement)
    assert after == [0, 0]
    assert before > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_at_all_can_be_sent(two_ranks: Ranks, name: str) -> None:
    assert around_step(two_ranks, name, size_bytes=0) == (0, [0, 0])


@pytest.mark.parametrize("params", [{"skew": 0.0}, {"skew": 0.7}, {"skew": 1.0}, {"traffic": "1 0;5 2"}])
def test_uneven_shards_arrive_as_they_were_sent(two_ranks: Ranks, params: dict[str, Any]) -> None:
    assert around_step(two_ranks, "collective.all_to_all_v", size_bytes=48_004, **params)[1] == [0, 0]


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
    if mutation == "dropped" and name in NOTHING_OF_RANK_1:
        assert wrong == [0, 0]
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


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", ["collective.reduce", "collective.gather", "collective.scatter"])
def test_every_rooted_operation_is_right_from_either_root(two_ranks: Ranks, name: str, root: int) -> None:
    assert around_step(two_ranks, name, size_bytes=4096, root=root)[1] == [0, 0]


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
    assert taken == ["world", *(param.name for param in definition.params if param.name not in OF_THE_RUNNER)]


def wrong_in_groups(world: World, name: str, groups: list[str]) -> tuple[int, list[str]]:
    """Return how many variants of an operation ran in groups, all at once, and which of them went wrong here."""
    parts = Parts(world)
    ran, wrong = 0, []
    for group in groups:
        world_of = parts.of({"group": group, "together": True}).world
        assert world_of is not None
        for params in variants(name, group, world):
            ran += 1
            before, after = check_around_step(world_of, name, params)
            if after or not (before or name in NOTHING_OF_RANK_1 | ONE_ROOT):
                wrong.append(f"{group} {params}: {before} wrong before, {after} after")
    return ran, wrong


def variants(name: str, group: str, world: World) -> list[dict[str, Any]]:
    """Return every type, reduction, placement and root that is not refused, at an odd size."""
    definition = OPERATIONS[name]
    setting = Setting(nproc=len(world.hosts), backend="gloo", device="cpu")
    choices = {param.name: param.choices for param in definition.params if param.name in ("redop", "placement")}
    found = []
    for dtype, *rest in itertools.product(GLOO_DTYPES, *choices.values()):
        given = {"size_bytes": 96 * 1001, "dtype": dtype, **dict(zip(choices, rest, strict=True))}
        if definition.refuse(definition.case({**given, "group": group}).params, setting) is None:
            found.append(given)
    if "root" in {param.name for param in definition.params}:
        n = len(groups_of(group, setting.nproc)[0])
        found += [{"size_bytes": 96 * 1001, "dtype": "float32", "root": root} for root in range(1, n)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "groups"),
    [
        (3, ["world", "node"]),
        (4, ["world", "node", "pairs", "contiguous:2", "strided:2", "dp=2 tp=2:dp", "dp=2 tp=2:tp", "dp=4 tp=1:dp"]),
    ],
)
def test_every_variant_is_right_in_every_group_of_more_ranks(size: int, groups: list[str]) -> None:
    in_groups = [name for name, definition in OPERATIONS.items() if "group" in {p.name for p in definition.params}]
    with Ranks(size) as ranks:
        for name in in_groups:
            for ran, wrong in ranks.call("test_collectives:wrong_in_groups", name=name, groups=groups):
                assert ran >= len(groups) * len(GLOO_DTYPES)
                assert wrong == []
        for name in set(OPERATIONS) - set(in_groups):
            assert around_step(ranks, name, size_bytes=96 * 1001)[1] == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_every_mutation_is_caught_on_more_ranks(size: int) -> None:
    with Ranks(size) as ranks:
        for name, mutation in itertools.product(OPERATIONS, MUTATIONS):
            arguments = {"name": name, "mutation": mutation, "dtype": "float32", "size_bytes": 4096 * 3}
            wrong = ranks.call("test_collectives:check_mutant", **arguments)
            assert (sum(wrong) > 0) != (mutation == "dropped" and name in NOTHING_OF_RANK_1), (name, mutation)
