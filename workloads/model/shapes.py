"""The sizes of models: named shapes, what may be changed of them, what follows in closed form; widths of elements."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, get_args

import msgspec

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError, format_choices, parse_duration

Recipe = Literal["gpt", "llama"]
Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
PRECISIONS = {"float32": 4, "bfloat16": 2}
"""Bytes of an element."""
Bias = Literal["q", "k", "v", "out", "ffn", "router", "experts"]
MOST_SIZE, MOST_LAYERS = 1 << 24, 1 << 12
"""Beyond any model: what is counted through, or split by all divisors, is bounded."""
Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_SIZE)]
Rest = Annotated[int, msgspec.Meta(ge=0, le=MOST_SIZE)]


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (arXiv 2405.04434), in the words of its config.json.

    Queries, keys and values are compressed to ``q_lora_rank`` (0: queries are not) and ``kv_lora_rank``; a head's
    queries and keys have a part that RoPE turns and one that it does not.
    """

    q_lora_rank: Rest = 0
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of one sequence; ``ffn`` is the hidden size of the FFN, ``sequence`` is in tokens.

    The rest only the planner has: ``head_dim`` (0: hidden / heads); ``tied``, a head that is the embedding; ``biases``,
    where the recipe's are others; ``qk_norm`` of each head; ``sinks``, a logit of each head that attends to nothing;
    ``learned_positions``, where the recipe has the others; ``latent`` attention.
    """

    recipe: Recipe
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    ffn: Size
    sequence: Size
    vocabulary: Size
    head_dim: Rest = 0
    tied: bool = False
    biases: tuple[Bias, ...] | None = None
    qk_norm: bool = False
    sinks: bool = False
    learned_positions: bool | None = None
    latent: Latent | None = None

    @property
    def head_size(self) -> int:
        """Of a head's queries and keys."""
        if self.latent is not None:
            return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim
        return self.head_dim or self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """Of a head's values."""
        return self.latent.v_head_dim if self.latent is not None else self.head_size

    @property
    def has_learned_positions(self) -> bool:
        """Whether they are learned, a table of as many as a sequence has tokens."""
        return self.recipe == "gpt" if self.learned_positions is None else self.learned_positions

    def has_bias(self, part: Bias) -> bool:
        return part in (_BIASES[self.recipe] if self.biases is None else self.biases)


_BIASES: Mapping[Recipe, tuple[Bias, ...]] = {"gpt": ("q", "v", "out", "ffn"), "llama": ()}


SHAPES = {  # recipe, layers, hidden, heads, kv_heads, ffn, sequence, vocabulary
    "tiny": Shape("gpt", 4, 128, 4, 4, 512, 64, 512),
    "tiny-llama": Shape("llama", 4, 128, 4, 2, 352, 64, 512),
    "small": Shape("gpt", 8, 192, 8, 8, 768, 128, 2048),
    "small-llama": Shape("llama", 8, 192, 8, 4, 512, 128, 2048),
    # Radford et al., 2019, its smallest; here the head is a matrix of its own and keys have no bias
    "gpt2": Shape("gpt", 12, 768, 12, 12, 3072, 1024, 50257),
    # arXiv 2407.21783, Table 3
    "llama3-8b": Shape("llama", 32, 4096, 32, 8, 14336, 8192, 128256),
    "llama3-70b": Shape("llama", 80, 8192, 64, 8, 28672, 8192, 128256),
}


def _override(name: str, meaning: str) -> Param:
    return Param(name=name, kind="int", default=0, minimum=0, help=meaning, optional=True)


MODEL = (
    Param(
        name="shape",
        kind="str",
        default="tiny",
        choices=tuple(SHAPES),
        help="the model and its sequence length",
    ),
    choice(
        "recipe", "the kind of norms, FFN and positions; empty = the shape's", "", *get_args(Recipe)
    ),
    _override("layers", "decoder layers; 0 = the shape's"),
    _override("hidden", "hidden size; 0 = the shape's"),
    _override("heads", "query heads; 0 = the shape's"),
    _override("kv_heads", "key and value heads; 0 = the shape's share of heads"),
    _override("ffn", "hidden size of the FFN; 0 = the shape's multiple of hidden"),
    _override("sequence", "tokens of one sequence; 0 = the shape's"),
    _override("vocabulary", "size of the vocabulary; 0 = the shape's"),
)


