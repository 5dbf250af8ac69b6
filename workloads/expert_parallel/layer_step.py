"""A layer's mixture of experts alone: router, dispatch, experts, combine and shared experts, forward and backward."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bench.launch.control_channel import Work
from bench.plan.params import Value
from bench.world.subject import Description
from bench.world.world import World
from workloads.expert_parallel.expert_scope import Scope
from workloads.expert_parallel.moe_case import num_expert_parameters
from workloads.expert_parallel.moe_layer import let_experts_wait
from workloads.model.timed_compute import TimedCompute
from workloads.step.layout import whole
from workloads.step.parity import DISTANCE_MARGIN, count_apart, distance

OUT, INPUT = "out", "input"


def prepare(world: World, **params: Value) -> "LayerStep":
    """Return the step."""
    return LayerStep(world, params)


class LayerStep(Scope):
    """Forward and backward of one mixture; gradients stay where they are, and nothing is updated.

    Experts' gradients are sums over the sources of one copy, the others' are of this rank's tokens.
    """

    claim = "ep_layer: one layer, forward and backward; no gradient is summed over copies, and no attention hides it"

    def __init__(self, world: World, params: Mapping[str, Value]) -> None:
        self._waiter = TimedCompute(world.device)
        super().__init__(world, params)
        if self._options.timed_seconds is not None:
            around = nn.Module()
            around.layers = nn.ModuleList([self.layer])
            let_experts_wait(around, self._options.timed_seconds, self._num_tokens, self._waiter)

    def step(self) -> None:
        """Compute the mixture, and all its gradients from those of what comes out."""
        self.layer.zero_grad()
        self._out = self.layer(self.x)
        self._out.backward(self.upstream)

    def check(self) -> int:
        """Return how many elements of output and gradients differ from one process's; of waits, what is misplaced."""
        if self._options.timed:
            return self.count_misplaced()
        found = {OUT: self._out.detach(), INPUT: self.x.grad, **_gradients_of(self.layer)}
        right = {name: tensor for name, tensor in found.items() if tensor is not None}
        expected = self._reference(torch.float32)
        if self._options.dtype == torch.float32:
            return count_apart(right, expected)
        limit = DISTANCE_MARGIN * distance(self._reference(self._options.dtype), expected)
        apart = distance(right, expected)
        return 0 if apart <= limit else sum(tensor.numel() for tensor in expected.values())

    def describe(self) -> Description:
        """Return tokens a second and, of the experts that tokens meet, FLOPs."""
        found, moe = super().describe(), self.moe
        tokens = self._num_tokens * self._world.size
        flops = 6.0 * (moe.top_k + moe.shared) * num_expert_parameters(self._options.shape, moe) * self._num_tokens
        timed = ("timed experts: T is their forward at the mean load of ranks; shared experts cost nothing",)
        return Description(
            headline=found.headline,
            work=(Work(name="tokens_per_second", amount=tokens),),
            details={**found.details, "flops_per_rank": flops},
            notes=(*found.notes, *(timed if self._options.timed else ())),
        )

    def _draw(self) -> None:
        self._waiter.forget()
        super()._draw()
        self.x.requires_grad_()

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return one process's output and gradients: experts' of all sources of this copy, the rest of this rank."""
        alone = self.dense(dtype)
        expected: dict[str, Tensor] = {}
        for source in self._axis.sources:
            alone.zero_grad()
            x = self.drawn_of("tokens", source).to(dtype).requires_grad_()
            given = self._routes.of(source)
            assert given is None or isinstance(given, Tensor)
            alone.given = given
            out = alone(x)
            out.backward(self.drawn_of("gradients", source).to(dtype))
            _add(expected, _gradients_of(alone), lambda name: name.startswith("experts."))
            if source == self._world.rank:
                assert x.grad is not None
                _add(expected, _gradients_of(alone), lambda name: not name.startswith("experts."))
                expected |= {OUT: out.detach(), INPUT: x.grad}
        return expected


def _gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def _add(total: dict[str, Tensor], found: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> None:
    for name, tensor in found.items():
        if wanted(name):
            total[name] = total[name] + tensor if name in total else tensor.clone()
