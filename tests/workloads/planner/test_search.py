"""The search: every mesh, none that a rule or the memory refuses, why the best is it, and how few GPUs would do."""

import math
import re
import time
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbench.bench.plan.params import Value
from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.planner.candidates import (
    CP_METHODS,
    SCHEDULES,
    Wanted,
    candidates,
    divisors,
    splits,
)
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.lacking import (
    lack_of,
    require_found,
    smallest_feasible,
    smallest_words,
)
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.rationale import binding_of, rationale
from parbench.workloads.planner.search import FRONT, search
from tests.support import refusals
from tests.support.planner_asks import H100, SIMPLE_HARDWARE, make_spec


def wanted(
    model: str | StepSpec = "llama3-70b", gpus: int = 64, batch: int = 512, **more: Any
) -> Wanted:
    said = {
        name: more.pop(name)
        for name in ("schedule", "cp_method", "zero", "checkpointing", "microbatch")
        if name in more
    }
    return Wanted(step=make_spec(model=model, **more), gpus=gpus, global_batch=batch, **said)


def best(want: Wanted) -> StepSpec:
    return search(want, H100, top=1).best[0].spec


def allowed(want: Wanted, hardware: Hardware = H100) -> list[DryRun]:
    return [
        dry_run(each, hardware, exact=False) for each in candidates(want) if each.refusal() is None
    ]


def test_candidates_are_all_meshes_that_the_sizes_allow() -> None:
    gpus = 12
    want = wanted(
        "small-llama", gpus, 1536
    )  # every number of data ranks and microbatches divides the batch
    sizes = product(divisors(gpus), repeat=5)
    meshes = [
        dict(zip(("dp", "pp", "fsdp", "cp", "tp"), size, strict=True))
        for size in sizes
        if math.prod(size) == gpus
    ]
    expected = {
        tuple(mesh.items())
        for mesh in meshes
        for split in ("", *splits(want.step.shape, None, mesh["pp"], 1, "1f1b"))
        if replace(want.step, mesh=mesh, split=split, microbatches=64).refusal() is None
    }
    found = [step for step in candidates(want) if step.refusal() is None]
    assert {tuple(step.mesh.items()) for step in found} == expected
    assert {step.zero for step in found} == {0, 1, 2, 3}
    assert {(step.schedule, step.stages_per_rank) for step in found if step.size("pp") > 1} <= set(
        SCHEDULES
    )
    assert {step.cp_method for step in found} == set(CP_METHODS)
    mixtures = list(candidates(wanted("mixtral-8x7b", 16, 16)))
    assert {each.size("ep") for each in mixtures} == {1, 2, 4, 8}
    assert {(each.size("tp"), each.size("etp")) for each in mixtures} > {
        (2, 1),
        (2, 2),
        (8, 1),
        (8, 8),
    }
    batches = {
        (each.world, each.global_batch, each.microbatch)
        for each in candidates(wanted("llama3-8b", 12, 48))
    }
    assert batches == {(12, 48, microbatch) for microbatch in (1, 2, 4, 8)}
    for number in (1, 12, 97, 1024, 2000):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0], number


def test_layers_that_do_not_divide_are_dealt_out_so_that_the_slowest_rank_is_least_slow() -> None:
    shape = model_of("llama3-405b").shape
    assert splits(shape, None, 16, 1, "1f1b") == ("7+" + "8+" * 14 + "7",)
    assert splits(shape, None, 14, 1, "1f1b")[0] == ""  # 9 each
    assert splits(shape, None, 200, 1, "1f1b") == ("",)
    [even, relieved] = splits(model_of("llama3-8b").shape, None, 2, 1, "1f1b")
    assert (even, relieved) == ("", "17+15")  # whose head is as much work as two layers
    for chunks, schedule in ((2, "interleaved"), (2, "zb_v")):
        for text in splits(shape, None, 16, chunks, schedule):
            counts = list(map(int, text.split("+")))
            assert (len(counts), sum(counts), min(counts)) == (32, 126, 3)


