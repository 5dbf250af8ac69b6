"""What is declared of an operation, and in which words it is refused where it cannot run; element types."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition, Params, never_refused, only_itself
from bench.plan.groups import groups_of, parse_matrix
from bench.plan.params import Param
from bench.text import UserError, format_size


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """An element type: its size, and the largest integer up to which every integer is exact in it."""

    itemsize: int
    exact_up_to: int


DTYPES = {
    "float64": Dtype(itemsize=8, exact_up_to=1 << 53),
    "float32": Dtype(itemsize=4, exact_up_to=1 << 24),
    "float16": Dtype(itemsize=2, exact_up_to=1 << 11),
    "bfloat16": Dtype(itemsize=2, exact_up_to=1 << 8),
    "float8_e4m3fn": Dtype(itemsize=1, exact_up_to=1 << 4),
    "float8_e5m2": Dtype(itemsize=1, exact_up_to=1 << 3),
    "int64": Dtype(itemsize=8, exact_up_to=(1 << 63) - 1),
    "int32": Dtype(itemsize=4, exact_up_to=(1 << 31) - 1),
    "int8": Dtype(itemsize=1, exact_up_to=(1 << 7) - 1),
    "uint8": Dtype(itemsize=1, exact_up_to=(1 << 8) - 1),
    "bool": Dtype(itemsize=1, exact_up_to=1),
}

# gloo answers float8 with "Invalid scalar type" (torch 2.13).
UNSUPPORTED = {"gloo": frozenset({"float8_e4m3fn", "float8_e5m2"})}


def supports(backend: str, dtype: str) -> bool:
    return dtype not in UNSUPPORTED.get(backend, frozenset())


# input, output and reference of the largest operation, and room for a temporary of the check
_BUFFERS_PER_RANK = 6


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Bus bandwidth over algorithm bandwidth on n ranks, as text and as a function."""

    text: str
    of: Callable[[int], float]


TWICE_RING = Factor(text="2(n-1)/n", of=lambda n: 2 * (n - 1) / n)
RING = Factor(text="(n-1)/n", of=lambda n: (n - 1) / n)
ONE = Factor(text="1", of=lambda n: 1.0)

SHARE = -1


@dataclass(frozen=True, kw_only=True)
class OperationSpec:
    """All that is known of an operation before it runs: what measures, refuses, shows, counts or imports it reads this.

    ``busbw`` is None if it moves nothing between ranks; a ``sharded`` one's size is made of a share for each rank.
    ``in_place`` is where its result goes by default, ``coalesced`` names the backends that can launch several at once,
    ``tags`` are what presets choose it by. ``names`` are other tools', c10d's by the argument that has the
    size: the first (0) or second (1), or the first, of which there is one for each rank (SHARE).
    """

    name: str
    help: str
    params: tuple[Param, ...]
    tags: tuple[str, ...] = ()
    function: str = ""
    busbw: Factor | None = None
    sharded: bool = False
    in_place: bool = False
    asynchronous: bool = True
    coalesced: tuple[str, ...] = ()
    expand: Callable[[Params, WorldSpec], Iterable[Params]] = only_itself
    refuse_first: Callable[[Params, WorldSpec], str | None] = never_refused
    names: Mapping[str, str] = field(default_factory=dict)
    c10d: Mapping[int, str] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[2]

    def has(self, param: str) -> bool:
        return any(one.name == param for one in self.params)

    @property
    def reduces(self) -> bool:
        return self.has("redop")

    @property
    def contributes(self) -> bool:
        """Whether other tools count what one rank contributes, of which there is one for each rank in a size."""
        return self.sharded and not self.reduces

    @property
    def definition(self) -> Definition:
        kind = self.name.partition(".")[0]
        module = {"collective": "collectives", "p2p": "p2p"}.get(kind, "local")
        return Definition(
            name=self.name,
            target=f"bench.operations.{module}:{self.function or self.short_name}",
            help=self.help,
            params=self.params,
            tags=self.tags,
            refuse=self.refuse,
            expand=self.expand,
        )

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Say why it cannot run with these parameters in a world, None if it can."""
        if reason := self.refuse_first(params, spec):
            return reason
        n = group_size(params, spec)
        if n < 2 and params.get("group", "world") != "world":
            return f"group {params['group']!r} has one rank: nothing moves"
        return (
            _refuse_type(params, spec)
            or (_refuse_reduction(params, n) if self.reduces else None)
            or _refuse_size(params, n if self.sharded and not self.has("skew") else 1, spec)
            or _refuse_ranks(params, n)
            or self._refuse_mode(params, spec)
        )

    def _refuse_mode(self, params: Params, spec: WorldSpec) -> str | None:
        mode = params.get("mode")
        if mode == "graph" and spec.device != "cuda":
            return f"mode graph needs CUDA; this is {spec.device}"
        apart = self.in_place and params.get("placement") == "out_of_place"
        if mode == "async" and (apart or not self.asynchronous):
            return f"mode async: {self.short_name} is several calls, or has no asynchronous form"
        if mode == "coalesced" and (apart or spec.backend not in self.coalesced):
            return f"mode coalesced: {spec.backend} cannot coalesce {self.short_name}"
        return None


def group_size(params: Params, spec: WorldSpec) -> int:
    """Return how many ranks the case's group has; ``UserError`` if the world cannot form it."""
    groups = groups_of(str(params.get("group", "world")), spec.nproc, spec.hosts)
    index = int(params.get("group_index", 0))
    if index >= len(groups):
        raise UserError(f"group_index {index} is not one of the {len(groups)} groups of {params['group']!r}")
    return len(groups[index])


