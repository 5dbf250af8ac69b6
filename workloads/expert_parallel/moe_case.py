"""What can be asked of a mixture of experts, and what follows from it in closed form. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError
from parbench.workloads.expert_parallel import routing as routings
from parbench.workloads.expert_parallel.routing import Generator
from parbench.workloads.model.shapes import Shape, num_ffn_matrices

_WHOLE = 8  # elements of 2 bytes in 16 bytes: rows of torch's grouped products are whole multiples of them
VARIANTS = ("all_to_all", "allgather")

_EXPERT = "hidden size of an expert; 0 = ffn / top_k, rounded down to a multiple of 8 * etp"
_SHARDED = "shard all but the experts with FSDP2, instead of DDP"
_CHOOSES = f"who chooses experts: the trained router, or {', '.join(routings.GENERATORS)}; :NUMBER sets its strength"
_factor = partial(Param, kind="float", default=0.0, minimum=0.0)
_parts = partial(Param, kind="int", default=1, minimum=1, optional=True)
_int = partial(Param, kind="int", minimum=1)
STEP_PARAMS = (
    _int(
        name="ep", default=0, minimum=0, help="ranks over which experts are spread; 0 = all / etp"
    ),
    _int(name="experts", default=8, help="routed experts per layer"),
    _int(name="top_k", default=2, help="experts per token"),
    _factor(name="capacity", help="capacity factor; tokens above it are dropped; 0 = dropless"),
    choice("variant", "how tokens travel to experts and back", *VARIANTS, optional=False),
    Param(name="routing", kind="str", default=routings.ROUTER, help=_CHOOSES),
    _int(name="expert_ffn", default=0, minimum=0, optional=True, help=_EXPERT),
    _int(
        name="shared",
        default=1,
        minimum=0,
        optional=True,
        help="shared experts, which every token takes",
    ),
    choice("scores", "the router's scores", "softmax", "sigmoid"),
    _parts(name="etp", help="ranks that split each expert"),
    _parts(name="chunks", help="parts, so that communication overlaps compute"),
    _factor(name="aux", optional=True, help="weight of the loss that balances the router"),
    Param(name="fsdp", kind="bool", default=False, optional=True, help=_SHARDED),
    _parts(name="tp", help="ranks that split attention and its sequences; 1 = data parallel"),
)
LAYER_PARAMS = tuple(
    replace(param, default=routings.BALANCED) if param.name == "routing" else param
    for param in STEP_PARAMS
    if param.name not in ("aux", "fsdp", "tp")
)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts over ``ep`` ranks, or ``ep`` times ``etp`` where each expert is split among several.

    ``capacity`` 0 drops nothing, ``expert_ffn`` is one whole expert's size. ``tp`` ranks share their sequences, each a
    source of its own positions. Only the planner has ``dense_layers``, the model's first ones, which have an FFN in
    place of experts, and ``shared_gate``, which weighs what the shared experts say.
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
    dense_layers: int = 0
    shared_gate: bool = False

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep

    def slots(self, tokens: int) -> int | None:
        """Return what an expert takes of the ``tokens`` of one source and microbatch; None is all."""
        return (
            routings.capacity(self.capacity, self.top_k, tokens, self.experts)
            if self.capacity
            else None
        )

    def generator(self, seed: int, parts: int) -> Generator | None:
        """Return the generator of its routes; None where the router chooses."""
        if self.routing == routings.ROUTER:
            return None
        return Generator(
            name=self.routing,
            strength=self.strength,
            seed=seed,
            experts=self.experts,
            top_k=self.top_k,
            parts=parts,
        )


def moe_of(params: Mapping[str, Value], shape: Shape, nproc: int) -> Moe:
    """Return the mixture that a case means on ``nproc`` ranks; ``UserError`` by equation if it cannot be built."""
    given: dict[str, Any] = {**{param.name: param.default for param in STEP_PARAMS}, **params}
    top_k, etp = given["top_k"], given["etp"]
    name, strength = routings.parse_routing(given["routing"])
    same = (
        "etp",
        "tp",
        "experts",
        "top_k",
        "shared",
        "capacity",
        "scores",
        "aux",
        "variant",
        "chunks",
    )
    moe = Moe(
        ep=given["ep"] or max(1, nproc // etp),
        expert_ffn=given["expert_ffn"]
        or max(1, shape.ffn // top_k // (_WHOLE * etp)) * _WHOLE * etp,
        routing=name,
        strength=strength,
        **{param: given[param] for param in same},
    )
    for wrong, reason in _reasons(moe, shape, given, nproc):
        if wrong:
            raise UserError(reason)
    return moe


def _reasons(
    moe: Moe, shape: Shape, given: Mapping[str, Value], nproc: int
) -> Iterator[tuple[object, str]]:
    """Yield what would be wrong of a mixture, which is true where it is, and the reason."""
    etp, tp, ffn = moe.etp, moe.tp, moe.expert_ffn
    dealt = f"ep({moe.ep})" if etp == 1 else f"(ep({moe.ep}) * etp({etp}))"
    yield nproc % (moe.ep * etp), f"world size({nproc}) % {dealt} != 0"
    yield moe.experts % moe.ep, f"experts({moe.experts}) % ep({moe.ep}) != 0"
    yield moe.top_k > moe.experts, f"top_k({moe.top_k}) > experts({moe.experts})"
    below = f"capacity({moe.capacity:g}) < 0: capacity is a factor above 0, or 0 for dropless"
    yield moe.capacity < 0, below
    yield ffn % etp, f"expert_ffn({ffn}) % etp({etp}) != 0"
    rows = f"% {_WHOLE} != 0: grouped products want rows of whole 16 bytes"
    yield shape.hidden % _WHOLE, f"hidden({shape.hidden}) {rows}"
    yield ffn // etp % _WHOLE, f"expert_ffn({ffn}){'' if etp == 1 else f' / etp({etp})'} {rows}"
    yield nproc % tp, f"world size({nproc}) % tp({tp}) != 0"
    for name in ("heads", "kv_heads", "hidden", "sequence"):
        yield getattr(shape, name) % tp, f"{name}({getattr(shape, name)}) % tp({tp}) != 0"
    under_ddp = f"tp({tp}) > 1 with fsdp(true): what attention does not split is under DDP alone"
    yield tp > 1 and given["fsdp"], under_ddp
    tokens = int(given.get("microbatch", 1)) * shape.sequence // tp
    yield moe.chunks > tokens, f"chunks({moe.chunks}) > tokens of a microbatch({tokens})"
    whole = (
        f"chunks({moe.chunks}) > 1 with variant({moe.variant}): only all_to_all is sent in chunks"
    )
    yield moe.chunks > 1 and moe.variant != "all_to_all", whole
    selective = "checkpointing(selective) is not for experts: their grouped products are not among what it keeps"
    yield given.get("checkpointing") == "selective", selective


def num_expert_parameters(shape: Shape, moe: Moe) -> int:
    """Return the elements of one routed expert, which has no biases."""
    return num_ffn_matrices(shape) * shape.hidden * moe.expert_ffn
