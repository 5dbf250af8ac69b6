"""The model of all training steps: a decoder Transformer with one of two recipes.

gpt (GPT-2) has LayerNorm, GELU, biases except for keys, and learned positions. llama (Llama 3) has
RMSNorm, SwiGLU, no biases, rotary positions, and fewer key and value heads than query heads. The
head has weights of its own. Weights depend on a seed and their name, tokens on a seed and the step,
so that they are the same on every mesh.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parbench.workloads.model.shapes import Checkpointing, Shape
from parbench.workloads.torch_internals import ATTENTIONS, tree_leaves, with_checkpointing

if TYPE_CHECKING:
    from parbench.workloads.costs.step_spec import StepSpec

_INIT_DEVIATION = 0.02
_NORM_EPSILON = 1e-5
_ROPE_BASE = 500_000.0  # Llama 3's, arXiv 2407.21783, section 3.2

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal softmax(q k^T / sqrt(d)) v of q (b, a, s, d) and k and v (b, a_kv, s, d)."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotate the pairs (i, i + d/2) of (b, a, s, d) by position * base^(-2i/d).

    This is RoPE (arXiv 2104.09864). ``positions`` (s) are 0, 1, ... by default. Angles are computed
    in float32 in each call.
    """
    s, d = x.shape[-2:]
    if positions is None:
        positions = torch.arange(s, device=x.device)
    frequencies = _ROPE_BASE ** (torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / -d)
    angles = positions.float()[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cosines - second * sines, second * cosines + first * sines), dim=-1
    )
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, (b, s, h) -> (b, s, h).

    The number of heads follows from the columns of the projections, which may be a rank's part.
    ``core`` computes attention from q, k and v, and ``rotate`` adds positions. Both may be
    replaced.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        has_bias = shape.recipe == "gpt"
        self.core: Core = attend
        self.rotate: Callable[[Tensor], Tensor] | None = None if has_bias else rotate
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=has_bias)
        # A bias of keys would shift all scores of a query equally, and softmax would cancel it.
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=has_bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split_heads(linear(x)) for linear in (self.q, self.k, self.v))
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        attended: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return attended

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return (b, s, heads * d) as (b, heads, s, d)."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Ffn(nn.Module):
    """down(gelu(up(x))) for gpt, down(silu(gate(x)) * up(x)) for llama, (b, s, h) -> (b, s, h)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        has_bias = shape.recipe == "gpt"
        self.gate = None if has_bias else nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=has_bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(x))
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
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
        """Apply attention and FFN to ``x`` (b, s, h) and return a tensor of the same shape.

        With sequence parallelism ``x`` has only this rank's positions. The blocks gather the others
        themselves.
        """
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder, or the part of one that a pipeline stage holds.

    It turns tokens (b, s) or, without the embedding, activations (b, s, hidden) into activations
    or, with the head, the logits of the next token (b, s, vocabulary). Parameters of a part have
    their names in the full model.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Iterable[int] | None = None,
        *,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        """Make a part with the layers of these numbers. None means all layers."""
        super().__init__()
        self.token_embedding: nn.Embedding | None = None
        self.position_embedding: nn.Embedding | None = None
        self.norm: nn.Module | None = None
        self.head: nn.Linear | None = None
        self.positions: Tensor | None = None
        """Positions (s) of the tokens in their sequence; None is 0, 1, ..."""
        if has_embedding:
            self.token_embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        if has_embedding and shape.recipe == "gpt":
            self.position_embedding = nn.Embedding(shape.sequence, shape.hidden)
        numbers = range(shape.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in numbers})
        if has_head:
            self.norm = _norm(shape)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.token_embedding is not None:
            x = self.token_embedding(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._get_positions(x))
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def _get_positions(self, x: Tensor) -> Tensor:
        """Return the positions (s) of activations (b, s, hidden)."""
        positions = self.positions
        return torch.arange(x.shape[1], device=x.device) if positions is None else positions


def merge_parts(parts: Sequence[Transformer]) -> nn.Module:
    """Return a model that holds the modules of all parts under their names in the full model.

    It is used for its parameters and is never called.
    """
    if len(parts) == 1:
        return parts[0]
    merged = nn.Module()
    layers = nn.ModuleDict()
    for part in parts:
        layers.update(dict(part.layers.items()))
        for name, module in part.named_children():
            merged.add_module(name, layers if name == "layers" else module)
    return merged


def _norm(shape: Shape) -> nn.Module:
    """Return the norm of a recipe: LayerNorm for gpt, RMSNorm otherwise."""
    return (nn.LayerNorm if shape.recipe == "gpt" else nn.RMSNorm)(shape.hidden, _NORM_EPSILON)


NO_TARGET = -100
"""The target of padding, which the loss ignores."""
DTYPES = {4: torch.float32, 2: torch.bfloat16}
"""The type of an element by its bytes."""


def get_dtype(spec: "StepSpec") -> torch.dtype:
    """Return the type of weights and activations."""
    return DTYPES[spec.bytes_per_element]


def make_meta_model(
    shape: Shape,
    dtype: torch.dtype,
    layers: Iterable[int] | None = None,
    *,
    has_embedding: bool = True,
    has_head: bool = True,
) -> Transformer:
    """Return the model, or a part of it, on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return Transformer(shape, layers, has_embedding=has_embedding, has_head=has_head).to(dtype)


