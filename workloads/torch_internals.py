"""Wrappers of the private functions of torch that training steps need."""

import functools
import gc
import importlib
import time
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
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import checkpoint

from parbench.bench.results.step_trace import TraceEvent
from parbench.bench.world import accelerator

ATTENTIONS = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
)
"""The operators by which torch implements scaled_dot_product_attention."""
_EVENT_SECONDS = 0.05
"""The seconds for which a profile waits for the last events of other threads."""


@contextmanager
def open_profiler(device: torch.device, *, memory: bool = False) -> Iterator[profile]:
    """Profile the body of the ``with`` statement, on the host and on CUDA also on the device.

    Yield torch's profiler, whose events exist after the body. With ``memory``, allocations are
    recorded too.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(accelerator.PROFILER_ACTIVITY)
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():
        # Before torch 2.13 the first profile of a process warns about events of an earlier one.
        warnings.filterwarnings(
            "ignore", "Warning: Profiler clears events at the end of each cycle", UserWarning
        )
        profiler.start()
    try:
        yield profiler
    finally:
        # Threads of gloo end their events a little after the work that they complete. An event
        # that ends in a stopped profiler corrupts the heap.
        time.sleep(_EVENT_SECONDS)
        profiler.stop()


def _list_events(profiler: profile) -> list[Any]:
    """Return the raw Kineto events of a finished profile.

    ``profiler.events()`` returns them as Python objects, which is a hundred times slower.
    """
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    assert results is not None, "the profile is finished"
    return list(results.events())


def list_allocations(profiler: profile, device: torch.device) -> list[tuple[int, int]]:
    """Return each allocation and release of memory on a device, in the order of time.

    An element is the time in ns of the profiler's clock and the number of bytes, which is negative
    for a release. ``profiler`` is a finished profile with ``memory``.
    """
    kind = accelerator.PROFILER_DEVICE if device.type == "cuda" else DeviceType.CPU
    allocations = []
    for event in _list_events(profiler):
        if event.name() == "[memory]" and event.device_type() == kind:
            allocations.append((event.start_ns(), event.nbytes()))
    return sorted(allocations, key=lambda allocation: allocation[0])


def trace_events(profiler: profile) -> list[TraceEvent]:
    """Return all events of a finished profile, of the host and the device, as ``TraceEvent``."""
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
        for event in _list_events(profiler)
    ]


def make_fake_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new process group of the same ranks, whose collectives send nothing.

    It uses torch's fake backend. All ranks of the group must call this function.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    ranks = dist.get_process_group_ranks(group)
    fake = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    return cast(dist.ProcessGroup, fake)


def find_group(name: str) -> dist.ProcessGroup:
    """Return the process group to which torch gave this name.

    Functional collectives have such names as arguments. Raises ``RuntimeError`` for an unknown
    name.
    """
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def unbox_group(argument: object) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a c10d operator contains.

    The result is None if the argument is not a process group.
    """
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None


def make_finished_work(tensors: Tensor | list[Tensor]) -> object:
    """Return a work object of torch's c10d, as a collective returns it, that has already finished.

    It is boxed as torch's operators require. The value of its future is the list of ``tensors``.
    """
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([tensors] if isinstance(tensors, Tensor) else list(tensors))
    return _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def load_zero_redundancy_optimizer() -> Callable[..., torch.optim.Optimizer]:
    """Return the class ZeroRedundancyOptimizer of torch.

    It is imported only here, without its warning, because the import takes a second.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def forget_meshes() -> None:
    """Clear the caches of DTensor, so that destroyed process groups and their threads are freed.

    The caches keep device meshes alive, and meshes keep their process groups alive. DTensor also
    finds a cached mesh for a new one with equal ranks and names, although its groups are destroyed.
    Torch 2.11 keeps some meshes elsewhere. Destroyed groups are removed from these meshes.
    """
    redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
    redistribute.clear_redistribute_planner_cache()
    debug = importlib.import_module("torch.distributed.tensor.debug")
    debug._clear_sharding_prop_cache()
    device = accelerator.get_selected_device()
    if device is not None:
        # The dispatch cache is per thread, and backward on a device has its own thread.
        _run_in_backward(debug._clear_sharding_prop_cache, device)
    for value in gc.get_objects():
        if type(value) is functools._lru_cache_wrapper:
            if value.__module__.startswith("torch.distributed"):
                value.cache_clear()
        elif type(value) is DeviceMesh:
            groups = vars(value).get("_pg_registry") or {}
            for name, group in list(groups.items()):
                if group not in distributed_c10d._world.pg_map:
                    del groups[name]


def _run_in_backward(function: Callable[[], None], device: torch.device) -> None:
    """Call ``function`` now in autograd's thread for ``device``, and wait until it returns.

    Autograd runs the backward pass of each device in a thread of its own. State that torch keeps
    per thread, such as DTensor's dispatch cache, can be cleared only there.
    """
    result = torch.zeros((), device=device, requires_grad=True) * 1
    result.register_hook(lambda _gradient: function())  # type: ignore[no-untyped-call]
    result.backward()  # type: ignore[no-untyped-call]


def with_checkpointing(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``function`` with activation checkpointing: it recomputes activations in backward.

    ``options`` are those of torch's ``checkpoint``. With ``context_fn``, some activations can be
    saved, which saved-tensor hooks do not see. The state of random generators is not saved, because
    on CUDA that would wait for the device.
    """
    if torch.__version__ >= "2.14":
        # Since then torch warns if hooks meet a policy, unless they explicitly see nothing.
        options["respect_saved_tensors_hooks"] = False
    return functools.partial(
        checkpoint, function, use_reentrant=False, preserve_rng_state=False, **options
    )
