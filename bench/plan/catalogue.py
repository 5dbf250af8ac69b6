"""The operations that can be measured, each declared once and without torch, by nccl-tests' conventions."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Definition, Params, only_itself
from parbench.bench.plan.groups import FORMS, groups_of, num_rounds, pairs_of, parse_matrix
from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_size


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
GLOO_REMEDY = "use --backend nccl with a GPU for each rank, or --device cpu"


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
    def is_local(self) -> bool:
        """Whether every rank does it by itself."""
        return self.name.startswith(("compute.", "memory."))

    @property
    def reduces(self) -> bool:
        return any(param.name == "redop" for param in self.params)

    @property
    def placements(self) -> tuple[str, ...]:
        """Return where its result can go, the default first."""
        given = next((param.choices for param in self.params if param.name == "placement"), ())
        return tuple(map(str, given)) or (IN_PLACE if self.in_place else OUT_OF_PLACE,)

    @property
    def contributes(self) -> bool:
        """Whether other tools count what one rank contributes, of which there is one for each rank in a size."""
        return self.sharded and not self.reduces

    @property
    def definition(self) -> Definition:
        module = {"collective": "collectives", "p2p": "p2p"}.get(self.name.partition(".")[0], "local")
        return Definition(
            name=self.name,
            target=f"parbench.bench.operations.{module}:{self.function or self.short_name}",
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
            if n < 2 and group != "world" and not self.is_local:
                yield f"group {group!r} has one rank: nothing moves"
        if {"size_bytes", "dtype"} <= params.keys():
            yield from _of_data(params, n, n if self.sharded and "skew" not in params else 1, spec)
        yield from _of_ranks(params, n)
        if spec.gloo_on_gpus and self.name.startswith("p2p."):
            yield f"gloo sends no CUDA tensors from one rank to another: {GLOO_REMEDY}"
        yield from self._of_modes(params, spec)

    def _of_modes(self, params: Params, spec: WorldSpec) -> Iterator[str]:
        mode, background = params.get("mode"), params.get("background", LOADS[0])
        if mode == "graph" and spec.device != "cuda":
            yield f"mode graph needs CUDA; this is {spec.device}"
        if mode == "graph" and spec.gloo_on_gpus and "group" in params:
            yield f"mode graph: gloo moves data by the host, which no graph holds: {GLOO_REMEDY}"
        if mode == "graph" and self.short_name == "barrier":
            yield "mode graph: the host waits in a barrier, which no graph holds"
        if mode == "graph" and background != LOADS[0]:
            yield f"mode graph: nothing else may run while a graph is captured, and background is {background}"
        apart = self.in_place and params.get("placement") == "out_of_place"
        if background in COLLECTIVE_LOADS and spec.backend == "nccl" and os.environ.get(QUEUES_VARIABLE) == "1":
            deadlock = "kernels of two NCCL communicators can deadlock in one hardware queue"
            yield f"{QUEUES_VARIABLE}=1: {deadlock}; unset it, or use background=gemm"
        if mode == "async" and (apart or not self.asynchronous):
            yield f"mode async: {self.short_name} is several calls, or has no asynchronous form"
        if mode == "async" and params.get("direction") == "in_turn":
            yield f"mode async: {self.short_name} with direction=in_turn is several calls"
        if mode == "coalesced" and (apart or spec.backend not in self.coalesced):
            yield f"mode coalesced: {spec.backend} cannot coalesce {self.short_name}"
        if mode == "coalesced" and spec.gloo_on_gpus and self.name != "collective.reduce_scatter":
            yield f"mode coalesced: gloo coalesces {self.short_name} of CPU tensors alone: {GLOO_REMEDY}"


def _of_data(params: Params, n: int, shards: int, spec: WorldSpec) -> Iterator[str]:
    size, dtype, redop = int(params["size_bytes"]), str(params["dtype"]), params.get("redop")
    itemsize, exact = DTYPES[dtype]
    if spec.backend == "gloo" and dtype.startswith("float8"):  # which it answers with "Invalid scalar type"
        yield f"{spec.backend} carries no {dtype}"
    if redop == "avg" and not dtype.startswith(("float", "bfloat")):
        yield f"the average of {dtype} is no {dtype}"
    if redop == "avg" and dtype.startswith("float8") and n & (n - 1):
        yield f"the average of {n} ranks is not exact in {dtype}"
    if redop == "avg" and (
        same := [other for other in (n - 1, n + 1) if other and _share(other, exact) == _share(n, exact)]
    ):
        yield f"the average of {n} ranks cannot be told from that of {same[0]} in {dtype}"
    if redop == "avg" and n == 1 and spec.backend == "nccl":
        yield "the average of one rank is wrong in NCCL before 2.29.7 (github.com/NVIDIA/nccl/issues/1950)"
    if redop == "sum" and dtype == "bool":
        yield "the sum of bool is no bool: use redop=max, min or product"
    step = shards * itemsize
    if left := size % step:
        ranks = f"{shards} ranks x " if shards > 1 else ""
        nearest = f"nearest are {size - left} and {size - left + step}" if size > step else f"the least is {step}"
        yield f"size {size} B is not a multiple of {ranks}{itemsize} B ({dtype}); {nearest}"
    needed = bytes_needed(size)
    if spec.rank_bytes is not None and needed > spec.rank_bytes:
        amounts = f"about {needed / 1e9:.1f} GB a rank; a rank can have {spec.rank_bytes / 1e9:.1f} GB"
        yield f"size {format_size(size)} needs {amounts}"


def bytes_needed(size: int) -> int:
    """Return what the largest operation takes: input, output, the reference and its parts, what a library copies.

    The two-step all-reduce takes up to 7.5 sizes on gloo, which may keep the copies of the previous step's two calls.
    """
    return 8 * size


def _share(n: int, exact_up_to: int) -> float:
    """Return 1/n rounded to a type whose whole numbers are exact up to a power of 2."""
    mantissa, exponent = math.frexp(1 / n)
    return math.ldexp(round(mantissa * exact_up_to), exponent)


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
TRAFFIC = Param(name="traffic", kind="matrix", default="", optional=True, help="amounts by sender (rows) and receiver")
COLLECTIVE_LOADS = ("all_reduce", "all_gather", "all_to_all")
LOADS = ("nothing", "gemm", *COLLECTIVE_LOADS)
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BACKGROUND = choice("background", "what runs at the same time on every rank", *LOADS)
GEMM_SIZE = Param(name="m", kind="int", default=512, minimum=1, help="rows and columns of each matrix")
PRODUCTS = ("float32", "bfloat16", "float16", "float64")
# Parameters that the runner handles. They are not passed to `prepare`.
OF_THE_RUNNER = (MODE.name, *(param.name for param in GROUP), BACKGROUND.name)


def each_group(given: Params, spec: WorldSpec) -> Iterable[Params]:
    text = str(given.get("group", "world"))
    groups = groups_of(text, spec.nproc, spec.hosts)
    if text == "world":
        return (given,)
    indices = [given["group_index"]] if "group_index" in given else range(len(groups))
    concurrent = [given["concurrent"]] if "concurrent" in given else [False, True] if len(groups) > 1 else [False]
    return [{**given, "group_index": index, "concurrent": both} for both in concurrent for index in indices]


def each_pair(given: Params, spec: WorldSpec) -> Iterable[Params]:
    n = spec.nproc
    sources = [int(given["source"])] if "source" in given else range(n)
    targets = [int(given["target"])] if "target" in given else range(n)
    return [{**given, "source": a, "target": b} for a in sources for b in targets if a != b or len(targets) == 1]


def each_round(given: Params, spec: WorldSpec) -> Iterable[Params]:
    if "round" in given or given.get("pairs"):
        return (given,)
    return [{**given, "round": index} for index in range(num_rounds(spec.nproc))]


def _collective(name: str, help_text: str, *more: Param, **declared: Any) -> OperationSpec:
    params = (SIZE, DTYPE, MODE, *more, BACKGROUND, *GROUP)
    sharded = declared.get("busbw") is RING  # whose factor is the share of the others
    declared = {"params": params, "sharded": sharded, "coalesced": ("nccl",), "expand": each_group, **declared}
    return OperationSpec(name=f"collective.{name}", help=help_text, **declared)


def _p2p(name: str, help_text: str, *more: Param, **declared: Any) -> OperationSpec:
    return OperationSpec(name=f"p2p.{name}", help=help_text, params=(SIZE, DTYPE, MODE, *more), busbw=ONE, **declared)


def _local(name: str, help_text: str, *, tags: tuple[str, ...] = ()) -> OperationSpec:
    params = (SIZE, DTYPE, choice("mode", MODE_HELP, *MODES[:2], optional=False), *GROUP)
    return OperationSpec(name=f"memory.{name}", help=help_text, params=params, tags=tags, expand=each_group)


MAIN, SIZED = ("smoke", "node", "main"), ("smoke", "node", "sized")
# fmt: off
OPERATIONS = (
    _collective(
        "all_reduce", "combine every rank's buffer, result on all; size = the buffer",
        REDOP, choice("placement", PLACE, IN_PLACE, OUT_OF_PLACE),
        tags=(*MAIN, "grouped"), busbw=TWICE_RING, in_place=True, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "all_reduce_perf", "osu": "allreduce"},
        c10d={0: "allreduce_, allreduce_coalesced_, all_reduce, all_reduce_, all_reduce_coalesced"},
    ),
    _collective(
        "all_gather", "collect every rank's shard on all; size = the output",
        choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "all_gather_perf", "osu": "allgather"},
        c10d={0: "_allgather_base_, allgather_, allgather_into_tensor_coalesced_",
              SHARE: "all_gather_into_tensor, all_gather_into_tensor_coalesced"},
    ),
    _collective(
        "reduce_scatter", "combine buffers, a shard of it on each; size = the input",
        REDOP, choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "reduce_scatter_perf", "osu": "reduce_scatter, reduce_scatter_block"},
        c10d={0: "reduce_scatter_tensor, reduce_scatter_tensor_coalesced",
              1: "_reduce_scatter_base_, reduce_scatter_, reduce_scatter_tensor_coalesced_"},
    ),
    _collective(
        "all_to_all", "each rank sends a shard to each; size = what one rank sends",
        tags=(*MAIN, "grouped"), busbw=RING,
        names={"nccl-tests": "alltoall_perf", "osu": "alltoall, all-to-all personalized exchange"},
        c10d={0: "all_to_all_single", 1: "alltoall_base_, alltoall_"},
    ),
    _collective(
        "broadcast", "copy one rank's buffer to all; size = the buffer", ROOT,
        tags=MAIN, busbw=ONE, in_place=True, c10d={0: "broadcast_, broadcast"},
        names={"nccl-tests": "broadcast_perf", "osu": "broadcast"},
    ),
    _collective(
        "all_to_all_v", "all_to_all, uneven shards; size = what the busiest rank sends", SKEW, TRAFFIC,
        tags=(*SIZED, "uneven"), busbw=RING, names={"nccl-tests": "alltoallv_perf"},
    ),
    _collective(
        "all_gather_v", "all_gather, uneven shards; size = the output", SKEW,
        tags=("sized", "uneven"), busbw=RING, coalesced=(), names={"osu": "allgatherv"},
    ),
    _collective(
        "reduce", "combine every rank's buffer on one; size = the buffer", REDOP, ROOT,
        tags=SIZED, busbw=ONE, in_place=True, c10d={0: "reduce_"},
        names={"nccl-tests": "reduce_perf", "osu": "reduce"},
    ),
    _collective(
        "gather", "collect every rank's shard on one; size = the output", ROOT,
        tags=SIZED, busbw=RING, c10d={0: "gather_"},
        names={"nccl-tests": "gather_perf", "osu": "gather"},
    ),
    _collective(
        "scatter", "split one rank's buffer over all; size = the input", ROOT,
        tags=SIZED, busbw=RING, c10d={1: "scatter_"},
        names={"nccl-tests": "scatter_perf", "osu": "scatter"},
    ),
    _collective(
        "all_reduce_two_step", "all_reduce as reduce_scatter, then all_gather", REDOP,
        tags=SIZED, busbw=TWICE_RING, sharded=True, asynchronous=False, coalesced=(),
    ),
    _collective(
        "barrier", "wait for all ranks; moves no data",
        params=(MODE, BACKGROUND, *GROUP), tags=("smoke", "node"), asynchronous=False, coalesced=(),
    ),
    _p2p(
        "sendrecv", "each sends to the next, receives from the last", *GROUP,
        tags=MAIN, expand=each_group, names={"nccl-tests": "sendrecv_perf"},
    ),
    OperationSpec(
        name="compute.gemm", help="a matrix product on every rank; every element of each is held against the exact one",
        params=(GEMM_SIZE, choice("dtype", "element type", *PRODUCTS), BACKGROUND, *GROUP), expand=each_group,
    ),
    _local("copy", "a memory copy on every rank; the ceiling for messages within a node", tags=("smoke", "node")),
    _local("to_device", "from page-locked memory of the host to the GPU"),
    _local("from_device", "from the GPU to page-locked memory of the host"),
    _p2p(
        "pingpong", "between two ranks and back; time = half the round trip", *ENDS,
        tags=SIZED, asynchronous=False, names={"osu": "latency"},
    ),
    _p2p("unidirectional", "one rank sends to another", *ENDS, tags=SIZED),
    _p2p("bidirectional", "two ranks send to each other at once", *ENDS, tags=SIZED),
    _p2p(
        "matrix", "one sends to another, every pair in turn", *ENDS,
        tags=("sized",), function="unidirectional", expand=each_pair,
    ),
    _p2p(
        "pairwise", "all ranks at once, in pairs; round by round, until each has met each",
        ROUND, PAIRS, DIRECTION, REPEAT, function="round_of_pairs", expand=each_round,
    ),
)
# fmt: on
DEFINITIONS = tuple(spec.definition for spec in OPERATIONS)


def busbw_factor(operation: str, n: int) -> float | None:
    """Return busbw / algbw of an operation, named without its kind, on ``n`` ranks; None if it is not known."""
    return next((spec.busbw.of(n) for spec in OPERATIONS if spec.short_name == operation and spec.busbw), None)


def names_of(tool: str) -> dict[str, OperationSpec]:
    return {name: spec for spec in OPERATIONS if tool in spec.names for name in spec.names[tool].split(", ")}


def busbw_words() -> str:
    factors = {factor.text: [s.short_name for s in OPERATIONS if s.busbw is factor] for factor in (TWICE_RING, RING)}
    words = "; ".join(f"{text} for {', '.join(names)}" for text, names in factors.items())
    return f"{words}; {ONE.text} for all others that move data"
