"""What is declared of an operation, and in which words it is refused where it cannot run; element types."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Definition, Params, only_itself
from bench.plan.groups import groups_of, pairs_of, parse_matrix
from bench.plan.params import Param
from bench.text import UserError, format_size


class Dtype(NamedTuple):
    """An element type: its size, and the largest integer up to which every integer is exact in it."""

    itemsize: int
    exact_up_to: int


DTYPES = {
    "float64": Dtype(8, 1 << 53),
    "float32": Dtype(4, 1 << 24),
    "float16": Dtype(2, 1 << 11),
    "bfloat16": Dtype(2, 1 << 8),
    "float8_e4m3fn": Dtype(1, 1 << 4),
    "float8_e5m2": Dtype(1, 1 << 3),
    "int64": Dtype(8, (1 << 63) - 1),
    "int32": Dtype(4, (1 << 31) - 1),
    "int8": Dtype(1, (1 << 7) - 1),
    "uint8": Dtype(1, (1 << 8) - 1),
    "bool": Dtype(1, 1),
}


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
    names: Mapping[str, str] = field(default_factory=dict)
    c10d: Mapping[int, str] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[2]

    @property
    def reduces(self) -> bool:
        return any(param.name == "redop" for param in self.params)

    @property
    def contributes(self) -> bool:
        """Whether other tools count what one rank contributes, of which there is one for each rank in a size."""
        return self.sharded and not self.reduces

    @property
    def definition(self) -> Definition:
        module = {"collective": "collectives", "p2p": "p2p"}.get(self.name.partition(".")[0], "local")
        return Definition(
            name=self.name,
            target=f"bench.operations.{module}:{self.function or self.short_name}",
            help=self.help,
            params=self.params,
            tags=self.tags,
            refuse=lambda params, spec: next(self._refusals(params, spec), None),
            expand=self.expand,
        )

    def _refusals(self, params: Params, spec: WorldSpec) -> Iterator[str]:
        """Yield why it cannot run with these, all parameters; ``UserError`` if its group cannot be."""
        n = spec.nproc
        if "group" in params:
            group, index = str(params["group"]), int(params["group_index"])
            groups = groups_of(group, spec.nproc, spec.hosts)
            if index >= len(groups):
                raise UserError(f"group_index {index} is not one of the {len(groups)} groups of {group!r}")
            n = len(groups[index])
            if n < 2 and group != "world":
                yield f"group {group!r} has one rank: nothing moves"
        if "dtype" in params:
            yield from _of_data(params, n, n if self.sharded and "skew" not in params else 1, spec)
        yield from _of_ranks(params, n)
        mode = params.get("mode")
        if mode == "graph" and spec.device != "cuda":
            yield f"mode graph needs CUDA; this is {spec.device}"
        apart = self.in_place and params.get("placement") == "out_of_place"
        if mode == "async" and (apart or not self.asynchronous):
            yield f"mode async: {self.short_name} is several calls, or has no asynchronous form"
        if mode == "async" and params.get("direction") == "in_turn":
            yield f"mode async: {self.short_name} with direction=in_turn is several calls"
        if mode == "coalesced" and (apart or spec.backend not in self.coalesced):
            yield f"mode coalesced: {spec.backend} cannot coalesce {self.short_name}"


def _of_data(params: Params, n: int, shards: int, spec: WorldSpec) -> Iterator[str]:
    size, dtype, redop = int(params["size_bytes"]), str(params["dtype"]), params.get("redop")
    itemsize, exact = DTYPES[dtype]
    if spec.backend == "gloo" and dtype.startswith("float8"):  # which it answers with "Invalid scalar type"
        yield f"{spec.backend} carries no {dtype}"
    if redop == "avg" and not dtype.startswith(("float", "bfloat")):
        yield f"the average of {dtype} is no {dtype}"
    if redop == "avg" and n > exact:
        yield f"the average of {n} ranks cannot be checked in {dtype}, which is exact up to {exact}"
    if redop == "sum" and dtype == "bool":
        yield "the sum of bool is no bool: use redop=max, min or product"
    step = shards * itemsize
    if left := size % step:
        ranks = f"{shards} ranks x " if shards > 1 else ""
        nearest = f"nearest are {size - left} and {size - left + step}" if size > step else f"the least is {step}"
        yield f"size {size} B is not a multiple of {ranks}{itemsize} B ({dtype}); {nearest}"
    # input, output and reference of the largest operation, and room for a temporary of the check
    needed = 6 * size
    if spec.rank_bytes is not None and needed > spec.rank_bytes:
        amounts = f"about {needed / 1e9:.1f} GB a rank; a rank can have {spec.rank_bytes / 1e9:.1f} GB"
        yield f"size {format_size(size)} needs {amounts}"


def _of_ranks(params: Params, n: int) -> Iterator[str]:
    for name in ("root", "source", "target"):
        if int(params.get(name, 0)) >= n:
            yield f"{name} {params[name]} is not one of the {n} ranks"
    if "source" in params and params["source"] == params["target"]:
        yield f"source {params['source']} and target {params['target']} are one rank"
    if params.get("traffic") and (rows := len(parse_matrix(str(params["traffic"])))) != n:
        yield f"traffic has {rows} rows; {n} ranks need {n}"
    if "round" in params:
        try:
            pairs_of(n, int(params["round"]), str(params["pairs"]))
        except UserError as error:
            yield str(error)
