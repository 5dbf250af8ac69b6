"""Every operation is right in every type, from the right rank, and its check sees every kind of wrong."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.operations.operation import DataPattern, Operation, count_wrong
from parbench.bench.operations.p2p import round_of_pairs, sendrecv
from parbench.bench.plan.catalogue import DEFINITIONS, DTYPES, OF_THE_RUNNER, bytes_needed
from parbench.bench.plan.groups import groups_of
from parbench.bench.rank.runner import load_target
from parbench.bench.world.torch_compat import allocations, profiling
from parbench.bench.world.world import Subgroups, World
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

OPERATIONS = {
    definition.name: definition
    for definition in DEFINITIONS
    if definition.name.startswith(("collective", "p2p"))
    and definition.name != "collective.barrier"  # it has no data
}
PARAMS = {
    name: {param.name: param for param in definition.params}
    for name, definition in OPERATIONS.items()
}
NOTHING_OF_RANK_1 = {
    *("collective.broadcast", "collective.scatter"),
    *("p2p.unidirectional", "p2p.matrix", "p2p.pingpong"),
}
GLOO_DTYPES = [dtype for dtype in DTYPES if not dtype.startswith("float8")]
SIZES = (0, 16, 24, 8 * 65_521, 8 * 100_003)
UNEVEN: list[dict[str, Any]] = [{"skew": 0.0}, {"skew": 0.7}, {"skew": 1.0}, {"traffic": "1 0;5 2"}]
CONTRACT = {
    # (busbw factor, sent / size, received / size) for four ranks
    (1.5, 1.0, 1.0): ("all_reduce", "all_reduce_two_step"),
    (0.75, 1.0, 1.0): ("all_to_all", "all_to_all_v"),
    (0.75, 0.25, 1.0): ("all_gather", "all_gather_v", "gather"),
    (0.75, 1.0, 0.25): ("reduce_scatter", "scatter"),
    (1.0, 1.0, 1.0): (
        *(
            "broadcast",
            "reduce",
            "sendrecv",
            "pingpong",
            "unidirectional",
            "bidirectional",
            "matrix",
            "pairwise",
        ),
    ),
}


def prepared(world: World, name: str, **params: Any) -> Operation:
    case = OPERATIONS[name].case(params)
    given = {key: value for key, value in case.params.items() if key not in OF_THE_RUNNER}
    return cast(Operation, load_target(case.target)(world, **given))


def variants(
    name: str, nproc: int, group: str = "world", size_bytes: int = 96 * 1001
) -> list[dict[str, Any]]:
    """Return every type, reduction, placement and root that is not refused."""
    spec = WorldSpec(nproc=nproc, backend="gloo", device="cpu")
    choices = {
        key: param.choices for key, param in PARAMS[name].items() if key in ("redop", "placement")
    }
    found = []
    for dtype, *rest in itertools.product(GLOO_DTYPES, *choices.values()):
        given = {"size_bytes": size_bytes, "dtype": dtype, **dict(zip(choices, rest, strict=True))}
        of_group = {} if group == "world" else {"group": group}
        reason = OPERATIONS[name].refuse(OPERATIONS[name].whole({**given, **of_group}), spec)
        assert reason is None or reason.startswith(("the average of", "the sum of bool")), reason
        found += [given] if reason is None else []
    if "root" in PARAMS[name]:
        n = len(groups_of(group, nproc)[0])
        found += [
            {"size_bytes": size_bytes, "dtype": "float32", "root": root} for root in range(1, n)
        ]
    return found


def around_steps(
    world: World, name: str, cases: list[dict[str, Any]], group: str
) -> list[tuple[int, int]]:
    """Return how much is wrong before a step and after it, for each case, in all groups at once."""
    part = Subgroups(world).of({"group": group, "concurrent": True})
    assert part.world is not None
    found = []
    for params in cases:
        operation = prepared(part.world, name, **params)
        operation.reset()
        before = operation.check()
        operation.step()
        found.append((before, operation.check()))
    return found


def mutants(world: World, name: str, dtypes: list[str]) -> dict[tuple[str, str], int]:
    """Return how much is wrong after steps that go wrong on purpose."""
    found = {}
    for dtype, (mutation, mutate) in itertools.product(dtypes, MUTATIONS.items()):
        operation = prepared(world, name, size_bytes=4096 * 3, dtype=dtype)
        if mutation == "wrong root" and name != "collective.broadcast":
            continue
        mutant = replace(operation, call=mutate(operation, world))
        mutant.reset()
        mutant.step()
        found[mutation, dtype] = mutant.check()
    return found


def described(world: World) -> dict[str, dict[str, Any]]:
    descriptions = {
        name: prepared(world, name, size_bytes=1 << 20).describe() for name in OPERATIONS
    }
    rates = {name: {work.name: work.amount for work in d.work} for name, d in descriptions.items()}
    return {name: {**d.details, **rates[name], "hops": d.hops} for name, d in descriptions.items()}


def most_held(world: World, size_bytes: int) -> dict[tuple[str, str, str], float]:
    """Return how many times its size each operation's tensors take at most, from its making to its second check."""
    found = {}
    for name, dtype in product(OPERATIONS, ("float32", "int8")):
        for placement in (
            PARAMS[name]["placement"].choices if "placement" in PARAMS[name] else ("",)
        ):
            more = {"placement": placement} if placement else {}
            with profiling(world.device, memory=True) as profiler:
                operation = prepared(world, name, size_bytes=size_bytes, dtype=dtype, **more)
                for _ in range(2):
                    operation.reset()
                    operation.step()
                    assert operation.check() == 0
                    operation.corrupt()  # to count takes more than to compare
                    operation.check()
            found[name, dtype, str(placement)] = (
                max(itertools.accumulate(allocations(profiler))) / size_bytes
            )
    return found


