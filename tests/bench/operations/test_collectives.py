"""Every operation is correct in every variant, and its check detects every kind of wrong result."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.operations.collectives import Barrier
from parbench.bench.operations.operation import Operation
from parbench.bench.plan.cases import load_target
from parbench.bench.plan.catalogue import (
    DEFINITIONS,
    DTYPES,
    RUNNER_PARAMS,
    estimate_needed_bytes,
)
from parbench.bench.plan.groups import form_groups
from parbench.bench.world.world import World, select_subgroup
from parbench.workloads.torch_internals import list_allocations, open_profiler
from tests.support.ranks import Ranks

Params = dict[str, Any]
THIS_MODULE = "tests.bench.operations.test_collectives"
# A barrier moves no data and has a test of its own.
OPERATIONS = {
    definition.name: definition
    for definition in DEFINITIONS
    if definition.name.startswith(("collective", "p2p"))
    and definition.name != "collective.barrier"
}
PARAMS = {
    name: {param.name: param for param in definition.params}
    for name, definition in OPERATIONS.items()
}
GLOO_DTYPES = [dtype for dtype in DTYPES if not dtype.startswith("float8")]
SIZE = 96 * 101
# Nothing, few elements, an odd number per rank, and several repetitions of the data's table.
SIZES = [0, 16, 24, 8 * 65_521, 8 * 100_003]
UNEVEN: list[Params] = [{"skew": 0.0}, {"skew": 0.7}, {"skew": 1.0}]
WITHOUT_DATA_OF_RANK_1 = {
    "collective.broadcast",
    "collective.scatter",
    "p2p.unidirectional",
    "p2p.matrix",
}
# Bus bandwidth over algorithm bandwidth, for four ranks.
BUS_FACTORS = {
    "collective.all_reduce": 1.5,
    "collective.all_gather": 0.75,
    "collective.reduce_scatter": 0.75,
    "collective.all_to_all": 0.75,
    "collective.all_to_all_v": 0.75,
    "collective.broadcast": 1.0,
    "collective.reduce": 1.0,
    "collective.gather": 0.75,
    "collective.scatter": 0.75,
    "p2p.sendrecv": 1.0,
    "p2p.pingpong": 1.0,
    "p2p.unidirectional": 1.0,
    "p2p.bidirectional": 1.0,
    "p2p.matrix": 1.0,
    "p2p.pairwise": 1.0,
}


def prepare(world: World, name: str, **params: Any) -> Operation:
    """Build the operation as a rank of a run does."""
    case = OPERATIONS[name].build_case(params)
    arguments = {key: value for key, value in case.params.items() if key not in RUNNER_PARAMS}
    return cast(Operation, load_target(case.target)(world, **arguments))


def list_variants(name: str, num_ranks: int, group: str = "world") -> list[Params]:
    """Return every supported combination of type and reduction, and every root."""
    definition = OPERATIONS[name]
    spec = WorldSpec(nproc=num_ranks, backend="gloo", device="cpu")
    choices: dict[str, Any] = {"dtype": GLOO_DTYPES}
    for param in definition.params:
        if param.name == "redop":
            choices[param.name] = param.choices
    group_params = {"group": group} if "group" in PARAMS[name] else {}
    variants = []
    for values in product(*choices.values()):
        params = {"size_bytes": SIZE, **dict(zip(choices, values, strict=True))}
        whole = definition.complete({**params, **group_params})
        if definition.refuse(whole, spec) is None:
            variants.append(params)
        else:
            assert params["redop"] == "avg"
    if "root" in PARAMS[name]:
        group_size = len(form_groups(group, num_ranks)[0])
        for root in range(1, group_size):
            variants.append({"size_bytes": SIZE, "dtype": "float32", "root": root})
    return variants


def count_wrong_around_steps(
    world: World, name: str, cases: list[Params], group: str
) -> list[tuple[int, int]]:
    """Return the wrong elements before and after a step of each case, in all groups at once."""
    subgroup = select_subgroup(world, {"group": group, "concurrent": True})
    assert subgroup.world is not None
    counts = []
    for params in cases:
        operation = prepare(subgroup.world, name, **params)
        operation.reset()
        wrong_before_step = operation.check()
        operation.step()
        counts.append((wrong_before_step, operation.check()))
    return counts


def assert_correct(ranks: Ranks, name: str, cases: list[Params], group: str = "world") -> None:
    """Assert that results are wrong before a step where data moves, and right after it."""
    target = f"{THIS_MODULE}:count_wrong_around_steps"
    by_rank = ranks.call(target, name=name, cases=cases, group=group)
    for index, params in enumerate(cases):
        counts = [counts_of_rank[index] for counts_of_rank in by_rank]
        wrong_before_step = sum(count for count, _ in counts)
        wrong_after_step = sum(count for _, count in counts)
        has_data = params["size_bytes"] > 0
        assert (wrong_before_step > 0) == has_data, (name, group, params)
        assert wrong_after_step == 0, (name, group, params)


def swap_halves(operation: Operation, world: World) -> None:
    operation.call()
    if len(operation.output) >= 2:
        first, second = operation.output.chunk(2)
        copy = first.clone()
        first.copy_(second)
        second.copy_(copy)


def keep_stale_output(operation: Operation, world: World) -> None:
    """Do not communicate."""


def drop_rank_1(operation: Operation, world: World) -> None:
    """Send zeros instead of the data of rank 1."""
    if world.rank == 1:
        for tensor in find_tensors(operation):
            tensor.zero_()
    operation.call()


def change_last_element(operation: Operation, world: World) -> None:
    operation.call()
    operation.corrupt()


def broadcast_from_rank_1(operation: Operation, world: World) -> None:
    dist.broadcast(operation.output, group=world.group, group_src=1)


MUTATIONS: dict[str, Callable[[Operation, World], None]] = {
    "swapped halves": swap_halves,
    "stale output": keep_stale_output,
    "dropped rank": drop_rank_1,
    "changed element": change_last_element,
}
BROADCAST_MUTATIONS = {**MUTATIONS, "wrong root": broadcast_from_rank_1}


def find_tensors(operation: Operation) -> list[torch.Tensor]:
    """Return the input and output tensors that the operation's call uses."""
    call = operation.call
    if isinstance(call, partial):
        values = [*call.args, *call.keywords.values()]
    else:
        values = list(inspect.getclosurevars(call).nonlocals.values())
    tensors = []
    for value in values:
        items = value if isinstance(value, list) else [value]
        tensors += [item for item in items if isinstance(item, torch.Tensor)]
    return tensors


