"""The operations, each declared once and without torch, by the conventions of nccl-tests."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition, Expansion, Params, keep_params
from parbench.bench.plan.groups import FORMS, groups_of, num_rounds, pairs_of
from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError, format_size


class Dtype(NamedTuple):
    """An element type."""

    itemsize: int
    exact_up_to: int  # Every integer up to this one is exact in the type.


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
    """Bus bandwidth over algorithm bandwidth."""

    text: str
    compute: Callable[[int], float]  # of the number of ranks


TWICE_RING = Factor(text="2(n-1)/n", compute=lambda n: 2 * (n - 1) / n)
RING = Factor(text="(n-1)/n", compute=lambda n: (n - 1) / n)
ONE = Factor(text="1", compute=lambda n: 1.0)

GLOO_REMEDY = "use --backend nccl with a GPU for each rank, or --device cpu"


@dataclass(frozen=True, kw_only=True)
class OperationSpec(Definition):
    """An operation, with what refuses, shows or imports it needs to know before it runs."""

    busbw: Factor | None = None  # None if it moves nothing between ranks
    sharded: bool = False  # The size is made of a shard for each rank.
    in_place: bool = False  # The result is written to the input's buffer by default.
    asynchronous: bool = True
    coalesced: tuple[str, ...] = ()  # The backends that can launch several at once.

    @property
    def is_local(self) -> bool:
        """Whether every rank works by itself."""
        return self.name.startswith(("compute.", "memory."))

    @property
    def reduces(self) -> bool:
        return any(param.name == "redop" for param in self.params)

    @property
    def placements(self) -> tuple[str, ...]:
        """The places where the result can be written, the default first."""
        for param in self.params:
            if param.name == "placement":
                return tuple(map(str, param.choices))
        return (IN_PLACE if self.in_place else OUT_OF_PLACE,)

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return why the operation cannot run, if it cannot.

        Raises ``UserError`` if the groups cannot be formed.
        """
        return next(self._problems(params, spec), None)

    def _problems(self, params: Params, spec: WorldSpec) -> Iterator[str]:
        n = spec.nproc
        if "group" in params:
            n = _group_size(params, spec)
            if n < 2 and params["group"] != "world" and not self.is_local:
                yield f"group {str(params['group'])!r} has one rank: nothing moves"
        if "size_bytes" in params and "dtype" in params:
            has_equal_shards = self.sharded and "skew" not in params
            yield from _data_problems(params, spec)
            yield from _average_problems(params, n, spec)
            yield from _size_problems(params, n if has_equal_shards else 1, spec)
        yield from _rank_problems(params, n)
        if spec.gloo_on_gpus and self.name.startswith("p2p."):
            yield f"gloo sends no CUDA tensors from one rank to another: {GLOO_REMEDY}"
        yield from self._graph_problems(params, spec)
        background = params.get("background", LOADS[0])
        if background in COLLECTIVE_LOADS and spec.backend == "nccl" and os.environ.get(QUEUES_VARIABLE) == "1":
            deadlock = "kernels of two NCCL communicators can deadlock in one hardware queue"
            yield f"{QUEUES_VARIABLE}=1: {deadlock}; unset it, or use background=gemm"
        yield from self._call_problems(params, spec)

    def _graph_problems(self, params: Params, spec: WorldSpec) -> Iterator[str]:
        if params.get("mode") != "graph":
            return
        background = params.get("background", LOADS[0])
        if spec.device != "cuda":
            yield f"mode graph needs CUDA; this is {spec.device}"
        if spec.gloo_on_gpus and "group" in params:
            yield f"mode graph: gloo moves data by the host, which no graph holds: {GLOO_REMEDY}"
        if self.short_name == "barrier":
            yield "mode graph: the host waits in a barrier, which no graph holds"
        if background != LOADS[0]:
            yield f"mode graph: nothing else may run while a graph is captured, and background is {background}"

    def _call_problems(self, params: Params, spec: WorldSpec) -> Iterator[str]:
        """Yield why the calls of a step cannot be asynchronous or coalesced."""
        mode = params.get("mode")
        copies_first = self.in_place and params.get("placement") == OUT_OF_PLACE
        if mode == "async" and (copies_first or not self.asynchronous):
            yield f"mode async: {self.short_name} is several calls, or has no asynchronous form"
        if mode == "async" and params.get("direction") == "in_turn":
            yield f"mode async: {self.short_name} with direction=in_turn is several calls"
        if mode == "coalesced" and (copies_first or spec.backend not in self.coalesced):
            yield f"mode coalesced: {spec.backend} cannot coalesce {self.short_name}"
        if mode == "coalesced" and spec.gloo_on_gpus and self.name != "collective.reduce_scatter":
            yield f"mode coalesced: gloo coalesces {self.short_name} of CPU tensors alone: {GLOO_REMEDY}"


