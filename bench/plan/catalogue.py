"""The table of operations, declared without torch, by the conventions of nccl-tests."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, NamedTuple

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import BenchmarkDefinition, Expansion, Params
from parbench.bench.plan.groups import FORMS, choose_pairs, count_rounds, form_groups
from parbench.bench.plan.params import Param, choice
from parbench.bench.text import UserError, format_size

# --- Types ---


class Dtype(NamedTuple):
    """The size of an element type, and the range in which the type stores all integers exactly."""

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


BusFactor = Callable[[int], float]
"""A function that returns busbw / algbw of an operation on n ranks, as nccl-tests defines it."""


def compute_double_ring_factor(n: int) -> float:
    """Return 2(n-1)/n, the ratio busbw / algbw of an all-reduce on ``n`` ranks."""
    return 2 * (n - 1) / n


def compute_ring_factor(n: int) -> float:
    """Return (n-1)/n, the ratio busbw / algbw if each of ``n`` ranks has a shard of the data."""
    return (n - 1) / n


def compute_unit_factor(n: int) -> float:
    """Return 1, the ratio busbw / algbw of an operation such as a broadcast, for any ``n``."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class OperationSpec(BenchmarkDefinition):
    """The definition of a collective, a point-to-point operation, a copy or a GEMM.

    The fields of this class decide on which ranks and in which modes the operation can run.
    """

    busbw: BusFactor | None = None
    """A function that returns busbw / algbw for a number of ranks.

    None if the operation moves no data between ranks.
    """
    in_place: bool = False
    """True if the result overwrites the input buffer by default."""
    asynchronous: bool = True
    """True if torch can issue the operation with ``async_op=True`` and wait for its end later."""

    @property
    def sharded(self) -> bool:
        """True if ``size_bytes`` consists of an equal shard for each rank, as in an all-gather."""
        return self.busbw is compute_ring_factor

    @property
    def is_reduction(self) -> bool:
        """True if the operation combines values of ranks and so has a parameter ``redop``."""
        return REDOP in self.params

    def refuse(self, params: Params, spec: WorldSpec) -> str | None:
        """Return a sentence with the reason why the operation cannot run, None if it can.

        ``params`` holds the values of all parameters of the case, and ``spec`` describes the ranks
        of the run. Raises ``UserError`` if the process group that ``params`` selects cannot be
        formed of these ranks.
        """
        case = CaseInWorld(self, params, spec, _count_ranks(params, spec))
        return (
            _refuse_ranks(case)
            or _refuse_dtype(case)
            or _refuse_size(case)
            or _refuse_backend(case)
            or _refuse_mode(case)
        )


# --- Parameters ---

IN_PLACE, OUT_OF_PLACE = "in_place", "out_of_place"
SIZE = Param("size_bytes", "size", 1 << 20, "total bytes, as nccl-tests counts them", minimum=0)
DTYPE = Param("dtype", "str", "float32", "element type", choices=tuple(DTYPES))
MODES = ("blocking", "pipelined", "async", "graph")
MODE_HELP = (
    "blocking: each starts at a barrier; pipelined: back to back, as in nccl-tests; "
    "async: issue and wait timed separately; graph: a CUDA graph, as in nccl-tests -G"
)
MODE = choice("mode", MODE_HELP, *MODES, optional=False)
LOCAL_MODE = choice("mode", MODE_HELP, "blocking", "pipelined", optional=False)
GROUP = (
    Param("group", "str", "world", f"ranks that take part: {FORMS}", optional=True),
    Param("group_index", "int", 0, "index of the measured group", minimum=0, optional=True),
    Param("concurrent", "bool", False, "run all groups at once", optional=True),
)
REDOP = choice("redop", "reduction of the values", "sum", "avg", "min", "max", "product")
ROOT_HELP = "rank in the group that sends (broadcast, scatter) or receives (reduce, gather)"
ROOT = Param("root", "int", 0, ROOT_HELP, minimum=0, optional=True)
ENDS = (
    Param("source", "int", 0, "the sending rank", minimum=0),
    Param("target", "int", 1, "the receiving rank", minimum=0),
)
ROUND = Param("round", "int", 0, "index of the round of the round-robin", minimum=0)
PAIRS_HELP = "pairs of ranks, such as '0-3 1-2', in place of a round"
PAIRS = Param("pairs", "str", "", PAIRS_HELP, optional=True)
DIRECTION_HELP = "both ranks of a pair send at once, or one after the other"
DIRECTION = choice("direction", DIRECTION_HELP, "at_once", "in_turn")
REPEAT_HELP = "number that distinguishes repeats of a case"
REPEAT = Param("repeat", "int", 0, REPEAT_HELP, minimum=0, optional=True)
SKEW_HELP = "share of the bytes that only rank 0 gets, before the rest is divided equally"
SKEW = Param("skew", "float", 0.0, SKEW_HELP, minimum=0, maximum=1, optional=True)
NO_LOAD = "nothing"
"""The value of the parameter ``background`` for a measurement without a background load."""
BACKGROUND = choice("background", "load on every rank during the measurement", NO_LOAD, "gemm")
GEMM_SIZE = Param("m", "int", 512, "rows and columns of each matrix", minimum=1)
GEMM_DTYPE = choice("dtype", "element type", "float32", "bfloat16", "float16", "float64")
LOAD_HELP = "seconds of GEMMs before the measurement, so that clocks and temperature are steady"
GEMM_LOAD = Param("load_seconds", "float", 0.0, LOAD_HELP, minimum=0, maximum=60, optional=True)
# Parameters that the runner handles. They are not passed to `prepare`.
RUNNER_PARAMS = (MODE.name, *(param.name for param in GROUP), BACKGROUND.name)

