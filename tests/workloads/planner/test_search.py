"""The search proposes steps that fit in memory and follow the rules, the simplest tie first."""

from dataclasses import replace

import msgspec
import pytest

from parbench.bench.text import UserError
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.models import load_model
from parbench.workloads.planner.search import (
    PREDICTION_ERROR,
    is_tie,
    rank_runs,
    search,
)
from tests.support.workloads.planner_asks import H100, SIMPLE_HARDWARE, make_request, make_spec


def test_search_ranks_meshes_that_fit() -> None:
    request = make_request("llama3-70b", 32, 32)
    result = search(request, H100)
    fastest = min(run.seconds for run in result.runs)
    for run in result.runs:
        assert run.fits
        assert run.spec.find_broken_rule() is None
        assert run.spec.global_batch == 32
    ties = [is_tie(run, fastest) for run in result.runs]
    assert ties == sorted(ties, reverse=True)
    meshes = [run.spec.dims.label for run in result.runs]
    assert len(meshes) == len(set(meshes))
    assert result.num_considered > result.num_too_large > 0


def test_search_uses_least_recomputation_that_fits() -> None:
    for run in search(make_request("llama3-8b", 8, 64), H100).runs:
        if run.spec.checkpointing == "full":
            for checkpointing in ("none", "selective"):
                spec = run.spec.with_checkpointing(checkpointing)
                assert spec.find_broken_rule() or not dry_run(spec, H100).fits


def make_run(mesh: str, seconds: float) -> DryRun:
    """Return a step that takes ``seconds``."""
    run = dry_run(make_spec(mesh, "llama3-8b", microbatches=8), SIMPLE_HARDWARE)
    others = run.seconds - run.compute_seconds
    return replace(run, compute_seconds=seconds - others)


def test_rank_puts_simplest_tie_first() -> None:
    runs = [make_run("dp=2,pp=2,tp=2", 100), make_run("fsdp=8", 109), make_run("dp=8", 112)]
    assert [run.spec.dims.label for run in rank_runs(runs)] == [
        "fsdp=8",
        "dp=2,pp=2,tp=2",
        "dp=8",
    ]
    assert runs[1].seconds / runs[0].seconds < 1 + PREDICTION_ERROR


SLOW_NETWORK = msgspec.structs.replace(H100, across_bytes_per_second=1e8)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "hardware", "axis"),
    [
        (load_model("llama3-8b", 131072), 16, 2, H100, "cp"),
        (load_model("mixtral-8x7b"), 16, 16, H100, "ep"),
        # A slow network forbids sharding across nodes.
        (load_model("llama3-70b"), 32, 4, SLOW_NETWORK, "pp"),
    ],
)
def test_search_selects_axis(
    model: StepSpec, gpus: int, batch: int, hardware: Hardware, axis: str
) -> None:
    request = make_request(model, gpus, batch, microbatch=1, schedule="1f1b")
    assert search(request, hardware).best.spec.dims.size(axis) > 1


def test_search_keeps_small_models_simple() -> None:
    best = search(make_request("small-llama", 8, 64), H100).best
    assert best.spec.dims.sizes == {"dp": 8}
    assert best.spec.checkpointing == "none"


@pytest.mark.parametrize("gpus", [0, 10**9])
def test_search_rejects_number_of_gpus(gpus: int) -> None:
    with pytest.raises(UserError, match=f"--gpus {gpus} is not between"):
        search(make_request("tiny", gpus), H100)