def _group_size(params: Params, spec: WorldSpec) -> int:
    group, index = str(params["group"]), int(params["group_index"])
    groups = groups_of(group, spec.nproc, spec.hosts)
    if index >= len(groups):
        raise UserError(f"group_index {index} is not one of the {len(groups)} groups of {group!r}")
    return len(groups[index])


def _data_problems(params: Params, spec: WorldSpec) -> Iterator[str]:
    dtype = str(params["dtype"])
    if spec.backend == "gloo" and dtype.startswith("float8"):  # Gloo answers with "Invalid scalar type".
        yield f"{spec.backend} carries no {dtype}"
    if params.get("redop") == "sum" and dtype == "bool":
        yield "the sum of bool is not a bool: use redop=max, min or product"


def _average_problems(params: Params, n: int, spec: WorldSpec) -> Iterator[str]:
    if params.get("redop") != "avg":
        return
    dtype = str(params["dtype"])
    exact_up_to = DTYPES[dtype].exact_up_to
    if not dtype.startswith(("float", "bfloat")):
        yield f"the average of {dtype} is not a {dtype}"
    if dtype.startswith("float8") and n & (n - 1):
        yield f"the average of {n} ranks is not exact in {dtype}"
    for other in (n - 1, n + 1):
        if other and _round_share(other, exact_up_to) == _round_share(n, exact_up_to):
            yield f"the average of {n} ranks cannot be told from that of {other} in {dtype}"
    if n == 1 and spec.backend == "nccl":
        yield "the average of one rank is wrong in NCCL before 2.29.7 (github.com/NVIDIA/nccl/issues/1950)"


def _size_problems(params: Params, shards: int, spec: WorldSpec) -> Iterator[str]:
    size, dtype = int(params["size_bytes"]), str(params["dtype"])
    itemsize = DTYPES[dtype].itemsize
    step = shards * itemsize
    remainder = size % step
    if remainder:
        factors = f"{shards} ranks x {itemsize} B" if shards > 1 else f"{itemsize} B"
        lower = size - remainder
        hint = f"nearest are {lower} and {lower + step}" if lower else f"the least is {step}"
        yield f"size {size} B is not a multiple of {factors} ({dtype}); {hint}"
    needed = bytes_needed(size)
    if spec.rank_bytes is not None and needed > spec.rank_bytes:
        amounts = f"about {needed / 1e9:.1f} GB a rank; a rank can have {spec.rank_bytes / 1e9:.1f} GB"
        yield f"size {format_size(size)} needs {amounts}"


def bytes_needed(size: int) -> int:
    """Return the memory of the largest operation: input, output, the reference with its parts, copies of a library.

    The two-step all-reduce takes up to 7.5 sizes on gloo, which may keep the copies of the previous step's two calls.
    """
    return 8 * size


def _round_share(n: int, exact_up_to: int) -> float:
    """Return 1/n rounded to a type whose whole numbers are exact up to a power of 2."""
    mantissa, exponent = math.frexp(1 / n)
    return math.ldexp(round(mantissa * exact_up_to), exponent)


def _rank_problems(params: Params, n: int) -> Iterator[str]:
    for name in ("root", "source", "target"):
        if int(params.get(name, 0)) >= n:
            yield f"{name} {params[name]} is not one of the {n} ranks"
    if "source" in params and params["source"] == params["target"]:
        yield f"source {params['source']} and target {params['target']} are one rank"
    if "round" in params:
        try:
            pairs_of(n, int(params["round"]), str(params["pairs"]))
        except UserError as error:
            yield str(error)


IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"
SIZE = Param(name="size_bytes", kind="size", default=1 << 20, minimum=0, help="total bytes, as nccl-tests counts them")
DTYPE = Param(name="dtype", kind="str", default="float32", choices=tuple(DTYPES), help="element type")
MODES = ("blocking", "pipelined", "async", "coalesced", "graph")
MODE_HELP = (
    "blocking: each starts at a barrier; pipelined: back to back, as nccl-tests; async: issue and wait timed apart; "
    "coalesced: several in one launch; graph: a CUDA graph, as nccl-tests -G"
)
MODE = choice("mode", MODE_HELP, *MODES, optional=False)
GROUP = (
    Param(name="group", kind="str", default="world", optional=True, help=f"which ranks take part: {FORMS}"),
    Param(name="group_index", kind="int", default=0, minimum=0, optional=True, help="measure this group alone"),
    Param(name="concurrent", kind="bool", default=False, optional=True, help="run all groups at once"),
)
PLACE = "where the result goes: into the input's buffer or another"
REDOP = choice("redop", "how values are combined", "sum", "avg", "min", "max", "product")
ROOT = Param(name="root", kind="int", default=0, minimum=0, optional=True, help="rank in the group that has the data")
ENDS = (
    Param(name="source", kind="int", default=0, minimum=0, help="the sending rank"),
    Param(name="target", kind="int", default=1, minimum=0, help="the receiving rank"),
)
ROUND = Param(name="round", kind="int", default=0, minimum=0, help="this round alone; in each, ranks pair anew")
PAIRS = Param(name="pairs", kind="str", default="", optional=True, help="these pairs instead, such as '0-3 1-2'")
DIRECTION = choice("direction", "both ways at once, or one after the other", "at_once", "in_turn")
REPEAT = Param(name="repeat", kind="int", default=0, minimum=0, optional=True, help="tells repetitions apart")
SHARE_OF_0 = "share of the bytes that goes to rank 0; in all_gather_v, that rank 0 contributes"
SKEW = Param(name="skew", kind="float", default=0.0, minimum=0, maximum=1, optional=True, help=SHARE_OF_0)
COLLECTIVE_LOADS = ("all_reduce", "all_gather", "all_to_all")
LOADS = ("nothing", "gemm", *COLLECTIVE_LOADS)
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BACKGROUND = choice("background", "what runs at the same time on every rank", *LOADS)
GEMM_SIZE = Param(name="m", kind="int", default=512, minimum=1, help="rows and columns of each matrix")
PRODUCTS = ("float32", "bfloat16", "float16", "float64")
# Parameters that the runner handles. They are not passed to `prepare`.
OF_THE_RUNNER = (MODE.name, *(param.name for param in GROUP), BACKGROUND.name)


