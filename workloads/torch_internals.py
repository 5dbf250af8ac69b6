"""The functions that torch keeps private and training steps need, in one place."""

import functools
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._autograd import DeviceType
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.checkpoint import checkpoint

from parbench.bench.results.step_trace import TraceEvent

ATTENTIONS = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
)
"""The operators that scaled_dot_product_attention becomes."""


@contextmanager
def profiling(device: torch.device, *, memory: bool = False) -> Iterator[profile]:
    """Profile the host, and the device on CUDA; with ``memory`` also what is allocated.

    Before torch 2.13 a process's first profile warns of events of the cycle before, which there is none of.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Warning: Profiler clears events at the end of each cycle", UserWarning
        )
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def kineto_events(profiler: profile) -> list[Any]:
    """Return a finished profile's events as they came; torch's own ``events()`` takes a hundred times as long."""
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    assert results is not None, "the profile is finished"
    return list(results.events())


def allocations(profiler: profile) -> list[int]:
    """Return what torch's allocator for the host took (positive) and gave back (negative), in bytes, in order."""
    return [num_bytes for _, num_bytes in allocations_at(profiler, torch.device("cpu"))]


def allocations_at(profiler: profile, device: torch.device) -> list[tuple[int, int]]:
    """Return when torch's allocator for a device took bytes (positive) or gave them back (negative), in order of ns."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    events = [
        each
        for each in kineto_events(profiler)
        if each.name() == "[memory]" and each.device_type() == kind
    ]
    return sorted(((each.start_ns(), each.nbytes()) for each in events), key=lambda one: one[0])


def trace_events(profiler: profile) -> list[TraceEvent]:
    return [
        TraceEvent(
            name=event.name(),
            start_ns=event.start_ns(),
            stop_ns=event.start_ns() + event.duration_ns(),
            thread=event.start_thread_id(),
            is_device=event.device_type() != DeviceType.CPU,
            is_async=event.is_async(),
            is_annotation=event.is_user_annotation(),
            correlation=event.correlation_id(),
            operator_correlation=event.linked_correlation_id(),
        )
        for event in kineto_events(profiler)
    ]


def fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks on torch's fake backend, on which nothing moves; its ranks take part."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    ranks = dist.get_process_group_ranks(group)
    return cast(
        dist.ProcessGroup, dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    )


def group_named(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def boxed_group(arg: object) -> dist.ProcessGroup | None:
    """Return the process group in what an operator of c10d is given; None of all else."""
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    return None


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
    """Make DTensor forget its meshes: meshes of the same ranks and names are equal to it, whatever their groups.

    Its caches keep the meshes, their groups and these groups' threads alive as long as the process. torch 2.11 keeps
    some meshes after a sum or a detach; closed groups are removed from those.
    """
    importlib.import_module(
        "torch.distributed.tensor._redistribute"
    ).clear_redistribute_planner_cache()
    clear_dispatch_cache = importlib.import_module(
        "torch.distributed.tensor.debug"
    )._clear_sharding_prop_cache
    clear_dispatch_cache()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # each thread has a cache for dispatch in C++, and backward of CUDA tensors has its own thread
        run_in_backward(clear_dispatch_cache, torch.device("cuda", torch.cuda.current_device()))
    for held in gc.get_objects():
        if type(held) is functools._lru_cache_wrapper and held.__module__.startswith(
            "torch.distributed"
        ):
            held.cache_clear()
        elif type(held) is DeviceMesh and (groups := vars(held).get("_pg_registry")):
            for name in [
                name
                for name, group in groups.items()
                if group not in distributed_c10d._world.pg_map
            ]:
                del groups[name]


def run_in_backward(function: Callable[[], None], device: torch.device) -> None:
    """Call a function in the thread that runs the backward pass of a device's tensors."""
    result = torch.zeros((), device=device, requires_grad=True) * 1
    result.register_hook(lambda _gradient: function())  # type: ignore[no-untyped-call]
    result.backward()  # type: ignore[no-untyped-call]


def checkpointed(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that forgets its activations, but what a policy keeps, which hooks do not see.

    The generators' state is not kept: on CUDA that would wait for the device. Since torch 2.14 it warns where hooks
    meet a policy, unless it is told that they see nothing.
    """
    if torch.__version__ >= "2.14":
        options["respect_saved_tensors_hooks"] = False
    return functools.partial(
        checkpoint, function, use_reentrant=False, preserve_rng_state=False, **options
    )
