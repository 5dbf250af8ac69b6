"""parbench measures collective communication and the training steps built on it.

This module is the public Python API. Importing it is cheap: torch and pandas are loaded by the
first call that needs them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from matplotlib.figure import Figure

    from parbench.bench.text import UserError
    from parbench.bench.world.benchmark import Benchmark
    from parbench.bench.world.world import World

__all__ = ["Benchmark", "UserError", "World", "figures", "load", "load_samples", "step_of"]

_MODULE_OF_CLASS = {
    "Benchmark": "parbench.bench.world.benchmark",
    "UserError": "parbench.bench.text",
    "World": "parbench.bench.world.world",
}


def __getattr__(name: str) -> Any:
    """Import and return an exported class, such as ``parbench.World``, when it is first used.

    Python calls this function for a name that the module does not have. The import waits because
    ``World`` needs torch. Raises ``AttributeError`` for other names.
    """
    if name not in _MODULE_OF_CLASS:
        raise AttributeError(f"module 'parbench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULE_OF_CLASS[name]), name)


def load(*runs: str | Path) -> "pd.DataFrame":
    """Return a pandas frame of every metric of the given runs.

    The frame has one row for each metric of each case and repetition. ``value``, ``low`` and
    ``high`` are in the row's ``unit`` (seconds, bytes, bytes per second). Each parameter of a case
    is a column ``param_NAME``. A case that failed, hung, was wrong, was skipped or has no record
    has one row whose ``metric`` and ``value`` are NA.

    Args:
        runs: Run folders, ``latest`` for the newest run, sweep folders, or folders that contain
            runs.

    Raises:
        UserError: No folder contains a run that can be read.
    """
    from parbench.reports.frames import build_metrics_frame
    from parbench.reports.sweeps import load_named_runs

    return build_metrics_frame(load_named_runs(runs))


def load_samples(*runs: str | Path, by_rank: bool = False) -> "pd.DataFrame":
    """Return a pandas frame of the raw samples of the given runs.

    The frame has one row for each timed iteration of each case and repetition. ``seconds`` is the
    duration of one step on the slowest rank.

    Args:
        runs: Run folders, ``latest`` for the newest run, sweep folders, or folders that contain
            runs.
        by_rank: Return one row for each iteration and rank instead, read from ``samples/*.npz``:
            ``arrival_seconds`` and ``exit_seconds`` since the case's first arrival on rank 0's
            clock, ``duration_seconds`` and, in mode async, ``issue_seconds``. Each covers
            ``steps_per_sample`` steps.

    Raises:
        UserError: No folder contains a run that can be read, or ``by_rank`` is set and a sample
            file is missing or corrupt.
    """
    from parbench.reports.frames import build_rank_samples_frame, build_samples_frame
    from parbench.reports.sweeps import load_named_runs

    loaded_runs = load_named_runs(runs)
    return build_rank_samples_frame(loaded_runs) if by_rank else build_samples_frame(loaded_runs)


def figures(*runs: str | Path) -> "Mapping[str, Figure]":
    """Return the matplotlib figures of the report on the given runs, by name of the figure.

    An example is ``figures(run)["bandwidth"]``. The names are those of the files that
    ``parbench report --figures`` writes, without extension.

    Args:
        runs: Run folders, ``latest`` for the newest run, or a sweep folder.

    Raises:
        UserError: No folder contains a run that can be read.
    """
    from parbench.reports.figures.svg import draw
    from parbench.reports.render.show import load_report

    report = load_report([Path(run) for run in runs])
    return {chart.name: draw(chart) for chart in report.charts}


def step_of(
    model: Any, batch: Any, loss: Any, optimizer: Any, reference: Any = None
) -> "Benchmark":
    """Return the step of a training loop as a benchmark for ``parbench run``.

    Args:
        model: The module as it trains: unwrapped, in DDP, after ``fully_shard`` or with DTensor
            parameters.
        batch: The second argument of ``loss``, or a function that returns it for a step number.
        loss: A function ``loss(model, batch)`` that returns the loss.
        optimizer: The optimizer of the model's parameters.
        reference: The module that a single process would train. Each rank's gradients are then
            compared with the mean of the reference gradients over all ranks. Without it the
            gradients are only checked to be finite.
    """
    from parbench.workloads.step.training_loop import TrainingLoop

    return TrainingLoop(model, batch, loss, optimizer, reference)
