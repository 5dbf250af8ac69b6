"""Requests that no mesh can meet: what they lack in numbers, and the fewest GPUs that would do."""

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planner_asks import H100, PLAIN, ask

from bench.errors import UserError
from workloads.planner.ask import refusal
from workloads.planner.catalog import Model, model_of
from workloads.planner.dry_run import dry_run
from workloads.planner.hardware import Hardware
from workloads.planner.infeasible import as_words, counts, lack_of, require_found, smallest_feasible, smallest_words
from workloads.planner.rank_memory import memory_of
from workloads.planner.search import Wanted, candidates, search
from workloads.planner.stage_parts import parts_of


def wanted(model: str | Model = "llama3-70b", gpus: int = 8, batch: int = 64, **more: Any) -> Wanted:
    known = model_of(model) if isinstance(model, str) else model
    return Wanted(model=known, gpus=gpus, global_batch=batch, **more)


def refused(want: Wanted, hardware: Hardware = H100) -> str:
    with pytest.raises(UserError) as caught:
        require_found(want, hardware, search(want, hardware))
    return str(caught.value)


def small(memory_bytes: float) -> Hardware:
    return msgspec.structs.replace(PLAIN, memory_bytes=memory_bytes)


def fits(want: Wanted, gpus: int, hardware: Hardware) -> bool:
    """Say by every candidate of a number of GPUs whether any keeps the rules and fits."""
    return any(
        refusal(each) is None and max(memory_of(each, part).total for part in parts_of(each)) <= hardware.usable_bytes
        for each in candidates(replace(want, gpus=gpus))
    )


def test_too_little_memory_is_refused_with_what_it_takes_and_what_would_do() -> None:
    words = refused(wanted())
    assert words.startswith("llama3-70b needs 1,129 GB of state over 8 x 80 GB (73.6 GB usable): ")
    assert ": 144.0 GB a GPU even as tp=8 with microbatch 1 and checkpointing full; smallest" in words
    assert words.endswith("smallest feasible: 16 GPUs as pp=2,tp=8 with microbatch 1 and checkpointing full")


def test_a_dry_run_that_does_not_fit_says_the_same_of_its_model() -> None:
    run = dry_run(ask("tp=8", "llama3-70b", microbatches=64), H100)
    words = lack_of(run, wanted())
    assert words.startswith("llama3-70b with tp=8 needs 188.1 GB on pp rank 0")
    assert "; it has 1,129 GB of state over 8 x 80 GB; " in words
    assert "141.1 GB of state" in words
    assert words.endswith("; smallest feasible: 16 GPUs as pp=2,tp=8 with microbatch 1 and checkpointing full")


SMALL = [
    ("small-llama", 12, 30e6, {}),
    ("small-llama", 8, 60e6, {"element_bytes": 4}),
    ("small", 6, 25e6, {}),
    ("tiny", 4, 5e6, {}),
    ("tiny-llama", 16, 3e6, {"cp_method": "ulysses"}),
    ("tiny", 4, 5e6, {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(("model", "batch", "memory_bytes", "more"), SMALL)
def test_no_fewer_gpus_would_do_whatever_their_mesh(
    model: str, batch: int, memory_bytes: float, more: dict[str, Any]
) -> None:
    want, hardware = wanted(model, 1, batch, **more), small(memory_bytes)
    best = smallest_feasible(want, hardware)
    assert best is not None
    assert 1 < best.ask.world == next(gpus for gpus in range(1, 2000) if fits(want, gpus, hardware))
    assert best.fits
    assert best.ask.global_batch == batch


def test_experts_too_need_no_more_than_they_must() -> None:
    tiny = model_of("tiny-llama")
    want, hardware = wanted(replace(tiny, num_experts=4, top_k=2), 1, 8), small(12e6)
    best = smallest_feasible(want, hardware)
    assert best is not None
    assert best.ask.world == next(gpus for gpus in range(1, 500) if fits(want, gpus, hardware)) > 1


@pytest.mark.parametrize("model", ["small-llama", "tiny"])
def test_every_number_of_gpus_that_has_a_mesh_is_tried(model: str) -> None:
    want = wanted(model, 1, 12)
    tried = set(counts(want, small(1e12)))
    assert {
        gpus for gpus in range(1, 200) if any(refusal(each) is None for each in candidates(replace(want, gpus=gpus)))
    } <= tried


def test_what_no_number_of_gpus_would_hold_is_said() -> None:
    assert smallest_words(wanted("small-llama", 2, 8), small(1e3)) == (
        "no number of GPUs up to 131072 fits it at global batch 8"
    )


def test_a_batch_too_small_for_any_mesh_is_refused_by_the_equation() -> None:
    words = refused(wanted("small-llama", 7, 3))
    assert "small-llama on 7 GPUs at global batch 3: global batch(3) % (dp(7) * fsdp(1) * microbatch(1)) != 0" in words
    assert words.endswith("smallest feasible: 1 GPUs as dp=1 with microbatch 1 and checkpointing none")


def test_rules_that_stop_every_mesh_are_told_with_their_numbers() -> None:
    """One head and an odd sequence leave a pipeline alone, and one microbatch is too few for its schedule."""
    shape = replace(model_of("tiny").shape, heads=1, kv_heads=1, sequence=63)
    words = refused(wanted(Model(name="lone", shape=shape), 2, 1, schedule="dualpipe_v"), PLAIN)
    assert words.startswith("lone on 2 GPUs at global batch 1: every mesh breaks a rule, such as pp=2: ")
    assert "microbatches(1)" in words
    assert words.endswith("; smallest feasible: 1 GPUs as dp=1 with microbatch 1 and checkpointing none")


def test_words_name_the_mesh_and_what_was_chosen_for_it() -> None:
    run = dry_run(ask("fsdp=2,tp=8", "llama3-70b", checkpointing="full", microbatch=2), H100)
    assert as_words(run) == "fsdp=2,tp=8 with microbatch 2 and checkpointing full"


@pytest.mark.parametrize("model", ["llama3-405b", "gpt-530b", "mixtral-8x7b"])
def test_the_fewest_are_found_at_once(model: str) -> None:
    began = time.process_time()
    assert smallest_feasible(wanted(model, 8, 512), H100) is not None
    assert time.process_time() - began < 10
