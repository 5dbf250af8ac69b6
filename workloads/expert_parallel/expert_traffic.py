"""The pairs of token and expert that ranks exchange in a step, their loads and their bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.layer_call import LayerCall
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.dispatch import count_pairs
from parbench.workloads.expert_parallel.moe_case import list_exchange_calls
from parbench.workloads.expert_parallel.moe_layer import MoeLayer


class RoutingCounts(NamedTuple):
    """The number of pairs of token and expert of one rank in a step."""

    layers: tuple[int, ...]  # the number of each layer in the model
    selected: Tensor  # (layers, experts)
    dispatched: Tensor  # (layers, experts), without dropped pairs


def count_routing(layers: Mapping[int, MoeLayer]) -> RoutingCounts:
    """Return the counts of this rank's pairs in the last step, as tensors on the CPU."""
    selected = []
    dispatched = []
    for layer in layers.values():
        for expert_ids in layer.expert_ids.values():
            selected.append(count_pairs(expert_ids, layer.moe.experts))
            dispatched.append(layer.plan_dispatch(expert_ids).counts)
    size = (len(layers), -1, len(selected[0]))
    return RoutingCounts(
        layers=tuple(layers),
        selected=torch.stack(selected).view(size).sum(1).cpu(),
        dispatched=torch.stack(dispatched).view(size).sum(1).cpu(),
    )


class ExpertTraffic:
    """The number of pairs that each rank sends and computes in a step, by layer (L,).

    Ranks that split experts gather each other's tokens first. Each of them dispatches all tokens.
    """

    def __init__(self, spec: StepSpec, counts: Sequence[RoutingCounts]) -> None:
        """Count the traffic of a step from the ``counts`` of all ranks, in rank order."""
        assert spec.moe is not None
        self.counts = counts
        self._spec = spec
        self._moe = spec.moe
        self.sent = self._make_zeros()  # to the experts of other ranks
        self.received = self._make_zeros()  # from other ranks
        self.computed = self._make_zeros()
        for group in spec.dims.expert_groups("etp"):
            dispatched = torch.stack([counts[rank].dispatched for rank in group]).sum(0)
            by_target = dispatched.view(len(dispatched), self._moe.ep, -1).sum(2)
            for source in group:
                self._add_pairs(source, by_target)

    def _make_zeros(self) -> dict[int, Tensor]:
        """Return, by rank, a zero for each MoE layer of the rank."""
        return {
            rank: torch.zeros(len(counts.layers), dtype=torch.int64)
            for rank, counts in enumerate(self.counts)
        }

    def _add_pairs(self, source: int, by_target: Tensor) -> None:
        """Add the pairs that a rank sends, as counts (layers, ep) by layer and target."""
        [ep_group] = [group for group in self._spec.dims.expert_groups("ep") if source in group]
        for target, pairs in zip(ep_group, by_target.unbind(1), strict=True):
            self.computed[target] += pairs
            if source != target:
                self.sent[source] += pairs
                self.received[target] += pairs

    def list_expert_loads(self) -> list[list[int]]:
        """Return, by layer, the number of tokens that chose each expert, dropped pairs included."""
        loads: defaultdict[int, list[Tensor]] = defaultdict(list)
        for counts in self.counts:
            for layer, selected in zip(counts.layers, counts.selected, strict=True):
                loads[layer].append(selected)
        return [torch.stack(loads[layer]).sum(0).tolist() for layer in sorted(loads)]

    def list_rank_loads(self) -> list[list[int]]:
        """Return, by layer, the number of pairs that each rank computes.

        Ranks that split the same experts compute the same pairs, so that only the first of them is
        listed.
        """
        loads: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(group[0] for group in self._spec.dims.expert_groups("etp")):
            computed = self.computed[rank].tolist()
            for layer, pairs in zip(self.counts[rank].layers, computed, strict=True):
                loads[layer].append(pairs)
        return [loads[layer] for layer in sorted(loads)]

    def compute_bytes(self, rank: int, *, has_backward: bool = True) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, keyed by the axes ``ep`` and ``etp``."""
        has_recomputation = self._spec.checkpointing == "full"
        layers = torch.tensor(self.counts[rank].layers)
        is_recomputed = layers % self._spec.checkpoint_every == 0
        sent: defaultdict[str, float] = defaultdict(float)
        for call in list_exchange_calls(self._moe):
            passes = call.forward + (call.backward if has_backward else 0)
            num_bytes = self._list_call_bytes(rank, call)
            sent[call.axis] += passes * float(num_bytes.sum())
            if has_recomputation and self._moe.is_recomputed(call):
                sent[call.axis] += call.forward * float(num_bytes[is_recomputed].sum())
        return dict(sent)

    def _list_call_bytes(self, rank: int, call: LayerCall) -> Tensor:
        """Return the bytes that a rank sends in a call, over all microbatches, by layer."""
        if call.pairs is not None:
            pairs = self.sent if call.pairs == "sent" else self.received
            row_bytes = self._spec.shape.hidden * self._spec.bytes_per_element
            return pairs[rank].double() * row_bytes
        size = Equation(text=call.size, symbols=self._spec.rank_view(rank).symbols).value
        num_bytes = self._spec.microbatches * sent_bytes(call.op, size, call.ranks)
        return torch.full((len(self.counts[rank].layers),), num_bytes, dtype=torch.double)


def compute_expert_bytes(
    world: World, spec: StepSpec, layers: Mapping[int, MoeLayer], *, has_backward: bool = True
) -> dict[str, float]:
    """Return the bytes of this rank's last step by axis, ``ep`` and ``etp``. All ranks call it."""
    traffic = ExpertTraffic(spec, world.gather(count_routing(layers)))
    return traffic.compute_bytes(world.rank, has_backward=has_backward)
