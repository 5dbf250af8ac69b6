"""The experts that the tokens of a step's microbatches take, and their verification.

The experts of a token depend on its number in the global batch, whichever rank has the token. They
come from a generator, before the step is timed, or from the router. Rounding may change a router's
selection between near scores, so that the reference takes the experts that the ranks took, and its
own router is compared with them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.expert_parallel.moe_layer import (
    MoeLayer,
    ReferenceMoeLayer,
    find_moe_layers,
    pop_aux_loss,
    replace_ffns_with_moe,
)
from parbench.workloads.expert_parallel.routing import BALANCED, NO_EXPERT, draw_experts
from parbench.workloads.model.transformer import (
    compute_loss,
    get_dtype,
    initialize,
    make_meta_model,
)

NEAR_SCORES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Scores that differ by less may change their order with the order of a sum."""
RecordedIds = Mapping[int, Mapping[int, Tensor]]
"""Expert ids (b, s, k) by microbatch and layer."""


class StepRouting:
    """The expert ids of a step for the positions of each sequence that this rank has.

    ``positions_by_source`` has the positions of all ranks that share a sequence, each with its own
    capacity. None is one rank with the whole sequence.
    """

    def __init__(
        self,
        world: World,
        spec: StepSpec,
        moe: Moe,
        positions: Sequence[int],
        positions_by_source: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._world = world
        self._spec = spec
        self._moe = moe
        self._positions = list(positions)
        self._positions_by_source = positions_by_source
        self._recorded: RecordedIds | None = None  # taken instead of all others, if present
        self._has_checked_router = False
        self._step = 0
        self._drawn: dict[int, Tensor] = {}
        self.use_balanced(False)

    def use_balanced(self, is_balanced: bool) -> None:
        """Take balanced routing from the next step on, or the routing of the case again."""
        moe = self._moe
        if is_balanced:
            moe = replace(moe, routing=BALANCED, strength=0.0)
        self.generator = moe.generator(self._world.seed, self._world.size)

    def draw(self, step: int, microbatches: Iterable[int]) -> None:
        """Draw the expert ids of this rank's microbatches, outside the timed step."""
        self._step = step
        self._drawn = {}
        if self.generator is not None:
            for microbatch in microbatches:
                ids = self._draw_microbatch(microbatch)[:, self._positions]
                self._drawn[microbatch] = ids.flatten(0, 1)

    def _draw_microbatch(self, microbatch: int) -> Tensor:
        """Return the generator's expert ids (b, s, k) for all positions."""
        assert self.generator is not None
        batch = self._spec.microbatch
        sequence = self._spec.shape.sequence
        tokens = batch * sequence
        ids = draw_experts(self.generator, self._step, microbatch * tokens, tokens)
        return torch.tensor(ids, device=self._world.device).view(batch, sequence, -1)

    def assign(
        self, layers: Mapping[int, MoeLayer], microbatch: int, *, is_reference: bool = False
    ) -> None:
        """Assign a microbatch's expert ids to layers, by layer number.

        A reference takes those of all positions.
        """
        for number, layer in layers.items():
            layer.microbatch = microbatch
            layer.assigned_ids = None
            if self._recorded is not None:
                ids = self._recorded[microbatch][number]
                local_ids = ids if is_reference else ids[:, self._positions]
                layer.assigned_ids = local_ids.flatten(0, 1)
            elif self.generator is not None and not is_reference:
                layer.assigned_ids = self._drawn[microbatch]
            elif self.generator is not None:
                layer.assigned_ids = self._draw_microbatch(microbatch).flatten(0, 1)

    def make_reference_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the single-process model on the meta device."""
        model = make_meta_model(self._spec.shape, dtype)
        moe = replace(self._moe, ep=1, etp=1)
        replace_ffns_with_moe(model, self._spec.shape, moe, kind=ReferenceMoeLayer)
        for layer in find_moe_layers(model):
            assert isinstance(layer, ReferenceMoeLayer)
            layer.positions_by_source = self._positions_by_source
        return model

    def compute_reference_loss(self, model: nn.Module, tokens: Tensor, microbatch: int) -> Tensor:
        """Return the mean loss of one microbatch (b, s + 1) of the global batch."""
        layers = dict(enumerate(find_moe_layers(model)))
        self.assign(layers, microbatch, is_reference=True)
        return compute_loss(model, tokens) + pop_aux_loss(model)

    def count_wrong(
        self, layers: Mapping[int, MoeLayer], batch: Tensor, check: Callable[[], int]
    ) -> int:
        """Return the count of ``check``, and the tokens that the reference would route elsewhere.

        ``layers`` are this rank's, by layer number. ``check`` runs with the expert ids that the
        ranks took. The router is compared once, because the reference has the seed's weights.
        """
        if self.generator is not None or self._spec.is_simulated:
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
        """Return the tokens of all layers with other experts than the reference's router; once."""
        if self._has_checked_router or not self._spec.reference_fits:
            return 0
        self._has_checked_router = True
        dtype = get_dtype(self._spec)
        model = self.make_reference_model(dtype)
        initialize(model, self._world.seed, self._world.device)
        counts: list[int] = []

        def audit(layer: MoeLayer, router: nn.Module, args: object, scores: Tensor) -> None:
            assert layer.assigned_ids is not None
            counts.append(count_misrouted(scores, layer.assigned_ids, NEAR_SCORES[dtype]))

        for layer in find_moe_layers(model):
            layer.router.register_forward_hook(partial(audit, layer))
        with torch.no_grad():
            for microbatch, tokens in enumerate(torch.split(batch, self._spec.microbatch)):
                self.compute_reference_loss(model, tokens, microbatch)
        return sum(counts)


def count_misrouted(scores: Tensor, expert_ids: Tensor, tolerance: float) -> int:
    """Return the tokens whose experts (T, k) do not have the best of their scores (T, E).

    A score may be worse by ``tolerance``. A token that takes an expert twice counts too.
    """
    worst_taken = scores.gather(1, expert_ids).amin(1)
    best_other = scores.scatter(1, expert_ids, -1.0).amax(1)
    has_duplicate = (expert_ids.sort(1).values.diff(dim=1) == 0).any(1)
    return int(((best_other - worst_taken > tolerance) | has_duplicate).sum())
