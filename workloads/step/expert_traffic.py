"""The pairs of token and expert that ranks exchange in a step, their loads and their bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import sent_bytes
from parbench.workloads.costs.equation import Equation
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import list_exchange_calls
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.model.layer_call import LayerCall


class RoutingCounts(NamedTuple):
    """The numbers of pairs of a token and one of its experts, for one rank's tokens in a step.

    Pairs are counted over all microbatches of the rank.
    """

    layers: tuple[int, ...]
    """The layer numbers in the model of the MoE layers of this rank."""
    selected: int
    """The number of pairs that the routing selected, over all layers, with the dropped ones."""
    dispatched: Tensor
    """The number of pairs of each expert that are not dropped, (layers, experts)."""


def count_routing(layers: Mapping[int, MoeLayer]) -> RoutingCounts:
    """Return the numbers of pairs of this rank's tokens and their experts in the last step.

    ``layers`` has the MoE layers of this rank by layer number.
    """
    selected = 0
    dispatched = []
    for layer in layers.values():
        plans = [layer.plan_dispatch(expert_ids) for expert_ids in layer.expert_ids.values()]
        selected += sum(plan.expert_ids.numel() for plan in plans)
        dispatched.append(torch.stack([plan.counts for plan in plans]).sum(0))
    return RoutingCounts(
        layers=tuple(layers), selected=selected, dispatched=torch.stack(dispatched).cpu()
    )


class ExpertTraffic:
    """The numbers of pairs of token and expert that each rank sends to each rank in a step.

    A pair is a token with one of its experts, without dropped pairs. Ranks of an ``etp`` group hold
    parts of the same experts. They first gather each other's tokens, and each of them then
    dispatches the tokens of the group.
    """

    def __init__(self, spec: StepSpec, counts: Sequence[RoutingCounts]) -> None:
        """Compute the pairs that each rank sends in a step.

        ``counts`` has the numbers of pairs of every rank's own tokens, in rank order.
        """
        assert spec.moe is not None
        self.counts = counts
        self._spec = spec
        self._moe = spec.moe
        self.pairs: dict[tuple[int, int], Tensor] = {}
        """The number of pairs in each MoE layer of a rank, (layers,), keyed by (source, target).

        The source is the rank that dispatches the pair, and the target the rank that computes it.
        Both may be the same rank.
        """
        for group in spec.dims.expert_groups("etp"):
            dispatched = torch.stack([counts[rank].dispatched for rank in group]).sum(0)
            by_target = dispatched.view(len(dispatched), self._moe.ep, -1).sum(2).unbind(1)
            for source in group:
                [ep_group] = [ranks for ranks in spec.dims.expert_groups("ep") if source in ranks]
                for target, pairs in zip(ep_group, by_target, strict=True):
                    self.pairs[source, target] = pairs

    def list_rank_loads(self) -> list[list[int]]:
        """Return, for each MoE layer, the number of pairs in a step that each rank computes.

        Layers are ordered by layer number, and ranks by rank number. A pair is a token with one of
        its experts, without dropped pairs. Ranks of one ``etp`` group compute the same pairs, so
        that only the first of them is listed.
        """
        loads: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(group[0] for group in self._spec.dims.expert_groups("etp")):
            received = [pairs for (_, target), pairs in self.pairs.items() if target == rank]
            computed = torch.stack(received).sum(0).tolist()
            for layer, pairs in zip(self.counts[rank].layers, computed, strict=True):
                loads[layer].append(pairs)
        return [loads[layer] for layer in sorted(loads)]

    def compute_bytes(self, rank: int, *, has_backward: bool = True) -> dict[str, float]:
        """Return the bytes that a rank sends in a step over ``ep`` and ``etp``, keyed by axis.

        Calls that full checkpointing repeats are counted again. Axes with one rank are not in the
        result. Without ``has_backward``, only the calls of the forward pass count.
        """
        layers = torch.tensor(self.counts[rank].layers)
        is_recomputed = torch.zeros_like(layers)
        if self._spec.checkpointing == "full":
            is_recomputed = layers % self._spec.checkpoint_every == 0
        sent: defaultdict[str, float] = defaultdict(float)
        for call in list_exchange_calls(self._moe):
            passes = call.forward + (call.backward if has_backward else 0)
            repeats = call.forward * is_recomputed if self._moe.is_recomputed(call) else 0
            sent[call.axis] += float(((passes + repeats) * self._list_call_bytes(rank, call)).sum())
        return dict(sent)

    def _list_call_bytes(self, rank: int, call: LayerCall) -> Tensor:
        """Return the bytes that a rank sends in one kind of call, for each of its MoE layers.

        The result is (layers,). Bytes are summed over the microbatches of a step, in each of which
        the call is made once. Repetitions in other passes are not included.
        """
        if call.pairs is not None:
            moved = [
                pairs
                for (source, target), pairs in self.pairs.items()
                if source != target and rank == (source if call.pairs == "sent" else target)
            ]
            row_bytes = self._spec.shape.hidden * self._spec.bytes_per_element
            return torch.stack(moved).sum(0).double() * row_bytes
        size = Equation(text=call.size, symbols=self._spec.make_rank_view(rank).symbols).value
        num_bytes = self._spec.microbatches * sent_bytes(call.op, size, call.ranks)
        return torch.full((len(self.counts[rank].layers),), num_bytes, dtype=torch.double)


def compute_expert_bytes(
    world: World, spec: StepSpec, layers: Mapping[int, MoeLayer], *, has_backward: bool = True
) -> dict[str, float]:
    """Return the analytical bytes that this rank sends in its last step, keyed by ``ep``, ``etp``.

    They follow from the experts that the tokens of all ranks took. All ranks call this function,
    because they exchange these numbers. ``layers`` has this rank's MoE layers by layer number.
    Without ``has_backward``, the step has no backward pass.
    """
    traffic = ExpertTraffic(spec, world.gather(count_routing(layers)))
    return traffic.compute_bytes(world.rank, has_backward=has_backward)