def count_wrong_of_mutants(
    world: World, name: str, dtypes: list[str]
) -> dict[tuple[str, str], int]:
    """Return the wrong elements of this rank after each mutated step, by mutation and type."""
    mutations = BROADCAST_MUTATIONS if name == "collective.broadcast" else MUTATIONS
    counts = {}
    for dtype, (mutation, mutate) in product(dtypes, mutations.items()):
        operation = prepare(world, name, size_bytes=4096 * 3, dtype=dtype)
        mutant = replace(operation, call=partial(mutate, operation, world))
        mutant.reset()
        mutant.step()
        counts[mutation, dtype] = mutant.check()
    return counts


def assert_mutants_detected(ranks: Ranks, name: str, dtypes: list[str]) -> None:
    by_rank = ranks.call(f"{THIS_MODULE}:count_wrong_of_mutants", name=name, dtypes=dtypes)
    for mutation, dtype in by_rank[0]:
        wrong = sum(counts[mutation, dtype] for counts in by_rank)
        harmless = mutation == "dropped rank" and name in WITHOUT_DATA_OF_RANK_1
        assert (wrong == 0) == harmless, (name, mutation, dtype)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_correct_and_checked(two_ranks: Ranks, name: str) -> None:
    cases = list_variants(name, 2)
    cases += [{"size_bytes": size} for size in SIZES]
    for params in UNEVEN:
        if params.keys() <= PARAMS[name].keys():
            cases.append({"size_bytes": 48_004, **params})
    assert_correct(two_ranks, name, cases)
    assert_mutants_detected(two_ranks, name, ["float32", "bfloat16", "int8"])


