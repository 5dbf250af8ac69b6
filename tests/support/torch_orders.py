"""torch's own pipeline schedules without stages or ranks: the orders of its classes, and its loader."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.pipelining import schedules as theirs

from parbench.bench.results.details import Action

Rows = tuple[tuple[Action, ...], ...]

CLASSES: dict[str, Any] = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zb_v": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}


def fake_stages(ranks: int, chunks: int) -> list[Any]:
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
    """Return the order of torch's class, with overlapped actions one after the other; it raises where it refuses."""
    schedule = CLASSES[name](fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)
    rows = (schedule.pipeline_order[rank] for rank in range(ranks))
    return tuple(
        tuple(
            Action.parse(str(part))
            for step in row
            if step is not None
            for part in step.sub_actions or (step,)
        )
        for row in rows
    )


def load(path: Path, ranks: int, microbatches: int, chunks: int) -> Any:
    """Return torch's runtime, as rank 0 has it, of a CSV's order, which it has checked and given sends and receives."""
    make = cast("Any", theirs._PipelineScheduleRuntime)
    loaded = make(fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)
    loaded._load_csv(str(path))
    return loaded
