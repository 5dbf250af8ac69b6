"""The search: every mesh, none that a rule or the memory refuses, why the best is it, and how few GPUs would do."""

import math
import re
import time
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import H100, PLAIN, ask

from parbench.bench.plan.params import Value
from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import moe_of
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.planner.candidates import CP_METHODS, SCHEDULES, Wanted, candidates, divisors, splits
from parbench.workloads.planner.dry_run import Axis, DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.lacking import lack_of, require_found, smallest_feasible, smallest_words
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.rationale import binding_of, rationale
from parbench.workloads.planner.search import FRONT, Found, search


def wanted(model: str | StepSpec = "llama3-70b", gpus: int = 64, batch: int = 512, **more: Any) -> Wanted:
    said = {
        name: more.pop(name)
        for name in ("schedule", "cp_method", "zero", "checkpointing", "microbatch")
        if name in more
    }
    return Wanted(step=ask(model=model, **more), gpus=gpus, global_batch=batch, **said)


def best(want: Wanted) -> StepSpec:
    return search(want, H100, top=1).best[0].spec


def allowed(want: Wanted) -> list[DryRun]:
    return [dry_run(each, H100, exact=False) for each in candidates(want) if each.refusal() is None]


def test_meshes_are_all_products_that_the_models_sizes_allow_the_innermost_talking_most() -> None:
    for gpus in (8, 12, 16):
        want = wanted("small-llama", gpus, 1536)  # which so many data ranks and microbatches divide
        every = [
            dict(zip(("dp", "pp", "fsdp", "cp", "tp"), each, strict=True))
            for each in product([n for n in range(1, gpus + 1) if gpus % n == 0], repeat=5)
            if math.prod(each) == gpus
        ]
        kept = {
            tuple(mesh.items())
            for mesh in every
            for split in ("", *splits(want.step.shape, None, mesh["pp"], 1, "1f1b"))
            if replace(want.step, mesh=mesh, split=split, microbatches=64).refusal() is None
        }
        found = [each for each in candidates(want) if each.refusal() is None]
        assert kept == {tuple(each.mesh.items()) for each in found}, gpus
        assert {each.zero for each in found} == {0, 1, 2, 3}
        assert {(each.schedule, each.stages_per_rank) for each in found if each.size("pp") > 1} <= set(SCHEDULES)
        assert {each.cp_method for each in found} == set(CP_METHODS)
    mixtures = list(candidates(wanted("mixtral-8x7b", 16, 16)))
    assert {each.size("ep") for each in mixtures} == {1, 2, 4, 8}
    assert {(each.size("tp"), each.size("etp")) for each in mixtures} > {(2, 1), (2, 2), (8, 1), (8, 8)}
    batches = {(each.world, each.global_batch, each.microbatch) for each in candidates(wanted("llama3-8b", 12, 48))}
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
    st.sampled_from(["small-llama", "llama3-8b", "mixtral-8x7b", "gpt-7.5b"]),
    st.sampled_from([2, 6, 8, 16, 24, 48]),
    st.sampled_from([1, 8, 48, 96, 512]),
    st.sampled_from(["1f1b", "interleaved", "gpipe", "zb_h1", "zb_v"]),
    st.sampled_from(["ring", "zigzag", "ulysses"]),
)
@settings(deadline=None, max_examples=10)
def test_nothing_is_proposed_that_its_own_rules_or_the_memory_refuse(
    model: str, gpus: int, batch: int, schedule: str, method: str
) -> None:
    for run in search(wanted(model, gpus, batch, schedule=schedule, cp_method=method), H100, top=50).best:
        assert run.fits
        assert (run.spec.world, run.spec.global_batch) == (gpus, batch)
        assert run.spec.size("pp") == 1 or run.spec.schedule == schedule
        assert run.spec.refusal() is None


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [
        ("llama3-8b", 16, 64),
        pytest.param("mixtral-8x7b", 32, 32, marks=pytest.mark.full),
        ("small-llama", 8, 64),
    ],
)
def test_what_is_never_priced_is_not_better_than_what_is_found(model: str, gpus: int, batch: int) -> None:
    said = {"schedule": "interleaved", "cp_method": "zigzag", "checkpointing": "selective"}
    for want in (wanted(model, gpus, batch, microbatch=1), wanted(model, gpus, batch, **said)):
        fitting = [run for run in allowed(want) if run.fits]
        found = search(want, H100, top=8)
        order = [float(f"{run.seconds:.3g}") for run in found.best]
        assert order == sorted(order)
        assert len({run.spec.mesh_text for run in found.best}) == len(found.best) == 8
        fastest = {run.spec.mesh_text: math.inf for run in fitting}
        for run in fitting:
            fastest[run.spec.mesh_text] = min(fastest[run.spec.mesh_text], run.seconds)
        for run, seconds in zip(found.best, sorted(fastest.values()), strict=False):
            assert run.seconds <= seconds * 1.01
        assert found.without.keys() == {name for name, size in found.best[0].spec.mesh.items() if size > 1}
        for name, other in found.without.items():
            least = min((run.seconds for run in fitting if run.spec.size(name) == 1), default=math.inf)
            assert other is None or other.seconds <= least * 1.005, name
            assert other is not None or least > 4 * found.best[0].seconds
        for run in fitting:  # a tenth of memory apart, no step is both faster and smaller than the front
            if run.seconds <= FRONT * found.best[0].seconds:
                front = [each for each in found.front if each.seconds <= run.seconds * 1.005]
                assert min(each.fullest.memory.total for each in front) * 0.89 <= run.fullest.memory.total, run.spec


