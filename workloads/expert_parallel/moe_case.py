"""What can be asked of a mixture of experts, and what follows from it in closed form. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.plan.params import Param, Value
from bench.text import UserError
from workloads.expert_parallel.routing import BALANCED, ROUTER, Generator, capacity, parse_routing, refuse_routing
from workloads.model.shapes import Shape, num_layer_weights, num_parameters

_WHOLE = 8
"""Elements of 16 bytes, in 2 bytes each: rows of torch's grouped products are whole multiples of them."""
VARIANTS = ("all_to_all", "padded", "allgather", "dedup")

_EP = Param(name="ep", kind="int", default=0, minimum=0, help="ranks that experts are dealt out to; 0 = all / etp")
_EXPERTS = Param(name="experts", kind="int", default=8, minimum=1, help="routed experts of a layer")
_TOP_K = Param(name="top_k", kind="int", default=2, minimum=1, help="experts that a token takes")
_CAPACITY = Param(
    name="capacity", kind="float", default=0.0, minimum=0.0, help="capacity factor, above it tokens drop; 0 = dropless"
)
_VARIANT = Param(
    name="variant", kind="str", default="all_to_all", choices=VARIANTS, help="how tokens get to experts and back"
)
_OPTIONAL = (
    Param(
        name="expert_ffn",
        kind="int",
        default=0,
        minimum=0,
        optional=True,
        help="hidden size of an expert; 0 = ffn / top_k, down to a multiple of 8 etp",
    ),
    Param(
        name="shared", kind="int", default=1, minimum=0, optional=True, help="experts of the same size that all take"
    ),
    Param(
        name="scores",
        kind="str",
        default="softmax",
        choices=("softmax", "sigmoid"),
        optional=True,
        help="the router's scores, which weigh what experts give",
    ),
    Param(name="etp", kind="int", default=1, minimum=1, optional=True, help="ranks that split each expert"),
    Param(name="chunks", kind="int", default=1, minimum=1, optional=True, help="parts whose traffic hides in compute"),
)
_AUX = Param(
    name="aux",
    kind="float",
    default=0.0,
    minimum=0.0,
    optional=True,
    help="coefficient of the loss that balances the router",
)


def _routing(default: str) -> Param:
    return Param(
        name="routing", kind="str", default=default, help="router, or a generator such as zipf, hot_rank or hot_rank:3"
    )


_FSDP = Param(
    name="fsdp", kind="bool", default=False, optional=True, help="shard by FSDP2 what is no expert's, in place of DDP"
)


_TP = Param(
    name="tp",
    kind="int",
    default=1,
    minimum=1,
    optional=True,
    help="ranks that split attention, each with its part of their sequences; 1 = data parallel",
)


LAYER_PARAMS = (_EP, _EXPERTS, _TOP_K, _CAPACITY, _VARIANT, _routing(BALANCED), *_OPTIONAL)
STEP_PARAMS = (_EP, _EXPERTS, _TOP_K, _CAPACITY, _VARIANT, _routing(ROUTER), *_OPTIONAL, _AUX, _FSDP, _TP)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts over ``ep`` ranks, or ``ep`` times ``etp`` where each expert is split among several.

    ``capacity`` 0 drops nothing, ``expert_ffn`` is one whole expert's size. ``tp`` ranks share their sequences, each a
    source of its own positions.
    """

    ep: int
    etp: int
    tp: int
    experts: int
    top_k: int
    expert_ffn: int
    shared: int
    capacity: float
    scores: str
    aux: float
    variant: str
    chunks: int
    routing: str
    strength: float

    @property
    def experts_per_rank(self) -> int:
        """Routed experts that one rank holds."""
        return self.experts // self.ep

    def slots(self, tokens: int) -> int | None:
        """Return what an expert takes of the ``tokens`` of one source and microbatch; None is all."""
        return capacity(self.capacity, self.top_k, tokens, self.experts) if self.capacity else None

    def generator(self, seed: int, parts: int, tokens: int, routing: str | None = None) -> Generator | None:
        """Return the generator of its routes, or of another's; None where the router chooses."""
        name, strength = (self.routing, self.strength) if routing is None else parse_routing(routing)
        if name == ROUTER:
            return None
        return Generator(
            name=name,
            strength=strength,
            seed=seed,
            experts=self.experts,
            top_k=self.top_k,
            parts=parts,
            tokens=tokens,
        )


