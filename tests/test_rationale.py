"""Why the best is the best: in the order of choosing, with numbers that are the candidate's own."""

import re
from dataclasses import replace

from planner_asks import H100

from workloads.planner.catalog import model_of
from workloads.planner.rationale import rationale
from workloads.planner.search import Found, Wanted, search


def found(model: str = "llama3-70b", gpus: int = 64, batch: int = 512) -> Found:
    return search(Wanted(model=model_of(model), gpus=gpus, global_batch=batch), H100)


DENSE = found()
MIXED = found("mixtral-8x7b", 64, 256)


def test_it_begins_with_what_fits_and_ends_with_what_binds() -> None:
    first, *_, last = rationale(DENSE)
    best = DENSE.best[0]
    assert first.startswith("fit: 1,129 GB of state over pp(")
    assert f"{best.fullest.memory.total / best.hardware.usable_bytes:.0%} of 73.6 GB usable" in first
    assert last.startswith(f"bound by {DENSE.bindings[0]}")
    assert "predicted" in last


def test_every_axis_in_use_is_told_in_the_order_of_choosing() -> None:
    told = [match[1] for line in rationale(DENSE) if (match := re.match(r"(\w+)=\d+ ", line)) is not None]
    used = [name for name in ("tp", "pp", "fsdp", "cp", "ep", "dp") if DENSE.best[0].ask.mesh.get(name, 1) > 1]
    assert told == used


def test_an_axis_says_what_it_does_where_it_is_and_what_it_costs() -> None:
    [tp] = [line for line in rationale(DENSE) if line.startswith("tp=")]
    assert "splits layers' state, work and activations, inside a node" in tp
    assert re.search(r": \d+\.\d% of the step is exposed; without it the fastest is [\w=,]+, [+-]\d", tp)


def test_a_pipeline_tells_its_bubble() -> None:
    best = DENSE.best[0]
    lines = [line for line in rationale(DENSE) if line.startswith("pp=")]
    assert all(f"its bubble is {best.time.bubble_seconds / best.time.seconds:.1%}" in line for line in lines)
    assert len(lines) == (best.ask.pp > 1)


def test_what_does_not_fit_without_an_axis_is_said() -> None:
    alone = replace(DENSE, without=dict.fromkeys(DENSE.without))
    assert any("without tp nothing fits or no rule allows it" in line for line in rationale(alone))


def test_experts_are_told_of() -> None:
    assert any(
        line.startswith("ep=") and "holds some experts only" in line.replace("hold ", "holds ")
        for line in rationale(MIXED)
    )


def test_a_simpler_mesh_that_is_about_as_fast_is_named() -> None:
    best = DENSE.best[0]
    simpler = replace(best, ask=replace(best.ask, mesh={"fsdp": 64}))
    as_fast = replace(DENSE, best=(best, simpler), bindings=("a", "b"))
    assert any(line.startswith("simpler: fsdp=64 has fewer axes and is 0.0% slower") for line in rationale(as_fast))


def test_a_simpler_mesh_that_is_slower_is_not() -> None:
    best = DENSE.best[0]
    slow = replace(best.time, compute_seconds=2 * best.time.compute_seconds)
    simpler = replace(best, ask=replace(best.ask, mesh={"fsdp": 64}), time=slow)
    assert not any("fewer axes" in line for line in rationale(replace(DENSE, best=(best, simpler))))
