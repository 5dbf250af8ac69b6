"""The parameters of a mixture of experts (MoE), and what follows from them. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError
from parbench.workloads.expert_parallel.dispatchers import DISPATCHERS
from parbench.workloads.expert_parallel.routing import BALANCED, ROUTINGS
from parbench.workloads.model.layer_call import LayerCall
from parbench.workloads.model.shapes import Shape

_ROW_ELEMENTS = 8
"""The number of elements of which a row of an expert's matrices must be a multiple.

torch's grouped_mm requires rows of a multiple of 16 bytes, which are 8 elements of 2 bytes.
"""

_EXPERT_FFN = "hidden size of an expert; 0 = ffn / top_k, rounded down to a multiple of 8 * etp"
_CAPACITY = "capacity factor; tokens above it are dropped; 0 = dropless"
_RENORMALIZE = "softmax over the scores of the chosen experts only; no effect with top_k=1"
_int = partial(Param, kind="int", minimum=1)
_optional_int = partial(Param, kind="int", minimum=0, optional=True)
MOE_PARAMS = (
    _int(name="ep", default=0, minimum=0, help="ranks that share the experts; 0 = all / etp"),
    _int(name="experts", default=8, help="routed experts per layer"),
    _int(name="top_k", default=2, help="experts per token"),
    Param("capacity", "float", 0.0, _CAPACITY, minimum=0.0),
    choice("variant", "token dispatcher", *DISPATCHERS, optional=False),
    choice("routing", "selection of experts", *ROUTINGS, optional=False),
    _optional_int(name="expert_ffn", default=0, help=_EXPERT_FFN),
    _optional_int(name="shared", default=1, help="shared experts, which every token takes"),
    Param(name="renormalize", kind="bool", default=True, optional=True, help=_RENORMALIZE),
)
"""The parameters of the experts of a training step."""
LAYER_PARAMS = tuple(
    replace(param, default=BALANCED) if param.name == "routing" else param for param in MOE_PARAMS
)
"""The parameters of the benchmarks of one MoE layer, where balanced routing is the default."""


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The settings of a mixture of experts (MoE), which replaces the FFN of each layer.

    The experts are spread over ``ep * etp`` ranks.
    """

    ep: int
    """The number of ranks that hold different experts."""
    etp: int
    """The number of ranks that hold parts of the same experts."""
    experts: int
    """The number of routed experts in a layer, over all ranks."""
    top_k: int
    """The number of routed experts of each token."""
    expert_ffn: int
    """The size of an expert's hidden layer, before ``etp`` splits it."""
    shared: int
    """The number of shared experts, which every token takes."""
    capacity: float
    """The maximum number of pairs that an expert takes, relative to the mean number over experts.

    A pair is a token with one of its experts. 0 means unlimited.
    """
    renormalize: bool
    """True if the weights of a token's routed experts sum to 1."""
    variant: str
    """The name of the token dispatcher, one of ``DISPATCHERS``."""
    routing: str
    """The name of the way in which experts are selected, one of ``ROUTINGS``."""
    dense_layers: int = 0
    """The number of leading layers with an FFN in place of experts. Only the planner sets it."""

    @property
    def experts_per_rank(self) -> int:
        """The number of routed experts of a layer on each rank of ``ep``."""
        return self.experts // self.ep

    def on_one_rank(self) -> "Moe":
        """Return the same mixture of experts on a single process, which holds all of them."""
        return replace(self, ep=1, etp=1)

    def is_recomputed(self, call: LayerCall) -> bool:
        """Return True if the recomputation of full checkpointing repeats a communication call.

        The result is False only for a call with ``ends_forward`` in a layer without shared experts,
        such as the reduce_scatter of expert results. Torch stops a recomputation when it has the
        last tensor that backward needs, which is before this call. Shared experts run after the
        call and save tensors, so that with them the call is repeated.
        """
        return self.shared > 0 or not call.ends_forward

    def slots(self, tokens: int) -> int | None:
        """Return the maximum number of tokens that an expert takes from one rank's microbatch.

        The result is None without a limit. Otherwise it is ceil(capacity * top_k * tokens /
        experts), as in arXiv 2101.03961, section 2.2. ``tokens`` is the number of the rank's tokens
        in the microbatch.
        """
        if not self.capacity:
            return None
        pairs = self.capacity * self.top_k * tokens
        return math.ceil(pairs / self.experts - 1e-9)


def make_moe(params: Mapping[str, Value], shape: Shape, ranks: int, tp: int = 1) -> Moe:
    """Return the mixture of experts that parameters describe.

    ``params`` has values of ``MOE_PARAMS`` and ``etp`` by name, and defaults apply to missing ones.
    ``ranks`` is the number of ranks of one pipeline stage. A value of 0 for ``etp`` means ``tp`` if that
    divides the ranks and the expert width, as in Megatron Core, and otherwise 1. A value of 0 for
    ``ep`` means ``ranks`` divided by ``etp``. Raises ``UserError`` with the equation that does not
    hold.
    """
    values: dict[str, Any] = {param.name: param.default for param in MOE_PARAMS}
    values |= {"etp": 0, **params}
    divides_ranks = ranks % (max(1, values["ep"]) * tp) == 0
    divides_experts = values["expert_ffn"] % (_ROW_ELEMENTS * tp) == 0
    etp = values["etp"] or (tp if divides_ranks and divides_experts else 1)
    unit = _ROW_ELEMENTS * etp
    fields = ("experts", "top_k", "shared", "capacity", "renormalize", "variant", "routing")
    moe = Moe(
        ep=values["ep"] or max(1, ranks // etp),
        etp=etp,
        expert_ffn=values["expert_ffn"] or max(1, shape.ffn // values["top_k"] // unit) * unit,
        **{name: values[name] for name in fields},
    )
    if moe.top_k > moe.experts:
        raise UserError(f"top_k({moe.top_k}) > experts({moe.experts})")
    rows = f"% {_ROW_ELEMENTS} != 0: grouped_mm requires rows of a multiple of 16 bytes"
    if shape.hidden % _ROW_ELEMENTS:
        raise UserError(f"hidden({shape.hidden}) {rows}")
    if moe.expert_ffn % unit:
        raise UserError(f"expert_ffn({moe.expert_ffn}) / etp({etp}) {rows}")
    if values.get("checkpointing") == "selective":
        raise UserError("checkpointing = selective does not support experts: use none or full")
    return moe


def list_exchange_calls(moe: Moe) -> list[LayerCall]:
    """Return the communication calls over ``etp`` and ``ep`` of one MoE layer and microbatch.

    The ranks of ``etp``, which split experts, first gather each other's tokens. Then each of them
    dispatches the tokens of all over ``ep``. The list is empty if both axes have one rank.
    """
    calls: list[LayerCall] = []
    if moe.etp > 1:
        calls += DISPATCHERS["allgather"]("etp", moe.etp, "sharded_tokens")
    if moe.ep > 1:
        calls += DISPATCHERS[moe.variant]("ep", moe.ep, "etp * sharded_tokens")
    return calls