def _refuse_type(params: Params, spec: WorldSpec) -> str | None:
    dtype = str(params.get("dtype", "float32"))
    return None if supports(spec.backend, dtype) else f"{spec.backend} carries no {dtype}"


def _refuse_reduction(params: Params, n: int) -> str | None:
    dtype, redop = str(params["dtype"]), params.get("redop", "sum")
    if redop == "avg" and not dtype.startswith(("float", "bfloat")):
        return f"the average of {dtype} is no {dtype}"
    if redop == "avg" and n > DTYPES[dtype].exact_up_to:
        return (
            f"the average of {n} ranks cannot be checked in {dtype}, which is exact up to {DTYPES[dtype].exact_up_to}"
        )
    if dtype == "bool" and redop == "sum":
        return "the sum of bool is no bool: use redop=max, min or product"
    return None


def _refuse_size(params: Params, shards: int, spec: WorldSpec) -> str | None:
    if "size_bytes" not in params:
        return None
    size, dtype = int(params["size_bytes"]), str(params["dtype"])
    step = shards * DTYPES[dtype].itemsize
    if size % step:
        ranks = f"{shards} ranks x " if shards > 1 else ""
        below, above = size - size % step, size - size % step + step
        nearest = f"nearest are {below} and {above}" if below else f"the least is {above}"
        return f"size {size} B is not a multiple of {ranks}{DTYPES[dtype].itemsize} B ({dtype}); {nearest}"
    needed = size * _BUFFERS_PER_RANK
    if spec.rank_bytes is not None and needed > spec.rank_bytes:
        return (
            f"size {format_size(size)} needs about {needed / 1e9:.1f} GB a rank; "
            f"a rank can have {spec.rank_bytes / 1e9:.1f} GB"
        )
    return None


def _refuse_ranks(params: Params, n: int) -> str | None:
    for name in ("root", "source", "target"):
        if int(params.get(name, 0)) >= n:
            return f"{name} {params[name]} is not one of the {n} ranks"
    if "source" in params and params["source"] == params["target"]:
        return f"source {params['source']} and target {params['target']} are one rank"
    if params.get("traffic") and len(parse_matrix(str(params["traffic"]))) != n:
        return f"traffic has {len(parse_matrix(str(params['traffic'])))} rows; {n} ranks need {n}"
    return None