def initialize(module: nn.Module, seed: int, device: torch.device, name: str = "") -> None:
    """Move the modules that are on the meta device to ``device``, and set their weights.

    Weights are a function of the seed and of a parameter's name in the model. ``name`` is the
    module's name in the model. A DTensor gets its part of the weights.
    """
    for path, part in module.named_modules(prefix=name):
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device=device, recurse=False)
            set_weights(part, seed, path)


def set_weights(module: nn.Module, seed: int, name: str = "") -> None:
    """Set every parameter to its first value; see ``draw_weights``."""
    with torch.no_grad():
        for path, parameter in module.named_parameters(prefix=name):
            weights = draw_weights(path, parameter.shape, seed, parameter.device)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(take_local_part(weights, parameter))
            else:
                parameter.copy_(weights)


def take_local_part(full: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of a tensor with the placements of a parameter.

    The axes of a mesh that are further right split a parameter first: FSDP shards what tensor
    parallelism has left.
    """
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = cast(Any, placement).dim
        chunks = part.chunk(mesh.size(axis), dim)
        index = coordinate[axis]
        part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
    return part


def draw_weights(name: str, size: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return the first values of a parameter in float32: normal(0, 0.02), norms 1, biases 0.

    Every rank draws the full tensor on its device, so that ranks with the same kind of device have
    the same values.
    """
    if len(size) == 1:
        return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0, device=device)
    generator = make_generator(seed, name, device)
    return torch.empty(size, device=device).normal_(0.0, _INIT_DEVIATION, generator=generator)


def draw_tokens(shape: Shape, sequences: int, seed: int, step: int) -> Tensor:
    """Return the tokens of a step (sequences, s + 1) on the CPU; targets are the next tokens."""
    size = (sequences, shape.sequence + 1)
    return torch.randint(shape.vocabulary, size, generator=make_generator(seed, step))


def make_generator(
    seed: int, purpose: object, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a random generator that depends on the seed and the purpose only."""
    # A generator has seeds of 32 bits on some devices.
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {purpose}".encode()))


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy over the next tokens of (b, s + 1) that are not padding."""
    return cross_entropy(model(get_inputs(tokens[:, :-1])), tokens[:, 1:])


def get_inputs(tokens: Tensor) -> Tensor:
    """Return token ids that the embedding accepts: padding is replaced by token 0."""
    return tokens.clamp(min=0)


def cross_entropy(logits: Tensor, targets: Tensor, *, is_sum: bool = False) -> Tensor:
    """Return the mean or the sum of the cross-entropy over tokens with a target, in float32.

    Logits are (b, s, vocabulary), targets (b, s).
    """
    reduction = "sum" if is_sum else "mean"
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NO_TARGET, reduction=reduction
    )


_MATRIX_MULTIPLICATIONS = ("mm", "bmm", "addmm", "baddbmm")
_GEMMS = frozenset(getattr(torch.ops.aten, name).default for name in _MATRIX_MULTIPLICATIONS)
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


def checkpoint_layers(part: Transformer, checkpointing: Checkpointing, every: int = 1) -> None:
    """Make layers recompute their activations in backward; ``full`` does so for one in ``every``.

    Only ``forward`` is replaced, so that parameters keep their names. FSDP and DDP wrap the layers
    later, so that gathered weights are available when a layer is recomputed.
    """
    if checkpointing == "none":
        return
    options = {"context_fn": _make_selective_contexts} if checkpointing == "selective" else {}
    for number, layer in part.layers.items():
        if int(number) % every == 0:
            layer.forward = with_checkpointing(layer.forward, **options)


watchers: list[list[Any]] = []
"""Lists to which each new cache of selective checkpointing is appended."""


def _make_selective_contexts() -> Any:
    """Return the contexts of selective checkpointing, and give their caches to ``watchers``."""
    contexts = create_selective_checkpoint_contexts(SelectivePolicy())  # type: ignore[no-untyped-call]
    for caches in watchers:
        caches.append(contexts[0].storage)
    return contexts


def list_kept_tensors(caches: list[Any]) -> list[Tensor]:
    """Return the tensors that selective checkpointing keeps in its caches."""
    return [kept.val for kept in tree_leaves(caches) if hasattr(kept, "val")]


class SelectivePolicy:
    """Keeps the results of attention and of every second matrix multiplication of a layer.

    This is torchtitan's selective checkpointing by operation.
    """

    def __init__(self) -> None:
        self._num_gemms = {False: 0, True: 0}  # in forward and in the recomputation

    def __call__(
        self, context: Any, operation: object, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        is_saved = operation in ATTENTIONS
        if operation in _GEMMS:
            self._num_gemms[context.is_recompute] += 1
            is_saved = self._num_gemms[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def plain_name(name: str) -> str:
    """Return a parameter's name without prefixes of DDP, torch.compile and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
