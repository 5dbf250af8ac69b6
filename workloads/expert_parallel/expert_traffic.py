"""The pairs of token and expert that ranks exchange in a step, their loads and their bytes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import count_pairs
from parbench.workloads.expert_parallel.dispatchers import DispatchCall
from parbench.workloads.expert_parallel.moe_case import list_exchanges
from parbench.workloads.expert_parallel.moe_layer import MoeLayer


class RoutingCounts(NamedTuple):
    """Pairs of token and expert of one rank by layer, microbatch and expert, (L, M, E)."""

    layers: tuple[int, ...]  # the number of each layer
    chosen: Tensor
    kept: Tensor  # without dropped pairs


def count_routing(layers: Mapping[int, MoeLayer]) -> RoutingCounts:
    """Count the pairs of this rank's last microbatches, on the CPU."""
    chosen = []
    kept = []
    for layer in layers.values():
        for expert_ids in layer.expert_ids.values():
            chosen.append(count_pairs(expert_ids, layer.moe.experts))
            kept.append(layer.plan_dispatch(expert_ids).counts)
    size = (len(layers), -1, chosen[0].numel())
    return RoutingCounts(
        layers=tuple(layers),
        chosen=torch.stack(chosen).view(size).cpu(),
        kept=torch.stack(kept).view(size).cpu(),
    )


class ExpertTraffic:
    """The pairs that each rank sends and computes, by layer and microbatch, (L, M).

    Ranks that split experts gather each other's tokens first, so that each dispatches all of them.
    """

    def __init__(self, spec: StepSpec, tokens: int, counts: Sequence[RoutingCounts]) -> None:
        """Count ``tokens`` of a rank's microbatch; ``counts`` are those of all ranks."""
        assert spec.moe is not None
        self.moe = spec.moe
        self.tokens = tokens
        self.counts = counts
        self._spec = spec
        self._etp_groups = spec.dims.expert_split_groups()
        self._ep_group = {rank: group for group in spec.dims.expert_groups() for rank in group}
        self._pairs: dict[int, Tensor] = {}  # (L, M, ep) by source
        for group in self._etp_groups:
            kept = torch.stack([counts[rank].kept for rank in group]).sum(0)
            by_target = kept.view(*kept.shape[:2], self.moe.ep, -1).sum(-1)
            self._pairs |= dict.fromkeys(group, by_target)

    def count_sent(self, rank: int) -> Tensor:
        """Return the pairs that leave a rank for the experts of others."""
        return self._pairs[rank].sum(-1) - self._count_between(rank, rank)

    def count_received(self, rank: int) -> Tensor:
        return self.count_computed(rank) - self._count_between(rank, rank)

    def count_computed(self, rank: int) -> Tensor:
        """Return the pairs that a rank's experts compute."""
        sources = self._ep_group[rank]
        return torch.stack([self._count_between(source, rank) for source in sources]).sum(0)

    def _count_between(self, source: int, target: int) -> Tensor:
        place = list(self._ep_group[target]).index(target)
        return self._pairs[source][..., place]

    def list_expert_loads(self) -> list[list[int]]:
        """List by layer how many tokens chose each expert, with dropped pairs."""
        loads: defaultdict[int, list[Tensor]] = defaultdict(list)
        for counts in self.counts:
            for layer, chosen in zip(counts.layers, counts.chosen.sum(1), strict=True):
                loads[layer].append(chosen)
        return [torch.stack(loads[layer]).sum(0).tolist() for layer in sorted(loads)]

    def list_rank_loads(self) -> list[list[int]]:
        """List by layer the pairs that ranks compute, for one of the ranks that split experts."""
        loads: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(group[0] for group in self._etp_groups):
            computed = self.count_computed(rank).sum(1).tolist()
            for layer, pairs in zip(self.counts[rank].layers, computed, strict=True):
                loads[layer].append(pairs)
        return [loads[layer] for layer in sorted(loads)]

    def list_bytes(self, rank: int) -> Iterator[tuple[str, DispatchCall, Tensor]]:
        """Yield axis, call and the bytes (L, M) that a rank sends in each call of dispatch."""
        symbols = {**self._spec.rank_view(rank).symbols, "sharded_tokens": self.tokens}
        row_bytes = self._spec.shape.hidden * self._spec.bytes_per_element
        sent = self.count_sent(rank).double() * row_bytes
        received = self.count_received(rank).double() * row_bytes
        for axis, ranks, calls in list_exchanges(self.moe):
            for call in calls:
                num_bytes = sent if call.direction == "to_experts" else received
                if not call.depends_on_routing:
                    size = Equation(text=call.size, symbols=symbols).value
                    num_bytes = torch.full_like(sent, sent_bytes(call.op, size, ranks))
                yield axis, call, num_bytes

    def expect_bytes(self, rank: int, *, has_backward: bool = True) -> dict[str, float]:
        """Return the bytes that a rank sends in a step by axis."""
        expected: defaultdict[str, float] = defaultdict(float)
        recomputed_layers = torch.zeros(len(self.counts[rank].layers), 1)
        if self._spec.checkpointing == "full":
            for index, layer in enumerate(self.counts[rank].layers):
                recomputed_layers[index] = layer % self._spec.checkpoint_every == 0
        for axis, call, num_bytes in self.list_bytes(rank):
            passes = call.forward + (call.backward if has_backward else 0)
            expected[axis] += passes * float(num_bytes.sum())
            if call.is_recomputed(self.moe.shared > 0):
                expected[axis] += call.forward * float((recomputed_layers * num_bytes).sum())
        return dict(expected)