MICROBATCH = Param(
    name="microbatch", kind="int", default=4, minimum=1, help="sequences of a rank's microbatch"
)
MICROBATCHES = Param(
    name="microbatches",
    kind="int",
    default=1,
    minimum=1,
    optional=True,
    help="microbatches of a step and data rank",
)
PRECISION = choice(
    "precision", "dtype of weights; bfloat16 has float32 master weights", *PRECISIONS
)
REDUCE_DTYPE = choice("reduce_dtype", "dtype in which gradients are reduced", *PRECISIONS)
CHECKPOINTING = Param(
    name="checkpointing",
    kind="str",
    default="none",
    optional=True,
    help="activation recomputation: none, selective, full, or full:K (one layer in K)",
)
REAL, SIMULATED = "real", "simulated:"
COMPUTE = Param(
    name="compute",
    kind="str",
    default=REAL,
    optional=True,
    help="real, or simulated:DURATION: sleep so long for the forward pass of a microbatch",
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
    CHECK,
)
"""The parameters of every training step."""
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
    """Return the named shape with what ``params`` change of it; ``UserError`` by equation if it cannot be built."""
    named = SHAPES[str(params["shape"])]
    hidden, heads = _given(params, "hidden", named.hidden), _given(params, "heads", named.heads)
    shape = Shape(
        recipe="llama" if (params.get("recipe") or named.recipe) == "llama" else "gpt",
        layers=_given(params, "layers", named.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=_given(params, "kv_heads", max(1, heads * named.kv_heads // named.heads)),
        ffn=_given(params, "ffn", max(1, hidden * named.ffn // named.hidden)),
        sequence=_given(params, "sequence", named.sequence),
        vocabulary=_given(params, "vocabulary", named.vocabulary),
    )
    require_shape(shape)
    return shape


def _given(params: Mapping[str, Value], name: str, otherwise: int) -> int:
    return int(params.get(name, 0)) or otherwise


def require_shape(shape: Shape) -> None:
    """Refuse by equation what cannot be built."""
    hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
    if shape.layers > MOST_LAYERS:
        raise UserError(f"layers({shape.layers}) > {MOST_LAYERS}")
    if hidden % heads and not shape.head_dim and shape.latent is None:
        raise UserError(f"hidden({hidden}) % heads({heads}) != 0")
    if heads % kv_heads:
        raise UserError(f"heads({heads}) % kv_heads({kv_heads}) != 0")
    if shape.recipe == "llama" and shape.head_size % 2:
        raise UserError(f"hidden({hidden}) / heads({heads}) % 2 != 0: llama's RoPE turns pairs")
    if shape.vocabulary < 2:
        raise UserError(f"vocabulary({shape.vocabulary}) < 2: one word leaves nothing to predict")


def num_ffn_matrices(shape: Shape) -> int:
    """Return the matrices of one FFN: up and down, and llama's gate."""
    return 3 if shape.recipe == "llama" else 2


DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of an element of state."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element of each kind of state; of two moments each, of a master copy 0 where there is none."""

    parameters: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        return self.master + 2 * self.moments

    @property
    def updated(self) -> int:
        """What AdamW moves for a parameter: it reads and writes both moments and the weight, and reads a gradient.

        Where the weight is a master copy it writes what is computed with as well.
        """
        copied = self.parameters if self.master else 0
        return 2 * (2 * self.moments + (self.master or self.parameters)) + self.gradients + copied

    @staticmethod
    def parse(text: str, otherwise: "Widths") -> "Widths":
        """Return what ``moments=bfloat16,master=none`` says; ``UserError`` names what is allowed."""
        found = {}
        for part in filter(None, text.split(",")):
            kind, _, dtype = part.partition("=")
            kinds = [one.name for one in fields(Widths)]
            if kind not in kinds:
                raise UserError(f"--state {part!r}: {kind!r} is not {format_choices(kinds, kind)}")
            dtypes = {**DTYPES, **({"none": 0} if kind == "master" else {})}
            if dtype not in dtypes:
                raise UserError(
                    f"--state {part!r}: {dtype!r} is not {format_choices(dtypes, dtype)}"
                )
            found[kind] = dtypes[dtype]
        return replace(otherwise, **found)


MIXED = Widths(parameters=2, gradients=2, master=4, moments=4)
SINGLE = Widths(parameters=4, gradients=4, master=0, moments=4)