# --- Rules: each returns a sentence with the reason why a case cannot run, None if it can run ---

GLOO_HINT = "use --backend nccl with a GPU for each rank, or --device cpu"
"""Advice for operations that gloo does not support with tensors on GPUs."""


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


def _refuse_ranks(case: CaseInWorld) -> str | None:
    """Return an error message if ranks in the parameters do not exist or cannot exchange data.

    The function checks root, source, target, round and pairs. A process group of an operation
    between ranks must have two ranks, except for a collective of the group ``world``. The result is
    None if all is valid.
    """
    params, n = case.params, case.num_ranks
    group = params.get("group", "world")
    is_local = case.operation.name.startswith(("compute.", "memory."))
    if n < 2 and group != "world" and not is_local:
        return f"group {group!r} has one rank, and no data would move; write a larger group"
    if n < 2 and case.operation.name.startswith("p2p."):
        return "a message needs two ranks: use --nproc 2 or more"
    for name in ("root", "source", "target"):
        if int(params.get(name, 0)) >= n:
            return f"{name} {params[name]} is not one of the {n} ranks, 0 to {n - 1}"
    if "source" in params and params["source"] == params["target"]:
        return f"source and target are both rank {params['source']}: use two ranks"
    if "round" in params:
        try:
            choose_pairs(n, int(params["round"]), str(params["pairs"]))
        except UserError as error:
            return str(error)
    return None


def _refuse_dtype(case: CaseInWorld) -> str | None:
    """Return an error message if the element type cannot be communicated or averaged.

    Results are compared with exact numbers. The comparison must detect that an average left out a
    rank or counted it twice. So averages of n - 1, n and n + 1 equal terms must differ in the
    dtype. The result is None if the element type is valid.
    """
    dtype, n = str(case.params.get("dtype")), case.num_ranks
    if case.spec.backend == "gloo" and dtype.startswith("float8"):
        return f"gloo does not support {dtype}: use dtype=bfloat16, or --backend nccl"
    is_inexact = dtype.startswith(("float8", "int", "uint"))
    if case.params.get("redop") == "avg" and (
        is_inexact or 2 * (n + 1) > DTYPES[dtype].exact_up_to
    ):
        return f"the average of {n} ranks is not exact in {dtype}: use redop=sum or dtype=float32"
    return None


def _refuse_size(case: CaseInWorld) -> str | None:
    """Return an error message if ``size_bytes`` is not divisible or needs too much memory.

    A size must be a multiple of the bytes of an element. If the operation is sharded, it must be a
    multiple of the bytes of one element on each rank. The result is None if the size is valid.
    """
    params, rank_bytes = case.params, case.spec.rank_bytes
    if "size_bytes" not in params:
        return None
    size, dtype = int(params["size_bytes"]), str(params["dtype"])
    is_sharded = case.operation.sharded and "skew" not in params
    step = DTYPES[dtype].itemsize * (case.num_ranks if is_sharded else 1)
    if size % step:
        owners = f" on each of {case.num_ranks} ranks" if is_sharded else ""
        return f"size {size} B is not a multiple of {step} B (one {dtype}{owners})"
    needed = estimate_needed_bytes(size)
    if rank_bytes is not None and needed > rank_bytes:
        available = f"{rank_bytes / 1e9:.1f} GB are available"
        return f"size {format_size(size)} needs about {needed / 1e9:.1f} GB a rank; {available}"
    return None


