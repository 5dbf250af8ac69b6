"""A step's memory is the analytical one, from each of three sources."""

from typing import Any

import pytest

from parbench.bench.results.details import STATE
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.step.layout import local, whole
from parbench.workloads.step.probe import run_probes
from tests.support.ranks import Ranks
from tests.support.training_steps import Params, build_small_step

N = 2
DIVISORS = {"ddp": (1, 1, 1), "zero1": (1, 1, N), "zero2": (1, N, N), "zero3": (N, N, N)}
"""The number of ranks over which each part of ``STATE`` is sharded (arXiv 1910.02054)."""
BYTES = {"float32": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes per parameter in each part of ``STATE``; mixed precision keeps masters and moments."""
SOURCES = ("memory", "memory_counted", "memory_formula")


def measure(world: World, name: str, params: Params) -> tuple[Explanation, int, int, int]:
    """Return the memory of a step, and parameters: in all, split by tp, and outside of layers."""
    step = build_small_step(world, name, {"kv_heads": 4, **params})
    named = dict(step.layout.model.named_parameters())
    psi = num_parameters(step.spec.shape)
    split = sum(whole(p).numel() for p in named.values() if local(p).numel() < whole(p).numel())
    root = sum(whole(p).numel() for key, p in named.items() if not key.startswith("layers."))
    step.reset()
    step.step()
    memory = run_probes(world, step.probes()[:1], step.step, world.barrier, 0.0)
    step.close()
    return memory, psi, split, root


def measured(ranks: Ranks, name: str, **params: Any) -> tuple[Explanation, int, int, int]:
    first, second = ranks.call(
        "tests.workloads.step.test_footprint:measure", name=name, params=params
    )
    assert first == second
    result: tuple[Explanation, int, int, int] = first
    return result


def values(memory: Explanation, component: str) -> list[float]:
    """Return a component's bytes from each source."""
    return [memory.metrics[f"{source}.{component}"].value or 0.0 for source in SOURCES]


@pytest.mark.parametrize("name", [*DIVISORS, "tp", "tp_sp"])
@pytest.mark.parametrize("precision", BYTES)
def test_state_is_sharded(two_ranks: Ranks, name: str, precision: str) -> None:
    memory, psi, split, _ = measured(two_ranks, name, precision=precision)
    divisors = DIVISORS.get(name, (N, N, N))
    for component, num_bytes, divisor in zip(STATE, BYTES[precision], divisors, strict=True):
        elements = psi / divisor if name in DIVISORS else psi - split + split / N
        *others, formula = values(memory, component)
        assert formula == pytest.approx(num_bytes * elements), component
        assert others == pytest.approx([formula] * 2, rel=0.01), component


@pytest.mark.parametrize("name", ["ddp", "zero3", "zero2", "hsdp"])
def test_buffers_are_what_stays_gathered(two_ranks: Ranks, name: str) -> None:
    memory, psi, _, root = measured(two_ranks, name)
    expected = {"zero2": 4 * psi / N, "hsdp": 4 * root / N}.get(name, 0)
    for source in ("memory", "memory_counted"):
        assert memory.metrics[f"{source}.buffers"].value == expected, source
    assert any("buffer" in note for note in memory.notes) == (name == "zero2")


def activations(ranks: Ranks, name: str, **params: Any) -> list[float]:
    return values(measured(ranks, name, **params)[0], "activations")


def test_checkpointing_reduces_activations(two_ranks: Ranks) -> None:
    levels = ("full", "selective", "none")
    by_how = [activations(two_ranks, "ddp", checkpointing=how) for how in levels]
    for full, selective, none in zip(*by_how, strict=True):
        assert full < selective < none
    _, counted, formula = by_how[1]
    assert counted == formula


@pytest.mark.parametrize("name", ["zero3", "tp"])
def test_full_checkpointing_reduces_activations(two_ranks: Ranks, name: str) -> None:
    none = activations(two_ranks, name)
    full = activations(two_ranks, name, checkpointing="full")
    assert all(after < 0.75 * before for before, after in zip(none, full, strict=True))


def test_activations_double_with_microbatch(two_ranks: Ranks) -> None:
    measured_bytes, counted, formula = activations(two_ranks, "ddp")
    *_, double = activations(two_ranks, "ddp", microbatch=4)
    assert double == pytest.approx(2 * formula, rel=1e-3)
    assert counted == formula <= measured_bytes


def test_split_layers_have_fewer_activations(two_ranks: Ranks) -> None:
    sp, tp, ddp = (activations(two_ranks, name)[1] for name in ("tp_sp", "tp", "ddp"))
    assert sp < tp < ddp
