"""The search: it finds every mesh, proposes none that a rule or the memory refuses, and is fast."""

import math
import time
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import H100

from bench.errors import UserError
from bench.params import Value
from workloads.hybrid.constraints import refuse
from workloads.hybrid.hybrid_case import refuse_hybrid
from workloads.planner.ask import Ask, refusal
from workloads.planner.catalog import model_of
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.hardware import PRESETS
from workloads.planner.search import ORDER, Wanted, candidates, divisors, meshes, search


def wanted(model: str = "llama3-70b", gpus: int = 64, batch: int = 512, **more: Any) -> Wanted:
    return replace(Wanted(model=model_of(model), gpus=gpus, global_batch=batch), **more)


@given(st.integers(1, 2000))
def test_divisors_are_all_that_divide(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("gpus", [8, 12, 16])
def test_meshes_are_all_products_that_the_models_sizes_allow(gpus: int) -> None:
    want = wanted("small-llama", gpus)
    found = {tuple(mesh[name] for name in ORDER) for mesh in meshes(want)}
    every = {
        sizes
        for sizes in product(divisors(gpus), repeat=5)
        if math.prod(sizes) == gpus
        and refuse(
            want.model.shape,
            dict(zip(ORDER, sizes, strict=True)),
            microbatches=64,
            microbatch=1,
            world=gpus,
            cp_method="zigzag",
        )
        is None
    }
    assert every == found


def test_the_innermost_axis_is_the_one_that_talks_most() -> None:
    [mesh, *_] = meshes(wanted())
    assert tuple(mesh) == ORDER


MODELS = st.sampled_from(["small", "small-llama", "llama3-8b", "llama3-70b", "mixtral-8x7b", "gpt-7.5b"])


@given(
    MODELS,
    st.sampled_from([2, 6, 8, 16, 48, 64]),
    st.sampled_from([1, 8, 48, 96, 512]),
    st.sampled_from(["1f1b", "interleaved", "gpipe", "zb_h1", "zb_v"]),
    st.sampled_from(["ring", "zigzag", "ulysses"]),
)
@settings(deadline=None, max_examples=25)
def test_nothing_is_proposed_that_its_own_rules_or_the_memory_refuse(
    model: str, gpus: int, batch: int, schedule: str, method: str
) -> None:
    want = wanted(model, gpus, batch, schedule=schedule, cp_method=method)
    found = search(want, H100, top=50)
    for run in found.best:
        ask = run.ask
        assert refusal(ask) is None
        assert run.fits
        assert (ask.world, ask.global_batch) == (gpus, batch)
        theirs = refuse(
            ask.model.shape,
            ask.mesh,
            microbatches=ask.microbatches,
            microbatch=ask.microbatch,
            world=gpus,
            num_experts=ask.model.num_experts or None,
            schedule=schedule,
            cp_method=method,
            checkpointing=ask.checkpointing,
            global_batch=batch,
        )
        assert theirs is None


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_nothing_is_proposed_that_the_measured_step_refuses(schedule: str) -> None:
    found = search(wanted("llama3-8b", 64, 256, schedule=schedule), H100, top=100)
    assert any(run.ask.pp > 1 for run in found.best)
    for run in found.best:
        ask = run.ask
        params: dict[str, Value] = {
            "mesh": ",".join(f"{name}={size}" for name, size in ask.mesh.items()),
            "microbatch": ask.microbatch,
            "microbatches": ask.microbatches,
            "schedule": schedule,
            "cp_method": ask.cp_method,
            "checkpointing": ask.checkpointing,
        }
        assert refuse_hybrid(ask.model.shape, params, ask.world) is None
    assert {"schedule", "checkpointing"} <= found.refused.keys()  # each rule by its first word


def test_the_best_is_the_fastest_of_all_that_fit() -> None:
    want = wanted("llama3-8b", 16, 64)
    runs = [dry_run(ask, H100, exact=False) for ask in candidates(want) if refusal(ask) is None]
    fastest = min(run.time.seconds for run in runs if run.fits)
    assert search(want, H100).best[0].time.seconds <= fastest * 1.005


def test_the_best_come_in_order_and_each_mesh_once() -> None:
    found = search(wanted(), H100, top=8)
    seconds = [float(f"{run.time.seconds:.3g}") for run in found.best]
    assert seconds == sorted(seconds)
    assert len({run.ask.mesh_text for run in found.best}) == len(found.best) == len(found.bindings) == 8


def test_every_candidate_is_counted() -> None:
    found = search(wanted(schedule="interleaved"), H100, top=1)
    assert found.refused == {"layers": found.refused["layers"]} or found.refused
    fitting = found.tried - found.too_large - sum(found.refused.values())
    assert fitting > 0
    assert found.too_large > 0


def test_tensor_parallel_stays_inside_the_node() -> None:
    for gpus in (64, 1024):
        assert search(wanted(gpus=gpus, batch=gpus), H100).best[0].ask.tp <= 8


def test_what_fits_without_help_takes_none() -> None:
    best = search(wanted("small-llama", 8, 64, element_bytes=4), H100).best[0].ask
    assert (best.pp, best.tp, best.checkpointing) == (1, 1, "none")


def test_a_long_sequence_asks_for_context_parallel() -> None:
    want = replace(wanted("llama3-8b", 64, 8), model=model_of("llama3-8b", 131072))
    assert search(want, H100).best[0].ask.cp > 1


def test_a_mixture_deals_out_its_experts() -> None:
    assert search(wanted("mixtral-8x7b", 64, 256), H100).best[0].ask.ep > 1


def test_without_an_axis_the_fastest_that_does_not_use_it_is_named() -> None:
    found = search(wanted(), H100)
    best = found.best[0]
    assert set(found.without) == {name for name, size in best.ask.mesh.items() if size > 1}
    for name, other in found.without.items():
        assert other is None or other.ask.mesh[name] == 1


def test_a_calls_time_can_come_from_elsewhere() -> None:
    free = search(wanted("llama3-8b", 16, 64), H100, seconds=lambda call: 0.0).best[0]
    assert free.time.exposed_seconds == 0


@pytest.mark.measures
@pytest.mark.parametrize(("gpus", "limit"), [(64, 10), (1024, 20), (16384, 60)])
def test_a_search_takes_no_longer_than_it_may(gpus: int, limit: float) -> None:
    began = time.perf_counter()
    assert search(wanted(gpus=gpus, batch=max(1024, gpus // 8)), H100).best
    assert time.perf_counter() - began < limit / 2


def test_rules_that_stop_meshes_are_told_with_their_numbers() -> None:
    found = search(wanted("llama3-70b", 256, 256, cp_method="ulysses"), H100, top=1)
    assert found.equations.keys() == found.refused.keys()
    assert all("(" in equation and ": " in equation for equation in found.equations.values())


@pytest.mark.parametrize(
    ("gpus", "batch", "told"),
    [(0, 8, r"--gpus\(0\) is not within 1"), (10**9, 8, r"--gpus\(1000000000\)"), (8, 0, r"--global-batch\(0\) < 1")],
)
def test_numbers_out_of_range_are_refused(gpus: int, batch: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        search(wanted(gpus=gpus, batch=batch), H100)


@pytest.mark.parametrize("gpus", [24, 96, 1000])
def test_worlds_need_not_be_powers_of_two(gpus: int) -> None:
    found = search(wanted("llama3-8b", gpus, gpus * 2), H100, top=3)
    assert found.best
    assert {run.ask.world for run in found.best} == {gpus}


def test_a_small_batch_binds_a_deep_pipeline() -> None:
    small = msgspec.structs.replace(
        H100, across_bytes_per_second=1e8
    )  # so slow that sharding across nodes is no choice
    found = search(wanted("llama3-70b", 64, 16), small, top=1)
    assert found.best[0].ask.pp > 1
    assert found.bindings[0].startswith(("batch", "bubble", "memory", "link tp"))


def test_more_memory_needs_less_recomputation() -> None:
    for model, gpus in (("llama3-70b", 64), ("gpt-175b", 128)):
        orders = [
            ("none", "selective", "full").index(
                search(wanted(model, gpus, gpus), PRESETS[name]).best[0].ask.checkpointing
            )
            for name in ("h100", "b200")
        ]
        assert orders[1] <= orders[0]


def test_faster_links_never_make_the_best_slower() -> None:
    fast = msgspec.structs.replace(H100, across_bytes_per_second=4 * H100.across_bytes_per_second)
    one, other = (search(wanted(gpus=128, batch=256), machine).best[0].time.seconds for machine in (H100, fast))
    assert other <= one * 1.005


@pytest.mark.parametrize("schedule", ["interleaved", "zb_h1", "gpipe"])
def test_other_schedules_are_searched(schedule: str) -> None:
    found = search(wanted(schedule=schedule), H100, top=20)
    assert {run.ask.schedule for run in found.best} == {schedule}


def test_experts_are_tried_on_every_divisor() -> None:
    want = wanted("mixtral-8x7b", 16, 16)
    assert {mesh["ep"] for mesh in meshes(want)} == {1, 2, 4, 8}
    assert all("ep" not in mesh for mesh in meshes(wanted(gpus=16, batch=16)))


def test_microbatches_make_the_batch_in_every_candidate() -> None:
    for ask in candidates(wanted("llama3-8b", 12, 48)):
        assert ask.global_batch == 48
        assert ask.world == 12


def test_what_fits_is_not_computed_again() -> None:
    found = search(wanted("small-llama", 8, 64), H100, top=100)
    assert {run.ask.checkpointing for run in found.best} == {"none"}
    assert (found.too_large, found.refused) == (0, {})
    microbatches = {
        (run.ask.mesh_text, run.ask.microbatch) for run in map(_dry, candidates(wanted("small-llama", 8, 64)))
    }
    assert found.tried == len(microbatches)


def _dry(ask: Ask) -> DryRun:
    return dry_run(ask, H100, exact=False)


def test_recomputing_more_is_never_faster() -> None:
    runs = [_dry(ask) for ask in candidates(wanted("llama3-8b", 16, 64)) if refusal(ask) is None]
    for none, selective, full in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        assert none.ask.mesh_text == selective.ask.mesh_text == full.ask.mesh_text
        seconds = [run.time.seconds * more for run, more in ((none, 1.0), (selective, 1 + 1e-9), (full, 1 + 2e-9))]
        assert seconds == sorted(seconds)  # equal where communication hides what is computed again
        memory = [run.fullest.memory.activations for run in (none, selective, full)]
        assert memory == sorted(memory, reverse=True)


@pytest.mark.parametrize("gpus", [16, 64])
def test_every_candidate_that_memory_stops_is_larger_than_what_fits(gpus: int) -> None:
    want = wanted(gpus=gpus, batch=gpus)
    found = search(want, H100)
    assert found.nearest is not None
    assert not found.nearest.fits
    too_large = [run for run in map(_dry, candidates(want)) if not run.fits]
    least = min(run.fullest.memory.total for run in too_large)
    assert found.nearest.fullest.memory.total >= least
