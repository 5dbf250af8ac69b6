"""Each rule of a mesh is an equation: it lets through what fits, and refuses the rest with the numbers."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from workloads.hybrid.axes import coordinate_of, multiplied
from workloads.hybrid.constraints import CP_METHODS, refuse, sequences_of
from workloads.shapes import SHAPES, Shape

TINY = SHAPES["tiny"]


def reason(
    mesh: dict[str, int], *, shape: Shape = TINY, microbatches: int = 4, microbatch: int = 1, **more: Any
) -> str | None:
    world = more.pop("world", math.prod(multiplied(mesh).values()))
    return refuse(shape, mesh, microbatches=microbatches, microbatch=microbatch, world=world, **more)


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2},
        {"fsdp": 4, "tp": 2},
        {"dp": 2, "pp": 2, "tp": 2},
        {"dp": 2, "pp": 2, "cp": 2, "tp": 2},
        {"dp": 2, "fsdp": 2, "pp": 4, "cp": 2, "tp": 4},
        {"pp": 2, "dp": 2, "etp": 1},
    ],
    ids=str,
)
def test_what_fits_is_let_through(mesh: dict[str, int]) -> None:
    assert reason(mesh) is None


@pytest.mark.parametrize(
    ("mesh", "more", "equation"),
    [
        ({"dp": 2, "tp": 4}, {"world": 6}, "dp(2) * tp(4) != world size(6)"),
        ({"dp": 2, "ep": 2}, {"world": 4, "num_experts": 8}, "dp(2) != world size(4)"),
        ({"fdsp": 2}, {}, "mesh axis 'fdsp' is not dp, fsdp, pp, cp, tp, ep or etp; did you mean 'fsdp'?"),
        ({"dp": 0}, {"world": 1}, "dp(0) < 1"),
        ({"dp": 2, "etp": 2}, {}, "etp(2) != 1: experts are whole here on every rank that holds them"),
        (
            {"tp": 2, "etp": 2},
            {"world": 2, "split_experts": True},
            "etp(2) > 1 without experts: a dense model has none to split",
        ),
        (
            {"dp": 2, "tp": 2, "etp": 4},
            {"world": 4, "num_experts": 8, "split_experts": True},
            "tp(2) % etp(4) != 0",
        ),
        ({"tp": 4}, {"shape": replace(TINY, heads=2, kv_heads=2)}, "heads(2) % tp(4) != 0"),
        ({"tp": 4}, {"shape": SHAPES["tiny-llama"]}, "kv_heads(2) % tp(4) != 0"),
        ({"tp": 4}, {"shape": replace(TINY, hidden=130)}, "hidden(130) % tp(4) != 0"),
        ({"tp": 2}, {"shape": replace(TINY, ffn=511)}, "ffn(511) % tp(2) != 0"),
        ({"cp": 3}, {}, "sequence(64) % cp(3) != 0"),
        (
            {"cp": 2},
            {"shape": replace(TINY, sequence=66), "cp_method": "zigzag"},
            "sequence(66) % (2 * cp(2)) != 0: zigzag gives each rank two chunks",
        ),
        ({"tp": 2}, {"shape": replace(TINY, sequence=63)}, "sequence(63) % tp(2) != 0"),
        ({"cp": 2, "tp": 2}, {"shape": replace(TINY, sequence=66)}, "sequence(66) % (cp(2) * tp(2)) != 0"),
        (
            {"cp": 4, "tp": 2},
            {"cp_method": "ulysses"},
            "heads(4) / tp(2) % cp(4) != 0: ulysses deals out heads",
        ),
        (
            {"cp": 2},
            {"cp_method": "rings"},
            "cp method 'rings' is not ring, striped, zigzag, allgather_kv or ulysses; did you mean 'ring'?",
        ),
        ({"pp": 2}, {"microbatches": 0}, "microbatches(0) < 1"),
        ({"pp": 8}, {}, "layers(4) < pp(8) * chunks(1)"),
        ({"pp": 4}, {"schedule": "interleaved"}, "layers(4) < pp(4) * chunks(2)"),
        (
            {"pp": 3},
            {},
            "layers(4) % stages(3) != 0: split = 2+1+... says how many each stage takes",
        ),
        ({"pp": 2}, {"split": "1+2"}, "split = '1+2' holds 3 layers, and the model has layers(4)"),
        (
            {"pp": 2},
            {"schedule": "interleaved", "microbatches": 5},
            "interleaved needs microbatches(5) % rounds(2) == 0, where rounds = microbatches(5) // ranks(2)",
        ),
        ({"pp": 2}, {"schedule": "dualpipe_v", "microbatches": 3}, "dualpipe_v needs microbatches(3) >= stages(4)"),
        (
            {"pp": 2, "fsdp": 2},
            {"schedule": "interleaved", "chunks": 4, "shape": replace(TINY, layers=8)},
            "chunks(4) > 3 with fsdp(2): torch's runtime keeps so many stages gathered "
            "and would gather the others again",
        ),
        ({"dp": 2, "ep": 2}, {}, "ep(2) > 1 without experts: a dense model has none to deal out"),
        ({"dp": 4, "ep": 4}, {"num_experts": 6}, "experts(6) % ep(4) != 0"),
        (
            {"dp": 2, "tp": 2, "ep": 4},
            {"num_experts": 8},
            "(dp(2) * fsdp(1) * cp(1)) % ep(4) != 0",
        ),
        ({"dp": 2}, {"microbatch": 0}, "microbatch(0) < 1"),
        (
            {"dp": 2, "fsdp": 2, "tp": 2},
            {"global_batch": 32},
            "dp(2) * fsdp(2) * microbatch(1) * microbatches(4) = 16 != global batch(32)",
        ),
        ({"tp": 2}, {"global_batch": 32}, "dp(1) * microbatch(1) * microbatches(4) = 4 != global batch(32)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_equation(mesh: dict[str, int], more: dict[str, Any], equation: str) -> None:
    assert reason(mesh, **more) == equation


def test_a_split_lets_layers_through_that_do_not_divide() -> None:
    assert reason({"pp": 3}, split="2+1+1") is None


def test_a_mixture_does_not_split_its_ffns() -> None:
    odd = replace(TINY, ffn=511)
    assert reason({"dp": 2, "tp": 2}, shape=odd) is not None
    assert reason({"dp": 2, "tp": 2}, shape=odd, num_experts=8) is None


def test_experts_lie_in_the_data_axes() -> None:
    assert reason({"dp": 2, "fsdp": 2, "cp": 2, "ep": 8}, num_experts=8) is None
    assert reason({"dp": 2, "pp": 2, "ep": 2}, num_experts=8) is None


def test_the_global_batch_is_what_the_data_ranks_take() -> None:
    mesh = {"dp": 2, "fsdp": 3, "pp": 2, "cp": 2, "tp": 2}
    assert sequences_of(mesh, microbatch=2, microbatches=4) == 48
    assert refuse(TINY, mesh, microbatches=4, microbatch=2, world=48, global_batch=48) is None


@pytest.mark.parametrize("method", CP_METHODS)
def test_what_is_let_through_gives_every_rank_as_many_heads_layers_and_tokens(method: str) -> None:
    sizes = (1, 2, 3, 4)
    seen = 0
    for dp, pp, cp, tp in itertools.product(sizes, repeat=4):
        mesh = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
        if reason(mesh, cp_method=method) is not None:
            continue
        seen += 1
        assert TINY.heads % tp == TINY.hidden % tp == TINY.ffn % tp == 0
        assert TINY.layers % pp == 0
        assert TINY.sequence % (cp * tp) == 0
        assert len({tuple(coordinate_of(mesh, rank).items()) for rank in range(dp * pp * cp * tp)}) == dp * pp * cp * tp
    assert seen >= 4 * 3 * 2 * 2


@pytest.mark.parametrize(
    ("mesh", "more", "told"),
    [
        ({"pp": 2}, {"checkpointing": "full"}, "checkpointing = full is not allowed with schedule = zb_h1"),
        ({"pp": 2}, {"checkpointing": "selective"}, "checkpointing = selective is not allowed with schedule = zb_h1"),
        ({"fsdp": 4, "pp": 2}, {}, "schedule = zb_h1 is not allowed with fsdp(4)"),
        ({"dp": 2, "pp": 2}, {"num_experts": 8}, "schedule = zb_h1 is not allowed with experts(8)"),
    ],
)
def test_a_split_backward_pass_carries_nothing_that_needs_it_whole(
    mesh: dict[str, int], more: dict[str, Any], told: str
) -> None:
    sentence = reason(mesh, schedule="zb_h1", **more)
    assert sentence is not None
    assert sentence.startswith(told)
    assert reason(mesh, schedule="1f1b", **more) is None
    assert reason({**mesh, "pp": 1}, schedule="zb_h1", **more) is None