def test_messages_that_take_no_time_are_not_exposed() -> None:
    assert search(wanted("llama3-8b", 8, 32), H100, seconds=lambda call: 0.0).best[0].exposed_seconds == 0


def test_the_front_needs_less_memory_with_each_step_that_takes_longer() -> None:
    front = search(wanted("llama3-8b", 16, 64), H100).front
    assert len(front) > 3
    for faster, slower in pairwise(front):
        assert slower.seconds > faster.seconds
        assert slower.fullest.memory.total < 0.9 * faster.fullest.memory.total


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
    assert any("schedule = zb_h1 is not allowed with fsdp(" in reason for reason in refused.values())


def test_the_best_is_what_one_would_choose_by_hand() -> None:
    assert best(wanted(gpus=64, batch=64)).size("tp") <= 8
    plain = best(wanted("small-llama", 8, 64, element_bytes=4))
    assert (plain.size("pp"), plain.size("tp"), plain.checkpointing) == (1, 1, "none")
    assert best(wanted(model_of("llama3-8b", 131072), 16, 2)).size("cp") > 1
    assert best(wanted("mixtral-8x7b", 16, 64)).size("ep") > 1
    slow = msgspec.structs.replace(H100, across_bytes_per_second=1e8)  # so that sharding across nodes is no choice
    [found] = search(wanted("llama3-70b", 64, 16), slow, top=1).best
    assert found.spec.size("pp") > 1
    assert binding_of(found).startswith(("batch", "bubble", "memory", "link tp"))
    for gpus in (0, 10**9):
        with pytest.raises(UserError, match=rf"--gpus\({gpus}\) is not within 1"):
            search(wanted(gpus=gpus), H100)


@pytest.mark.full
@pytest.mark.measures
@pytest.mark.parametrize(("model", "gpus", "limit"), [("llama3-70b", 16384, 10), ("mixtral-8x7b", 4096, 20)])
def test_a_search_takes_no_longer_than_it_may(model: str, gpus: int, limit: float) -> None:
    began = time.process_time()
    assert search(wanted(model, gpus, gpus), H100).best
    assert time.process_time() - began < limit


def refused(want: Wanted, hardware: Hardware = H100) -> str:
    return refusals.refusal(require_found, want, hardware, search(want, hardware))


def test_too_little_memory_is_refused_with_what_it_takes_and_what_would_do() -> None:
    words = refused(wanted(gpus=8, batch=64))
    assert words.startswith("llama3-70b needs 1,129 GB of state over 8 x 80 GB (73.6 GB usable): ")
    assert ": 144.0 GB a GPU even as tp=8 with microbatch 1, checkpointing full; smallest" in words
    smallest = "; smallest feasible: 16 GPUs as pp=2,tp=8 with microbatch 1, checkpointing full"
    assert smallest in words
    words = lack_of(dry_run(ask("tp=8", "llama3-70b", microbatches=64), H100))
    assert words.startswith("llama3-70b with tp=8 needs 188.1 GB on pp rank 0")
    parts = "(141.1 GB of state, 46.9 GB of activations, 0.0 GB of buffers) > 73.6 GB usable of 80"
    assert f"{parts}; it has 1,129 GB of state over 8 x 80 GB{smallest}" in words
    none = smallest_words(wanted("small-llama", 2, 8), msgspec.structs.replace(PLAIN, memory_bytes=1e3))
    assert none == "no number of GPUs up to 131072 fits it at global batch 8"


TINY = model_of("tiny-llama")
EXPERTS: dict[str, Value] = {"experts": 4, "shared": 0, "expert_ffn": 352, "routing": BALANCED}
SMALL: list[tuple[str | StepSpec, int, float, dict[str, Any]]] = [
    ("small-llama", 12, 30e6, {}),
    ("small-llama", 8, 60e6, {"element_bytes": 4}),
    ("tiny", 4, 5e6, {"schedule": "gpipe"}),
    ("tiny-llama", 16, 3e6, {"cp_method": "ulysses"}),
    (replace(TINY, moe=moe_of(EXPERTS, TINY.shape, 1)), 8, 12e6, {}),
]


