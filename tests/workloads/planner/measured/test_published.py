"""The planner predicts published training runs without fitting."""

import pytest

from parbench.bench.results.stats import median
from parbench.workloads.planner.hardware import PRESETS
from tests.studies.training_runs import GPU_HOURS, load_training_runs

RUNS = load_training_runs()


def test_published_speeds_are_predicted() -> None:
    errors = [abs(run.error) for run in RUNS]
    assert median(errors) < 0.15
    assert max(errors) < 0.4
    for run in RUNS:
        assert run.spec.find_broken_rule() is None, run.name
        if run.metric is not GPU_HOURS:
            assert run.hardware.efficiency == PRESETS["h100"].efficiency, run.name


def test_published_pipeline_scales_with_bubble() -> None:
    """The bubble is 11 stages over 384 microbatches, or over 96 on four times the GPUs."""
    runs = [run for run in RUNS if run.name == "GPT 175 B" and run.hardware.name == "selene"]
    few_gpus, _, many_gpus = (run.predicted for run in runs)
    slowdown = (1 + 11 / 96) / (1 + 11 / 384)
    # Gradients of four times the replicas are reduced behind fewer microbatches.
    assert few_gpus / many_gpus == pytest.approx(slowdown, rel=0.03)
