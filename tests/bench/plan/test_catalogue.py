"""The catalogue refuses what a world cannot run, and expands groups, pairs and rounds."""

from collections.abc import Mapping
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.catalogue import DEFINITIONS
from tests.support.refusals import usage_error

BY_NAME = {definition.name.partition(".")[2]: definition for definition in DEFINITIONS}
SENDING = {"pingpong", "unidirectional", "bidirectional", "matrix", "sendrecv", "pairwise"}
KIB = 1 << 10


def gloo(num_ranks: int) -> WorldSpec:
    return WorldSpec(nproc=num_ranks, backend="gloo", device="cpu")


def nccl(num_ranks: int) -> WorldSpec:
    return WorldSpec(nproc=num_ranks, backend="nccl", device="cuda")


GLOO_ON_GPU = WorldSpec(nproc=2, backend="gloo", device="cuda")


def refuse(name: str, spec: WorldSpec, **params: object) -> str:
    definition = BY_NAME[name]
    return definition.refuse(definition.complete(params), spec) or ""


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_definition_has_help_and_valid_defaults(definition: Any) -> None:
    assert definition.help
    for param in definition.params:
        assert param.help, param.name
        assert param.parse(str(param.default)) == param.default, param.name


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_defaults_run_on_powers_of_two(num_ranks: int) -> None:
    for name in BY_NAME:
        is_refused = name in SENDING and num_ranks == 1
        assert bool(refuse(name, gloo(num_ranks))) is is_refused, name
        assert bool(refuse(name, nccl(num_ranks))) is is_refused, name


@pytest.mark.parametrize(
    ("name", "spec", "params", "fact"),
    [
        ("reduce_scatter", gloo(4), {"dtype": "int32", "redop": "avg"}, "not exact in int32"),
        ("all_reduce", nccl(3), {"dtype": "float8_e5m2", "redop": "avg"}, "average of 3 ranks"),
        # In bfloat16, the averages of 190 and of 191 values can be the same.
        (
            "all_reduce",
            nccl(190),
            {"dtype": "bfloat16", "redop": "avg"},
            "average of 190 ranks",
        ),
        ("all_gather", gloo(4), {"dtype": "float8_e4m3fn"}, "does not support float8_e4m3fn"),
        ("all_reduce", gloo(4), {"group": "dp=4 tp=1:tp"}, "one rank"),
        ("sendrecv", gloo(1), {}, "two ranks"),
        ("pairwise", gloo(1), {}, "two ranks"),
        ("broadcast", gloo(4), {"root": 4}, "root 4"),
        ("pingpong", gloo(4), {"source": 1, "target": 1}, "both rank 1"),
        ("pairwise", gloo(4), {"pairs": "0-4"}, "rank 4"),
        ("all_reduce", gloo(4), {"size_bytes": 1001}, "multiple of 4 B"),
        ("all_gather", gloo(4), {"size_bytes": 1002}, "multiple of 16 B"),
        ("all_reduce", GLOO_ON_GPU, {"mode": "graph"}, "mode graph"),
        ("barrier", nccl(4), {"mode": "graph"}, "mode graph"),
        ("all_reduce", nccl(4), {"mode": "graph", "background": "gemm"}, "mode graph"),
        ("pingpong", nccl(4), {"mode": "async"}, "mode async"),
    ],
)
def test_impossible_case_is_refused(
    name: str, spec: WorldSpec, params: dict[str, Any], fact: str
) -> None:
    assert fact in refuse(name, spec, **params)


def test_size_beyond_memory_is_refused() -> None:
    spec = WorldSpec(nproc=2, backend="gloo", device="cpu", rank_bytes=8 * KIB)
    assert refuse("all_reduce", spec, size_bytes=KIB) == ""
    assert "0.0 GB" in refuse("all_reduce", spec, size_bytes=KIB + 4)


@pytest.mark.parametrize(
    ("name", "spec", "params"),
    [
        ("all_reduce", gloo(4), {"dtype": "int8", "redop": "max"}),
        ("all_reduce", nccl(4), {"mode": "graph"}),
        ("sendrecv", nccl(4), {"mode": "async"}),
        ("all_reduce", nccl(126), {"dtype": "bfloat16", "redop": "avg"}),
        ("all_reduce", gloo(1), {"redop": "avg"}),
        ("all_gather", nccl(4), {"dtype": "float8_e4m3fn"}),
    ],
)
def test_possible_case_is_accepted(name: str, spec: WorldSpec, params: dict[str, Any]) -> None:
    assert refuse(name, spec, **params) == ""


def test_gloo_between_gpus_refuses_sends() -> None:
    refused = {name for name in BY_NAME if refuse(name, GLOO_ON_GPU)}
    assert refused == SENDING


def test_group_index_beyond_groups_is_refused() -> None:
    message = usage_error(refuse, "all_reduce", gloo(4), group="pairs", group_index=2)
    assert "group_index 2" in message


def expand(name: str, **params: Any) -> list[Mapping[str, Any]]:
    """Expand an operation on four ranks."""
    expand_params = BY_NAME[name].expand
    assert expand_params is not None
    return list(expand_params(params, gloo(4)))


def test_groups_run_in_turn_and_concurrently() -> None:
    cases = expand("all_reduce", group="pairs")
    assert [case["group_index"] for case in cases] == [0, 1, 0, 1]
    assert [case["concurrent"] for case in cases] == [False, False, True, True]
    assert expand("all_reduce", group="node") == [{"group": "node"}]
    params = {"group": "pairs", "group_index": 1, "concurrent": True}
    assert expand("all_reduce", **params) == [params]


def test_matrix_has_every_ordered_pair() -> None:
    cases = expand("matrix")
    pairs = {(case["source"], case["target"]) for case in cases}
    assert len(cases) == len(pairs) == 12
    from_rank_1 = expand("matrix", source=1)
    assert [case["target"] for case in from_rank_1] == [0, 2, 3]


def test_pairwise_has_every_round() -> None:
    cases = expand("pairwise")
    assert [case["round"] for case in cases] == [0, 1, 2]
    assert expand("pairwise", round=2) == [{"round": 2}]
    assert expand("pairwise", pairs="0-2") == [{"pairs": "0-2"}]
