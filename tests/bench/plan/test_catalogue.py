"""The catalogue refuses what a world cannot run, and expands groups, pairs and rounds."""

from collections.abc import Mapping
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.catalogue import DEFINITIONS, DTYPES
from tests.support.refusals import usage_error

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
PAIRS = {"pingpong", "unidirectional", "bidirectional", "matrix"}
SENDING = {*PAIRS, "sendrecv", "pairwise"}


def gloo(num_ranks: int) -> WorldSpec:
    return WorldSpec(nproc=num_ranks, backend="gloo", device="cpu")


def nccl(num_ranks: int) -> WorldSpec:
    return WorldSpec(nproc=num_ranks, backend="nccl", device="cuda")


GLOO = gloo(4)
NCCL = nccl(4)
GLOO_ON_GPU = WorldSpec(nproc=2, backend="gloo", device="cuda")
SMALL_MEMORY = WorldSpec(nproc=2, backend="gloo", device="cpu", rank_bytes=7 << 20)


def refuse(name: str, spec: WorldSpec, **params: object) -> str | None:
    definition = BY_NAME[name]
    return definition.refuse(definition.whole(params), spec)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_definition_has_help_and_valid_defaults(definition: Any) -> None:
    assert definition.help
    for param in definition.params:
        assert param.help, param.name
        assert param.parse(str(param.default)) == param.default, param.name


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_defaults_run_on_powers_of_two(num_ranks: int) -> None:
    for name in BY_NAME:
        is_refused = name in PAIRS and num_ranks == 1
        assert bool(refuse(name, gloo(num_ranks))) is is_refused, name
        assert bool(refuse(name, nccl(num_ranks))) is is_refused, name


REFUSED: list[tuple[str, WorldSpec, dict[str, Any], str]] = [
    ("all_reduce", GLOO, {"dtype": "bool"}, "sum of bool"),
    ("reduce_scatter", GLOO, {"dtype": "int32", "redop": "avg"}, "average of int32"),
    # An average of 190 bfloat16 values cannot be told from that of 191.
    ("all_reduce", nccl(190), {"dtype": "bfloat16", "redop": "avg"}, "191"),
    ("all_reduce", nccl(3), {"dtype": "float8_e4m3fn", "redop": "avg"}, "average of 3 ranks"),
    ("all_reduce", nccl(1), {"redop": "avg"}, "2.29.7"),
    ("all_reduce", GLOO_ON_GPU, {"mode": "graph"}, "mode graph"),
    ("all_reduce", GLOO, {"mode": "graph"}, "mode graph"),
    ("barrier", NCCL, {"mode": "graph"}, "mode graph"),
    ("all_reduce", NCCL, {"mode": "graph", "background": "gemm"}, "mode graph"),
    ("pingpong", NCCL, {"mode": "async"}, "mode async"),
    ("all_reduce_two_step", NCCL, {"mode": "async"}, "mode async"),
    ("all_reduce", NCCL, {"mode": "async", "placement": "out_of_place"}, "mode async"),
    ("pairwise", NCCL, {"mode": "async", "direction": "in_turn"}, "mode async"),
    ("sendrecv", NCCL, {"mode": "coalesced"}, "mode coalesced"),
    ("broadcast", GLOO, {"mode": "coalesced"}, "mode coalesced"),
    ("all_reduce", GLOO_ON_GPU, {"mode": "coalesced"}, "mode coalesced"),
    ("all_reduce", GLOO, {"group": "dp=4 tp=1:tp"}, "one rank"),
    ("broadcast", GLOO, {"root": 4}, "root 4"),
    ("pingpong", GLOO, {"source": 1, "target": 1}, "source 1 and target 1"),
    ("pairwise", GLOO, {"round": 3}, "round 3"),
    ("pairwise", GLOO, {"pairs": "0-4"}, "rank 4"),
    ("all_to_all_v", GLOO, {"traffic": "1 2;3 4"}, "2 rows"),
    ("all_reduce", GLOO, {"size_bytes": 1001}, "1000 and 1004"),
    ("all_gather", GLOO, {"size_bytes": 1002}, "992 and 1008"),
    ("all_gather", GLOO, {"size_bytes": 4}, "least is 16"),
    ("all_reduce", SMALL_MEMORY, {"size_bytes": (1 << 20) + 4}, "0.0 GB"),
]