def moe_of(params: Mapping[str, Value], shape: Shape, nproc: int) -> Moe:
    """Return the mixture that a case means on ``nproc`` ranks; ``UserError`` by equation if it cannot be built."""
    given = {**{param.name: param.default for param in STEP_PARAMS}, **params}
    top_k, etp = int(given["top_k"]), int(given["etp"])
    name, strength = parse_routing(str(given["routing"]))
    moe = Moe(
        ep=int(given["ep"]) or max(1, nproc // etp),
        etp=etp,
        tp=int(given["tp"]),
        experts=int(given["experts"]),
        top_k=top_k,
        expert_ffn=int(given["expert_ffn"]) or max(1, shape.ffn // top_k // (_WHOLE * etp)) * _WHOLE * etp,
        shared=int(given["shared"]),
        capacity=float(given["capacity"]),
        scores=str(given["scores"]),
        aux=float(given["aux"]),
        variant=str(given["variant"]),
        chunks=int(given["chunks"]),
        routing=name,
        strength=strength,
    )
    reason = _refuse_sizes(moe, nproc) or _refuse_rows(moe, shape) or _refuse_attention(moe.tp, nproc, given, shape)
    reason = reason or _refuse_ways(moe, nproc, given, shape)
    if reason is not None:
        raise UserError(reason)
    return moe


def refuse_moe(shape: Shape, params: Mapping[str, Value], nproc: int) -> str | None:
    """Say by equation why a mixture cannot be built; None if it can."""
    try:
        moe_of(params, shape, nproc)
    except UserError as error:
        return str(error)
    return None


def _refuse_sizes(moe: Moe, nproc: int) -> str | None:
    if nproc % (moe.ep * moe.etp):
        over = f"ep({moe.ep})" if moe.etp == 1 else f"(ep({moe.ep}) * etp({moe.etp}))"
        return f"world size({nproc}) % {over} != 0"
    if moe.experts % moe.ep:
        return f"experts({moe.experts}) % ep({moe.ep}) != 0"
    if moe.top_k > moe.experts:
        return f"top_k({moe.top_k}) > experts({moe.experts})"
    if moe.capacity < 0:
        return f"capacity({moe.capacity:g}) < 0: capacity is a factor above 0, or 0 for dropless"
    return None


def _refuse_rows(moe: Moe, shape: Shape) -> str | None:
    if moe.expert_ffn % moe.etp:
        return f"expert_ffn({moe.expert_ffn}) % etp({moe.etp}) != 0"
    for name, value in (("hidden", shape.hidden), ("expert_ffn", moe.expert_ffn // moe.etp)):
        if value % _WHOLE:
            split = "" if name == "hidden" or moe.etp == 1 else f" / etp({moe.etp})"
            found = value if not split else moe.expert_ffn
            return f"{name}({found}){split} % {_WHOLE} != 0: grouped products want rows of whole 16 bytes"
    return None


def _refuse_attention(tp: int, nproc: int, params: Mapping[str, Value], shape: Shape) -> str | None:
    if nproc % tp:
        return f"world size({nproc}) % tp({tp}) != 0"
    for name in ("heads", "kv_heads", "hidden", "sequence"):
        if getattr(shape, name) % tp:
            return f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    if tp > 1 and params["fsdp"]:
        return f"tp({tp}) > 1 with fsdp(true): what attention does not split is under DDP alone"
    return None


def _refuse_ways(moe: Moe, nproc: int, params: Mapping[str, Value], shape: Shape) -> str | None:
    if moe.variant == "padded" and not moe.capacity:
        return "variant(padded) needs capacity > 0: it sends as many slots as the capacity says"
    tokens = int(params.get("microbatch", 1)) * shape.sequence // moe.tp
    if moe.chunks > tokens:
        return f"chunks({moe.chunks}) > tokens of a microbatch({tokens})"
    if moe.chunks > 1 and moe.variant != "all_to_all":
        return f"chunks({moe.chunks}) > 1 with variant({moe.variant}): only all_to_all is sent in chunks"
    if params.get("checkpointing", "none") == "selective":
        return "checkpointing(selective) is not for experts: their grouped products are not among what it keeps"
    generator = moe.generator(0, nproc, tokens)
    return None if generator is None else refuse_routing(generator)


def num_ffn_matrices(shape: Shape) -> int:
    """Return the matrices of one FFN: up and down, and llama's gate."""
    return 3 if shape.recipe == "llama" else 2


def num_expert_parameters(shape: Shape, moe: Moe) -> int:
    """Return the elements of one routed expert, which has no biases."""
    return num_ffn_matrices(shape) * shape.hidden * moe.expert_ffn


def num_routed_parameters(shape: Shape, moe: Moe) -> int:
    """Return the elements of all routed experts of all layers, which the expert axis divides."""
    return shape.layers * moe.experts * num_expert_parameters(shape, moe)


def num_moe_parameters(shape: Shape, moe: Moe) -> int:
    """Return the elements of the whole model: each FFN exchanged for router, experts and shared experts."""
    biased = shape.recipe == "gpt"
    ffn = num_ffn_matrices(shape) * shape.hidden * shape.ffn + (shape.ffn + shape.hidden if biased else 0)
    wide = moe.shared * moe.expert_ffn
    shared = num_ffn_matrices(shape) * shape.hidden * wide + (wide + shape.hidden if biased and wide else 0)
    each = shape.hidden * moe.experts + shared - ffn
    return num_parameters(shape) + shape.layers * each + num_routed_parameters(shape, moe)


def num_split_parameters(shape: Shape) -> int:
    """Return the elements of all layers' attention that ranks split by heads: all but gpt's bias of what comes out."""
    wide = shape.hidden + shape.kv_heads * shape.head_size
    return shape.layers * (2 * shape.hidden * wide + (wide if shape.recipe == "gpt" else 0))


def moe_flops_per_token(shape: Shape, moe: Moe) -> float:
    """Return model FLOPs of forward and backward per token, 6 N + 12 L H Q T, N the weights that a token meets.

    PaLM's convention (arXiv 2204.02311, appendix B) with k of the E experts; what is dropped counts too.
    """
    attention = num_layer_weights(shape) - num_ffn_matrices(shape) * shape.hidden * shape.ffn
    met = (moe.top_k + moe.shared) * num_expert_parameters(shape, moe) + shape.hidden * moe.experts
    weights = shape.layers * (attention + met) + shape.hidden * shape.vocabulary
    return 6.0 * weights + 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