def each_group(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameters of every group, alone and concurrent with the other groups."""
    text = str(params.get("group", "world"))
    groups = groups_of(text, spec.nproc, spec.hosts)
    if text == "world":
        return [params]
    indices = [params["group_index"]] if "group_index" in params else range(len(groups))
    concurrencies: list[Value] = [False, True] if len(groups) > 1 else [False]
    if "concurrent" in params:
        concurrencies = [params["concurrent"]]
    expanded = []
    for concurrent in concurrencies:
        for index in indices:
            expanded.append({**params, "group_index": index, "concurrent": concurrent})
    return expanded


def each_pair(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameters of every ordered pair of different ranks."""
    ranks = range(spec.nproc)
    sources = [int(params["source"])] if "source" in params else ranks
    targets = [int(params["target"])] if "target" in params else ranks
    pairs = []
    for source in sources:
        for target in targets:
            if source != target or len(targets) == 1:
                pairs.append({**params, "source": source, "target": target})
    return pairs


def each_round(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameters of every round in which ranks meet in pairs."""
    if "round" in params or params.get("pairs"):
        return [params]
    return [{**params, "round": index} for index in range(num_rounds(spec.nproc))]


def _collective(
    name: str,
    help_text: str,
    *more: Param,
    tags: tuple[str, ...],
    busbw: Factor,
    sharded: bool = False,
    in_place: bool = False,
    asynchronous: bool = True,
    coalesced: tuple[str, ...] = ("nccl",),
) -> OperationSpec:
    return OperationSpec(
        name=f"collective.{name}",
        target=f"parbench.bench.operations.collectives:{name}",
        help=help_text,
        params=(SIZE, DTYPE, MODE, *more, BACKGROUND, *GROUP),
        tags=tags,
        expansion=each_group,
        busbw=busbw,
        sharded=sharded or busbw is RING,  # The factor is the share of the other ranks.
        in_place=in_place,
        asynchronous=asynchronous,
        coalesced=coalesced,
    )


def _p2p(
    name: str,
    help_text: str,
    *more: Param,
    tags: tuple[str, ...] = (),
    function: str = "",
    asynchronous: bool = True,
    expansion: Expansion = keep_params,
) -> OperationSpec:
    return OperationSpec(
        name=f"p2p.{name}",
        target=f"parbench.bench.operations.p2p:{function or name}",
        help=help_text,
        params=(SIZE, DTYPE, MODE, *more),
        tags=tags,
        expansion=expansion,
        busbw=ONE,
        asynchronous=asynchronous,
    )


def _memory(name: str, help_text: str, *, tags: tuple[str, ...] = ()) -> OperationSpec:
    return OperationSpec(
        name=f"memory.{name}",
        target=f"parbench.bench.operations.local:{name}",
        help=help_text,
        params=(SIZE, DTYPE, choice("mode", MODE_HELP, *MODES[:2], optional=False), *GROUP),
        tags=tags,
        expansion=each_group,
    )


MAIN, SIZED = ("smoke", "node", "main"), ("smoke", "node", "sized")
# fmt: off
OPERATIONS = (
    _collective(
        "all_reduce", "combine every rank's buffer, result on all; size = the buffer",
        REDOP, choice("placement", PLACE, IN_PLACE, OUT_OF_PLACE),
        tags=(*MAIN, "grouped"), busbw=TWICE_RING, in_place=True, coalesced=("nccl", "gloo"),
    ),
    _collective(
        "all_gather", "collect every rank's shard on all; size = the output",
        choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
    ),
    _collective(
        "reduce_scatter", "combine buffers, a shard of it on each; size = the input",
        REDOP, choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
    ),
    _collective(
        "all_to_all", "each rank sends a shard to each; size = what one rank sends",
        tags=(*MAIN, "grouped"), busbw=RING,
    ),
    _collective(
        "broadcast", "copy one rank's buffer to all; size = the buffer", ROOT, tags=MAIN, busbw=ONE, in_place=True,
    ),
    _collective(
        "all_to_all_v", "all_to_all, uneven shards; size = what one rank sends", SKEW,
        tags=(*SIZED, "uneven"), busbw=RING,
    ),
    _collective(
        "all_gather_v", "all_gather, uneven shards; size = the output", SKEW,
        tags=("sized", "uneven"), busbw=RING, coalesced=(),
    ),
    _collective(
        "reduce", "combine every rank's buffer on one; size = the buffer", REDOP, ROOT,
        tags=SIZED, busbw=ONE, in_place=True,
    ),
    _collective("gather", "collect every rank's shard on one; size = the output", ROOT, tags=SIZED, busbw=RING),
    _collective("scatter", "split one rank's buffer over all; size = the input", ROOT, tags=SIZED, busbw=RING),
    _collective(
        "all_reduce_two_step", "all_reduce as reduce_scatter, then all_gather", REDOP,
        tags=SIZED, busbw=TWICE_RING, sharded=True, asynchronous=False, coalesced=(),
    ),
    OperationSpec(
        name="collective.barrier", target="parbench.bench.operations.collectives:barrier",
        help="wait for all ranks; moves no data",
        params=(MODE, BACKGROUND, *GROUP), tags=("smoke", "node"), expansion=each_group, asynchronous=False,
    ),
    _p2p("sendrecv", "each sends to the next, receives from the last", *GROUP, tags=MAIN, expansion=each_group),
    OperationSpec(
        name="compute.gemm", target="parbench.bench.operations.local:gemm",
        help="a matrix product on every rank; every element of each is compared with the exact one",
        params=(GEMM_SIZE, choice("dtype", "element type", *PRODUCTS), BACKGROUND, *GROUP), expansion=each_group,
    ),
    _memory("copy", "a memory copy on every rank; the ceiling for messages within a node", tags=("smoke", "node")),
    _memory("to_device", "from page-locked memory of the host to the GPU"),
    _memory("from_device", "from the GPU to page-locked memory of the host"),
    _p2p(
        "pingpong", "between two ranks and back; time = half the round trip", *ENDS, tags=SIZED, asynchronous=False,
    ),
    _p2p("unidirectional", "one rank sends to another", *ENDS, tags=SIZED),
    _p2p("bidirectional", "two ranks send to each other at once", *ENDS, tags=SIZED),
    _p2p(
        "matrix", "one sends to another, every pair in turn", *ENDS,
        tags=("sized",), function="unidirectional", expansion=each_pair,
    ),
    _p2p(
        "pairwise", "all ranks at once, in pairs; round by round, until each has met each",
        ROUND, PAIRS, DIRECTION, REPEAT, function="round_of_pairs", expansion=each_round,
    ),
)
# fmt: on
DEFINITIONS: tuple[Definition, ...] = OPERATIONS


def busbw_factor(operation: str, n: int) -> float | None:
    """Return busbw / algbw of an operation on ``n`` ranks; None if it is not known."""
    for spec in OPERATIONS:
        if spec.short_name == operation and spec.busbw is not None:
            return spec.busbw.compute(n)
    return None


def busbw_words() -> str:
    """Return the factors with the operations that have them."""
    parts = []
    for factor in (TWICE_RING, RING):
        names = [spec.short_name for spec in OPERATIONS if spec.busbw is factor]
        parts.append(f"{factor.text} for {', '.join(names)}")
    return f"{'; '.join(parts)}; {ONE.text} for all others that move data"