def test_no_fewer_gpus_would_do_whatever_their_mesh() -> None:
    for model, batch, memory_bytes, more in SMALL:
        want, hardware = wanted(model, 1, batch, **more), msgspec.structs.replace(PLAIN, memory_bytes=memory_bytes)
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
    assert "small-llama on 11 GPUs at global batch 3: global batch(3) % (dp(11) * fsdp(1) * microbatch(1))" in words
    assert words.endswith(one)
    # one head and an odd sequence leave a pipeline alone, and one microbatch is too few for its schedule
    shape = replace(model_of("tiny").shape, heads=1, kv_heads=1, sequence=63)
    words = refused(wanted(StepSpec(name="lone", shape=shape), 2, 1, schedule="dualpipe_v"), PLAIN)
    assert words.startswith("lone on 2 GPUs at global batch 1: every mesh breaks a rule, such as pp=2: ")
    assert "microbatches(1)" in words
    assert words.endswith(one)


@pytest.fixture(scope="module")
def dense() -> Found:
    return search(wanted(), H100)


def test_why_begins_with_what_fits_tells_each_axis_in_the_order_of_choosing_and_ends_with_what_binds(
    dense: Found,
) -> None:
    best, lines = dense.best[0], rationale(dense)
    assert lines[0].startswith("fit: 1,129 GB of state over pp(")
    assert f"{best.fullest.memory.total / best.hardware.usable_bytes:.0%} of 73.6 GB usable" in lines[0]
    assert lines[-1].startswith(f"bound by {binding_of(best)}: ")
    assert "predicted" in lines[-1]
    told = {match[1]: line for line in lines if (match := re.match(r"(\w+)=\d+ ", line)) is not None}
    assert list(told) == [name for name in ("tp", "pp", "fsdp", "cp", "ep", "dp") if best.spec.mesh.get(name, 1) > 1]
    assert "splits layers' state, work and activations, inside a node" in told["tp"]
    cost = r": \d+\.\d% of the step is exposed; without it the fastest is [\w=,]+, [+-]\d"
    assert re.search(cost, told["tp"])
    alone = rationale(replace(dense, without=dict.fromkeys(dense.without)))
    assert any("without tp nothing fits, no rule allows it, or it takes 4 times as long" in line for line in alone)


def test_experts_and_pipelines_have_reasons_of_their_own() -> None:
    [experts] = [line for line in rationale(search(wanted("mixtral-8x7b", 16, 64), H100)) if line.startswith("ep=")]
    assert "lets each rank hold some experts only" in experts
    staged = search(wanted(gpus=16, batch=64), H100)
    [line] = [line for line in rationale(staged) if line.startswith("pp=")]
    time = staged.best[0]
    assert f"its bubble is {time.bubble_seconds / time.seconds:.1%}" in line


def test_a_simpler_mesh_is_named_where_it_is_about_as_fast(dense: Found) -> None:
    best = dense.best[0]
    simpler = replace(best, spec=replace(best.spec, mesh={"fsdp": 64}))
    as_fast = rationale(replace(dense, best=(best, simpler)))
    assert any(line.startswith("simpler: fsdp=64 has fewer axes and is 0.0% slower") for line in as_fast)
    slow = replace(simpler, compute_seconds=2 * best.compute_seconds)
    assert not any("fewer axes" in line for line in rationale(replace(dense, best=(best, slow))))


def made(compute: float = 1.0, how: str = "none", microbatch: int = 1, bubble: float = 0.0, **exposed: float) -> DryRun:
    run = dry_run(ask("dp=2", checkpointing=how, microbatch=microbatch), H100)
    axes = tuple(
        Axis(name=name, seconds=seconds, exposed_seconds=seconds, sent_bytes=0, where="", assumption="")
        for name, seconds in exposed.items()
    )
    return replace(run, update_seconds=1e-9, compute_seconds=compute, bubble_seconds=bubble, axes=axes)


def test_the_largest_part_that_is_no_arithmetic_binds() -> None:
    for run, binding in (
        (made(), "compute (100% of the step)"),
        (made(tp=0.1), "compute (91% of the step)"),
        (made(tp=1.0), "link tp (50% of the step)"),
        (made(tp=0.5, dp=0.5), "link tp (25% of the step)"),
        (made(tp=0.4, dp=0.6), "link dp (30% of the step)"),
        (made(bubble=1.0), "batch (50% of the step)"),
        (made(bubble=1.0, microbatch=2), "bubble (50% of the step)"),
        (made(bubble=0.6, tp=1.0), "link tp (38% of the step)"),
        (made(how="full"), "memory (25% of the step)"),
        (made(how="full", tp=3.0), "link tp (75% of the step)"),
        (made(0.1, tp=0.01, how="full"), "memory (23% of the step)"),
    ):
        assert binding_of(run) == binding
        full = msgspec.structs.replace(PLAIN, memory_bytes=run.fullest.memory.total / 0.95)
        assert binding_of(replace(run, hardware=full)) == binding[:-1] + ", memory 95% full)"
