"""The orders of torch's own pipeline schedules without ranks, and its loader of orders."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from parbench.bench.results.details import Action

TORCH_CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
Rows = tuple[tuple[Action, ...], ...]


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Any:
    """Return the schedule of torch that has the order of a schedule of parbench."""
    torch_class = getattr(torch_schedules, TORCH_CLASSES[name])
    return torch_class(fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)


def fake_stages(ranks: int, chunks: int) -> list[Any]:
    """Return the stages of rank 0 as far as the constructors of schedules read them."""
    return [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            submod=torch.nn.Identity(),
        )
        for chunk in range(chunks)
    ]


def no_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


def order(name: str, ranks: int, microbatches: int, chunks: int) -> Rows:
    """Return the order of torch's class, by rank, with overlapped actions in sequence.

    Raises torch's own error where torch refuses the sizes.
    """
    schedule = make_schedule(name, ranks, microbatches, chunks)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for rank, row in enumerate(rows):
        for step in schedule.pipeline_order[rank]:
            if step is not None:
                row += [Action.parse(str(part)) for part in step.sub_actions or (step,)]
    return tuple(tuple(row) for row in rows)


def load(path: Path, ranks: int, microbatches: int, chunks: int) -> Any:
    """Return torch's runtime of rank 0 for the order in a CSV file.

    Torch checks the order while loading, and adds sends and receives.
    """
    runtime = cast("Any", torch_schedules._PipelineScheduleRuntime)
    loaded = runtime(fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)
    loaded._load_csv(str(path))
    return loaded
