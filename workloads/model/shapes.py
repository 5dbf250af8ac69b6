"""The sizes of models, the parameters that change them, and the bytes of an element. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError, parse_duration

Recipe = Literal["gpt", "llama"]
Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
PRECISIONS = {"float32": 4, "bfloat16": 2}
"""The bytes of an element, by precision."""
Bias = Literal["q", "k", "v", "out", "ffn", "router", "experts"]
MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 12
"""The limits of sizes, because searches go through all layers and all divisors of a size."""
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
SizeOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of multi-head latent attention (arXiv 2405.04434), named as in its config.json."""

    q_lora_rank: SizeOrZero = 0  # compressed size of queries, 0 = not compressed
    kv_lora_rank: Size  # compressed size of keys and values
    qk_nope_head_dim: Size  # the part of a head's queries and keys that RoPE does not rotate
    qk_rope_head_dim: Size  # the part that RoPE rotates
    v_head_dim: Size


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of one sequence. Only the planner sets fields with defaults."""

    recipe: Recipe
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    ffn: Size  # hidden size of the FFN
    sequence: Size  # tokens
    vocabulary: Size
    head_dim: SizeOrZero = 0  # 0 = hidden / heads
    tied: bool = False  # the head is the token embedding
    biases: tuple[Bias, ...] | None = None  # the parts with biases, None = as in the recipe
    qk_norm: bool = False  # a norm of each head's queries and keys
    sinks: bool = False  # a logit per head that attends to nothing
    learned_positions: bool | None = None  # None = as in the recipe
    latent: Latent | None = None
    dropout: bool = False  # after attention and after the FFN of each layer

    @property
    def head_size(self) -> int:
        """The size of a head's queries and keys."""
        if self.latent is not None:
            return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """The size of a head's values."""
        return self.latent.v_head_dim if self.latent is not None else self.head_size

    @property
    def has_learned_positions(self) -> bool:
        """True if the model has an embedding of each position of a sequence."""
        if self.learned_positions is None:
            return self.recipe == "gpt"
        return self.learned_positions

    def has_bias(self, part: Bias) -> bool:
        """Return True if the linear layers of a part of the model have biases."""
        biases = _BIASES[self.recipe] if self.biases is None else self.biases
        return part in biases


_BIASES: Mapping[Recipe, tuple[Bias, ...]] = {"gpt": ("q", "v", "out", "ffn"), "llama": ()}


SHAPES = {  # recipe, layers, hidden, heads, kv_heads, ffn, sequence, vocabulary
    "tiny": Shape("gpt", 4, 128, 4, 4, 512, 64, 512),
    "tiny-llama": Shape("llama", 4, 128, 4, 2, 352, 64, 512),
    "small": Shape("gpt", 8, 192, 8, 8, 768, 128, 2048),
    "small-llama": Shape("llama", 8, 192, 8, 4, 512, 128, 2048),
    # The smallest of Radford et al., 2019, with a separate head and without biases of keys.
    "gpt2": Shape("gpt", 12, 768, 12, 12, 3072, 1024, 50257),
    # arXiv 2407.21783, Table 3
    "llama3-8b": Shape("llama", 32, 4096, 32, 8, 14336, 8192, 128256),
    "llama3-70b": Shape("llama", 80, 8192, 64, 8, 28672, 8192, 128256),
}


def _override(name: str, help_text: str) -> Param:
    """Return an optional parameter that replaces one size of the named shape."""
    return Param(name, "int", 0, help_text, minimum=0, optional=True)


MODEL = (
    Param("shape", "str", "tiny", "the model and its sequence length", choices=tuple(SHAPES)),
    choice("recipe", "norms, FFN and positions; empty = the shape's", "", *get_args(Recipe)),
    _override("layers", "decoder layers; 0 = the shape's"),
    _override("hidden", "hidden size; 0 = the shape's"),
    _override("heads", "query heads; 0 = the shape's"),
    _override("kv_heads", "key and value heads; 0 = the shape's share of heads"),
    _override("ffn", "hidden size of the FFN; 0 = the shape's multiple of hidden"),
    _override("sequence", "tokens of one sequence; 0 = the shape's"),
    _override("vocabulary", "size of the vocabulary; 0 = the shape's"),
)


