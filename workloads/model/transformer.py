"""The model of all training steps: a decoder Transformer with one of two recipes.

gpt (GPT-2) has LayerNorm, GELU, biases except for keys, and learned positions. llama (Llama 3) has
RMSNorm, SwiGLU, no biases, rotary positions, and fewer key and value heads than query heads. The
head has weights of its own. Weights depend on a seed and their name, tokens on a seed and the step,
so that they are the same on every mesh.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parbench.workloads.model.shapes import Checkpointing, Shape
from parbench.workloads.torch_internals import ATTENTIONS, tree_leaves, with_checkpointing

_INIT_DEVIATION = 0.02
"""The standard deviation of initial weights."""
_NORM_EPSILON = 1e-5
_ROPE_BASE = 500_000.0  # Llama 3's, arXiv 2407.21783, section 3.2

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of q, k and v (b, heads, s, d) that returns attention before its output projection."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, softmax(q k^T / sqrt(d)) v, by torch's fused kernel.

    q is (b, a, s, d), k and v are (b, a_kv, s, d), where a and a_kv are the numbers of query heads
    and key-value heads. The result has the shape of q.
    """
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return queries or keys (b, a, s, d) rotated by their positions, in their dtype.

    This is RoPE (arXiv 2104.09864), which rotates the pair of elements (i, i + d/2). The angle is
    the position times 500,000^(-2i/d), computed in float32 in each call. ``positions`` (s) are 0,
    1, ... by default.
    """
    s, d = x.shape[-2:]
    if positions is None:
        positions = torch.arange(s, device=x.device)
    exponents = torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / -d
    frequencies = _ROPE_BASE**exponents
    angles = positions.float()[:, None] * frequencies
    cosines = angles.cos()
    sines = angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    rotated_first = first * cosines - second * sines
    rotated_second = second * cosines + first * sines
    return torch.cat((rotated_first, rotated_second), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with its projections, (b, s, hidden) -> (b, s, hidden).

    The number of heads follows from the columns of the projections, which may be a rank's part.
    ``core`` computes attention from q, k and v, and ``rotate`` adds positions to q and k.
    Parallelism replaces both.
    """

    def __init__(self, shape: Shape) -> None:
        """Make the projections q, k, v and out of one layer.

        They have biases for gpt, except the projection to keys.
        """
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
        """Return attention of ``x`` (b, s, hidden) after its output projection, (b, s, hidden)."""
        heads = (*x.shape[:2], -1, self.head_size)
        q = self.q(x).view(heads).transpose(1, 2)
        k = self.k(x).view(heads).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        attended: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return attended


