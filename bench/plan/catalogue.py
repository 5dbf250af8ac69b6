"""The collectives and point-to-point operations that can be measured, declared without torch.

The conventions of size and bus bandwidth are nccl-tests' (its doc/PERFORMANCE.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.plan.cases import Definition, Params, WorldSpec, only_itself
from bench.plan.groups import FORMS, groups_of, num_rounds, pairs_of, parse_matrix
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
    """Say whether ``backend`` can carry ``dtype``."""
    return dtype not in UNSUPPORTED.get(backend, frozenset())


REDOPS = ("sum", "avg", "min", "max", "product")
PLACEMENTS = ("in_place", "out_of_place")

SIZE = Param(name="size_bytes", kind="size", default=1 << 20, minimum=0, help="total bytes, as nccl-tests counts them")
DTYPE = Param(name="dtype", kind="str", default="float32", choices=tuple(DTYPES), help="element type")
MODE = Param(
    name="mode",
    kind="str",
    default="blocking",
    choices=("blocking", "pipelined", "async", "coalesced", "graph"),
    help="each from a barrier; back to back; issue and wait apart; in one launch; as a CUDA graph",
)
GROUP = (
    Param(name="group", kind="str", default="world", optional=True, help=f"which ranks: {FORMS}"),
    Param(name="member", kind="int", default=0, minimum=0, optional=True, help="which of the groups; all in turn"),
    Param(name="together", kind="bool", default=False, optional=True, help="while all groups do the same; both"),
)
REDOP = Param(name="redop", kind="str", default="sum", choices=REDOPS, optional=True, help="how ranks' data are joined")
ROOT = Param(name="root", kind="int", default=0, minimum=0, optional=True, help="rank of the group that holds the data")
SOURCE = Param(name="source", kind="int", default=0, minimum=0, help="rank that sends first")
TARGET = Param(name="target", kind="int", default=1, minimum=0, help="rank that it sends to")
ROUND = Param(name="round", kind="int", default=0, minimum=0, help="which round of a tournament of all ranks")
PAIRS = Param(name="pairs", kind="str", default="", optional=True, help="who meets whom instead, as '0-3 1-2'")
WAYS = Param(
    name="ways",
    kind="str",
    default="at_once",
    choices=("at_once", "in_turn"),
    optional=True,
    help="both ways at once, or there and then back",
)
REPEAT = Param(name="repeat", kind="int", default=0, minimum=0, optional=True, help="which measurement of the same")
SKEW = Param(
    name="skew",
    kind="float",
    default=0.0,
    minimum=0,
    maximum=1,
    optional=True,
    help="share that all send to rank 0",
)
TRAFFIC = Param(name="traffic", kind="matrix", default="", optional=True, help="who sends how much to whom")

BESIDE = Param(
    name="beside",
    kind="str",
    default="nothing",
    choices=("nothing", "gemm", "all_reduce", "all_gather", "all_to_all"),
    optional=True,
    help="what runs beside it on every rank",
)
OF_THE_RUNNER = (MODE.name, *(param.name for param in GROUP), BESIDE.name)
"""Parameters that say how and where a subject is measured; it is not told."""
COPY_MODE = Param(name="mode", kind="str", default="blocking", choices=("blocking", "pipelined"), help=MODE.help)
GEMM_SIZE = Param(name="m", kind="int", default=512, minimum=1, help="rows and columns of each matrix")

# input, output and reference of the largest operation, and room for a temporary of the check
_BUFFERS_PER_RANK = 6
_SEVERAL_CALLS = ("all_reduce_two_step", "barrier", "pingpong")
_NEVER_COALESCED = (
    "all_reduce_two_step",
    "barrier",
    "sendrecv",
    "pingpong",
    "unidirectional",
    "bidirectional",
    "matrix",
    "round",
)
_GLOO_COALESCES = ("all_reduce", "all_gather", "reduce_scatter")


def _placement(default: str) -> Param:
    return Param(
        name="placement", kind="str", default=default, choices=PLACEMENTS, optional=True, help="where the result goes"
    )


def group_size(params: Params, spec: WorldSpec) -> int:
    """Return how many ranks the case's group has; ``UserError`` if the world cannot form it."""
    groups = groups_of(str(params.get("group", "world")), spec.nproc, spec.hosts)
    member = int(params.get("member", 0))
    if member >= len(groups):
        raise UserError(f"member {member} is not one of the {len(groups)} groups of {params['group']!r}")
    return len(groups[member])


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Says why an operation cannot run with given parameters in a world, None if it can.

    ``sharded`` operations divide their size among ranks; ``joins`` tells those that reduce.
    """

    name: str
    sharded: bool = False
    joins: bool = False

    def __call__(self, params: Params, spec: WorldSpec) -> str | None:
        """Return the reason in words."""
        n = group_size(params, spec)
        if n < 2 and params.get("group", "world") != "world":
            return f"group {params['group']!r} has one rank: nothing moves"
        return (
            _refuse_type(params, spec)
            or (_refuse_reduction(params, n) if self.joins else None)
            or _refuse_size(params, n if self.sharded else 1, spec)
            or _refuse_ranks(params, n)
            or _refuse_mode(self.name, params, spec)
        )


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


def _refuse_mode(name: str, params: Params, spec: WorldSpec) -> str | None:
    mode = params["mode"]
    if mode == "graph" and spec.device != "cuda":
        return f"mode graph needs CUDA; this is {spec.device}"
    apart = name == "all_reduce" and params.get("placement") == "out_of_place"
    if mode == "async" and (apart or name in _SEVERAL_CALLS):
        return f"mode async: {name} is several calls, or has no asynchronous form"
    limited = spec.backend == "gloo" and name not in _GLOO_COALESCES
    if mode == "coalesced" and (limited or apart or name in _NEVER_COALESCED):
        return f"mode coalesced: {spec.backend} cannot coalesce {name}"
    return None


def each_group(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Make a case of each group, alone and with all groups at once, unless it is said which."""
    text = str(given.get("group", "world"))
    groups = groups_of(text, spec.nproc, spec.hosts)
    if text == "world":
        return (given,)
    members = [given["member"]] if "member" in given else range(len(groups))
    together = [given["together"]] if "together" in given else [False, True] if len(groups) > 1 else [False]
    return [{**given, "member": member, "together": both} for both in together for member in members]


