"""The experts that the tokens of a step's microbatches take, and their verification.

Experts come from a generator, before the step is timed, or from the router. A generator draws them
for a microbatch of the global batch, whichever ranks have its tokens. Rounding may change a
router's selection between near scores, so that the reference takes the experts that the ranks took,
and its own router is compared with them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from parbench.workloads.expert_parallel.routing import BALANCED, NO_EXPERT, ROUTER
from parbench.workloads.model.transformer import (
    DTYPES,
    compute_loss,
    initialize,
    make_generator,
    make_meta_model,
)

RecordedIds = Mapping[int, Mapping[int, Tensor]]
"""The experts that tokens took, (sequences, positions, top_k), by microbatch, then by layer.

The keys are the index of the microbatch in the global batch and the number of the layer.
"""


def draw_experts(moe: Moe, tokens: int, *, seed: int, purpose: object) -> Tensor:
    """Return ``top_k`` different random experts of each token, (tokens, top_k), on the CPU.

    With balanced routing, the experts take turns in a random order, so that their loads differ by
    at most one token. With ``zipf``, each token draws experts without replacement. The first draw
    takes an expert with a probability proportional to 1 / r, where r from 1 is its place in an
    order that depends on ``seed`` only. The same ``seed`` and ``purpose`` give the same experts.
    ``purpose`` separates draws, such as one per microbatch.
    """
    generator = make_generator(seed, purpose)
    if moe.routing == BALANCED:
        order = torch.randperm(moe.experts, generator=generator)
        turns = torch.arange(tokens * moe.top_k) % moe.experts
        return order[turns].view(tokens, moe.top_k)
    places = torch.randperm(moe.experts, generator=make_generator(seed, "popularity")) + 1
    return torch.multinomial((1 / places).expand(tokens, -1), moe.top_k, generator=generator)


class StepRouting:
    """Decides the experts of this rank's tokens in each step, and verifies the choice of routers.

    With the routing ``router``, the router of each MoE layer chooses the experts in forward. With
    other routings, a random generator draws them before the step is timed.
    """

    def __init__(
        self,
        world: World,
        spec: StepSpec,
        positions: Sequence[int],
        positions_by_source: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Make the routing of a step that has experts, ``spec.moe``.

        ``positions`` are the positions of this rank's tokens in each sequence.
        ``positions_by_source`` has one list of positions for each rank that shares the sequences,
        by the rank's index among them. The reference needs the lists, because each of these ranks
        may send an expert only as many tokens as its capacity. None means that one rank has
        complete sequences.
        """
        assert spec.moe is not None
        self._world = world
        self._spec = spec
        self._moe = spec.moe
        self._is_drawn = spec.moe.routing != ROUTER
        self._positions = list(positions)
        self._positions_by_source = positions_by_source
        self._recorded: RecordedIds | None = None  # taken instead of all others, if present
        self._has_checked_router = False
        self._step = 0
        self._drawn: dict[int, Tensor] = {}

    def draw(self, step: int, microbatches: Iterable[int]) -> None:
        """Draw the experts of this rank's tokens for a step, before it is timed.

        ``step`` is the number of the step, and ``microbatches`` are the indices in the global batch
        of this rank's microbatches. With the routing ``router`` nothing is drawn.
        """
        self._step = step
        self._drawn = {}
        if self._is_drawn:
            for microbatch in microbatches:
                ids = self._draw_microbatch(microbatch)[:, self._positions]
                self._drawn[microbatch] = ids.flatten(0, 1)

    def _draw_microbatch(self, microbatch: int) -> Tensor:
        """Return random experts of a microbatch, (sequences, positions, top_k), on the device.

        They cover all positions of its sequences, also those of other ranks. ``microbatch`` is an
        index in the global batch.
        """
        batch = self._spec.microbatch
        sequence = self._spec.shape.sequence
        ids = draw_experts(
            self._moe,
            batch * sequence,
            seed=self._world.seed,
            purpose=f"experts {self._step} {microbatch}",
        )
        return ids.view(batch, sequence, -1).to(self._world.device)

    def assign(
        self, layers: Mapping[int, MoeLayer], microbatch: int, *, is_reference: bool = False
    ) -> None:
        """Set the experts that MoE layers take in the next forward pass of a microbatch.

        ``layers`` has the MoE layers by layer number, and ``microbatch`` is an index in the global
        batch. Layers of a reference, ``is_reference``, take the experts of all positions of the
        sequences, and other layers those of this rank's positions. With the routing ``router``, the
        layers' routers choose, except while ``count_wrong`` repeats the choice of the ranks.
        """
        for number, layer in layers.items():
            layer.microbatch = microbatch
            layer.assigned_ids = None
            if self._recorded is not None:
                ids = self._recorded[microbatch][number]
                local_ids = ids if is_reference else ids[:, self._positions]
                layer.assigned_ids = local_ids.flatten(0, 1)
            elif self._is_drawn and is_reference:
                layer.assigned_ids = self._draw_microbatch(microbatch).flatten(0, 1)
            elif self._is_drawn:
                layer.assigned_ids = self._drawn[microbatch]

    def make_reference_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the model of a single process with all experts, on the meta device.

        Its MoE layers are ``ReferenceMoeLayer``, which take the experts that the ranks took.
        """
        model = make_meta_model(self._spec.shape, dtype)
        moe = self._moe.on_one_rank()
        replace_ffns_with_moe(model, self._spec.shape, moe, kind=ReferenceMoeLayer)
        for layer in _find_reference_layers(model):
            layer.positions_by_source = self._positions_by_source
        return model

    def compute_reference_loss(
        self, model: nn.Module, tokens: Tensor, microbatch: int, weight: float = 1.0
    ) -> Tensor:
        """Return the loss of the single-process ``model`` for one microbatch, as a scalar.

        ``tokens`` (sequences, positions + 1) has inputs and targets, and ``microbatch`` is the
        index in the global batch. The value is ``weight`` times the mean cross-entropy over tokens.
        """
        layers = dict(enumerate(find_moe_layers(model)))
        self.assign(layers, microbatch, is_reference=True)
        return weight * compute_loss(model, tokens)

    def count_wrong(
        self, layers: Mapping[int, MoeLayer], batch: Tensor, check: Callable[[], int]
    ) -> int:
        """Return the number of wrong results of ``check``, plus the number of misrouted tokens.

        With the routing ``router``, all layers take the same experts as in the last step while
        ``check`` runs, so that ranks and reference do not differ by a rounded score. Misrouted
        tokens are those that took wrong experts (see ``_count_misrouted``). With other routings
        there are none. ``layers`` has this rank's MoE layers by layer number, and ``batch`` is the
        global batch (sequences, positions + 1). All ranks call it.
        """
        if self._is_drawn:
            return check()
        self._recorded = self._gather_expert_ids(layers)
        try:
            return self._count_misrouted(batch) + check()
        finally:
            self._recorded = None

    def _gather_expert_ids(self, layers: Mapping[int, MoeLayer]) -> RecordedIds:
        """Gather on every rank the experts that the tokens of all ranks took in the last step.

        All ranks call this function, each with its own MoE layers by layer number. The result is
        keyed by index of the microbatch in the global batch, and then by layer number. Its values
        are tensors (sequences, positions, top_k) of expert ids for the complete sequences of the
        microbatch. Positions that no rank recorded have ``NO_EXPERT``.
        """
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
        """Return the number of tokens that took wrong experts in the last step, over all layers.

        A token counts once for each MoE layer in which it took wrong experts. Experts are wrong if
        the router of a single process with the initial weights would choose others. ``batch`` are
        the tokens of all ranks (sequences, positions + 1).

        The comparison is made only at the first call. Later calls return 0, because the weights of
        the ranks are then trained and no longer the initial ones. The result is also 0 if the
        single process does not fit in memory.
        """
        if self._has_checked_router or not self._spec.reference_fits:
            return 0
        self._has_checked_router = True
        model = self.make_reference_model(DTYPES[self._spec.bytes_per_element])
        initialize(model, self._world.seed, self._world.device)
        wrong = 0
        with torch.no_grad():
            for microbatch, tokens in enumerate(torch.split(batch, self._spec.microbatch)):
                self.compute_reference_loss(model, tokens, microbatch)
                wrong += sum(layer.num_misrouted for layer in _find_reference_layers(model))
        return wrong


def _find_reference_layers(model: nn.Module) -> list[ReferenceMoeLayer]:
    """Return all MoE layers of a single-process reference, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, ReferenceMoeLayer)]