class Ffn(nn.Module):
    """The FFN of one layer, (b, s, hidden) -> (b, s, hidden).

    It is down(gelu(up(x))) for gpt and down(silu(gate(x)) * up(x)) for llama.
    """

    def __init__(self, shape: Shape) -> None:
        """Make the linear layers: up, down and, for llama, gate."""
        super().__init__()
        has_bias = shape.recipe == "gpt"
        self.gate = None if has_bias else nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=has_bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the FFN for ``x`` (b, s, hidden), in the same shape."""
        if self.gate is None:
            inner = F.gelu(self.up(x))
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Layer(nn.Module):
    """A decoder layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        """Make the attention, the FFN and the norm before each."""
        super().__init__()
        self.attention_norm = _make_norm(shape)
        self.attention = Attention(shape)
        self.ffn_norm = _make_norm(shape)
        self.ffn = Ffn(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and FFN to ``x`` (b, s, hidden) and return a tensor of the same shape.

        With sequence parallelism ``x`` has only this rank's positions. Attention and FFN gather the
        others themselves.
        """
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder, or the part of one that a pipeline stage holds.

    It turns tokens (b, s) or, without the embedding, activations (b, s, hidden) into the logits of
    the next token (b, s, vocabulary) or, without the head, into activations. Parameters of a part
    have their names in the full model.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Iterable[int] | None = None,
        *,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        """Make a part of the model with the layers of these numbers. None means all layers.

        The head includes the final norm.
        """
        super().__init__()
        self.token_embedding: nn.Embedding | None = None
        self.position_embedding: nn.Embedding | None = None
        self.norm: nn.Module | None = None
        self.head: nn.Linear | None = None
        self.positions: Tensor | None = None
        """The positions (s) of the tokens in their sequence. None means 0, 1, ..."""
        if has_embedding:
            self.token_embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        if has_embedding and shape.recipe == "gpt":
            self.position_embedding = nn.Embedding(shape.sequence, shape.hidden)
        numbers = range(shape.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in numbers})
        if has_head:
            self.norm = _make_norm(shape)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (b, s, vocabulary), or activations (b, s, hidden) without the head.

        ``x`` are token ids (b, s), or activations (b, s, hidden) without the embedding.
        """
        if self.token_embedding is not None:
            x = self.token_embedding(x)
        if self.position_embedding is not None:
            positions = self.positions
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)
            x = x + self.position_embedding(positions)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def merge_parts(parts: Sequence[Transformer]) -> nn.Module:
    """Return one module with the parameters of several parts of the model, which is never called.

    The parts are those of a rank's pipeline stages. Parameters have their names in the full model.
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


def _make_norm(shape: Shape) -> nn.Module:
    """Return the norm over the hidden size: LayerNorm for gpt, RMSNorm for llama."""
    if shape.recipe == "gpt":
        return nn.LayerNorm(shape.hidden, _NORM_EPSILON)
    return nn.RMSNorm(shape.hidden, _NORM_EPSILON)


NO_TARGET = -100
"""The target id of padding, which the loss ignores."""
DTYPES = {4: torch.float32, 2: torch.bfloat16}
"""The type of weights and activations, by the bytes of an element."""


def make_meta_model(
    shape: Shape,
    dtype: torch.dtype,
    layers: Iterable[int] | None = None,
    *,
    has_embedding: bool = True,
    has_head: bool = True,
) -> Transformer:
    """Return the model, or a part of it, on the meta device, where parameters take no memory.

    ``layers`` has the numbers of the part's layers, None means all. The head includes the final
    norm.
    """
    with torch.device("meta"):
        return Transformer(shape, layers, has_embedding=has_embedding, has_head=has_head).to(dtype)


def initialize(module: nn.Module, seed: int, device: torch.device, name: str = "") -> None:
    """Move the parameters of ``module`` from the meta device to ``device``, and set them.

    A submodule whose own parameters are not on the meta device keeps its values and its device,
    even if that is not ``device``. Weights depend only on ``seed`` and on a parameter's name in the
    model. ``name`` is the module's name in the model. A DTensor gets its part of the weights.
    """
    for path, part in module.named_modules(prefix=name):
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device=device, recurse=False)
            set_weights(part, seed, path)


def set_weights(module: nn.Module, seed: int, name: str = "") -> None:
    """Set all parameters of a module to the initial values that ``seed`` and their names define.

    ``name`` is the module's name in the model. A DTensor gets this rank's part.
    """
    with torch.no_grad():
        for path, parameter in module.named_parameters(prefix=name):
            weights = draw_weights(path, parameter.shape, seed, parameter.device)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(take_local_part(weights, parameter))
            else:
                parameter.copy_(weights)


def take_local_part(full: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of ``full``, which is split as the DTensor ``parameter`` is.

    The last dimension of the device mesh splits the tensor first. With (fsdp, tp), FSDP shards the
    part that tensor parallelism has left.
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
    """Return the initial values of a full parameter in float32: normal(0, 0.02), norms 1, biases 0.

    ``name`` is the parameter's name in the model and ``size`` its full shape. The values depend on
    ``seed`` and ``name`` only. Every rank draws the full tensor on its own device, also if it
    keeps only a part. Devices of one kind give equal values.
    """
    if len(size) == 1:
        return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0, device=device)
    generator = make_generator(seed, name, device)
    return torch.empty(size, device=device).normal_(0.0, _INIT_DEVIATION, generator=generator)


def draw_tokens(shape: Shape, sequences: int, seed: int, step: int) -> Tensor:
    """Return random token ids (sequences, s + 1) of one step's global batch, on the CPU.

    Column i + 1 has the targets of column i. The ids depend on the seed and the number of the step.
    """
    generator = make_generator(seed, step)
    size = (sequences, shape.sequence + 1)
    return torch.randint(shape.vocabulary, size, generator=generator)


def make_generator(
    seed: int, purpose: object, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a random generator whose seed is a hash of ``seed`` and ``purpose``.

    ``purpose`` distinguishes the uses of one seed, such as the name of a parameter.
    """
    # A generator has seeds of 32 bits on some devices.
    short_seed = zlib.crc32(f"{seed} {purpose}".encode())
    return torch.Generator(device).manual_seed(short_seed)


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the model on tokens (b, s + 1), a scalar in float32.

    The target of each token is the next one. Targets that are padding do not count.
    """
    logits = model(get_inputs(tokens[:, :-1]))
    return cross_entropy(logits, tokens[:, 1:])


def get_inputs(tokens: Tensor) -> Tensor:
    """Return token ids that the embedding accepts: ``NO_TARGET`` of padding becomes token 0."""
    return tokens.clamp(min=0)


def cross_entropy(logits: Tensor, targets: Tensor, *, is_sum: bool = False) -> Tensor:
    """Return the mean or, if ``is_sum``, the sum of the cross-entropy over tokens, in float32.

    Logits are (b, s, vocabulary), target ids (b, s). Targets that are padding do not count.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=NO_TARGET,
        reduction="sum" if is_sum else "mean",
    )


