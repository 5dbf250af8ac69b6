"""The operations that can be measured, each declared once and without torch: ``OPERATIONS``.

The conventions of size and bus bandwidth are nccl-tests' (its doc/PERFORMANCE.md).
"""

from collections.abc import Iterable
from typing import Any

from bench.machine.world_spec import WorldSpec
from bench.plan.cases import Params
from bench.plan.groups import FORMS, groups_of, num_rounds
from bench.plan.operation_spec import DTYPES, ONE, RING, SHARE, TWICE_RING, OperationSpec
from bench.plan.params import Param, choice

IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"
SIZE = Param(name="size_bytes", kind="size", default=1 << 20, minimum=0, help="total bytes, as nccl-tests counts them")
DTYPE = Param(name="dtype", kind="str", default="float32", choices=tuple(DTYPES), help="element type")
MODES = ("blocking", "pipelined", "async", "coalesced", "graph")
MODE_HELP = "each from a barrier; back to back; issue and wait apart; in one launch; as a CUDA graph"
MODE = choice("mode", MODE_HELP, *MODES, optional=False)
COPY_MODE = choice("mode", MODE_HELP, *MODES[:2], optional=False)
GROUP = (
    Param(name="group", kind="str", default="world", optional=True, help=f"which ranks: {FORMS}"),
    Param(name="group_index", kind="int", default=0, minimum=0, optional=True, help="which of the groups; all in turn"),
    Param(name="concurrent", kind="bool", default=False, optional=True, help="while all groups do the same; both"),
)
PLACE = "where the result goes"
REDOP = choice("redop", "how ranks' data are joined", "sum", "avg", "min", "max", "product")
ROOT = Param(name="root", kind="int", default=0, minimum=0, optional=True, help="rank of the group that holds the data")
ENDS = (
    Param(name="source", kind="int", default=0, minimum=0, help="rank that sends first"),
    Param(name="target", kind="int", default=1, minimum=0, help="rank that it sends to"),
)
ROUND = Param(name="round", kind="int", default=0, minimum=0, help="which round of a tournament of all ranks")
PAIRS = Param(name="pairs", kind="str", default="", optional=True, help="who meets whom instead, as '0-3 1-2'")
DIRECTION = choice("direction", "both ways at once, or there and then back", "at_once", "in_turn")
REPEAT = Param(name="repeat", kind="int", default=0, minimum=0, optional=True, help="which measurement of the same")
SHARE_OF_0 = "share of the bytes that all send to rank 0, or that it gives"
SKEW = Param(name="skew", kind="float", default=0.0, minimum=0, maximum=1, optional=True, help=SHARE_OF_0)
TRAFFIC = Param(name="traffic", kind="matrix", default="", optional=True, help="who sends how much to whom")
LOADS = ("nothing", "gemm", "all_reduce", "all_gather", "all_to_all")
BACKGROUND = choice("background", "what runs beside it on every rank", *LOADS)
GEMM_SIZE = Param(name="m", kind="int", default=512, minimum=1, help="rows and columns of each matrix")
# how and where a subject is measured, which it is not told
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


