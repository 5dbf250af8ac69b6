"""What torch's pipeline runtime renamed or keeps private, in one place.

| until | what it is there, of what is used here |
|---|---|
| 2.11 | stages are not told gradients' meta tensors, and greet each other first: on one rank, with gloo, for ever |
| 2.12 | a node of the graph that is an ``autograd.Function`` lives no longer than the node it gives its gradient to |
| 2.14 | a microbatch's outputs are in ``fwd_cache``; since then in ``_forward_chunk_states``, and let go once sent |
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage


class PlainStage(PipelineStage):
    """A stage from one tensor to one; told their meta tensors, torch need not run the module to find out."""

    def __init__(self, module: nn.Module, index: int, given: Tensor, out: Tensor, **rest: Any) -> None:
        if "output_grads" in inspect.signature(PipelineStage).parameters:
            rest |= {"input_grads": (given if given.is_floating_point() else None,), "output_grads": out}
        super().__init__(module, index, input_args=given, output_args=out, **rest)
        self._graphs: dict[int, list[Any]] = {}

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        graph = [] if full_backward else self._graph(bwd_chunk_id, loss)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not full_backward:
            self._hold(bwd_chunk_id, graph, self.backward_state[bwd_chunk_id][1])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)

    def input_gradient(self, microbatch: int, inner: Tensor, weights: Iterable[Tensor]) -> tuple[Tensor, Any]:
        """Return the gradient of ``inner``, on the way to this stage's output, and where ``weight_gradients`` starts.

        In place of ``backward_one_chunk`` it uses up what the microbatch's forward left; not of the last stage.
        """
        graph = self._graph(microbatch)
        if torch.__version__ < "2.15":
            outputs = self.fwd_cache.pop(microbatch)[0]
        else:
            outputs = self._forward_chunk_states.pop(microbatch).stage_output_for_backward()  # type: ignore[attr-defined]
        inner.retain_grad()  # torch's function leaves the gradient there as well, and warns of tensors without
        gradients = self._retrieve_recv_grads(microbatch)
        [gradient], groups = _backward().stage_backward_input(list(outputs), gradients, [inner], weights)
        self._hold(microbatch, graph, groups)
        return gradient, groups

    def weight_gradients(self, microbatch: int, weights: Iterable[Tensor], start: Any) -> None:
        """Add to the gradients of weights after the input gradient was taken."""
        _backward().stage_backward_weight(weights, start)
        self._graphs.pop(microbatch, None)

    def _graph(self, microbatch: int, loss: Tensor | None = None) -> list[Any]:
        """Return what keeps the nodes of a microbatch's graph until its weight gradients."""
        if torch.__version__ >= "2.13":
            return []
        return [get_gradient_edge(out) for out in (self.fwd_cache[microbatch][0] if loss is None else [loss])]

    def _hold(self, microbatch: int, graph: list[Any], groups: list[dict[str, Any]]) -> None:
        if any(isinstance(node, BackwardCFunction) for group in groups for node in group["intermediates"]):
            self._graphs[microbatch] = graph

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def _backward() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


def pipeline_runtime(
    stages: Sequence[PlainStage],
    order: Mapping[int, Sequence[str]],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return torch's runtime of pipelines with an order of actions, by rank, that torch has no class for.

    Gradients are added up as they come: ``loss`` is a microbatch's part of the mean. All ranks of the stages' group
    take part: sends and receives in one batch want a group that was used as a whole before.
    """
    module = importlib.import_module("torch.distributed.pipelining.schedules")
    runtime = module._PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    actions = {rank: [module._Action.from_str(action) for action in of] for rank, of in order.items()}
    runtime.pipeline_order = {rank: list(of) for rank, of in actions.items()}
    runtime._prepare_schedule_with_comms(actions)
    dist.all_reduce(torch.zeros(1, device=stages[0].device), group=stages[0].group)
    return runtime
