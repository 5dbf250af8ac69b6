"""torch's own pipeline schedules without stages or ranks: what its classes print, and what its runtime runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.pipelining import schedules as theirs

from workloads.pipeline.actions import Action, Kind

Rows = tuple[tuple[Action, ...], ...]
Pairs = tuple[tuple[tuple[Action, ...], ...], ...]  # by rank and step: one action, or the two that torch overlaps

CLASSES: dict[str, Any] = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zb_v": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}
SINGLE: dict[str, Any] = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}


def fake_stages(ranks: int, chunks: int) -> list[Any]:
    """As many stages as rank 0 has, with what torch's constructors read of them."""
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


def pairs(name: str, ranks: int, microbatches: int, chunks: int) -> Pairs:
    """Return the order of torch's class; it raises where it refuses."""
    schedule = CLASSES[name](fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)
    return tuple(
        tuple(
            tuple(Action.parse(str(part)) for part in action.sub_actions or (action,))
            for action in schedule.pipeline_order[rank]
            if action is not None
        )
        for rank in range(ranks)
    )


def order(name: str, ranks: int, microbatches: int, chunks: int) -> Rows:
    """Return the order of torch's class with overlapped actions one after the other."""
    rows = pairs(name, ranks, microbatches, chunks)
    return tuple(tuple(action for step in row for action in step) for row in rows)


def runtime(ranks: int, microbatches: int, chunks: int) -> Any:
    """Return torch's runtime of custom orders, as rank 0 has it."""
    make = cast("Any", theirs._PipelineScheduleRuntime)
    return make(fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)


def load(path: Path, ranks: int, microbatches: int, chunks: int) -> Any:
    """Return torch's runtime with the order in a CSV, which torch has checked and given its sends and receives."""
    loaded = runtime(ranks, microbatches, chunks)
    loaded._load_csv(str(path))
    return loaded


def printed(name: str, ranks: int, microbatches: int) -> Rows:
    """Return the order that torch's one-stage schedules print."""
    asked = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
    rows = SINGLE[name]._get_pipeline_order(asked)
    return tuple(
        tuple(Action.parse(str(action)) for action in rows[rank] if action is not None and "REDUCE" not in str(action))
        for rank in range(ranks)
    )


def run(name: str, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Return what torch's one-stage schedules really do on ``rank``, with a stage that only remembers."""
    done: list[Action] = []

    def remember(kind: Kind) -> Any:
        return lambda microbatch, *rest, **named: done.append(Action(rank, kind, microbatch))

    def nothing(*given: object, **named: object) -> list[object]:
        return []

    stage = SimpleNamespace(
        stage_index=rank,
        forward_one_chunk=remember("F"),
        backward_one_chunk=remember("B"),
        perform_reduce_grad=nothing,
        **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), nothing),
    )
    schedule = SimpleNamespace(
        _stage=stage,
        _num_stages=ranks,
        _n_microbatches=microbatches,
        _has_backward=True,
        _stage_forward_initialized=True,
        _stage_initialized=True,
        scale_grads=False,
        _check_inputs=lambda *given: ([()] * microbatches, [{}] * microbatches),
        **dict.fromkeys(("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), nothing),
    )
    SINGLE[name]._step_microbatches(cast("Any", schedule))
    return tuple(done)
