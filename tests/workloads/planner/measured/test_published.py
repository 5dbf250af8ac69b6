"""The planner's predictions of published training runs."""

import pytest

from parbench.bench.results.stats import median
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from tests.studies.training_runs import GPU_HOURS, load_training_runs

RUNS = load_training_runs()


def test_published_speeds_are_predicted_without_fitting() -> None:
    errors = [abs(run.error) for run in RUNS]
    assert median(errors) < 0.15
    assert max(errors) < 0.4
    for run in RUNS:
        assert run.spec.refusal() is None, run.name
        if run.metric is not GPU_HOURS:
            assert run.hardware.efficiency == PRESETS["h100"].efficiency, run.name


def test_published_zero3_scales_worse_than_pipeline() -> None:
    zero3, pipeline = (
        [
            run.predicted
            for run in RUNS
            if run.hardware.name == "selene" and ("fsdp" in run.spec.mesh) == sharded
        ]
        for sharded in (True, False)
    )
    assert zero3[0] > 1.3 * zero3[1] > 1.3 * 1.8 * zero3[2]
    # Only the pipeline's bubble grows: 11 stages over 384, then 96 microbatches.
    assert pipeline[2] / pipeline[0] == pytest.approx((1 + 11 / 384) / (1 + 11 / 96), rel=0.02)


def test_published_deepseek_needs_its_hidden_dispatch() -> None:
    [deepseek] = [run for run in RUNS if run.metric is GPU_HOURS]
    assert dry_run(deepseek.spec, PRESETS["h800"]).seconds > 1.7 * deepseek.step.seconds