MICROBATCH = Param("microbatch", "int", 4, "sequences of a rank's microbatch", minimum=1)
MICROBATCHES = Param(
    "microbatches", "int", 1, "microbatches of a step and data rank", minimum=1, optional=True
)
PRECISION = choice(
    "precision", "dtype of weights; bfloat16 has float32 master weights", *PRECISIONS
)
REDUCE_DTYPE = choice("reduce_dtype", "dtype in which gradients are reduced", *PRECISIONS)
CHECKPOINTING = Param(
    "checkpointing",
    "str",
    "none",
    "activation recomputation: none, selective, full, or full:K (one layer in K)",
    optional=True,
)
REAL, SIMULATED = "real", "simulated:"
COMPUTE = Param(
    "compute",
    "str",
    REAL,
    "real, or simulated:DURATION: sleep so long for the forward pass of a microbatch",
    optional=True,
)
PADDING = Param(
    "padding",
    "float",
    0.0,
    "mean share of padding at the ends of sequences; the loss is the mean over other tokens",
    minimum=0.0,
    maximum=0.5,
    optional=True,
)
WHOLE, SMALL = "whole", "small"
CHECK = choice(
    "check",
    "model of the numerical check: the whole one, or a small one; auto = whole if it fits",
    "auto",
    WHOLE,
    SMALL,
)
COMMON = (
    *MODEL,
    MICROBATCH,
    MICROBATCHES,
    PRECISION,
    REDUCE_DTYPE,
    CHECKPOINTING,
    COMPUTE,
    PADDING,
    CHECK,
)
"""The parameters of every training step."""
# The buckets of torch's DDP that the costs assume when ``bucket_mb`` is 0.
DEFAULT_FIRST_BUCKET_BYTES = 2**20  # dist._DEFAULT_FIRST_BUCKET_BYTES
DEFAULT_BUCKET_BYTES = 25 * 2**20


def parse_compute(text: str) -> float | None:
    """Return the seconds of a simulated forward pass of a microbatch, None for real compute.

    Raises ``UserError`` for other texts.
    """
    if text == REAL:
        return None
    if not text.startswith(SIMULATED):
        allowed = "it is real or simulated:DURATION, such as simulated:20ms"
        raise UserError(f"compute = {text!r} is not allowed: {allowed}")
    return parse_duration(text.removeprefix(SIMULATED))


def shape_of(params: Mapping[str, Value]) -> Shape:
    """Return the named shape with the sizes that parameters change.

    Raises ``UserError`` with the equation that the sizes do not satisfy.
    """
    named = SHAPES[str(params["shape"])]

    def get_size(name: str, default: int) -> int:
        return int(params.get(name, 0)) or default

    hidden = get_size("hidden", named.hidden)
    heads = get_size("heads", named.heads)
    shape = Shape(
        recipe="llama" if (params.get("recipe") or named.recipe) == "llama" else "gpt",
        layers=get_size("layers", named.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=get_size("kv_heads", max(1, heads * named.kv_heads // named.heads)),
        ffn=get_size("ffn", max(1, hidden * named.ffn // named.hidden)),
        sequence=get_size("sequence", named.sequence),
        vocabulary=get_size("vocabulary", named.vocabulary),
    )
    require_shape(shape)
    return shape


def require_shape(shape: Shape) -> None:
    """Raise ``UserError`` with the equation that a shape does not satisfy."""
    hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
    if shape.layers > MAX_LAYERS:
        raise UserError(f"layers({shape.layers}) > {MAX_LAYERS}")
    if hidden % heads and not shape.head_dim and shape.latent is None:
        raise UserError(f"hidden({hidden}) % heads({heads}) != 0")
    if heads % kv_heads:
        raise UserError(f"heads({heads}) % kv_heads({kv_heads}) != 0")
    if shape.recipe == "llama" and shape.head_size % 2:
        raise UserError(f"hidden({hidden}) / heads({heads}) % 2 != 0: RoPE rotates pairs")
    if shape.vocabulary < 2:
        raise UserError(f"vocabulary({shape.vocabulary}) < 2: it needs two tokens")


def num_ffn_matrices(shape: Shape) -> int:
    """Return the number of matrices of an FFN: up and down, and llama's gate."""
    return 3 if shape.recipe == "llama" else 2


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The bytes of an element of each kind of model state."""

    parameters: int
    gradients: int
    master: int  # float32 copy of weights, 0 = there is none
    moments: int  # of each of Adam's two moments

    @property
    def optimizer(self) -> int:
        """The bytes of optimizer state per parameter: the master weight and both moments."""
        return self.master + 2 * self.moments


MIXED = Widths(parameters=2, gradients=2, master=4, moments=4)
SINGLE = Widths(parameters=4, gradients=4, master=0, moments=4)
