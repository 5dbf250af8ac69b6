"""Parts of torch's pipeline runtime that are private or differ between versions, in one place.

| torch up to | behavior |
|---|---|
| 2.11 | stages do not know the meta tensors of gradients, and a rank hangs on gloo at start |
| 2.12 | the graph node of an ``autograd.Function`` may end before the node that it belongs to |
| 2.14 | ``fwd_cache`` has a microbatch's outputs, since then ``_forward_chunk_states`` |
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
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

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        graph = [] if full_backward else self._list_graph_edges(bwd_chunk_id, loss)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not full_backward:
            self._keep_graph(bwd_chunk_id, graph, self.backward_state[bwd_chunk_id][1])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)

    def input_gradient(
        self, microbatch: int, inner: Tensor, weights: Iterable[Tensor]
    ) -> tuple[Tensor, Any]:
        """Return the gradient of ``inner``, a tensor within this stage, and the rest of the graph.

        It replaces ``backward_one_chunk`` and is not for the last stage. ``weight_gradients`` takes
        the rest of the graph.
        """
        graph = self._list_graph_edges(microbatch)
        if torch.__version__ < "2.15":
            outputs = self.fwd_cache.pop(microbatch)[0]
        else:
            state = self._forward_chunk_states.pop(microbatch)  # type: ignore[attr-defined]
            outputs = state.stage_output_for_backward()
        inner.retain_grad()  # Torch's function stores the gradient there too, or warns.
        output_gradients = self._retrieve_recv_grads(microbatch)
        [gradient], groups = _import_backward().stage_backward_input(
            list(outputs), output_gradients, [inner], weights
        )
        self._keep_graph(microbatch, graph, groups)
        return gradient, groups

    def weight_gradients(
        self, microbatch: int, weights: Iterable[Tensor], graph_start: Any
    ) -> None:
        """Accumulate the gradients of weights after the input gradient."""
        _import_backward().stage_backward_weight(weights, graph_start)
        self._graphs.pop(microbatch, None)

    def _list_graph_edges(self, microbatch: int, loss: Tensor | None = None) -> list[Any]:
        """Return edges that keep the nodes of a graph alive until the weight gradient."""
        if torch.__version__ >= "2.13":
            return []
        outputs = self.fwd_cache[microbatch][0] if loss is None else [loss]
        return [get_gradient_edge(output) for output in outputs]

    def _keep_graph(self, microbatch: int, graph: list[Any], groups: list[dict[str, Any]]) -> None:
        nodes = [node for group in groups for node in group["intermediates"]]
        if any(isinstance(node, BackwardCFunction) for node in nodes):
            self._graphs[microbatch] = graph

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def _import_backward() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


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