@pytest.mark.parametrize(("name", "spec", "params", "fact"), REFUSED)
def test_impossible_case_is_refused(
    name: str, spec: WorldSpec, params: dict[str, Any], fact: str
) -> None:
    assert fact in str(refuse(name, spec, **params))


ACCEPTED: list[tuple[str, WorldSpec, dict[str, Any]]] = [
    ("all_reduce", GLOO, {"dtype": "bool", "redop": "max", "size_bytes": 64}),
    ("all_reduce", nccl(189), {"dtype": "bfloat16", "redop": "avg", "size_bytes": 2}),
    ("all_reduce", nccl(1), {}),
    ("all_reduce", gloo(1), {"redop": "avg"}),
    ("all_reduce", NCCL, {"mode": "graph"}),
    ("all_reduce", NCCL, {"mode": "pipelined", "background": "gemm"}),
    ("sendrecv", NCCL, {"mode": "async"}),
    ("reduce_scatter", GLOO, {"mode": "coalesced"}),
    ("reduce_scatter", GLOO_ON_GPU, {"mode": "coalesced"}),
    ("all_reduce", SMALL_MEMORY, {"size_bytes": 1 << 20}),
]


@pytest.mark.parametrize(("name", "spec", "params"), ACCEPTED)
def test_possible_case_is_accepted(name: str, spec: WorldSpec, params: dict[str, Any]) -> None:
    assert refuse(name, spec, **params) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_refused_on_gloo_only(dtype: str) -> None:
    assert bool(refuse("all_gather", GLOO, dtype=dtype)) is dtype.startswith("float8")
    assert refuse("all_gather", NCCL, dtype=dtype) is None


def test_gloo_between_gpus_refuses_sends() -> None:
    for name in BY_NAME:
        assert bool(refuse(name, GLOO_ON_GPU)) is (name in SENDING), name


def test_impossible_groups_are_refused() -> None:
    mesh = usage_error(refuse, "all_reduce", GLOO, group="dp=2 tp=4:tp")
    assert "dp(2) * tp(4) != world size(4)" in mesh
    index = usage_error(refuse, "all_reduce", GLOO, group="pairs", group_index=2)
    assert "group_index 2" in index


def expand(name: str, num_ranks: int, **params: Any) -> list[Mapping[str, Any]]:
    return list(BY_NAME[name].expand(params, gloo(num_ranks)))


def test_groups_run_in_turn_and_concurrently() -> None:
    cases = expand("all_reduce", 4, group="pairs")
    values = [(case["group_index"], case["concurrent"]) for case in cases]
    assert values == [(0, False), (1, False), (0, True), (1, True)]
    [single] = expand("all_reduce", 4, group="contiguous:4")
    assert (single["group_index"], single["concurrent"]) == (0, False)
    chosen = {"group": "pairs", "group_index": 1, "concurrent": True}
    assert expand("all_reduce", 4, **chosen) == [chosen]


def test_matrix_has_every_ordered_pair() -> None:
    pairs = [(case["source"], case["target"]) for case in expand("matrix", 3)]
    assert pairs == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    from_rank_1 = [case["target"] for case in expand("matrix", 3, source=1)]
    assert from_rank_1 == [0, 2]


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(4, 3), (5, 5)])
def test_pairwise_has_every_round(num_ranks: int, num_rounds: int) -> None:
    rounds = [case["round"] for case in expand("pairwise", num_ranks)]
    assert rounds == list(range(num_rounds))


@pytest.mark.parametrize("params", [{"round": 2}, {"pairs": "0-2"}])
def test_pairwise_with_round_or_pairs_is_one_case(params: dict[str, Any]) -> None:
    assert expand("pairwise", 4, **params) == [params]