_MATRIX_MULTIPLICATIONS = ("mm", "bmm", "addmm", "baddbmm")
_GEMMS = frozenset(getattr(torch.ops.aten, name).default for name in _MATRIX_MULTIPLICATIONS)
"""The operators that multiply matrices in linear layers."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""The parts of parameter names that wrappers of modules add."""


def checkpoint_layers(part: Transformer, checkpointing: Checkpointing, every: int = 1) -> None:
    """Make layers of a model part recompute their activations in backward, in place.

    Only the layers whose number in the full model, from 0, is a multiple of ``every`` are changed.
    ``full`` recomputes all of their operators. ``selective`` recomputes all operators except those
    that ``SelectivePolicy`` saves. Only ``forward`` is replaced, so that parameters keep their
    names. FSDP and DDP wrap the layers later, so that gathered weights are available when a layer
    is recomputed.
    """
    if checkpointing == "none":
        return
    options = {"context_fn": _make_selective_contexts} if checkpointing == "selective" else {}
    for number, layer in part.layers.items():
        if int(number) % every == 0:
            layer.forward = with_checkpointing(layer.forward, **options)


watchers: list[list[Any]] = []
"""Lists to which each selectively checkpointed layer appends its cache in forward.

The cache is torch's store of the outputs that selective checkpointing keeps for backward.
``watchers`` is empty unless the bytes that a forward pass saves are being counted
(``count_saved_bytes``). Saved-tensor hooks do not see the tensors in a cache.
"""


def _make_selective_contexts() -> Any:
    """Return two contexts for one selectively checkpointed layer: of forward and of recomputation.

    The first context stores the outputs that it keeps in a cache, from which the second takes them.
    ``watchers`` is a module variable: the lists of the functions that presently count saved bytes.
    The cache is appended to each of these lists, so that the functions can count its tensors.
    """
    contexts = create_selective_checkpoint_contexts(SelectivePolicy())  # type: ignore[no-untyped-call]
    for caches in watchers:
        caches.append(contexts[0].storage)
    return contexts


def list_kept_tensors(caches: list[Any]) -> list[Tensor]:
    """Return the tensors that selective checkpointing saves for backward, over all layers.

    ``caches`` has one cache for each forward pass of a layer: torch's store of the outputs that the
    layer keeps. A list that is in ``watchers`` during forward collects these caches.
    """
    return [kept.val for kept in tree_leaves(caches) if hasattr(kept, "val")]


class SelectivePolicy:
    """Decides for each operator of a layer if selective checkpointing saves its result.

    It saves the results of attention and of every second matrix multiplication, as torchtitan's
    selective checkpointing by operation does.
    """

    def __init__(self) -> None:
        """Make the policy of one layer and microbatch."""
        self._num_gemms = {False: 0, True: 0}
        """The number of matrix multiplications so far in forward (False) and recomputation."""

    def __call__(
        self, context: Any, operation: object, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        """Return MUST_SAVE or PREFER_RECOMPUTE for the next operator of the layer.

        ``context`` is torch's object with the pass in which the operator runs: forward or
        recomputation.
        """
        is_saved = operation in ATTENTIONS
        if operation in _GEMMS:
            is_saved = self._num_gemms[context.is_recompute] % 2 == 0
            self._num_gemms[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers add.

    The wrappers are DDP, torch.compile and checkpointing.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
