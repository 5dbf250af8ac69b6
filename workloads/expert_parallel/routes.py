"""The routes that a step's microbatches take, and whether they are those that one process would take.

A token's route is of its number in the global batch, whichever rank takes the token: a generator's, drawn before the
step is timed, or the router's. Roundings can turn a router's choice between near scores, so that one process is told
the routes that ranks took, and its router is asked apart whether it would have taken them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe
from parbench.workloads.expert_parallel.moe_layer import MoeLayer, aux_loss, exchange_ffns, mixtures
from parbench.workloads.expert_parallel.routing import BALANCED, NOWHERE, routes
from parbench.workloads.model.transformer import loss_of, materialise, outline
from parbench.workloads.step.layout import dtype_of

# scores of two experts that are nearer than this may come out in another order, where sums are rounded otherwise
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Routes:
    """Routes of a step's microbatches, of which this rank takes the positions ``mine`` of each sequence.

    ``frozen``, while it is given, is taken in place of all else: routes (b, s, k) by number of the microbatch and of
    the layer.
    """

    def __init__(self, world: World, spec: StepSpec, moe: Moe, mine: Sequence[int]) -> None:
        self._world, self.spec, self._moe, self._mine = world, spec, moe, list(mine)
        balanced = replace(moe, routing=BALANCED, strength=0.0)
        self._own_generator, self._balanced_generator = (
            mixture.generator(world.seed, world.size) for mixture in (moe, balanced)
        )
        self.generator = self._own_generator
        self.frozen: Mapping[int, Mapping[int, Tensor]] | None = None
        self._misrouted_counted = False
        self.step = 0
        self._kept: dict[int, Tensor] = {}

    def balance(self, now: bool) -> None:
        """From the next step on, take balanced routes in place of the case's, or the case's again."""
        self.generator = self._balanced_generator if now else self._own_generator

    def begin(self, step: int, microbatches: Iterable[int]) -> None:
        """Draw what another step takes of these microbatches: drawing is no part of a step's time."""
        self.step = step
        self._kept = (
            {} if self.generator is None else {n: self.drawn(n, self._mine) for n in microbatches}
        )

    def drawn(self, microbatch: int, positions: Sequence[int] | slice = slice(None)) -> Tensor:
        """Return a generator's routes of a microbatch's sequences, of some positions of each, (tokens, k)."""
        assert self.generator is not None, "routers draw nothing"
        size = (self.spec.microbatch, self.spec.shape.sequence)
        tokens = size[0] * size[1]
        whole = torch.tensor(routes(self.generator, self.step, microbatch * tokens, tokens)).view(
            *size, -1
        )
        return whole[:, positions].flatten(0, 1).to(self._world.device)

    def give(self, layers: Mapping[int, MoeLayer], microbatch: int, *, whole: bool = False) -> None:
        """Let mixtures, by number of the layer, take a drawn microbatch's routes: this rank's, or one process's all."""
        drawn = None
        if self.frozen is None and self.generator is not None:
            drawn = self.drawn(microbatch) if whole else self._kept[microbatch]
        for layer, mixture in layers.items():
            mixture.microbatch = microbatch
            mixture.given = drawn
            mixture.all_routed = drawn is not None
            if self.frozen is not None:
                frozen = self.frozen[microbatch][layer]
                mixture.given = (frozen if whole else frozen[:, self._mine]).flatten(0, 1)

    def reference_model(self, dtype: torch.dtype) -> nn.Module:
        model = outline(self.spec.shape, dtype)
        exchange_ffns(
            model, self.spec.shape, replace(self._moe, ep=1, etp=1), self._world.seed, dense=True
        )
        return model

    def reference_loss(self, model: nn.Module, tokens: Tensor, microbatch: int) -> Tensor:
        """Return the mean loss of one process on a microbatch, by its routes in the global batch."""
        self.give(dict(enumerate(mixtures(model))), microbatch, whole=True)
        return loss_of(model, tokens) + aux_loss(model)

    def count_wrong(
        self, layers: Mapping[int, MoeLayer], batch: Tensor, check: Callable[[], int]
    ) -> int:
        """Return what a check counts by the routes that ranks took, and tokens that one process would route elsewhere.

        ``layers`` are this rank's mixtures by number. The latter are counted in the first step alone: one process's
        router is told the weights of the seed.
        """
        if self.generator is not None or self.spec.timed:
            return check()
        self.frozen = self._taken(layers)
        try:
            return self.count_misrouted(batch) + check()
        finally:
            self.frozen = None

    def _taken(self, layers: Mapping[int, MoeLayer]) -> Mapping[int, Mapping[int, Tensor]]:
        size = (self.spec.microbatch, self.spec.shape.sequence, self._moe.top_k)
        mine = [
            (microbatch, layer, self._mine, chosen.view(size[0], len(self._mine), -1).cpu())
            for layer, mixture in layers.items()
            for microbatch, chosen in mixture.chosen.items()
        ]
        found: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        for microbatch, layer, positions, chosen in (
            one for of in self._world.gather(mine) for one in of
        ):
            nowhere = torch.full(size, NOWHERE, device=self._world.device)
            found[microbatch].setdefault(layer, nowhere)[:, positions] = chosen.to(nowhere.device)
        return found

    def count_misrouted(self, batch: Tensor) -> int:
        """Return how many tokens, in all layers together, took what one process's router would not; once."""
        if self._misrouted_counted or not self.spec.reference_fits:
            return 0
        self._misrouted_counted = True
        dtype, wrong = dtype_of(self.spec), 0
        model = self.reference_model(dtype)
        materialise(model, self._world.seed, self._world.device)
        for mixture in mixtures(model):

            def count(
                router: nn.Module, args: object, scores: Tensor, mixture: MoeLayer = mixture
            ) -> None:
                nonlocal wrong
                assert mixture.given is not None, "routes are frozen"
                wrong += count_misrouted(scores, mixture.given, NEAR[dtype])

            mixture.router.register_forward_hook(count)
        with torch.no_grad():
            for microbatch, tokens in enumerate(torch.split(batch, self.spec.microbatch)):
                self.reference_loss(model, tokens, microbatch)
        return wrong


def count_misrouted(scores: Tensor, taken: Tensor, near: float) -> int:
    """Return how many tokens left an expert out whose score (T, E) is better, by more than ``near``, than one taken.

    A token that took an expert twice counts too.
    """
    worst_taken = scores.gather(1, taken).amin(1)
    best_left = scores.scatter(1, taken, -1.0).amax(1)
    twice = (taken.sort(1).values.diff(dim=1) == 0).any(1)
    return int(((best_left - worst_taken > near) | twice).sum())
