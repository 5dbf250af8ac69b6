"""The routes of a hybrid step: a token's is of its number in the global batch, whichever rank takes the token."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from workloads.expert_parallel.moe_layer import MoeLayer
from workloads.expert_parallel.routing import Generator, routes

ByLayer = Mapping[int, Tensor]
"""Routes by number of the layer."""
Taken = tuple[int, int, list[int], Tensor]
"""A microbatch, a layer, and the routes (b, s/n, k) that a rank took at some positions."""


class Routes:
    """Routes of microbatches of ``size`` (sequences, positions), of which this rank takes the positions ``mine``.

    ``frozen``, while it is given, is taken in place of all else: routes (b, s, k) by microbatch and layer.
    """

    def __init__(
        self, generator: Generator | None, size: tuple[int, int], mine: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        self._generator, self._size, self._mine = generator, size, list(mine)
        self.frozen: Mapping[int, ByLayer] | None = None
        self._step = 0
        self._kept: dict[int, Tensor] = {}

    def begin(self, step: int, microbatches: Iterable[int]) -> None:
        """Draw what another step takes of these microbatches: drawing is no part of a step's time."""
        self._step = step
        self._kept = {} if self._generator is None else {n: self._mine_of(self._draw(n)) for n in microbatches}

    def give(self, mixtures: Mapping[int, MoeLayer], microbatch: int) -> None:
        """Let mixtures, by number of their layer, take this rank's routes of a microbatch that was drawn."""
        for layer, mixture in mixtures.items():
            mixture.microbatch = microbatch
            mixture.given = self._part(microbatch, layer)

    def give_all(self, mixtures: Mapping[int, MoeLayer], microbatch: int) -> None:
        """Let the mixtures of one process take a whole microbatch's."""
        for layer, mixture in mixtures.items():
            whole = self._whole(microbatch, layer)
            mixture.microbatch = microbatch
            mixture.given = None if whole is None else whole.flatten(0, 1)

    def taken(self, mixtures: Mapping[int, MoeLayer]) -> list[Taken]:
        """Return what this rank took of each microbatch and layer."""
        sequences = self._size[0]
        return [
            (microbatch, layer, self._mine, chosen.view(sequences, len(self._mine), -1).cpu())
            for layer, mixture in mixtures.items()
            for microbatch, chosen in mixture.chosen.items()
        ]

    def joined(self, told: Iterable[Sequence[Taken]]) -> dict[int, dict[int, Tensor]]:
        """Return routes (b, s, k) by microbatch and layer, of what all ranks took."""
        found: dict[int, dict[int, Tensor]] = {}
        for microbatch, layer, positions, chosen in (one for of in told for one in of):
            by_layer = found.setdefault(microbatch, {})
            if layer not in by_layer:
                by_layer[layer] = chosen.new_full((*self._size, chosen.shape[-1]), -1)
            by_layer[layer][:, positions] = chosen
        return found

    def _part(self, microbatch: int, layer: int) -> Tensor | None:
        if self.frozen is not None:
            return self._mine_of(self.frozen[microbatch][layer])
        return None if self._generator is None else self._kept[microbatch]

    def _whole(self, microbatch: int, layer: int) -> Tensor | None:
        if self.frozen is not None:
            return self.frozen[microbatch][layer].to(self._device)
        return None if self._generator is None else self._draw(microbatch).to(self._device)

    def _mine_of(self, whole: Tensor) -> Tensor:
        return whole[:, self._mine].flatten(0, 1).to(self._device)

    def _draw(self, microbatch: int) -> Tensor:
        assert self._generator is not None, "routers draw nothing"
        tokens = self._size[0] * self._size[1]
        return torch.tensor(routes(self._generator, self._step, microbatch * tokens, tokens)).view(*self._size, -1)


def mixtures_of(layers: Iterable[tuple[str, nn.Module]]) -> dict[int, MoeLayer]:
    """Return the mixtures of layers that are named by their number."""
    return {int(name): layer.ffn for name, layer in layers if isinstance(layer.ffn, MoeLayer)}