@given(
    st.sampled_from(["small-llama", "llama3-8b", "mixtral-8x7b"]),
    st.sampled_from([2, 6, 16]),
    st.sampled_from([1, 8, 48]),
    st.sampled_from(["1f1b", "interleaved", "zb_h1"]),
    st.sampled_from(["zigzag", "ulysses"]),
)
@settings(deadline=None, max_examples=4)
def test_search_proposes_only_what_fits_and_follows_the_rules(
    model: str, gpus: int, batch: int, schedule: str, method: str
) -> None:
    want = wanted(model, gpus, batch, schedule=schedule, cp_method=method, microbatch=1)
    for run in search(want, H100, top=50).best:
        assert run.fits
        assert (run.spec.world, run.spec.global_batch) == (gpus, batch)
        assert run.spec.size("pp") == 1 or run.spec.schedule == schedule
        assert run.spec.refusal() is None


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "memory_bytes"),
    [
        pytest.param("llama3-8b", 16, 64, 80e9, marks=pytest.mark.full),
        pytest.param("mixtral-8x7b", 32, 32, 80e9, marks=pytest.mark.full),
        ("small-llama", 8, 16, 80e9),
        ("small-llama", 8, 16, 2e7),  # many meshes do not fit
    ],
)
def test_search_finds_the_fastest_of_all_candidates(
    model: str, gpus: int, batch: int, memory_bytes: float
) -> None:
    hardware = msgspec.structs.replace(H100, memory_bytes=memory_bytes)
    said = {"schedule": "interleaved", "cp_method": "zigzag", "checkpointing": "selective"}
    for want in (
        wanted(model, gpus, batch, microbatch=1, schedule="1f1b"),
        wanted(model, gpus, batch, **said),
    ):
        fitting = [run for run in allowed(want, hardware) if run.fits]
        found = search(want, hardware, top=8)
        assert all(run.fits for run in found.best)
        order = [float(f"{run.seconds:.3g}") for run in found.best]
        assert order == sorted(order)
        assert len({run.spec.mesh_text for run in found.best}) == len(found.best) == 8
        fastest = {run.spec.mesh_text: math.inf for run in fitting}
        for run in fitting:
            fastest[run.spec.mesh_text] = min(fastest[run.spec.mesh_text], run.seconds)
        for run, seconds in zip(found.best, sorted(fastest.values()), strict=False):
            assert run.seconds <= seconds * 1.01
        assert found.without.keys() == {
            name for name, size in found.best[0].spec.mesh.items() if size > 1
        }
        for name, other in found.without.items():
            least = min(
                (run.seconds for run in fitting if run.spec.size(name) == 1), default=math.inf
            )
            assert other is None or other.seconds <= least * 1.005, name
            assert other is not None or least > 4 * found.best[0].seconds
        for (
            run
        ) in fitting:  # a tenth of memory apart, no step is both faster and smaller than the front
            if run.seconds <= FRONT * found.best[0].seconds:
                front = [each for each in found.front if each.seconds <= run.seconds * 1.005]
                assert (
                    min(each.fullest.memory.total for each in front) * 0.89
                    <= run.fullest.memory.total
                ), run.spec


def test_rules_are_told_with_their_numbers_and_the_nearest_lacks_least() -> None:
    want = wanted(gpus=8, batch=8, schedule="zb_h1")
    found, runs = search(want, H100), allowed(want)
    assert (found.best, found.front) == ((), ())
    assert found.too_large + sum(found.refused.values()) == found.tried > 0
    assert found.nearest is not None
    least = min(run.fullest.memory.total for run in runs)
    assert found.nearest.fullest.memory.total == least > H100.usable_bytes
    staged = wanted("llama3-8b", 8, 8, schedule="zb_h1")
    refused = search(staged, H100).equations
    assert any(
        "schedule = zb_h1 is not allowed with fsdp(" in reason for reason in refused.values()
    )


def test_best_mesh_suits_the_model_and_the_network() -> None:
    plain = best(wanted("small-llama", 8, 64, element_bytes=4))
    assert (plain.size("pp"), plain.size("tp"), plain.checkpointing) == (1, 1, "none")
    assert best(wanted(model_of("llama3-8b", 131072), 16, 2, schedule="1f1b")).size("cp") > 1
    assert best(wanted("mixtral-8x7b", 16, 16, schedule="1f1b", microbatch=1)).size("ep") > 1
    slow = msgspec.structs.replace(H100, across_bytes_per_second=1e8)  # no sharding across nodes
    [found] = search(wanted("llama3-70b", 16, 4, schedule="1f1b"), slow, top=1).best
    assert found.spec.size("pp") > 1
    for gpus in (0, 10**9):
        with pytest.raises(UserError, match=rf"--gpus\({gpus}\) is not within 1"):
            search(wanted(gpus=gpus), H100)


@pytest.mark.full
@pytest.mark.measures
def test_search_of_16384_gpus_takes_seconds() -> None:
    began = time.process_time()
    assert search(wanted("llama3-70b", 16384, 16384), H100).best
    assert time.process_time() - began < 10


def refused(want: Wanted, hardware: Hardware = H100) -> str:
    return refusals.usage_error(require_found, want, hardware, search(want, hardware))


def test_too_little_memory_is_refused_with_what_it_takes_and_what_would_do() -> None:
    words = refused(wanted(gpus=8, batch=64, schedule="1f1b", microbatch=1))
    assert words.startswith("llama3-70b needs 1,129 GB of state over 8 x 80 GB (73.6 GB usable): ")
    assert ": 144.0 GB a GPU even as tp=8 with microbatch 1, checkpointing full; smallest" in words
    smallest = "; smallest feasible: 16 GPUs as pp=2,tp=8 with microbatch 1, checkpointing full"
    assert smallest in words
    words = lack_of(dry_run(make_spec("tp=8", "llama3-70b", microbatches=64), H100))
    assert words.startswith("llama3-70b with tp=8 needs 188.1 GB on pp rank 0")
    parts = "(141.1 GB of state, 46.9 GB of activations, 0.0 GB of buffers) > 73.6 GB usable of 80"
    assert f"{parts}; it has 1,129 GB of state over 8 x 80 GB{smallest}" in words
    none = smallest_words(
        wanted("small-llama", 2, 8), msgspec.structs.replace(SIMPLE_HARDWARE, memory_bytes=1e3)
    )
    assert none == "no number of GPUs up to 131072 fits it at global batch 8"


