"""The names that torch renamed or keeps private, in one place.

torch 2.13 has ``all_gather_single`` and ``reduce_scatter_single`` and deprecates the older names; 2.11 has only those.
"""

import ctypes
import functools
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._autograd import DeviceType
from torch.distributed import _functional_collectives, distributed_c10d
from torch.profiler import profile

REDUCE_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "min", "max", "product")}


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """What torch's profiler saw, in ns of its clock; ``device`` is the device's, not the host's.

    An ``annotation`` is a range with a name of its own: torch puts those of the host on the device too, around kernels.
    A kernel has the ``correlation`` of the host's launch of it, and is ``linked`` to the correlation of the innermost
    operator that launched it; 0 is none. Operators and launches number theirs apart.
    """

    name: str
    start_ns: int
    stop_ns: int
    thread: int
    device: bool
    asynchronous: bool
    annotation: bool = False
    correlation: int = 0
    linked: int = 0


def trace_events(profiler: profile) -> list[TraceEvent]:
    """Return all events of a finished profile; torch's own ``events()`` takes a hundred times as long to make trees."""
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    assert results is not None, "the profile is finished"
    return [
        TraceEvent(
            name=event.name(),
            start_ns=event.start_ns(),
            stop_ns=event.start_ns() + event.duration_ns(),
            thread=event.start_thread_id(),
            device=event.device_type() != DeviceType.CPU,
            asynchronous=event.is_async(),
            annotation=event.is_user_annotation(),
            correlation=event.correlation_id(),
            linked=event.linked_correlation_id(),
        )
        for event in results.events()
    ]


def all_gather_single(
    output: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Gather every rank's ``shard`` (s elements) into ``output`` (n * s elements), in rank order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work | None, call(output, shard, group=group, async_op=async_op))


def reduce_scatter_single(
    shard: Tensor, whole: Tensor, group: dist.ProcessGroup, redop: str = "sum", *, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``whole`` (n * s elements) over ranks and leave this rank's ``shard`` (s elements) of it."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(dist.Work | None, call(shard, whole, op=REDUCE_OPS[redop], group=group, async_op=async_op))


def all_reduce_apart(tensor: Tensor, group: dist.ProcessGroup, redop: str) -> Tensor:
    """Return the reduction of ``tensor`` in a new tensor: torch's functional collective, its copy included."""
    out = _functional_collectives.all_reduce(tensor, redop, group)
    return cast(Tensor, _functional_collectives.wait_tensor(out))  # type: ignore[no-untyped-call]


def coalescing(group: dist.ProcessGroup, device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which collectives are gathered and launched as one; torch keeps it private.

    Without a device, as gloo needs it, only calls of one kind are gathered, and only some kinds.
    """
    return distributed_c10d._coalescing_manager(group=group, device=device)


def fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks on torch's fake backend, on which nothing moves; its ranks take part."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    ranks = dist.get_process_group_ranks(group)
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend="fake", use_local_synchronization=True))


def recorded_work() -> tuple[dict[str, tuple[int, ...]], list[bytes]]:
    """Return this rank's groups by name, with their ranks, and torch's records of work on NCCL and on gloo, in JSON."""
    world = distributed_c10d._world
    names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)  # copies, for another thread makes groups
    groups = {str(name): tuple(ranks[group]) for group, name in names.items() if group in ranks}
    dumps = [getattr(_distributed_c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return groups, [dump() for dump in dumps if dump is not None]


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Let every group that is made within have this time-out, meshes' and torch's own too, rather than torch's."""
    theirs = vars(distributed_c10d)
    before = {name: theirs[name] for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    theirs.update(dict.fromkeys(before, timeout))
    try:
        yield
    finally:
        theirs.update(before)


def nccl_version() -> str:
    """Return the version of the NCCL that is loaded; torch's own function tells what it was compiled with."""
    number = ctypes.c_int()
    try:  # the library that torch is linked to, or torch's own
        failed = ctypes.CDLL("libtorch_cuda.so").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        failed = True
    if failed:
        compiled = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"{compiled} when torch was compiled"
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def group_named(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def done_work(tensors: Tensor | list[Tensor]) -> object:
    """Return work that is done, with its tensors as its future's value, as operators return it."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([tensors] if isinstance(tensors, Tensor) else list(tensors))
    return _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def sharding_optimizer() -> Callable[..., torch.optim.Optimizer]:
    """Return torch's ZeroRedundancyOptimizer, whose module takes a second to import and warns of torch's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def forget_meshes() -> None:
    """Let DTensor forget meshes: to it those of the same ranks and names are one, whatever their groups.

    Its caches hold the meshes, and with them their groups and these groups' threads, as long as the process lives.
    """
    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    importlib.import_module("torch.distributed.tensor._redistribute").clear_redistribute_planner_cache()
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and cached.__module__.startswith("torch.distributed"):
            cached.cache_clear()


def stage_backward() -> Any:
    """Return torch's module of ``stage_backward_input`` and ``stage_backward_weight``, a backward pass in two."""
    return importlib.import_module("torch.distributed.pipelining._backward")


def pipeline_runtime(
    stages: list[Any], order: Mapping[int, Sequence[str]], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Return torch's runtime of pipelines with an order of actions, by rank, that torch has no class for.

    Gradients are added up as they come: ``loss`` is a microbatch's part of the mean.
    """
    module = importlib.import_module("torch.distributed.pipelining.schedules")
    runtime = module._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss, scale_grads=False)
    actions = {rank: [module._Action.from_str(action) for action in of] for rank, of in order.items()}
    runtime.pipeline_order = {rank: list(of) for rank, of in actions.items()}
    runtime._prepare_schedule_with_comms(actions)
    return runtime