def test_operations_are_correct_on_four_ranks(four_ranks: Ranks) -> None:
    for name in OPERATIONS:
        cases: list[Params] = [{"size_bytes": SIZE}]
        if "root" in PARAMS[name]:
            cases.append({"size_bytes": SIZE, "root": 2})
        assert_correct(four_ranks, name, cases)


@pytest.mark.full
@pytest.mark.parametrize("group", ["world", "pairs", "dp=2 tp=2:dp"])
def test_variants_are_correct_in_groups(four_ranks: Ranks, group: str) -> None:
    for name in OPERATIONS:
        if group == "world" or "group" in PARAMS[name]:
            assert_correct(four_ranks, name, list_variants(name, 4, group), group)


@pytest.mark.full
def test_variants_are_correct_on_three_ranks() -> None:
    with Ranks(3) as three_ranks:
        for name in OPERATIONS:
            assert_correct(three_ranks, name, list_variants(name, 3))
            assert_mutants_detected(three_ranks, name, ["float32"])


def count_wrong_barriers(world: World) -> list[int]:
    """Return the check of a barrier before a step, after it, and after a corruption."""
    barrier = Barrier(world)
    counts = [barrier.check()]
    barrier.step()
    counts.append(barrier.check())
    barrier.corrupt()
    counts.append(barrier.check())
    return counts


def test_barrier_check_detects_early_exit(two_ranks: Ranks) -> None:
    assert two_ranks.call(f"{THIS_MODULE}:count_wrong_barriers") == [[1, 0, 1], [1, 0, 1]]


def describe_operations(world: World) -> dict[str, dict[str, Any]]:
    facts_by_name = {}
    for name in OPERATIONS:
        description = prepare(world, name, size_bytes=1 << 20).describe()
        rates = {work.name: work.amount for work in description.work}
        facts_by_name[name] = {**description.details, **rates, "hops": description.hops}
    return facts_by_name


def test_bus_bandwidth_follows_nccl_tests(four_ranks: Ranks) -> None:
    [facts_by_name, *_] = four_ranks.call(f"{THIS_MODULE}:describe_operations")
    assert facts_by_name.keys() == BUS_FACTORS.keys()
    for name, facts in facts_by_name.items():
        size = facts["size_bytes"]
        assert size == 1 << 20
        assert facts["algbw"] == size, name
        assert facts["busbw"] / size == BUS_FACTORS[name], name
        assert (facts["hops"] == 2) == (name == "p2p.pingpong"), name


def measure_all_peak_bytes(world: World, size_bytes: int) -> list[int]:
    """Return the most bytes that the tensors of each operation take until its second check."""
    peaks = []
    for name in OPERATIONS:
        with open_profiler(world.device, memory=True) as profiler:
            # The type with the most elements.
            operation = prepare(world, name, size_bytes=size_bytes, dtype="int8")
            for _ in range(2):
                operation.reset()
                operation.step()
                assert operation.check() == 0
            # To count wrong elements takes more memory than to find none.
            operation.corrupt()
            operation.check()
        changes = [num_bytes for _, num_bytes in list_allocations(profiler, world.device)]
        peaks.append(int(max(accumulate(changes))))
    return peaks


MAX_SMALL_BYTES = 4096
"""Bytes of counters and of other tensors that do not grow with the size."""


def test_operation_memory_is_within_request(two_ranks: Ranks) -> None:
    size = 8 << 20
    for peaks in two_ranks.call(f"{THIS_MODULE}:measure_all_peak_bytes", size_bytes=size):
        assert max(peaks) > estimate_needed_bytes(size) / 2
        assert max(peaks) <= estimate_needed_bytes(size) + MAX_SMALL_BYTES


def test_target_takes_declared_parameters() -> None:
    for definition in DEFINITIONS:
        arguments = list(inspect.signature(load_target(definition.target)).parameters)
        declared = [
            param.name for param in definition.params if param.name not in RUNNER_PARAMS
        ]
        assert arguments == ["world", *declared], definition.name
