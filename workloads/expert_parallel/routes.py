"""The routes that a step's microbatches take: a generator's, drawn before the step is timed, or those once chosen.

A token's route is of its number in the global batch, sequence by sequence, whichever rank takes the token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workloads.expert_parallel.routing import Generator, routes

Chosen = Mapping[int, Mapping[int, Tensor]]
"""Routes (T, k) by number of a source's microbatch and by layer."""
Given = Mapping[int, Tensor] | Tensor | None
"""Routes by layer, the same in all layers, or None where routers choose."""


class Drawn:
    """Routes of the microbatches of a global batch, of ``sequences`` sequences and ``tokens`` tokens each.

    ``parts`` ranks share a microbatch: part p takes the p-th of as many equal runs of positions of each sequence, and
    is number ``parts`` times the microbatch's plus p. ``frozen``, while it is given, is taken in place of all else.
    """

    def __init__(
        self,
        generator: Generator | None,
        tokens: int,
        device: torch.device,
        *,
        sequences: int = 1,
        parts: int = 1,
    ) -> None:
        self.generator = generator
        self.frozen: Chosen | None = None
        self._tokens, self._device = tokens, device
        self._sequences, self._parts = sequences, parts
        self._step = 0
        self._kept: dict[int, Tensor] = {}

    def begin(self, step: int, numbers: range) -> None:
        """Draw what a step takes of these parts of microbatches."""
        self._step, self._kept = step, {}
        for number in numbers:
            self.of(number)

    def of(self, number: int) -> Given:
        """Return the routes (T / parts, k) of a part of a microbatch, sequence by sequence."""
        if self.frozen is not None:
            return self.frozen[number]
        if self.generator is None:
            return None
        if number not in self._kept:
            microbatch, part = divmod(number, self._parts)
            drawn = routes(self.generator, self._step, microbatch * self._tokens, self._tokens)
            by_part = torch.tensor(drawn, device=self._device).view(self._sequences, self._parts, -1, len(drawn[0]))
            self._kept[number] = by_part[:, part].flatten(0, 1)
        return self._kept[number]

    def of_all(self, microbatch: int) -> Given:
        """Return the routes (T, k) of a microbatch's parts, one part after the other."""
        return _joined([self.of(microbatch * self._parts + part) for part in range(self._parts)])


def _joined(parts: Sequence[Given]) -> Given:
    by_layer = [part for part in parts if isinstance(part, Mapping)]
    if by_layer:
        return {layer: torch.cat([part[layer] for part in by_layer]) for layer in by_layer[0]}
    plain = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(plain) if plain else None
