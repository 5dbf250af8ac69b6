"""The sizes of models, the parameters that change them, and the bytes of an element. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError, parse_duration

Recipe = Literal["gpt", "llama"]
"""The model family: its norms, its FFN, its biases and its encoding of positions."""
Checkpointing = Literal["none", "selective", "full"]
"""The activation recomputation: of nothing, of some operators, or of whole layers."""
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
PRECISIONS = {"float32": 4, "bfloat16": 2}
"""The bytes of an element, by precision."""
Bias = Literal["q", "k", "v", "out", "ffn", "router"]
"""The parts of a model that may have biases."""
MAX_SIZE = 1 << 24
"""The maximum of any size of a model, because searches go through all divisors of a size."""
MAX_LAYERS = 1 << 12
"""The maximum number of layers of a model, because searches go through all layers."""
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
"""A size of a model, at least 1."""
SizeOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
"""A size of a model, at least 0. The meaning of 0 depends on the field."""


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of multi-head latent attention (arXiv 2405.04434), named as in its config.json."""

    q_lora_rank: SizeOrZero = 0
    """The size of compressed queries. 0 means that queries are not compressed."""
    kv_lora_rank: Size
    """The size of compressed keys and values."""
    qk_nope_head_dim: Size
    """The size of the part of each head's queries and keys that RoPE does not rotate."""
    qk_rope_head_dim: Size
    """The size of the part of each head's queries and keys that RoPE rotates."""
    v_head_dim: Size
    """The size of each head's values."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of one sequence. Only the planner sets fields with defaults."""

    recipe: Recipe
    """The model family, ``gpt`` or ``llama``."""
    layers: Size
    """The number of layers."""
    hidden: Size
    """The size of a token's activation between layers."""
    heads: Size
    """The number of query heads."""
    kv_heads: Size
    """The number of key and value heads."""
    ffn: Size
    """The inner size of the FFN."""
    sequence: Size
    """The number of tokens in a sequence."""
    vocabulary: Size
    """The number of different tokens."""
    head_dim: SizeOrZero = 0
    """The size of a head. 0 means hidden / heads."""
    tied: bool = False
    """True if the head has the weights of the token embedding."""
    biases: tuple[Bias, ...] | None = None
    """The parts whose linear layers have biases. None means the parts of the recipe."""
    qk_norm: bool = False
    """True if each head's queries and keys are normalized."""
    latent: Latent | None = None
    """The sizes of multi-head latent attention, None for plain attention."""
    dropout: bool = False
    """True if each layer has dropout after attention and after the FFN."""

    @property
    def head_size(self) -> int:
        """The number of elements of one head's query or key for a token."""
        if self.latent is not None:
            return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """The number of elements of one head's value for a token."""
        return self.latent.v_head_dim if self.latent is not None else self.head_size

    def has_bias(self, part: Bias) -> bool:
        """Return True if the linear layers of a part of the model, such as "q", have biases."""
        biases = _BIASES[self.recipe] if self.biases is None else self.biases
        return part in biases


_BIASES: Mapping[Recipe, tuple[Bias, ...]] = {"gpt": ("q", "v", "out", "ffn"), "llama": ()}
"""The parts of the model that have biases, by recipe."""


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
"""The models that users can choose, by name."""


def _make_size_param(name: str, help_text: str) -> Param:
    """Return an optional parameter of a case that replaces one size of the model.

    Its value 0 keeps the size of the model that the parameter ``shape`` names.
    """
    return Param(name, "int", 0, help_text, minimum=0, optional=True)


MODEL = (
    Param("shape", "str", "tiny", "the model and its sequence length", choices=tuple(SHAPES)),
    choice("recipe", "norms, FFN and positions; empty = the shape's", "", *get_args(Recipe)),
    _make_size_param("layers", "decoder layers; 0 = the shape's"),
    _make_size_param("hidden", "hidden size; 0 = the shape's"),
    _make_size_param("heads", "query heads; 0 = the shape's"),
    _make_size_param("kv_heads", "key and value heads; 0 = the shape's share of heads"),
    _make_size_param("ffn", "hidden size of the FFN; 0 = the shape's multiple of hidden"),
    _make_size_param("sequence", "tokens of one sequence; 0 = the shape's"),
    _make_size_param("vocabulary", "size of the vocabulary; 0 = the shape's"),
)
"""The parameters of a case that choose the model and its sizes."""


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
COMMON = (
    *MODEL,
    MICROBATCH,
    MICROBATCHES,
    PRECISION,
    REDUCE_DTYPE,
    CHECKPOINTING,
    COMPUTE,
    PADDING,
)
"""The parameters that every training step has."""
# The buckets of torch's DDP that the costs assume when ``bucket_mb`` is 0.
DEFAULT_FIRST_BUCKET_BYTES = 2**20  # dist._DEFAULT_FIRST_BUCKET_BYTES
DEFAULT_BUCKET_BYTES = 25 * 2**20


def parse_compute(text: str) -> float | None:
    """Parse the parameter ``compute``, such as ``simulated:20ms``.

    Returns the simulated seconds of one rank's forward pass of one microbatch, None for ``real``.
    Raises ``UserError`` for other texts.
    """
    if text == REAL:
        return None
    if not text.startswith(SIMULATED):
        allowed = "choose real or simulated:DURATION, such as simulated:20ms"
        raise UserError(f"compute = {text!r} is not allowed: {allowed}")
    return parse_duration(text.removeprefix(SIMULATED))


def build_shape(params: Mapping[str, Value]) -> Shape:
    """Return the model that the parameters of a case choose.

    It is the model named ``shape`` with the sizes that other parameters replace. Raises
    ``UserError`` with a violation, such as ``heads(6) % kv_heads(4) != 0``, for impossible sizes.
    """
    named = SHAPES[str(params["shape"])]

    def get_size(name: str, default: int) -> int:
        """Return the parameter ``name``, or ``default`` if it is missing or 0."""
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
    """Raise ``UserError`` if the sizes of a model are impossible.

    The error has the violation: ``heads(6) % kv_heads(4) != 0`` means that 4 key-value heads cannot
    serve equally many of 6 query heads.
    """
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


def count_ffn_matrices(shape: Shape) -> int:
    """Return the number of weight matrices in one FFN: up and down for gpt, also gate for llama.

    An expert has the same number.
    """
    return 3 if shape.recipe == "llama" else 2


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The bytes of model state per parameter, by component."""

    parameters: int
    """The bytes of a weight in the precision of forward and backward."""
    gradients: int
    """The bytes of a gradient element."""
    optimizer: int
    """The bytes of optimizer state: Adam's two float32 moments and, if any, a float32 weight."""


MIXED = Widths(parameters=2, gradients=2, optimizer=12)
"""The bytes of bfloat16 training with float32 copies of the weights."""
SINGLE = Widths(parameters=4, gradients=4, optimizer=8)
"""The bytes of float32 training."""
