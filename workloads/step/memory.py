"""The memory of a step: by component as measured, as counted and by formula, and over time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from parbench.bench.results.details import COMPONENTS, MemoryOverTime
from parbench.bench.results.metrics import MetricValue, make_values
from parbench.bench.results.step_trace import STEP, list_phases
from parbench.bench.world.benchmark import Explanation
from parbench.workloads.model.optimizer import MasterAdamW
from parbench.workloads.model.transformer import kept_in, watchers
from parbench.workloads.step.probe import ProbedStep, ResetFn, Step
from parbench.workloads.torch_internals import list_allocations, profiling, trace_events

_MAX_POINTS = 160
_SOURCES = ("memory", "memory_counted", "memory_formula")
_DEFINITIONS = {
    "memory.activations": "peak of forward and backward above their start",
    "memory.buffers": "buffers, and parameters that FSDP has gathered after forward",
    "memory_counted.activations": "saved for backward by the microbatches in flight",
}

BytesByComponent = Mapping[str, float]
MemoryBySource = Mapping[str, BytesByComponent]
"""Bytes by component from each source: measured (``memory``), counted and by formula."""


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """Measures and counts the memory of each component of a step on this rank."""

    step: ProbedStep
    count_activations: Callable[[], float]
    """Runs forward passes, and returns the bytes that microbatches in flight save for backward."""
    formula: BytesByComponent
    """The analytical bytes of this rank, of the components that have a formula."""
    notes: tuple[str, ...] = ()
    share = 0.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> MemoryBySource:
        """Measure the state between steps, the peak of a step, and forward passes.

        The parameters that FSDP has gathered after these passes count as buffers.
        """
        model = self.step.model
        forward_backward = self.step.forward_backward
        parameters: list[Tensor] = list(model.parameters())
        reset()
        forward_backward()
        reset()
        peak = peak_during(forward_backward, self.step.world.device)
        saved = self.count_activations()
        gathered = [
            after
            for before, after in zip(parameters, model.parameters(), strict=True)
            if after is not before
        ]
        tensors: dict[str, list[Tensor]] = {
            "parameters": parameters,
            "gradients": list_gradients(parameters),
            "optimizer": list_optimizer_state(self.step.optimizer),
            "buffers": [*model.buffers(), *gathered],
        }
        measured = {name: storage_bytes(tensors[name]) for name in tensors}
        counted = {name: local_bytes(tensors[name]) for name in tensors}
        forward_backward()  # ends what the counted passes began, such as FSDP's gathers
        self.step.optimizer.zero_grad()
        return {
            "memory": {**measured, "activations": peak or 0},
            "memory_counted": {**counted, "activations": saved},
            "memory_formula": self.formula,
        }

    def summarize(self, samples: Sequence[MemoryBySource]) -> Explanation:
        by_rank = {name: [sample["memory"][name] for sample in samples] for name in COMPONENTS}
        return Explanation(
            metrics=max_over_ranks(samples),
            details={"memory_by_rank": by_rank},
            notes=self.notes,
        )


def max_over_ranks(samples: Sequence[MemoryBySource]) -> dict[str, MetricValue]:
    """Return the maximum over ranks of each component, from each source that has it."""
    metrics: dict[str, MetricValue] = {}
    for source, component in product(_SOURCES, COMPONENTS):
        if component not in samples[0][source]:
            continue
        name = f"{source}.{component}"
        largest = max(sample[source][component] for sample in samples)
        method = "maximum over ranks"
        if name in _DEFINITIONS:
            method = f"{_DEFINITIONS[name]}, maximum over ranks"
        metrics |= make_values({name: largest}, method)
    return metrics


@dataclass(frozen=True)
class MemoryTimelineProbe:
    """Records the memory of the device over the time of a step, from torch's allocator."""

    device: torch.device
    share = 0.0

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> MemoryOverTime | None:
        reset()
        with profiling(self.device, memory=True) as profiler, record_function(STEP):
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        events = trace_events(profiler)
        [event] = [event for event in events if event.name == STEP and not event.is_device]
        changes = []
        for time_ns, num_bytes in list_allocations(profiler, self.device):
            if event.start_ns <= time_ns <= event.stop_ns:
                changes.append(((time_ns - event.start_ns) // 1000, num_bytes))
        points = reduce_points(changes)
        if len(points) < 2:
            return None
        phases = []
        for name, (start_ns, stop_ns) in list_phases(events)[:_MAX_POINTS]:
            start_us = (start_ns - event.start_ns) // 1000
            phases.append((name, start_us, (stop_ns - event.start_ns) // 1000))
        return MemoryOverTime(rank=0, points=points, phases=tuple(phases))

    def summarize(self, samples: Sequence[MemoryOverTime | None]) -> Explanation:
        """Return the timeline of the rank with the highest peak."""
        timelines = [
            msgspec.structs.replace(sample, rank=rank)
            for rank, sample in enumerate(samples)
            if sample is not None
        ]
        if not timelines:
            return Explanation()
        highest = max(timelines, key=lambda timeline: timeline.peak[1])
        return Explanation(details=highest.as_details)


def reduce_points(
    changes: Sequence[tuple[int, int]], max_points: int = _MAX_POINTS
) -> tuple[tuple[int, int], ...]:
    """Return the running sum of changes by time: the maximum of each time slice, and the last sum.

    Changes are microseconds and bytes in order of time. The slices are ``max_points`` equal parts.
    """
    if not changes:
        return ()
    first = changes[0][0]
    last = changes[-1][0]
    width = (last - first) / max_points + 1
    total = 0
    highest: dict[int, tuple[int, int]] = {}
    for microsecond, change in changes:
        total += change
        index = int((microsecond - first) / width)
        if index not in highest or total > highest[index][1]:
            highest[index] = (microsecond, total)
    points = dict(highest.values())
    points[last] = total
    return tuple(sorted(points.items()))


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the elements on this rank."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.element_size()
    return total


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors on this rank, each once."""
    return sum(_find_storages(tensors).values())


def list_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def list_optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state on this rank, also of one that wraps another."""
    inner = getattr(optimizer, "optim", optimizer)
    if isinstance(inner, MasterAdamW):
        return inner.list_state()
    values = [value for state in inner.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def count_saved_bytes(module: nn.Module, forward: Callable[[], object]) -> int:
    """Run a forward pass and return the bytes that it saves for backward, each storage once.

    The parameters of ``module`` do not count, gathered ones included, nor does memory that is
    freed before the pass ends. The tensors that selective checkpointing saves do count.
    """
    saved: list[Tensor] = []
    caches: list[Any] = []
    parameters = list(module.parameters())

    def save(tensor: Tensor) -> Tensor:
        # Freed FSDP buffers are reused, so an address identifies a storage only at the end.
        saved.extend(part.detach() for part in _list_parts(tensor))
        return tensor

    watchers.append(caches)
    try:
        with saved_tensors_hooks(save, lambda tensor: tensor):
            forward()
    finally:
        watchers.pop()
    excluded = _find_storages([*parameters, *module.parameters()])
    storages = _find_storages([*saved, *kept_in(caches)])
    return sum(num_bytes for key, num_bytes in storages.items() if key not in excluded)


def peak_during(step: Callable[[], object], device: torch.device) -> int | None:
    """Run a step and return the bytes of its peak above its start; None on an unknown device.

    On CUDA it is the peak of the caching allocator. On the CPU it is that of the allocations in the
    profile, which has those of torch in this thread and in that of backward. The profile makes the
    step slower.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    if device.type != "cpu":
        return None
    with profiling(device, memory=True) as profiler:
        step()
    changes = [num_bytes for _, num_bytes in list_allocations(profiler, device)]
    return max(accumulate(changes, initial=0))


def _find_storages(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """Return the bytes of each storage by device and address, without those on the meta device."""
    storages = {}
    for tensor in tensors:
        for part in _list_parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr():
                storages[part.device, storage.data_ptr()] = storage.nbytes()
    return storages


def _list_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a DTensor or a tensor whose collective is in progress."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # the mesh of a DTensor is not
            yield from _list_parts(part)
