"""The table of operations, declared without torch, by the conventions of nccl-tests."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, Expansion, Params, keep_params
from parbench.bench.plan.groups import FORMS, choose_pairs, count_rounds, form_groups
from parbench.bench.plan.params import Param, Value, choice
from parbench.bench.text import UserError, format_size

# --- Types ---


class Dtype(NamedTuple):
    """The size of an element type, and the range of integers that the type stores exactly."""

    itemsize: int
    """The bytes of one element."""
    exact_up_to: int
    """The largest n for which the type represents every integer from 0 to n exactly."""


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
}


class Factor(NamedTuple):
    """The ratio busbw / algbw of an operation, as nccl-tests defines it."""

    text: str
    """The formula of the ratio as text, such as ``2(n-1)/n``, in which n is the number of ranks."""
    compute: Callable[[int], float]
    """Computes the ratio from the number of ranks."""


# The ratios busbw / algbw of nccl-tests.
TWICE_RING = Factor(text="2(n-1)/n", compute=lambda n: 2 * (n - 1) / n)
RING = Factor(text="(n-1)/n", compute=lambda n: (n - 1) / n)
ONE = Factor(text="1", compute=lambda n: 1.0)


@dataclass(frozen=True, kw_only=True)
class OperationSpec(BenchmarkDefinition):
    """The definition of a collective, a point-to-point operation, a copy or a matrix product.

    Its fields decide on which ranks and in which modes the operation can run.
    """

    busbw: Factor | None = None
    """The ratio busbw / algbw, None if the operation moves no data between ranks."""
    sharded: bool = False
    """True if ``size_bytes`` consists of an equal shard for each rank, as in an all-gather."""
    in_place: bool = False
    """True if the result overwrites the input buffer by default."""
    asynchronous: bool = True
    """True if torch can issue the operation with ``async_op=True`` and wait for its end later."""
    coalesced: tuple[str, ...] = ()
    """The backends that can launch several calls of the operation as one: ``nccl``, ``gloo``."""

    @property
    def is_reduction(self) -> bool:
        """True if the operation combines values of ranks and so has a parameter ``redop``."""
        return REDOP in self.params

    @property
    def placements(self) -> tuple[str, ...]:
        """The allowed values of ``placement``, which are ``in_place`` and ``out_of_place``.

        The first one is the default. An operation without this parameter has only one placement.
        """
        for param in self.params:
            if param.name == "placement":
                return tuple(map(str, param.choices))
        return (IN_PLACE if self.in_place else OUT_OF_PLACE,)

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return a sentence with the reason why the operation cannot run, None if it can.

        ``params`` holds the values of all parameters of the case, and ``spec`` describes the ranks
        of the run. Raises ``UserError`` if the process group that ``params`` selects cannot be
        formed of these ranks.
        """
        case = CaseInWorld(self, params, spec, _count_ranks(params, spec))
        for rule in RULES:
            reason = rule(case)
            if reason is not None:
                return reason
        return None


# --- Parameters ---

IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"
SIZE = Param("size_bytes", "size", 1 << 20, "total bytes, as nccl-tests counts them", minimum=0)
DTYPE = Param("dtype", "str", "float32", "element type", choices=tuple(DTYPES))
MODES = ("blocking", "pipelined", "async", "coalesced", "graph")
MODE_HELP = (
    "blocking: each starts at a barrier; pipelined: back to back, as nccl-tests; "
    "async: issue and wait timed apart; coalesced: several in one launch; "
    "graph: a CUDA graph, as nccl-tests -G"
)
MODE = choice("mode", MODE_HELP, *MODES, optional=False)
LOCAL_MODE = choice("mode", MODE_HELP, "blocking", "pipelined", optional=False)
GROUP = (
    Param("group", "str", "world", f"which ranks take part: {FORMS}", optional=True),
    Param("group_index", "int", 0, "measure only this group", minimum=0, optional=True),
    Param("concurrent", "bool", False, "run all groups at once", optional=True),
)
PLACE_HELP = "where the result goes: into the input's buffer or another"
IN_PLACE_FIRST = choice("placement", PLACE_HELP, IN_PLACE, OUT_OF_PLACE)
OUT_OF_PLACE_FIRST = choice("placement", PLACE_HELP, OUT_OF_PLACE, IN_PLACE)
REDOP = choice("redop", "how values are combined", "sum", "avg", "min", "max", "product")
ROOT = Param("root", "int", 0, "rank in the group that has the data", minimum=0, optional=True)
ENDS = (
    Param("source", "int", 0, "the sending rank", minimum=0),
    Param("target", "int", 1, "the receiving rank", minimum=0),
)
ROUND = Param("round", "int", 0, "only this round; each has other pairs of ranks", minimum=0)
PAIRS = Param("pairs", "str", "", "these pairs instead, such as '0-3 1-2'", optional=True)
DIRECTION = choice("direction", "both ways at once, or in turn", "at_once", "in_turn")
REPEAT = Param("repeat", "int", 0, "a number for repeated cases", minimum=0, optional=True)
SKEW_HELP = "share of the bytes that goes to rank 0; in all_gather_v, that rank 0 contributes"
SKEW = Param("skew", "float", 0.0, SKEW_HELP, minimum=0, maximum=1, optional=True)
COLLECTIVE_LOADS = ("all_reduce", "all_gather", "all_to_all")
"""The collectives that can run in the background of a measurement."""
NO_LOAD = "nothing"
"""The value of the parameter ``background`` for a measurement without a background load."""
LOADS = (NO_LOAD, "gemm", *COLLECTIVE_LOADS)
BACKGROUND = choice("background", "what runs at the same time on every rank", *LOADS)
REGISTER = Param(
    "register", "bool", False, "register the buffers with NCCL (ncclCommRegister)", optional=True
)
GEMM_SIZE = Param("m", "int", 512, "rows and columns of each matrix", minimum=1)
GEMM_DTYPES = ("float32", "bfloat16", "float16", "float64")
GEMM_DTYPE = choice("dtype", "element type", *GEMM_DTYPES)
GEMM_LOAD = Param(
    "load_seconds",
    "float",
    0.0,
    "seconds of products of random numbers first, which heat a GPU",
    minimum=0,
    maximum=60,
    optional=True,
)
# Parameters that the runner handles. They are not passed to `prepare`.
RUNNER_PARAMS = (MODE.name, *(param.name for param in GROUP), BACKGROUND.name, REGISTER.name)

# --- Rules: each returns a sentence with the reason why a case cannot run, None if it can run ---