def estimate_needed_bytes(size: int) -> int:
    """Return an upper bound of the memory (bytes) that any operation needs on a rank.

    ``size`` is the parameter ``size_bytes``. An operation needs input, output, reference result and
    the copies that torch and the backend make.
    """
    return 8 * size


def _refuse_backend(case: CaseInWorld) -> str | None:
    """Return an error message if the backend cannot run the operation, None if it can."""
    if case.spec.gloo_on_gpus and case.operation.name.startswith("p2p."):
        return f"gloo sends no CUDA tensors from one rank to another: {GLOO_HINT}"
    return None


def _refuse_mode(case: CaseInWorld) -> str | None:
    """Return an error message if the case cannot be a CUDA graph or an asynchronous call.

    Only the modes ``graph`` and ``async`` are checked. The result is None if the case can run.
    """
    operation, params, spec = case.operation, case.params, case.spec
    if params.get("mode") == "graph":
        if spec.device != "cuda" or (spec.gloo_on_gpus and "group" in params):
            return "mode graph requires --device cuda and --backend nccl: use mode=pipelined"
        if operation.short_name == "barrier" or params.get("background", NO_LOAD) != NO_LOAD:
            return "mode graph supports neither barrier nor background: use mode=pipelined"
    can_be_async = operation.asynchronous and params.get("direction") != "in_turn"
    if params.get("mode") == "async" and not can_be_async:
        return f"mode async: torch has no asynchronous {operation.short_name} of this kind"
    return None


# --- Expansions: each returns the parameters of all cases that follow from a user's parameters ---


