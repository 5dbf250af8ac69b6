"""The search proposes the fastest steps that fit in memory and follow the rules."""

import math
import time
from collections import defaultdict

import msgspec
import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import Wanted, candidates
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.search import FRONT, Found, search
from tests.support.planner_asks import H100, make_request


def run_all_candidates(request: Wanted, hardware: Hardware) -> list[DryRun]:
    """Return the dry run of every candidate that breaks no rule."""
    steps = [step for step in candidates(request) if step.find_broken_rule() is None]
    return [dry_run(step, hardware, exact=False) for step in steps]


def list_best_seconds(runs: list[DryRun]) -> list[float]:
    """Return the time of the fastest step of each mesh, fastest first."""
    seconds_by_mesh: dict[str, float] = defaultdict(lambda: math.inf)
    for run in runs:
        mesh = run.spec.dims.label
        seconds_by_mesh[mesh] = min(seconds_by_mesh[mesh], run.seconds)
    return sorted(seconds_by_mesh.values())


def assert_search_is_exhaustive(request: Wanted, hardware: Hardware) -> None:
    fitting = [run for run in run_all_candidates(request, hardware) if run.fits]
    result = search(request, hardware, top=8)
    fastest = result.best[0]
    assert len({run.spec.dims.label for run in result.best}) == 8
    for run, seconds in zip(result.best, list_best_seconds(fitting), strict=False):
        assert run.fits
        assert run.spec.find_broken_rule() is None
        assert run.spec.global_batch == request.global_batch
        assert run.seconds <= seconds * 1.01
    for axis, run_without in result.without.items():
        times = [run.seconds for run in fitting if run.spec.dims.size(axis) == 1]
        if run_without is None:
            assert min(times, default=math.inf) > 4 * fastest.seconds
        else:
            assert run_without.seconds <= min(times) * 1.005
    for run in fitting:
        if run.seconds <= FRONT * fastest.seconds:
            assert_front_reaches(result, run)


def assert_front_reaches(result: Found, run: DryRun) -> None:
    """The front may need a tenth more memory than a step that is as fast."""
    front = [entry for entry in result.front if entry.seconds <= run.seconds * 1.005]
    least_memory = min(entry.fullest.memory.total for entry in front)
    assert least_memory * 0.89 <= run.fullest.memory.total, run.spec


def test_search_of_dense_model_is_exhaustive() -> None:
    """Many meshes do not fit."""
    hardware = msgspec.structs.replace(H100, memory_bytes=2e7)
    request = make_request(
        "small-llama", 8, 16, microbatch=1, schedule="1f1b", cp_method="zigzag"
    )
    assert_search_is_exhaustive(request, hardware)


def test_search_of_experts_is_exhaustive() -> None:
    choices = {"schedule": "1f1b", "checkpointing": "full", "cp_method": "zigzag"}
    request = make_request("mixtral-8x7b", 16, 16, microbatch=1, **choices)
    assert_search_is_exhaustive(request, H100)


def test_search_nearest_lacks_least_memory() -> None:
    request = make_request("llama3-70b", 4, 4, schedule="zb_h1", microbatch=1)
    result = search(request, H100)
    least_memory = min(run.fullest.memory.total for run in run_all_candidates(request, H100))
    assert result.best == ()
    assert result.too_large + sum(result.refused.values()) == result.tried > 0
    assert result.nearest is not None
    assert result.nearest.fullest.memory.total == least_memory > H100.usable_bytes


def find_best(model: StepSpec, batch: int, hardware: Hardware = H100) -> StepSpec:
    request = make_request(model, 16, batch, microbatch=1, schedule="1f1b")
    [run] = search(request, hardware, top=1).best
    return run.spec


def test_search_selects_cp_for_long_sequences() -> None:
    assert find_best(model_of("llama3-8b", 131072), batch=2).dims.cp > 1


def test_search_selects_ep_for_experts() -> None:
    assert find_best(model_of("mixtral-8x7b"), batch=16).dims.ep > 1


def test_search_selects_pp_on_slow_networks() -> None:
    """A slow network forbids sharding across nodes."""
    hardware = msgspec.structs.replace(H100, across_bytes_per_second=1e8)
    assert find_best(model_of("llama3-70b"), batch=4, hardware=hardware).dims.pp > 1


def test_search_keeps_small_models_simple() -> None:
    [run] = search(make_request("small-llama", 8, 64, schedule="1f1b"), H100, top=1).best
    assert run.spec.dims.size("pp", "tp") == 1
    assert run.spec.checkpointing == "none"


@pytest.mark.parametrize("gpus", [0, 10**9])
def test_search_rejects_number_of_gpus(gpus: int) -> None:
    with pytest.raises(UserError, match=rf"--gpus\({gpus}\)"):
        search(make_request("tiny", gpus), H100)


@pytest.mark.full
@pytest.mark.measures
def test_search_time_of_16384_gpus() -> None:
    start = time.process_time()
    assert search(make_request("llama3-70b", 16384, 16384), H100).best
    assert time.process_time() - start < 20