GLOO_HINT = "use --backend nccl with a GPU for each rank, or --device cpu"
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable with the number of hardware queues of a GPU."""


class CaseInWorld(NamedTuple):
    """An operation with the values of its parameters and the ranks on which it is to run."""

    operation: OperationSpec
    """The definition of the operation."""
    params: Params
    """The value of every parameter by name, with defaults."""
    spec: WorldSpec
    """All ranks of the run."""
    num_ranks: int
    """The number of ranks in the process group that is measured."""


def _count_ranks(params: Params, spec: WorldSpec) -> int:
    """Return the number of ranks in the group that ``group`` and ``group_index`` select.

    Without these parameters all ranks are measured. Raises ``UserError`` if the group does not
    exist.
    """
    if "group" not in params:
        return spec.nproc
    group, index = str(params["group"]), int(params["group_index"])
    groups = form_groups(group, spec.nproc, spec.hosts)
    if index >= len(groups):
        raise UserError(f"group_index {index} is not one of the {len(groups)} groups of {group!r}")
    return len(groups[index])


def _refuse_single_rank(case: CaseInWorld) -> str | None:
    """Return an error message if an operation between ranks has a process group of one rank.

    The group ``world`` is allowed to have one rank.
    """
    group = case.params.get("group", "world")
    is_local = case.operation.name.startswith(("compute.", "memory."))
    if case.num_ranks < 2 and group != "world" and not is_local:
        return f"group {group!r} has one rank, and no data would move; write a larger group"
    return None


def _refuse_dtype(case: CaseInWorld) -> str | None:
    """Return an error message if the backend does not support the element type: float8 on gloo."""
    dtype = str(case.params.get("dtype"))
    backend = case.spec.backend
    if backend == "gloo" and dtype.startswith("float8"):
        return f"{backend} does not support {dtype}: use dtype=bfloat16, or --backend nccl"
    return None


def _refuse_average(case: CaseInWorld) -> str | None:
    """Return an error message if an average over the ranks cannot be checked in this dtype.

    The check compares exact numbers, and it must notice that a rank is missing or counted twice.
    """
    if case.params.get("redop") != "avg":
        return None
    n = case.num_ranks
    dtype = str(case.params["dtype"])
    if "float" not in dtype:
        return f"the average of {dtype} is not a {dtype}: use redop=sum or dtype=float32"
    if dtype.startswith("float8") and n & (n - 1):
        return f"the average of {n} ranks is not exact in {dtype}: use redop=sum or dtype=float32"
    if n == 1 and case.spec.backend == "nccl":
        bug = "is wrong in NCCL before 2.29.7 (github.com/NVIDIA/nccl/issues/1950)"
        return f"the average of one rank {bug}: use redop=sum"
    exact_up_to = DTYPES[dtype].exact_up_to
    for wrong_n in (n - 1, n + 1):
        if wrong_n and _round_share(wrong_n, exact_up_to) == _round_share(n, exact_up_to):
            return f"averages of {n} and {wrong_n} ranks are equal in {dtype}: use dtype=float32"
    return None


def _round_share(n: int, exact_up_to: int) -> float:
    """Return 1/n, rounded to a floating-point type that has all integers up to ``exact_up_to``."""
    mantissa, exponent = math.frexp(1 / n)
    return math.ldexp(round(mantissa * exact_up_to), exponent)


def _refuse_size(case: CaseInWorld) -> str | None:
    """Return an error message if ``size_bytes`` has a remainder or needs too much memory.

    A size must be a multiple of the bytes of an element, or of an element on each rank if the
    operation is sharded.
    """
    params = case.params
    if "size_bytes" not in params:
        return None
    size, dtype = int(params["size_bytes"]), str(params["dtype"])
    num_shards = case.num_ranks if case.operation.sharded and "skew" not in params else 1
    itemsize = DTYPES[dtype].itemsize
    step = num_shards * itemsize
    remainder = size % step
    if remainder:
        factors = f"{num_shards} ranks x {itemsize} B" if num_shards > 1 else f"{itemsize} B"
        lower = size - remainder
        hint = f"nearest are {lower} and {lower + step}" if lower else f"the least is {step}"
        return f"size {size} B is not a multiple of {factors} ({dtype}); {hint}"
    rank_bytes = case.spec.rank_bytes
    needed = estimate_needed_bytes(size)
    if rank_bytes is not None and needed > rank_bytes:
        available = f"{rank_bytes / 1e9:.1f} GB are available"
        return f"size {format_size(size)} needs about {needed / 1e9:.1f} GB a rank; {available}"
    return None


def estimate_needed_bytes(size: int) -> int:
    """Return an upper bound of the memory (bytes) that any operation needs on a rank.

    ``size`` is the parameter ``size_bytes``. An operation needs input, output, reference result and
    the copies that torch and the backend make. The largest known need is 7.5 times ``size``, of
    the two-step all-reduce on gloo, which may keep the copies of the previous step's two calls.
    """
    return 8 * size


def _refuse_ranks(case: CaseInWorld) -> str | None:
    """Return an error message if a rank or a pairing of ranks in the parameters does not exist.

    It checks root, source, target, round and pairs.
    """
    params, n = case.params, case.num_ranks
    for name in ("root", "source", "target"):
        if int(params.get(name, 0)) >= n:
            return f"{name} {params[name]} is not one of the {n} ranks, 0 to {n - 1}"
    if "source" in params and params["source"] == params["target"]:
        return f"source {params['source']} and target {params['target']} are one rank: use two"
    if "round" in params:
        try:
            choose_pairs(n, int(params["round"]), str(params["pairs"]))
        except UserError as error:
            return str(error)
    return None


def _refuse_sends_of_gloo(case: CaseInWorld) -> str | None:
    """Return an error message for point-to-point operations if gloo carries CUDA tensors."""
    if case.spec.gloo_on_gpus and case.operation.name.startswith("p2p."):
        return f"gloo sends no CUDA tensors from one rank to another: {GLOO_HINT}"
    return None


def _refuse_register(case: CaseInWorld) -> str | None:
    """Return an error message if the case registers its buffers and the backend is not NCCL.

    The parameter ``register`` requests registration. The result is None if the case can run.
    """
    backend = case.spec.backend
    if case.params.get("register") and backend != "nccl":
        return f"register=true is for NCCL, and the backend is {backend}: use register=false"
    return None


def _refuse_background(case: CaseInWorld) -> str | None:
    """Return an error message if a background collective on NCCL can deadlock with the operation.

    A deadlock is possible if CUDA_DEVICE_MAX_CONNECTIONS=1 gives all kernels one hardware queue.
    """
    background, spec = case.params.get("background"), case.spec
    has_one_queue = os.environ.get(QUEUES_VARIABLE) == "1"
    if background in COLLECTIVE_LOADS and spec.backend == "nccl" and has_one_queue:
        cause = "kernels of two NCCL communicators can deadlock in one hardware queue"
        return f"{QUEUES_VARIABLE}=1: {cause}; unset it, or use background=gemm"
    return None


def _refuse_graph(case: CaseInWorld) -> str | None:
    """Return an error message if mode ``graph`` is set and the case cannot be a CUDA graph."""
    params, spec = case.params, case.spec
    if params.get("mode") != "graph":
        return None
    if spec.device != "cuda":
        return f"mode graph needs CUDA, and the device is {spec.device}: use mode=pipelined"
    if spec.gloo_on_gpus and "group" in params:
        return f"mode graph: a graph cannot contain gloo, which works on the host: {GLOO_HINT}"
    if case.operation.short_name == "barrier":
        return "mode graph: the host waits in a barrier, so use mode=blocking"
    background = params.get("background", NO_LOAD)
    if background != NO_LOAD:
        return f"mode graph: background={background} would be captured too: use background=nothing"
    return None


def _refuse_async(case: CaseInWorld) -> str | None:
    """Return an error message if mode ``async`` is set and torch has no asynchronous call."""
    operation, params = case.operation, case.params
    if params.get("mode") != "async":
        return None
    if _must_copy_input(case) or not operation.asynchronous:
        return f"mode async: {operation.short_name} has no asynchronous form: use mode=pipelined"
    if params.get("direction") == "in_turn":
        return "mode async: direction=in_turn is several calls: use direction=at_once"
    return None


def _refuse_coalesced(case: CaseInWorld) -> str | None:
    """Return an error message if mode ``coalesced`` is set and the backend cannot do it.

    In this mode several calls of the operation are launched as one.
    """
    operation, spec = case.operation, case.spec
    if case.params.get("mode") != "coalesced":
        return None
    if _must_copy_input(case) or spec.backend not in operation.coalesced:
        name = operation.short_name
        return f"mode coalesced: {spec.backend} cannot coalesce {name}: use mode=pipelined"
    if spec.gloo_on_gpus and operation.short_name != "reduce_scatter":
        return f"mode coalesced: gloo coalesces {operation.short_name} only on CPUs: {GLOO_HINT}"
    return None


def _must_copy_input(case: CaseInWorld) -> bool:
    """Return True if the result is out of place, but torch has only the in-place form.

    Then a step includes a copy of the input.
    """
    return case.operation.in_place and case.params.get("placement") == OUT_OF_PLACE


RULES = (
    _refuse_single_rank,
    _refuse_dtype,
    _refuse_average,
    _refuse_size,
    _refuse_ranks,
    _refuse_sends_of_gloo,
    _refuse_register,
    _refuse_background,
    _refuse_graph,
    _refuse_async,
    _refuse_coalesced,
)
"""The functions that check a case before a run, each of which returns a reason or None.

