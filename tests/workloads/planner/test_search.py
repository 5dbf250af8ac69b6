"""The search proposes the fastest steps that fit in memory and follow the rules."""

import math
import time
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.candidates import Wanted, candidates
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.search import FRONT, search
from tests.support.planner_asks import H100, make_request

ONE_SCHEDULE: dict[str, Any] = {"microbatch": 1, "schedule": "1f1b"}


def run_all_candidates(request: Wanted, hardware: Hardware) -> list[DryRun]:
    """Return the dry run of every candidate that breaks no rule."""
    steps = [step for step in candidates(request) if step.refusal() is None]
    return [dry_run(step, hardware, exact=False) for step in steps]


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "memory_bytes", "choices"),
    [
        ("small-llama", 8, 16, 2e7, {"cp_method": "zigzag"}),  # Many meshes do not fit.
        ("mixtral-8x7b", 16, 16, 80e9, {"checkpointing": "full", "cp_method": "zigzag"}),
        pytest.param("llama3-8b", 16, 64, 80e9, {}, marks=pytest.mark.full),
        pytest.param("mixtral-8x7b", 32, 32, 80e9, {}, marks=pytest.mark.full),
    ],
)
def test_search_matches_exhaustive_search(
    model: str, gpus: int, batch: int, memory_bytes: float, choices: dict[str, Any]
) -> None:
    hardware = msgspec.structs.replace(H100, memory_bytes=memory_bytes)
    request = make_request(model, gpus, batch, **ONE_SCHEDULE, **choices)
    fitting = [run for run in run_all_candidates(request, hardware) if run.fits]
    seconds_by_mesh: dict[str, float] = defaultdict(lambda: math.inf)
    for run in fitting:
        mesh = run.spec.mesh_text
        seconds_by_mesh[mesh] = min(seconds_by_mesh[mesh], run.seconds)

    result = search(request, hardware, top=8)

    fastest = result.best[0]
    assert len({run.spec.mesh_text for run in result.best}) == 8
    for run, seconds in zip(result.best, sorted(seconds_by_mesh.values()), strict=False):
        assert run.fits
        assert run.spec.refusal() is None
        assert run.spec.global_batch == batch
        assert run.seconds <= seconds * 1.01
    for axis, run_without in result.without.items():
        times = [run.seconds for run in fitting if run.spec.size(axis) == 1]
        if run_without is None:
            assert min(times, default=math.inf) > 4 * fastest.seconds
        else:
            assert run_without.seconds <= min(times) * 1.005
    # The front may need a tenth more memory than a step that is as fast.
    for run in fitting:
        if run.seconds <= FRONT * fastest.seconds:
            front = [entry for entry in result.front if entry.seconds <= run.seconds * 1.005]
            least_memory = min(entry.fullest.memory.total for entry in front)
            assert least_memory * 0.89 <= run.fullest.memory.total, run.spec


def test_search_nearest_lacks_least_memory() -> None:
    request = make_request("llama3-70b", 8, 8, schedule="zb_h1", microbatch=1)
    result = search(request, H100)
    least_memory = min(run.fullest.memory.total for run in run_all_candidates(request, H100))
    assert result.best == ()
    assert result.too_large + sum(result.refused.values()) == result.tried > 0
    assert result.nearest is not None
    assert result.nearest.fullest.memory.total == least_memory > H100.usable_bytes


def test_search_reports_broken_rules() -> None:
    result = search(make_request("llama3-8b", 8, 8, schedule="zb_h1", microbatch=1), H100)
    assert "schedule = zb_h1 is not allowed with fsdp(" in " ".join(result.equations.values())


@pytest.mark.parametrize(
    ("model", "batch", "across_bytes_per_second", "axis"),
    [
        (model_of("llama3-8b", 131072), 2, 50e9, "cp"),
        (model_of("mixtral-8x7b"), 16, 50e9, "ep"),
        # A slow network forbids sharding across nodes.
        (model_of("llama3-70b"), 4, 1e8, "pp"),
    ],
)
def test_search_selects_the_expected_axis(
    model: StepSpec, batch: int, across_bytes_per_second: float, axis: str
) -> None:
    hardware = msgspec.structs.replace(H100, across_bytes_per_second=across_bytes_per_second)
    [run] = search(make_request(model, 16, batch, **ONE_SCHEDULE), hardware, top=1).best
    assert run.spec.size(axis) > 1


def test_search_keeps_small_models_simple() -> None:
    [run] = search(make_request("small-llama", 8, 64, schedule="1f1b"), H100, top=1).best
    assert run.spec.size("pp", "tp") == 1
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
    assert time.process_time() - start < 10
