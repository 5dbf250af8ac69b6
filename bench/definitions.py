"""The collectives and point-to-point operations that can be measured, declared without torch.

The conventions of size and bus bandwidth are nccl-tests' (its doc/PERFORMANCE.md).
"""

from collections.abc import Callable, Mapping

from bench.cases import Definition, Setting
from bench.dtypes import DTYPES, supports
from bench.params import Param, Value
from bench.units import format_size

SIZE = Param(name="size_bytes", kind="size", default=1 << 20, minimum=1, help="total bytes, as nccl-tests counts them")
DTYPE = Param(name="dtype", kind="str", default="float32", choices=tuple(DTYPES), help="element type")
MODE = Param(
    name="mode",
    kind="str",
    default="blocking",
    choices=("blocking", "pipelined"),
    help="one at a time from a barrier, or many back to back",
)
ROOT = Param(name="root", kind="int", default=0, minimum=0, help="rank that holds the data")
COMMON = (SIZE, DTYPE, MODE)

# input, output and reference of the largest operation, and room for a temporary of the check
_BUFFERS_PER_RANK = 6


def _refuse(params: Mapping[str, Value], setting: Setting, *, shards: int) -> str | None:
    """Refuse a dtype that the backend lacks, a size that does not divide, a size that does not fit in memory."""
    dtype, size = str(params["dtype"]), int(params["size_bytes"])
    if not supports(setting.backend, dtype):
        return f"{setting.backend} carries no {dtype}"
    itemsize = DTYPES[dtype].itemsize
    if size % (shards * itemsize):
        ranks = f"{shards} ranks x " if shards > 1 else ""
        below = size - size % (shards * itemsize)
        above = below + shards * itemsize
        nearest = f"nearest are {below} and {above}" if below else f"the least is {above}"
        return f"size {size} B is not a multiple of {ranks}{itemsize} B ({dtype}); {nearest}"
    needed = size * _BUFFERS_PER_RANK
    if setting.rank_bytes is not None and needed > setting.rank_bytes:
        return (
            f"size {format_size(size)} needs about {needed / 1e9:.1f} GB a rank; "
            f"a rank can have {setting.rank_bytes / 1e9:.1f} GB"
        )
    root = int(params.get("root", 0))
    return f"root {root} is not one of the {setting.nproc} ranks" if root >= setting.nproc else None


def _whole(params: Mapping[str, Value], setting: Setting) -> str | None:
    return _refuse(params, setting, shards=1)


def _sharded(params: Mapping[str, Value], setting: Setting) -> str | None:
    return _refuse(params, setting, shards=setting.nproc)


def _operation(
    name: str, help_text: str, refuse: Callable[[Mapping[str, Value], Setting], str | None], *more: Param
) -> Definition:
    module = "bench.p2p" if name.startswith("p2p.") else "bench.collectives"
    function = name.partition(".")[2]
    return Definition(name=name, target=f"{module}:{function}", help=help_text, params=(*COMMON, *more), refuse=refuse)


DEFINITIONS = (
    _operation("collective.all_reduce", "sum of one buffer, in place on every rank; size = the buffer", _whole),
    _operation("collective.all_gather", "every rank's shard to every rank; size = the gathered output", _sharded),
    _operation("collective.reduce_scatter", "sum, one shard to each rank; size = the whole input", _sharded),
    _operation("collective.all_to_all", "one shard from each rank to each; size = what one rank sends", _sharded),
    _operation("collective.broadcast", "one rank's buffer to every rank; size = the buffer", _whole, ROOT),
    _operation("p2p.sendrecv", "ring: every rank sends to the next while it receives from the last", _whole),
)
