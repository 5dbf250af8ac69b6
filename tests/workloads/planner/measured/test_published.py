"""The planner predicts the time of published training runs, and that they fit in memory."""

import pytest

from parbench.bench.results.stats import median
from tests.studies.training_runs import TrainingRun, load_training_runs

RUNS = load_training_runs()


def test_published_speeds_are_predicted() -> None:
    errors = [abs(run.error) for run in RUNS]
    assert len(RUNS) >= 36
    assert median(errors) < 0.1
    assert max(errors) < 0.4


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name}, {run.spec.ranks}")
def test_published_runs_fit_in_memory(run: TrainingRun) -> None:
    assert run.spec.find_broken_rule() is None
    assert run.step.fits


def test_published_pipeline_scales_with_bubble() -> None:
    """The bubble is 11 stages over 384 microbatches, or over 96 on four times the GPUs."""
    runs = [run for run in RUNS if run.name == "GPT 175 B" and run.hardware.name == "selene"]
    few_gpus, _, many_gpus = (run.predicted for run in runs)
    slowdown = (1 + 11 / 96) / (1 + 11 / 384)
    # Gradients of four times the replicas are reduced behind fewer microbatches.
    assert few_gpus / many_gpus == pytest.approx(slowdown, rel=0.03)