TINY = model_of("tiny-llama")
EXPERTS: dict[str, Value] = {"experts": 4, "shared": 0, "expert_ffn": 352, "routing": BALANCED}
SMALL: list[tuple[str | StepSpec, int, float, dict[str, Any]]] = [
    ("small-llama", 12, 30e6, {}),
    (replace(TINY, moe=moe_of(EXPERTS, TINY.shape, 1)), 8, 12e6, {}),
]


def test_no_fewer_gpus_would_do_whatever_their_mesh() -> None:
    for model, batch, memory_bytes, more in SMALL:
        want, hardware = (
            wanted(model, 1, batch, **more),
            msgspec.structs.replace(SIMPLE_HARDWARE, memory_bytes=memory_bytes),
        )
        best = smallest_feasible(want, hardware)
        assert best is not None
        assert best.fits
        assert best.spec.global_batch == batch
        fewest = next(
            gpus
            for gpus in range(1, 2000)
            for each in candidates(replace(want, gpus=gpus))
            if each.refusal() is None and dry_run(each, hardware, exact=False).fits
        )
        assert 1 < best.spec.world == fewest, (model, batch)


def test_a_batch_too_small_and_rules_that_stop_every_mesh_are_told_with_their_numbers() -> None:
    one = "; smallest feasible: 1 GPUs as dp=1 with microbatch 1, checkpointing none"
    words = refused(wanted("small-llama", 11, 3))
    assert (
        "small-llama on 11 GPUs at global batch 3: global batch(3) % (dp(11) * fsdp(1) * microbatch(1))"
        in words
    )
    assert words.endswith(one)
    # one head and an odd sequence leave a pipeline alone, and one microbatch is too few for its schedule
    shape = replace(model_of("tiny").shape, heads=1, kv_heads=1, sequence=63)
    words = refused(
        wanted(StepSpec(name="lone", shape=shape), 2, 1, schedule="dualpipe_v"), SIMPLE_HARDWARE
    )
    assert words.startswith(
        "lone on 2 GPUs at global batch 1: every mesh breaks a rule, such as pp=2: "
    )
    assert "microbatches(1)" in words
    assert words.endswith(one)


def test_rationale_explains_each_axis_of_the_best_mesh() -> None:
    found = search(wanted(gpus=16, batch=16, schedule="1f1b"), H100)
    best, lines = found.best[0], rationale(found)
    assert lines[0].startswith("fit: 1,129 GB of state over pp(")
    assert lines[-1].startswith(f"bound by {binding_of(best)}: ")
    explained = {
        match[1]: line for line in lines if (match := re.match(r"(\w+)=\d+ ", line)) is not None
    }
    assert list(explained) == [
        name for name in ("tp", "pp", "fsdp", "cp", "ep", "dp") if best.spec.mesh.get(name, 1) > 1
    ]
    assert f"its bubble is {best.bubble_seconds / best.seconds:.1%}" in explained["pp"]
    alone = rationale(replace(found, without=dict.fromkeys(found.without)))
    assert any(
        "without tp nothing fits, no rule allows it, or it takes 4 times as long" in line
        for line in alone
    )
    simpler = replace(best, spec=replace(best.spec, mesh={"fsdp": 16}))
    assert any(
        line.startswith("simpler: fsdp=16 ")
        for line in rationale(replace(found, best=(best, simpler)))
    )


def made(
    compute: float = 1.0,
    how: str = "none",
    microbatch: int = 1,
    bubble: float = 0.0,
    **exposed: float,
) -> DryRun:
    run = dry_run(make_spec("dp=2", checkpointing=how, microbatch=microbatch), H100)
    axes = tuple(
        Axis(
            name=name,
            seconds=seconds,
            exposed_seconds=seconds,
            sent_bytes=0,
            where="",
            assumption="",
        )
        for name, seconds in exposed.items()
    )
    return replace(
        run, update_seconds=1e-9, compute_seconds=compute, bubble_seconds=bubble, axes=axes
    )


def test_the_largest_part_that_is_no_arithmetic_binds() -> None:
    for run, binding in (
        (made(), "compute (100% of the step)"),
        (made(tp=0.1), "compute (91% of the step)"),
        (made(tp=1.0), "link tp (50% of the step)"),
        (made(tp=0.4, dp=0.6), "link dp (30% of the step)"),
        (made(bubble=1.0), "batch (50% of the step)"),
        (made(bubble=1.0, microbatch=2), "bubble (50% of the step)"),
        (made(how="full"), "memory (25% of the step)"),
    ):
        assert binding_of(run) == binding
        full = msgspec.structs.replace(
            SIMPLE_HARDWARE, memory_bytes=run.fullest.memory.total / 0.95
        )
        assert binding_of(replace(run, hardware=full)) == binding[:-1] + ", memory 95% full)"