MAIN, SIZED = ("smoke", "node", "main"), ("smoke", "node", "sized")
# fmt: off
OPERATIONS = (
    _collective(
        "all_reduce", "joins a buffer on every rank; size = the buffer",
        REDOP, choice("placement", PLACE, IN_PLACE, OUT_OF_PLACE),
        tags=(*MAIN, "grouped"), busbw=TWICE_RING, in_place=True, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "all_reduce_perf", "osu": "allreduce", "param": "all_reduce",
               "gloo": "allreduce_ring, allreduce_ring_chunked, allreduce_halving_doubling, allreduce_bcube"},
        c10d={0: "allreduce_, allreduce_coalesced_, all_reduce, all_reduce_, all_reduce_coalesced"},
    ),
    _collective(
        "all_gather", "every rank's shard to every rank; size = the output",
        choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "all_gather_perf", "osu": "allgather", "param": "all_gather, all_gather_base",
               "gloo": "allgather, allgather_ring"},
        c10d={0: "_allgather_base_, allgather_, allgather_into_tensor_coalesced_",
              SHARE: "all_gather_into_tensor, all_gather_into_tensor_coalesced"},
    ),
    _collective(
        "reduce_scatter", "joins, a shard to each; size = the input",
        REDOP, choice("placement", PLACE, OUT_OF_PLACE, IN_PLACE),
        tags=MAIN, busbw=RING, coalesced=("nccl", "gloo"),
        names={"nccl-tests": "reduce_scatter_perf", "osu": "reduce_scatter, reduce_scatter_block",
               "param": "reduce_scatter, reduce_scatter_base", "gloo": "reduce_scatter"},
        c10d={0: "reduce_scatter_tensor, reduce_scatter_tensor_coalesced",
              1: "_reduce_scatter_base_, reduce_scatter_, reduce_scatter_tensor_coalesced_"},
    ),
    _collective(
        "all_to_all", "one shard from each rank to each; size = what one rank sends",
        tags=(*MAIN, "grouped"), busbw=RING,
        names={"nccl-tests": "alltoall_perf", "osu": "alltoall, all-to-all personalized exchange",
               "param": "all_to_all, all_to_all_single", "gloo": "alltoall"},
        c10d={0: "all_to_all_single", 1: "alltoall_base_, alltoall_"},
    ),
    _collective(
        "broadcast", "one rank's buffer to every rank; size = the buffer", ROOT,
        tags=MAIN, busbw=ONE, in_place=True, c10d={0: "broadcast_, broadcast"},
        names={"nccl-tests": "broadcast_perf", "osu": "broadcast", "param": "broadcast",
               "gloo": "broadcast, broadcast_one_to_all, broadcast_ring"},
    ),
    _collective(
        "all_to_all_v", "uneven shards; size = what the busiest rank sends", SKEW, TRAFFIC,
        tags=(*SIZED, "uneven"), busbw=RING, names={"nccl-tests": "alltoallv_perf", "param": "all_to_allv"},
    ),
    _collective(
        "all_gather_v", "uneven shards to every rank, a skew of them rank 0's; size = the output", SKEW,
        tags=("sized", "uneven"), busbw=RING, coalesced=(),
        names={"nccl-tests": "all_gather_v_perf", "osu": "allgatherv", "param": "all_gather_v"},
    ),
    _collective(
        "reduce", "joins a buffer on one rank; size = the buffer", REDOP, ROOT,
        tags=SIZED, busbw=ONE, c10d={0: "reduce_"},
        names={"nccl-tests": "reduce_perf", "osu": "reduce", "param": "reduce", "gloo": "reduce"},
    ),
    _collective(
        "gather", "every rank's shard to one; size = the output", ROOT,
        tags=SIZED, busbw=RING, c10d={0: "gather_"},
        names={"nccl-tests": "gather_perf", "osu": "gather", "param": "gather"},
    ),
    _collective(
        "scatter", "one rank's shards to every rank; size = the input", ROOT,
        tags=SIZED, busbw=RING, c10d={1: "scatter_"},
        names={"nccl-tests": "scatter_perf", "osu": "scatter", "param": "scatter", "gloo": "scatter"},
    ),
    _collective(
        "all_reduce_two_step", "all_reduce as reduce_scatter and all_gather", REDOP,
        tags=SIZED, busbw=TWICE_RING, sharded=True, asynchronous=False, coalesced=(),
    ),
    _collective(
        "barrier", "waits for every rank; moves no data",
        params=(MODE, BACKGROUND, *GROUP), tags=("smoke", "node"), asynchronous=False, coalesced=(),
    ),
    _p2p(
        "sendrecv", "ring: every rank sends to the next while it receives from the last", *GROUP,
        tags=MAIN, expand=each_group, names={"nccl-tests": "sendrecv_perf"},
    ),
    OperationSpec(
        name="compute.gemm", help="a float32 matrix product on every rank, to see what communication beside it costs",
        params=(GEMM_SIZE, BACKGROUND),
    ),
    OperationSpec(
        name="memory.copy",
        help="a copy in memory on every rank at once: what no message between them on this node can exceed",
        params=(SIZE, DTYPE, COPY_MODE), tags=("smoke", "node"),
    ),
    _p2p(
        "pingpong", "there and back between two ranks; the time is half the round trip", *ENDS,
        tags=SIZED, asynchronous=False, names={"osu": "latency"},
    ),
    _p2p("unidirectional", "one rank sends to another", *ENDS, tags=SIZED),
    _p2p("bidirectional", "two ranks send to each other at once", *ENDS, tags=SIZED),
    _p2p(
        "matrix", "every ordered pair of ranks in turn, one sends to the other", *ENDS,
        tags=("sized",), function="unidirectional", expand=each_pair,
    ),
    _p2p(
        "pairwise", "every rank and one other send to each other, all pairs at once; a tournament's rounds in turn",
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
