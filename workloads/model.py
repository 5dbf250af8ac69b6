"""The model of all training steps: a decoder Transformer in the style of GPT-2.

LayerNorm before each block, GELU, learned positions, causal attention, output tied to nothing. Weights and tokens are
functions of a seed alone, so that every layout of ranks starts from the same.
"""

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INIT_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model and of one sequence."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int


class Attention(nn.Module):
    """Causal multi-head self-attention, (b, s, h) -> (b, s, h)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all earlier positions."""
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(b, s, h))
        return out


class Layer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)), (b, s, h) -> (b, s, h)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Apply both blocks."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder from tokens (b, s) to the logits of the next token (b, s, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(shape: Shape, seed: int, device: torch.device) -> Transformer:
    """Return the model with the weights of a seed: normal matrices, norms of one, biases of zero."""
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape).normal_(0.0, _INIT_DEVIATION, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def draw_tokens(shape: Shape, sequences: int, seed: int, step: int) -> Tensor:
    """Return the tokens of a step, (sequences, s + 1), on the CPU; targets are inputs moved by one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))  # it reads no more than 32 bits
    return torch.randint(shape.vocabulary, (sequences, shape.sequence + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each next token of (b, s + 1)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