The first reason that is not None is reported.
"""

# --- Expansions: each returns the parameters of all cases that follow from a user's parameters ---


def expand_groups(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameter values of each case to measure, two for every process group.

    The user's parameter ``group`` divides all ranks into process groups. In one of the two cases of
    a group only this group communicates (``concurrent`` is False). In the other case all groups
    communicate at once, and this group is measured. If ``params`` has ``group_index`` or
    ``concurrent``, only cases with this value are made. A single group makes only one case.
    """
    text = str(params.get("group", "world"))
    num_groups = len(form_groups(text, spec.nproc, spec.hosts))
    if text == "world":
        return [params]
    indices = [params["group_index"]] if "group_index" in params else range(num_groups)
    concurrencies: list[Value] = [False, True] if num_groups > 1 else [False]
    if "concurrent" in params:
        concurrencies = [params["concurrent"]]
    pairs = product(concurrencies, indices)
    return [{**params, "group_index": index, "concurrent": flag} for flag, index in pairs]


def expand_pairs(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameter values of each case to measure, one for every ordered pair of ranks.

    The pair is in the parameters ``source`` and ``target``. If ``params`` has one of them, only
    pairs with this rank are made.
    """
    ranks = range(spec.nproc)
    sources = [int(params["source"])] if "source" in params else ranks
    targets = [int(params["target"])] if "target" in params else ranks
    pairs = list(product(sources, targets))
    if len(targets) > 1:
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
    return [{**params, "source": source, "target": target} for source, target in pairs]


def expand_rounds(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameter values of each case to measure, one for every round of a tournament.

    In a round each rank exchanges messages with one partner. Over all rounds of the tournament,
    each rank meets every other rank once. The parameter ``round`` of a case is the index of the
    round. If ``params`` has ``round`` or ``pairs``, the result has only ``params`` itself.
    """
    if "round" in params or params.get("pairs"):
        return [params]
    return [{**params, "round": index} for index in range(count_rounds(spec.nproc))]


# --- The table ---

_MODULES = {"collective": "collectives", "p2p": "p2p", "compute": "local", "memory": "local"}
"""The module with the functions of operations, by the part of their names before the dot."""


def _declare_operation(
    name: str,
    help_text: str,
    *params: Param,
    function: str | None = None,
    expand: Expansion = expand_groups,
    busbw: Factor | None = None,
    sharded: bool = False,
    **fields: Any,
) -> OperationSpec:
    """Return the definition of the operation ``name``, such as ``collective.all_reduce``.

    ``function`` names the function that prepares it, by default the part of ``name`` after the dot.
    ``fields`` are other fields of ``OperationSpec``.
    """
    kind, _, short_name = name.partition(".")
    return OperationSpec(
        name=name,
        target=f"parbench.bench.operations.{_MODULES[kind]}:{function or short_name}",
        help=help_text,
        params=params,
        expand=expand,
        busbw=busbw,
        sharded=sharded or busbw is RING,  # The factor is the share of the other ranks.
        **fields,
    )


DATA = (SIZE, DTYPE, MODE)
SHARED = (BACKGROUND, *GROUP)
COLLECTIVE = (REGISTER, *SHARED)
LOCAL = (SIZE, DTYPE, LOCAL_MODE, *GROUP)
MAIN = ("smoke", "node", "main")
SIZED = ("smoke", "node", "sized")
NCCL = ("nccl",)
BOTH = ("nccl", "gloo")

# fmt: off
OPERATIONS = (
    _declare_operation(
        "collective.all_reduce", "combine every rank's buffer, result on all; size = the buffer",
        *DATA, REDOP, IN_PLACE_FIRST, *COLLECTIVE,
        tags=(*MAIN, "grouped"), busbw=TWICE_RING, in_place=True, coalesced=BOTH,
    ),
    _declare_operation(
        "collective.all_gather", "collect every rank's shard on all; size = the output",
        *DATA, OUT_OF_PLACE_FIRST, *COLLECTIVE,
        tags=MAIN, busbw=RING, coalesced=BOTH,
    ),
    _declare_operation(
        "collective.reduce_scatter", "combine buffers, a shard of it on each; size = the input",
        *DATA, REDOP, OUT_OF_PLACE_FIRST, *COLLECTIVE,
        tags=MAIN, busbw=RING, coalesced=BOTH,
    ),
    _declare_operation(
        "collective.all_to_all", "each rank sends a shard to each; size = what one rank sends",
        *DATA, *COLLECTIVE,
        tags=(*MAIN, "grouped"), busbw=RING, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.broadcast", "copy one rank's buffer to all; size = the buffer",
        *DATA, ROOT, *COLLECTIVE,
        tags=MAIN, busbw=ONE, in_place=True, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.all_to_all_v", "all_to_all, uneven shards; size = what one rank sends",
        *DATA, SKEW, *COLLECTIVE,
        tags=(*SIZED, "uneven"), busbw=RING, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.all_gather_v", "all_gather, uneven shards; size = the output",
        *DATA, SKEW, *COLLECTIVE,
        tags=("sized", "uneven"), busbw=RING,
    ),
    _declare_operation(
        "collective.reduce", "combine every rank's buffer on one; size = the buffer",
        *DATA, REDOP, ROOT, *COLLECTIVE,
        tags=SIZED, busbw=ONE, in_place=True, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.gather", "collect every rank's shard on one; size = the output",
        *DATA, ROOT, *COLLECTIVE,
        tags=SIZED, busbw=RING, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.scatter", "split one rank's buffer over all; size = the input",
        *DATA, ROOT, *COLLECTIVE,
        tags=SIZED, busbw=RING, coalesced=NCCL,
    ),
    _declare_operation(
        "collective.all_reduce_two_step", "all_reduce as reduce_scatter, then all_gather",
        *DATA, REDOP, *COLLECTIVE,
        tags=SIZED, busbw=TWICE_RING, sharded=True, asynchronous=False,
    ),
    _declare_operation(
        "collective.barrier", "wait for all ranks; moves no data",
        MODE, *SHARED,
        tags=("smoke", "node"), asynchronous=False,
    ),
    _declare_operation(
        "p2p.sendrecv", "each sends to the next, receives from the last",
        *DATA, *GROUP,
        tags=MAIN, busbw=ONE,
    ),
    _declare_operation(
        "compute.gemm", "a matrix product on every rank; each element is compared",
        GEMM_SIZE, GEMM_DTYPE, GEMM_LOAD, *SHARED,
    ),
    _declare_operation(
        "memory.copy", "a memory copy on every rank; the ceiling for messages within a node",
        *LOCAL,
        tags=("smoke", "node"),
    ),
    _declare_operation(
        "memory.to_device", "from page-locked memory of the host to the GPU", *LOCAL
    ),
    _declare_operation(
        "memory.from_device", "from the GPU to page-locked memory of the host", *LOCAL
    ),
    _declare_operation(
        "p2p.pingpong", "between two ranks and back; time = half the round trip",
        *DATA, *ENDS,
        tags=SIZED, busbw=ONE, expand=keep_params, asynchronous=False,
    ),
    _declare_operation(
        "p2p.unidirectional", "one rank sends to another",
        *DATA, *ENDS,
        tags=SIZED, busbw=ONE, expand=keep_params,
    ),
    _declare_operation(
        "p2p.bidirectional", "two ranks send to each other at once",
        *DATA, *ENDS,
        tags=SIZED, busbw=ONE, expand=keep_params,
    ),
    _declare_operation(
        "p2p.matrix", "one sends to another, every pair in turn",
        *DATA, *ENDS,
        tags=("sized",), busbw=ONE, function="unidirectional", expand=expand_pairs,
    ),
    _declare_operation(
        "p2p.pairwise", "all ranks at once, in pairs; round by round, until each has met each",
        *DATA, ROUND, PAIRS, DIRECTION, REPEAT,
        busbw=ONE, function="round_of_pairs", expand=expand_rounds,
    ),
)
# fmt: on
DEFINITIONS: tuple[BenchmarkDefinition, ...] = OPERATIONS
"""The benchmarks that this module adds to the catalogue."""


def get_busbw_factor(operation: str, n: int) -> float | None:
    """Return the ratio busbw / algbw of an operation on ``n`` ranks.

    ``operation`` is a name without its kind, such as ``all_reduce``. Returns None if the
    operation has no bus bandwidth.
    """
    for spec in OPERATIONS:
        if spec.short_name == operation and spec.busbw is not None:
            return spec.busbw.compute(n)
    return None


def describe_busbw_factors() -> str:
    """Return a phrase with each formula of busbw / algbw and the operations that have it.

    For example ``2(n-1)/n for all_reduce, ..., and 1 for all others that move data``.
    """
    parts = []
    for factor in (TWICE_RING, RING):
        names = [spec.short_name for spec in OPERATIONS if spec.busbw is factor]
        parts.append(f"{factor.text} for {', '.join(names)}")
    return f"{', '.join(parts)}, and {ONE.text} for all others that move data"
