"""Parts of torch's pipeline runtime that are private or differ between versions, in one place.

| torch up to | behavior |
|---|---|
| 2.11 | stages do not know the meta tensors of gradients, and a rank hangs on gloo at start |
| 2.12 | the graph node of an ``autograd.Function`` may end before the node that it belongs to |
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from parbench.workloads.pipeline_parallel.order import PipelineOrder


class PlainStage(PipelineStage):
    """A stage with one input and one output, whose meta tensors torch need not derive."""

    def __init__(
        self, module: nn.Module, index: int, input_meta: Tensor, output_meta: Tensor, **options: Any
    ) -> None:
        if "output_grads" in inspect.signature(PipelineStage).parameters:
            has_gradient = input_meta.is_floating_point()
            options["input_grads"] = (input_meta if has_gradient else None,)
            options["output_grads"] = output_meta
        super().__init__(module, index, input_args=input_meta, output_args=output_meta, **options)
        self._graphs: dict[int, list[Any]] = {}
        """Edges that keep the nodes of a graph alive until the weight gradient."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not full_backward and torch.__version__ < "2.13":
            outputs = self.fwd_cache[bwd_chunk_id][0] if loss is None else [loss]
            self._graphs[bwd_chunk_id] = [get_gradient_edge(output) for output in outputs]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def make_runtime(
    stages: Sequence[PlainStage],
    order: PipelineOrder,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return torch's pipeline runtime with the actions of an order.

    Gradients are summed, so that ``loss`` is a microbatch's part of the mean. All ranks of the
    group take part: batched sends and receives require a group whose ranks have all used it.
    """
    module = importlib.import_module("torch.distributed.pipelining.schedules")
    runtime = module._PipelineScheduleRuntime(
        list(stages), order.microbatches, loss_fn=loss, scale_grads=False
    )
    actions = {
        rank: [module._Action.from_str(str(action)) for action in rank_actions]
        for rank, rank_actions in enumerate(order.actions_by_rank)
    }
    runtime.pipeline_order = {rank: list(actions[rank]) for rank in actions}
    runtime._prepare_schedule_with_comms(actions)
    dist.all_reduce(torch.zeros(1, device=stages[0].device), group=stages[0].group)
    return runtime
