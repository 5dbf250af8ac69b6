"""The model of all training steps: a decoder Transformer after one of two recipes.

gpt (GPT-2): LayerNorm, GELU, biases (of all but keys), learned positions. llama (Llama 3): RMSNorm, SwiGLU, no biases,
rotary positions, fewer key and value heads than query heads. The head is tied to nothing. Weights and tokens are
functions of a seed and a name or a step alone, so that every layout of ranks starts from the same.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parbench.bench.text import UserError
from parbench.workloads.model.shapes import CHECKPOINTINGS, Shape
from parbench.workloads.torch_internals import ATTENTIONS, tree_leaves, with_checkpointing

_INIT_DEVIATION = 0.02
_NORM_EPSILON = 1e-5
_ROPE_BASE = 500_000.0  # Llama 3's, arXiv 2407.21783, section 3.2

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over what is not later: q (b, a, s, d), k and v (b, a_kv, s, d)."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turn the pairs (i, i + d/2) of (b, a, s, d) by position * base^(-2i/d) (RoPE, arXiv 2104.09864).

    ``positions`` (s) are 0, 1, ... if not given. Angles are float32 and made anew: no table to lose or to move.
    """
    s, d = x.shape[-2:]
    if positions is None:
        positions = torch.arange(s, device=x.device)
    frequencies = _ROPE_BASE ** (torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / -d)
    angles = positions.float()[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, (b, s, h) -> (b, s, h), of as many heads as the projections' columns hold.

    ``core`` joins the heads' q, k, v and ``rotate`` gives them positions; both may be exchanged.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size, biased = shape.head_size, shape.recipe == "gpt"
        self.core: Core = attend
        self.rotate: Callable[[Tensor], Tensor] | None = None if shape.recipe == "gpt" else rotate
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=biased)
        # without bias: it would move all scores of a query alike, which softmax does not see, and have no gradient
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=biased)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._by_head(projected(x)) for projected in (self.q, self.k, self.v))
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        attended: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return attended

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Ffn(nn.Module):
    """down(gelu(up(x))) for gpt, down(silu(gate(x)) * up(x)) for llama, (b, s, h) -> (b, s, h)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biased = shape.recipe == "gpt"
        self.gate = None if biased else nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=biased)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(wide)
        return out


class Layer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)), (b, s, h) -> (b, s, h)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.ffn_norm = _norm(shape)
        self.ffn = Ffn(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both blocks; only they see the whole sequence, so x may be a part of it."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder from tokens (b, s) to the logits of the next token (b, s, vocabulary).

    ``places`` (s) are where the tokens stand in their sequence, for learned positions; 0, 1, ... if None.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.places: Tensor | None = None
        self.positions = (
            nn.Embedding(shape.sequence, shape.hidden) if shape.recipe == "gpt" else None
        )
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            places = (
                torch.arange(tokens.shape[1], device=tokens.device)
                if self.places is None
                else self.places
            )
            x = x + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _norm(shape: Shape) -> nn.Module:
    return (nn.LayerNorm if shape.recipe == "gpt" else nn.RMSNorm)(shape.hidden, _NORM_EPSILON)


def build(
    shape: Shape, seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Transformer:
    model = outline(shape, dtype)
    materialise(model, seed, device)
    return model


def outline(shape: Shape, dtype: torch.dtype) -> Transformer:
    """Return the model on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return Transformer(shape).to(dtype)


def materialise(module: nn.Module, seed: int, device: torch.device, name: str = "") -> None:
    """Move the parts that are on the meta device to this one, and initialize their weights.

    ``name`` is the module's name in the model. A layer that is materialised right before it is sharded is the only
    one that is whole.
    """
    for place, part in module.named_modules(prefix=name):
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device=device, recurse=False)
            fill(part, seed, place)


def fill(module: nn.Module, seed: int, name: str = "") -> None:
    """Give every parameter its weights, a function of (seed, name) alone; a DTensor takes its own part of them."""
    with torch.no_grad():
        for place, parameter in module.named_parameters(prefix=name):
            weights = draw_weights(place, parameter.shape, seed, parameter.device)
            if isinstance(parameter, DTensor):
                mine = distribute_tensor(
                    weights, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(mine.to_local())
            else:
                parameter.copy_(weights)


def draw_weights(name: str, size: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return a parameter's first values in float32: matrices normal(0, 0.02), norms one, biases zero.

    They are drawn on the device, whole: the same on all ranks of one kind of device, whichever part of them each keeps.
    """
    if len(size) == 1:
        return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0, device=device)
    chance = generator(seed, name, device)
    return torch.empty(size, device=device).normal_(0.0, _INIT_DEVIATION, generator=chance)


def draw_tokens(shape: Shape, sequences: int, seed: int, step: int) -> Tensor:
    """Return the tokens of a step, (sequences, s + 1), on the CPU; targets are inputs moved by one."""
    return torch.randint(
        shape.vocabulary, (sequences, shape.sequence + 1), generator=generator(seed, step)
    )


def generator(seed: int, what: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return what draws numbers that are a function of a seed and of what they are for."""
    return torch.Generator(device).manual_seed(
        zlib.crc32(f"{seed} {what}".encode())
    )  # it reads no more than 32 bits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each next token of (b, s + 1)."""
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens, of logits (b, s, vocabulary) and targets (b, s), in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_KEPT = frozenset({*(getattr(torch.ops.aten, name).default for name in _PRODUCTS), *ATTENTIONS})
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


def checkpoint(model: nn.Module, how: str) -> None:
    """Let each of ``model.layers`` forget its activations; parameters keep their names: only ``forward`` is exchanged.

    Call it once, before FSDP or DDP takes the model, so that gathered weights are there when a layer is computed again.
    """
    if how not in CHECKPOINTINGS:
        raise UserError(
            f"checkpointing = {how!r} is not allowed: checkpointing is {', '.join(CHECKPOINTINGS)}"
        )
    if how == "none":
        return
    keeping = {"context_fn": _selective_contexts} if how == "selective" else {}
    for layer in model.get_submodule("layers").children():
        layer.forward = with_checkpointing(layer.forward, **keeping)


watchers: list[list[Any]] = []
"""Who asks what torch's policy keeps: each is given the caches that are made while it stands here."""


def _selective_contexts() -> Any:
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    for caches in watchers:
        caches.append(contexts[0].storage)
    return contexts


def kept_in(caches: list[Any]) -> list[Tensor]:
    """Return the tensors in caches; the rest of them is to be computed again."""
    return [kept.val for kept in tree_leaves(caches) if hasattr(kept, "val")]


def _policy(
    _context: object, operation: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, torch.compile and torch's checkpoint wrapper put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