def _swapped(operation: Operation, world: World) -> Callable[[], None]:
    def call() -> None:
        operation.call()
        if len(operation.output) >= 2:  # else nothing is received here
            first, second = operation.output.chunk(2)
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    return call


def _stale(operation: Operation, world: World) -> Callable[[], None]:
    return lambda: None


def _dropped(operation: Operation, world: World) -> Callable[[], None]:
    """Rank 1's contribution is lost: the others get zeros from it."""

    def call() -> None:
        for tensor in tensors_of(operation) if world.rank == 1 else ():
            tensor.zero_()
        operation.call()

    return call


def _one_late_element(operation: Operation, world: World) -> Callable[[], None]:
    def call() -> None:
        operation.call()
        operation.corrupt()

    return call


def _wrong_root(operation: Operation, world: World) -> Callable[[], object]:
    return lambda: dist.broadcast(operation.output, group=world.group, group_src=1)


MUTATIONS: dict[str, Callable[[Operation, World], Callable[[], object]]] = {
    "swapped": _swapped,
    "stale": _stale,
    "dropped": _dropped,
    "one element": _one_late_element,
    "wrong root": _wrong_root,
}


def tensors_of(operation: Operation) -> list[torch.Tensor]:
    """Return every tensor that the operation's call holds: its inputs and outputs."""
    call = operation.call
    if isinstance(call, partial):
        held = [*call.args, *call.keywords.values()]
        held += [item for value in held if isinstance(value, list) for item in value]
    else:
        held = list(inspect.getclosurevars(call).nonlocals.values())
    return [value for value in held if isinstance(value, torch.Tensor)]


def assert_right(
    ranks: Ranks, name: str, cases: list[dict[str, Any]], group: str = "world"
) -> None:
    """Every rank is right after each step, and some are wrong before it where anything is sent."""
    by_rank = ranks.call(
        "tests.bench.operations.test_collectives:around_steps", name=name, cases=cases, group=group
    )
    for params, answers in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert [after for _, after in answers] == [0] * ranks.size, (name, group, params)
        assert (sum(before for before, _ in answers) > 0) == (params["size_bytes"] > 0), (
            name,
            group,
            params,
        )