def each_pair(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Make a case of each ordered pair of ranks, unless it is said which."""
    n = spec.nproc
    sources = [int(given["source"])] if "source" in given else range(n)
    targets = [int(given["target"])] if "target" in given else range(n)
    return [{**given, "source": a, "target": b} for a in sources for b in targets if a != b or len(targets) == 1]


def each_round(given: Params, spec: WorldSpec) -> Iterable[Params]:
    """Make a case of each round of a tournament, unless it is said which, or who meets whom."""
    if "round" in given or given.get("pairs"):
        return (given,)
    return [{**given, "round": index} for index in range(num_rounds(spec.nproc))]


def refuse_round(params: Params, spec: WorldSpec) -> str | None:
    """Say why a round cannot be measured: a round or a rank that there is not, or what any operation may refuse."""
    try:
        pairs_of(spec.nproc, int(params.get("round", 0)), str(params.get("pairs", "")))
    except UserError as error:
        return str(error)
    if params["mode"] == "async" and params.get("ways") == "in_turn":
        return "mode async: round with ways=in_turn is several calls"
    return Refusal(name="round")(params, spec)


def _collective(
    name: str, help_text: str, *more: Param, data: tuple[Param, ...] = (SIZE, DTYPE), **refusal: bool
) -> Definition:
    return Definition(
        name=f"collective.{name}",
        target=f"bench.operations.collectives:{name}",
        help=help_text,
        params=(*data, MODE, *more, BESIDE, *GROUP),
        refuse=Refusal(name=name, **refusal),
        expand=each_group,
    )


def _pair(name: str, help_text: str, *, function: str | None = None) -> Definition:
    return Definition(
        name=f"p2p.{name}",
        target=f"bench.operations.p2p:{function or name}",
        help=help_text,
        params=(SIZE, DTYPE, MODE, SOURCE, TARGET),
        refuse=Refusal(name=name),
        expand=each_pair if function else only_itself,
    )


IN_PLACE, OUT_OF_PLACE = _placement("in_place"), _placement("out_of_place")

DEFINITIONS = (
    _collective("all_reduce", "joins a buffer on every rank; size = the buffer", REDOP, IN_PLACE, joins=True),
    _collective("all_gather", "every rank's shard to every rank; size = the output", OUT_OF_PLACE, sharded=True),
    _collective(
        "reduce_scatter", "joins, a shard to each; size = the input", REDOP, OUT_OF_PLACE, joins=True, sharded=True
    ),
    _collective("all_to_all", "one shard from each rank to each; size = what one rank sends", sharded=True),
    _collective("broadcast", "one rank's buffer to every rank; size = the buffer", ROOT),
    _collective("all_to_all_v", "uneven shards; size = what the busiest rank sends", SKEW, TRAFFIC),
    _collective("reduce", "joins a buffer on one rank; size = the buffer", REDOP, ROOT, joins=True),
    _collective("gather", "every rank's shard to one; size = the output", ROOT, sharded=True),
    _collective("scatter", "one rank's shards to every rank; size = the input", ROOT, sharded=True),
    _collective("all_reduce_two_step", "all_reduce as reduce_scatter and all_gather", REDOP, joins=True, sharded=True),
    _collective("barrier", "waits for every rank; moves no data", data=()),
    Definition(
        name="p2p.sendrecv",
        target="bench.operations.p2p:sendrecv",
        help="ring: every rank sends to the next while it receives from the last",
        params=(SIZE, DTYPE, MODE, *GROUP),
        refuse=Refusal(name="sendrecv"),
        expand=each_group,
    ),
    Definition(
        name="compute.gemm",
        target="bench.operations.local:gemm",
        help="a float32 matrix product on every rank, to see what communication beside it costs",
        params=(GEMM_SIZE, BESIDE),
    ),
    Definition(
        name="memory.copy",
        target="bench.operations.local:copy",
        help="a copy in memory on every rank at once: what no message between them on this node can exceed",
        params=(SIZE, DTYPE, COPY_MODE),
        refuse=Refusal(name="copy"),
    ),
    _pair("pingpong", "there and back between two ranks; the time is half the round trip"),
    _pair("unidirectional", "one rank sends to another"),
    _pair("bidirectional", "two ranks send to each other at once"),
    _pair("matrix", "every ordered pair of ranks in turn, one sends to the other", function="unidirectional"),
    Definition(
        name="p2p.round",
        target="bench.operations.p2p:round_of_pairs",
        help="every rank and one other send to each other, all pairs at once; a tournament's rounds in turn",
        params=(SIZE, DTYPE, MODE, ROUND, PAIRS, WAYS, REPEAT),
        refuse=refuse_round,
        expand=each_round,
    ),
)