def expand_groups(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameter values of each case to measure, two for every process group.

    The user's parameter ``group`` divides all ranks into process groups. In one of the two cases of
    a group only this group communicates (``concurrent`` is False). In the other case all groups
    communicate at once, and this group is measured. If ``params`` has ``group_index`` or
    ``concurrent``, only cases with this value are made. If all ranks form a single group, the
    result has only ``params``.
    """
    num_groups = len(form_groups(str(params.get("group", "world")), spec.nproc, spec.hosts))
    if num_groups == 1:
        return [params]
    cases = [
        {**params, "group_index": index, "concurrent": concurrent}
        for concurrent, index in product((False, True), range(num_groups))
    ]
    return _select_agreeing(cases, params)


def expand_pairs(params: Params, spec: WorldSpec) -> Iterable[Params]:
    """Return the parameter values of each case to measure, one for every ordered pair of ranks.

    The pair is in the parameters ``source`` and ``target``. If ``params`` has one of them, only
    pairs with this rank are made.
    """
    cases = [
        {**params, "source": source, "target": target}
        for source, target in permutations(range(spec.nproc), 2)
    ]
    return _select_agreeing(cases, params)


def _select_agreeing(cases: Sequence[Params], params: Params) -> Sequence[Params]:
    """Return the elements of ``cases`` that have all values of ``params``.

    If there are none, the result has only ``params``. ``OperationSpec.refuse`` later rejects this
    case with the reason why its values are not possible.
    """
    return [case for case in cases if params.items() <= case.items()] or [params]


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
    params: tuple[Param, ...],
    tags: tuple[str, ...] = (),
    *,
    expand: Expansion = expand_groups,
    **fields: Any,
) -> OperationSpec:
    """Return the definition of the operation ``name``, such as ``collective.all_reduce``.

    The function that sets it up has the part of ``name`` after the dot as its name. The other
    arguments are fields of ``OperationSpec``.
    """
    kind, _, function = name.partition(".")
    return OperationSpec(
        name=name,
        target=f"parbench.bench.operations.{_MODULES[kind]}:{function}",
        help=help_text,
        params=params,
        tags=tags,
        expand=expand,
        **fields,
    )


DATA = (SIZE, DTYPE, MODE)
"""The parameters of every operation that moves data between ranks."""
SHARED = (BACKGROUND, *GROUP)
"""The parameters that select a background load and process groups."""
LOCAL = (SIZE, DTYPE, LOCAL_MODE, *GROUP)
"""The parameters of a copy within a rank."""
MAIN = ("smoke", "node", "main")
"""The tags of operations that the presets measure at several sizes."""
SIZED = ("smoke", "node", "sized")
"""The tags of operations that the presets ``smoke`` and ``node`` measure at one size."""

OPERATIONS = (
    _declare_operation(
        "collective.all_reduce",
        "combine every rank's buffer, result on all; size = the buffer",
        (*DATA, REDOP, *SHARED),
        MAIN,
        busbw=compute_double_ring_factor,
        in_place=True,
    ),
    _declare_operation(
        "collective.all_gather",
        "collect every rank's shard on all; size = the output",
        (*DATA, *SHARED),
        MAIN,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.reduce_scatter",
        "combine every rank's buffer, a shard on each; size = the input",
        (*DATA, REDOP, *SHARED),
        MAIN,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.all_to_all",
        "each rank sends a shard to each; size = what one rank sends",
        (*DATA, *SHARED),
        MAIN,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.broadcast",
        "copy one rank's buffer to all; size = the buffer",
        (*DATA, ROOT, *SHARED),
        MAIN,
        busbw=compute_unit_factor,
        in_place=True,
    ),
    _declare_operation(
        "collective.all_to_all_v",
        "all_to_all, uneven shards; size = what one rank sends",
        (*DATA, SKEW, *SHARED),
        SIZED,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.reduce",
        "combine every rank's buffer on one; size = the buffer",
        (*DATA, REDOP, ROOT, *SHARED),
        SIZED,
        busbw=compute_unit_factor,
        in_place=True,
    ),
    _declare_operation(
        "collective.gather",
        "collect every rank's shard on one; size = the output",
        (*DATA, ROOT, *SHARED),
        SIZED,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.scatter",
        "split one rank's buffer over all; size = the input",
        (*DATA, ROOT, *SHARED),
        SIZED,
        busbw=compute_ring_factor,
    ),
    _declare_operation(
        "collective.barrier",
        "wait for all ranks; moves no data",
        (MODE, *SHARED),
        ("smoke", "node"),
        asynchronous=False,
    ),
    _declare_operation(
        "p2p.sendrecv",
        "ring: each rank sends to the next and receives from the previous",
        (*DATA, *GROUP),
        MAIN,
        busbw=compute_unit_factor,
    ),
    _declare_operation(
        "compute.gemm",
        "a GEMM on every rank; each element is compared",
        (GEMM_SIZE, GEMM_DTYPE, GEMM_LOAD, *SHARED),
    ),
    _declare_operation(
        "memory.copy",
        "a memory copy on every rank; the ceiling for messages within a node",
        LOCAL,
        ("smoke", "node"),
    ),
    _declare_operation("memory.to_device", "from pinned memory of the host to the GPU", LOCAL),
    _declare_operation("memory.from_device", "from the GPU to pinned memory of the host", LOCAL),
    _declare_operation(
        "p2p.pingpong",
        "between two ranks and back; time = half the round trip",
        (*DATA, *ENDS),
        SIZED,
        busbw=compute_unit_factor,
        asynchronous=False,
    ),
    _declare_operation(
        "p2p.unidirectional",
        "one rank sends to another",
        (*DATA, *ENDS),
        SIZED,
        busbw=compute_unit_factor,
    ),
    _declare_operation(
        "p2p.bidirectional",
        "two ranks send to each other at once",
        (*DATA, *ENDS),
        SIZED,
        busbw=compute_unit_factor,
    ),
    _declare_operation(
        "p2p.matrix",
        "one rank sends to another, every ordered pair in turn",
        (*DATA, *ENDS),
        ("sized",),
        busbw=compute_unit_factor,
        expand=expand_pairs,
    ),
    _declare_operation(
        "p2p.pairwise",
        "all ranks exchange data in pairs, in rounds of a round-robin",
        (*DATA, ROUND, PAIRS, DIRECTION, REPEAT),
        busbw=compute_unit_factor,
        expand=expand_rounds,
    ),
)
DEFINITIONS: tuple[BenchmarkDefinition, ...] = OPERATIONS
"""The benchmarks that this module adds to the catalogue."""


def get_busbw_factor(operation: str, n: int) -> float | None:
    """Return the ratio busbw / algbw of an operation on ``n`` ranks.

    ``operation`` is a name without its kind, such as ``all_reduce``. Returns None if the
    operation has no bus bandwidth.
    """
    for spec in OPERATIONS:
        if spec.short_name == operation and spec.busbw is not None:
            return spec.busbw(n)
    return None