def assert_caught(ranks: Ranks, name: str, dtypes: list[str]) -> None:
    first, *others = ranks.call(
        "tests.bench.operations.test_collectives:mutants", name=name, dtypes=dtypes
    )
    for mutation, dtype in first:
        wrong = first[mutation, dtype] + sum(found[mutation, dtype] for found in others)
        assert (wrong > 0) != (mutation == "dropped" and name in NOTHING_OF_RANK_1), (
            name,
            mutation,
            dtype,
        )


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_step_is_right_in_every_variant_and_every_mutation_is_caught(
    two_ranks: Ranks, name: str
) -> None:
    sizes = [{"size_bytes": size} for size in SIZES]
    uneven = [
        {"size_bytes": 48_004, **params}
        for params in UNEVEN
        if params.keys() <= PARAMS[name].keys()
    ]
    assert_right(two_ranks, name, [*variants(name, 2), *sizes, *uneven])
    assert_caught(two_ranks, name, ["float32", "bfloat16", "int8"])


def test_every_operation_is_right_among_four_ranks(four_ranks: Ranks) -> None:
    for name in OPERATIONS:
        roots = [{"size_bytes": 96 * 1001, "root": 2}] if "root" in PARAMS[name] else []
        assert_right(four_ranks, name, [{"size_bytes": 96 * 1001}, *roots])


def test_bytes_and_bus_bandwidth_follow_the_convention(four_ranks: Ranks) -> None:
    for by_name in four_ranks.call("tests.bench.operations.test_collectives:described"):
        for name, facts in by_name.items():
            [shares] = [
                shares for shares, names in CONTRACT.items() if name.partition(".")[2] in names
            ]
            factor, sent, received = (share * (1 << 20) for share in shares)
            assert (facts["convention"], facts["size_bytes"]) == ("nccl-tests", 1 << 20)
            assert (facts["algbw"], facts["busbw"]) == (1 << 20, factor), name
            assert (facts["send_bytes"], facts["recv_bytes"]) == (sent, received), name
            assert (facts["hops"] == 2) == (name == "p2p.pingpong")


def test_the_function_takes_exactly_the_declared_parameters() -> None:
    for definition in DEFINITIONS:
        taken = list(inspect.signature(load_target(definition.target)).parameters)
        declared = [param.name for param in definition.params if param.name not in OF_THE_RUNNER]
        assert taken == ["world", *declared], definition.name


GROUPS = [
    "node",
    "pairs",
    "contiguous:2",
    "strided:2",
    "dp=2 tp=2:dp",
    "dp=2 tp=2:tp",
    "dp=4 tp=1:dp",
]


@pytest.mark.full
def test_every_variant_is_right_and_every_mutation_caught_on_more_ranks_and_in_their_groups(
    four_ranks: Ranks,
) -> None:
    with Ranks(3) as three_ranks:
        for ranks, name in product((three_ranks, four_ranks), OPERATIONS):
            assert_right(ranks, name, variants(name, ranks.size))
            assert_caught(ranks, name, ["float32"])
            for group in GROUPS if ranks is four_ranks and "group" in PARAMS[name] else ():
                assert_right(ranks, name, variants(name, ranks.size, group), group)


def sender_of(output: torch.Tensor, dtype: str, world: World) -> int | None:
    """Return the rank whose data a buffer holds, None if it is nobody's."""
    code = DataPattern(dtype, world.size, world.device)
    found = [
        r for r in range(world.size) if not count_wrong(output, code.values(r, 0, len(output)))
    ]
    return found[0] if len(found) == 1 else None


def received_from(world: World, cases: list[tuple[int, str]]) -> list[int | None]:
    """Return the rank whose data a step of the ring brings, for each size and type."""
    senders = []
    for size_bytes, dtype in cases:
        ring = sendrecv(world, size_bytes=size_bytes, dtype=dtype)
        ring.reset()
        ring.step()
        ring.step()  # pipelined mode steps many times from one reset
        assert ring.check() == 0
        senders.append(sender_of(ring.output, dtype, world))
    return senders


