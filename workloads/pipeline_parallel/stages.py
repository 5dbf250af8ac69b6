"""The Transformer cut into stages: embeddings before the first layer, the norm and the head after the last."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workloads.model.transformer import Transformer


class Chunk(nn.Module):
    """One stage: its layers, and what stands before the first or after the last of all.

    (b, s) tokens or (b, s, h) activations -> (b, s, h) activations or (b, s, vocabulary) logits. Parameters have the
    names that they have in the whole model. What the embeddings gave for the last microbatch is ``embedded``.
    """

    def __init__(self, model: Transformer, first: int, count: int) -> None:
        super().__init__()
        last = first + count == len(model.layers)
        self.tokens = model.tokens if first == 0 else None
        self.positions = model.positions if first == 0 else None
        self.places = model.places
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(first, first + count)})
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        self.embedded: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage to one microbatch."""
        if self.tokens is not None:
            x = self.tokens(x)
            if self.positions is not None:
                places = torch.arange(x.shape[1], device=x.device) if self.places is None else self.places
                x = x + self.positions(places)
            self.embedded = x
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Held(nn.Module):
    """The parameters of several chunks under their plain names, for optimizer, parity and memory; it is not called."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for chunk in chunks:
            self.layers.update(dict(chunk.layers.items()))
            for name in ("tokens", "positions", "norm", "head"):
                part = getattr(chunk, name)
                if part is not None:
                    setattr(self, name, part)
