"""torch's own pipeline schedules without stages or ranks: what its classes print, and what its runtime runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.pipelining import schedules as theirs

from parbench.bench.results.details import Action, ActionKind

Rows = tuple[tuple[Action, ...], ...]

CLASSES: dict[str, Any] = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zb_v": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}
SINGLE: dict[str, Any] = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}


_ASKED = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops", "release_fwd_send_outputs")


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
        tuple(Action.parse(str(part)) for step in row if step is not None for part in step.sub_actions or (step,))
        for row in rows
    )


def load(path: Path, ranks: int, microbatches: int, chunks: int) -> Any:
    """Return torch's runtime, as rank 0 has it, of a CSV's order, which it has checked and given sends and receives."""
    make = cast("Any", theirs._PipelineScheduleRuntime)
    loaded = make(fake_stages(ranks, chunks), microbatches, loss_fn=no_loss)
    loaded._load_csv(str(path))
    return loaded


def run(name: str, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Return what torch's one-stage schedules really do on ``rank``, with a stage that only remembers."""
    done: list[Action] = []

    def remember(kind: ActionKind) -> Any:
        return lambda microbatch, *rest, **named: done.append(Action(rank, kind, microbatch))

    def nothing(*given: object, **named: object) -> list[object]:
        return []

    stage = SimpleNamespace(
        stage_index=rank,
        forward_one_chunk=remember("F"),
        backward_one_chunk=remember("B"),
        perform_reduce_grad=nothing,
        **dict.fromkeys(_ASKED, nothing),
    )
    schedule = SimpleNamespace(
        _stage=stage,
        _num_stages=ranks,
        _n_microbatches=microbatches,
        _has_backward=True,
        _stage_forward_initialized=True,
        _stage_initialized=True,
        scale_grads=False,
        _finalize_gradients=True,
        _check_inputs=lambda *given: ([()] * microbatches, [{}] * microbatches),
        **dict.fromkeys(("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), nothing),
    )
    SINGLE[name]._step_microbatches(cast("Any", schedule))
    return tuple(done)