def met(
    world: World, pairs: str, index: int, size_bytes: int, direction: str
) -> tuple[object, ...]:
    """Return whose data a round brings, how much is wrong before and after it, and who is said to meet."""
    how: dict[str, Any] = {"round": index, "pairs": pairs, "direction": direction}
    operation = round_of_pairs(world, size_bytes=size_bytes, dtype="float32", **how)
    operation.reset()
    before = operation.check()
    operation.step()
    said = operation.describe().details["pairs"]
    return sender_of(operation.output, "float32", world), before, operation.check(), said


def order_of_calls(world: World, direction: str) -> list[str]:
    """Return which sends and receives a step makes, in order."""
    operation = round_of_pairs(world, size_bytes=64, dtype="float32", direction=direction)
    operation.reset()
    calls: list[str] = []

    def noted(name: str, known: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return known(*args, **kwargs)

        return call

    noting: dict[str, Any] = {
        name: noted(name, getattr(dist, name)) for name in ("send", "recv", "batch_isend_irecv")
    }
    with mock.patch.multiple(dist, **noting):
        operation.step()
    return calls


def test_all_pairs_of_a_round_exchange_at_once_and_a_rank_in_none_stands_by(
    four_ranks: Ranks,
) -> None:
    rounds: list[tuple[int, str, list[int | None], str]] = [
        (0, "", [3, 2, 1, 0], "0-3 1-2"),
        (1, "", [2, 3, 0, 1], "0-2 1-3"),
        (2, "0-1 2-3", [1, 0, 3, 2], "0-1 2-3"),
        (0, "1-3", [None, 3, None, 1], "1-3"),
    ]
    for direction, size, (index, pairs, partners, said) in product(
        ("at_once", "in_turn"), (4096, 8 << 20), rounds
    ):
        found = four_ranks.call(
            "tests.bench.operations.test_collectives:met",
            pairs=pairs,
            index=index,
            size_bytes=size,
            direction=direction,
        )
        expected = [(partner, 0 if partner is None else size // 4, 0, said) for partner in partners]
        assert found == expected, (direction, index, pairs, size)


def test_there_and_back_the_smaller_rank_sends_first_and_the_other_waits_for_it(
    two_ranks: Ranks,
) -> None:
    in_turn = two_ranks.call(
        "tests.bench.operations.test_collectives:order_of_calls", direction="in_turn"
    )
    assert in_turn == [["send", "recv"], ["recv", "send"]]
    assert (
        two_ranks.call(
            "tests.bench.operations.test_collectives:order_of_calls", direction="at_once"
        )
        == [["batch_isend_irecv"]] * 2
    )


def test_a_rank_alone_has_no_neighbour_and_meets_nobody_and_is_refused_in_words() -> None:
    alone = cast(World, SimpleNamespace(size=1))
    told = [
        usage_error(prepare, alone, size_bytes=4096, dtype="float32")
        for prepare in (sendrecv, round_of_pairs)
    ]
    assert told == [
        "sendrecv needs a neighbour: size(1) < 2 ranks",
        "a round needs a pair: size(1) < 2 ranks",
    ]


def test_data_come_from_the_neighbour_even_beyond_what_sockets_buffer(
    two_ranks: Ranks, four_ranks: Ranks
) -> None:
    """Two ranks that send first and receive afterwards would wait for each other: 8 MiB is in no buffer."""
    cases = [(size, dtype) for size in (64, 8 << 20) for dtype in ("float32", "bfloat16", "uint8")]
    assert two_ranks.call("tests.bench.operations.test_collectives:received_from", cases=cases) == [
        [1] * 6,
        [0] * 6,
    ]
    assert four_ranks.call(
        "tests.bench.operations.test_collectives:received_from", cases=[(4096, "float32")]
    ) == [
        [3],
        [0],
        [1],
        [2],
    ]


def test_no_operation_in_any_type_holds_more_than_is_asked_of_the_device_for_it(
    two_ranks: Ranks,
) -> None:
    size = 8 << 20
    for found in two_ranks.call(
        "tests.bench.operations.test_collectives:most_held", size_bytes=size
    ):
        assert max(found.values()) <= bytes_needed(size) / size
