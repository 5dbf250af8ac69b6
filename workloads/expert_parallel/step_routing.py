"""The experts that the tokens of a step's microbatches take, and their verification.

Experts come from a generator, before the step is timed, or from the router. A generator draws them
for a microbatch of the global batch, whichever ranks have its tokens. Rounding may change a
router's selection between near scores, so that the reference takes the experts that the ranks took,
and its own router is compared with them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    ReferenceMoeLayer,
    find_moe_layers,
    replace_ffns_with_moe,
)
from parbench.workloads.expert_parallel.routing import (
    BALANCED,
    NO_EXPERT,
    ROUTER,
    compute_popularity,
)
from parbench.workloads.model.transformer import (
    compute_loss,
    get_dtype,
    initialize,
    make_generator,
    make_meta_model,
)

RecordedIds = Mapping[int, Mapping[int, Tensor]]
"""Expert ids (b, s, k) by microbatch and layer."""


def draw_experts(moe: Moe, tokens: int, *, seed: int, ranks: int, purpose: object) -> Tensor:
    """Return k different experts of each token (T, k), which depend on the seed and the purpose.

    Balanced experts take turns in a random order. With other routings, a token's experts are drawn
    by popularity without replacement.
    """
    generator = make_generator(seed, purpose)
    if moe.routing == BALANCED:
        order = torch.randperm(moe.experts, generator=generator)
        turns = torch.arange(tokens * moe.top_k) % moe.experts
        return order[turns].view(tokens, moe.top_k)
    popularity = compute_popularity(moe.routing, moe.experts, ranks=ranks, seed=seed)
    weights = torch.tensor(popularity).expand(tokens, -1)
    return torch.multinomial(weights, moe.top_k, generator=generator)


class StepRouting:
    """The expert ids of a step for the positions of each sequence that this rank has.

    ``positions_by_source`` has the positions of all ranks that share a sequence, each with its own
    capacity. None is one rank with the whole sequence.
    """

    def __init__(
        self,
        world: World,
        spec: StepSpec,
        positions: Sequence[int],
        positions_by_source: Sequence[Sequence[int]] | None = None,
    ) -> None:
        assert spec.moe is not None
        self._world = world
        self._spec = spec
        self._moe = spec.moe
        self.name = spec.moe.routing
        """The routing from the next step on, one of ``ROUTINGS``."""
        self._positions = list(positions)
        self._positions_by_source = positions_by_source
        self._recorded: RecordedIds | None = None  # taken instead of all others, if present
        self._has_checked_router = False
        self._step = 0
        self._drawn: dict[int, Tensor] = {}

    def draw(self, step: int, microbatches: Iterable[int]) -> None:
        """Draw the expert ids of this rank's microbatches, outside the timed step."""
        self._step = step
        self._drawn = {}
        if self.name != ROUTER:
            for microbatch in microbatches:
                ids = self._draw_microbatch(microbatch)[:, self._positions]
                self._drawn[microbatch] = ids.flatten(0, 1)

    def _draw_microbatch(self, microbatch: int) -> Tensor:
        """Return the generator's expert ids (b, s, k) for all positions."""
        batch = self._spec.microbatch
        sequence = self._spec.shape.sequence
        ids = draw_experts(
            replace(self._moe, routing=self.name),
            batch * sequence,
            seed=self._world.seed,
            ranks=self._world.size,
            purpose=f"experts {self._step} {microbatch}",
        )
        return ids.view(batch, sequence, -1).to(self._world.device)

    def assign(
        self, layers: Mapping[int, MoeLayer], microbatch: int, *, is_reference: bool = False
    ) -> None:
        """Assign a microbatch's expert ids to layers, by layer number.

        A reference takes the ids of all positions, other layers the ids of this rank's positions.
        """
        for number, layer in layers.items():
            layer.microbatch = microbatch
            layer.assigned_ids = None
            if self._recorded is not None:
                ids = self._recorded[microbatch][number]
                local_ids = ids if is_reference else ids[:, self._positions]
                layer.assigned_ids = local_ids.flatten(0, 1)
            elif self.name != ROUTER and is_reference:
                layer.assigned_ids = self._draw_microbatch(microbatch).flatten(0, 1)
            elif self.name != ROUTER:
                layer.assigned_ids = self._drawn[microbatch]

    def make_reference_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the single-process model on the meta device."""
        model = make_meta_model(self._spec.shape, dtype)
        moe = self._moe.on_one_rank()
        replace_ffns_with_moe(model, self._spec.shape, moe, kind=ReferenceMoeLayer)
        for layer in _find_reference_layers(model):
            layer.positions_by_source = self._positions_by_source
        return model

    def compute_reference_loss(
        self, model: nn.Module, tokens: Tensor, microbatch: int, weight: float = 1.0
    ) -> Tensor:
        """Return the loss of one microbatch (b, s + 1) of the global batch.

        ``weight`` multiplies the mean over tokens. The layers' load-balancing losses have
        gradients but do not change the value, because no rank of a pipeline knows all of them.
        """
        layers = dict(enumerate(find_moe_layers(model)))
        self.assign(layers, microbatch, is_reference=True)
        loss = weight * compute_loss(model, tokens)
        losses = [layer.aux_loss for layer in _find_reference_layers(model)]
        known = [aux_loss for aux_loss in losses if aux_loss is not None]
        if known:
            aux_loss = torch.stack(known).mean()
            loss = loss + (aux_loss - aux_loss.detach())
        return loss

    def count_wrong(
        self, layers: Mapping[int, MoeLayer], batch: Tensor, check: Callable[[], int]
    ) -> int:
        """Return the result of ``check`` plus the tokens that the reference would route elsewhere.

        ``layers`` are this rank's, by layer number. ``check`` runs with the expert ids that the
        ranks took. The router is compared once, because the reference has the seed's weights.
        """
        if self.name != ROUTER:
            return check()
        self._recorded = self._gather_expert_ids(layers)
        try:
            return self._count_misrouted(batch) + check()
        finally:
            self._recorded = None

    def _gather_expert_ids(self, layers: Mapping[int, MoeLayer]) -> RecordedIds:
        size = (self._spec.microbatch, self._spec.shape.sequence, self._moe.top_k)
        local_ids = []
        for number, layer in layers.items():
            for microbatch, ids in layer.expert_ids.items():
                by_position = ids.view(size[0], -1, size[2]).cpu()
                local_ids.append((microbatch, number, self._positions, by_position))
        recorded: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        for ids_of_rank in self._world.gather(local_ids):
            for microbatch, number, positions, by_position in ids_of_rank:
                missing = torch.full(size, NO_EXPERT, device=self._world.device)
                all_ids = recorded[microbatch].setdefault(number, missing)
                all_ids[:, positions] = by_position.to(all_ids.device)
        return recorded

    def _count_misrouted(self, batch: Tensor) -> int:
        """Return the number of tokens that the reference's router would send to other experts.

        Tokens count in each layer. The routers are compared only in the first check.
        """
        if self._has_checked_router or not self._spec.reference_fits:
            return 0
        self._has_checked_router = True
        model = self.make_reference_model(get_dtype(self._spec))
        initialize(model, self._world.seed, self._world.device)
        wrong = 0
        with torch.no_grad():
            for microbatch, tokens in enumerate(torch.split(batch, self._spec.microbatch)):
                self.compute_reference_loss(model, tokens, microbatch)
                wrong += sum(layer.num_misrouted for layer in _find_reference_layers(model))
        return wrong


def _find_reference_layers(model: nn.Module) -> list[ReferenceMoeLayer]:
    """Return the reference MoE layers in a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, ReferenceMoeLayer)]
