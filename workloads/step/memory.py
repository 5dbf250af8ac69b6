"""What a step holds in memory: by component by formula, as counted and as measured, and over the step's time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from parbench.bench.world.world import World
from parbench.workloads.model.optimizer import MasterAdamW
from parbench.workloads.model.transformer import kept_in, watchers
from parbench.workloads.step.layout import Layout, local
from parbench.workloads.step.probe import ResetFn, Step
from parbench.workloads.torch_internals import allocations, allocations_at, profiling, trace_events

_HOW = {
    "parameters": "between forward and backward, where FSDP may hold them gathered",
    "gradients": "after backward",
    "optimizer": "after a step",
    "activations": "of a forward pass above its start, parameters gathered meanwhile included",
    "buffers": "buffers, and shards kept beside gathered parameters",
}

Held = Mapping[str, float]
BySource = Mapping[str, Held]
"""Bytes by component, as measured (``memory``) and as counted (``memory_counted``)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The probe of what each component takes; ``forward`` is one microbatch's, after whole steps have been taken."""

    world: World
    layout: Layout
    forward: Callable[[], Tensor]
    formula: Held
    notes: tuple[str, ...] = ()
    share = 0.0

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> BySource:
        model, optimizer = self.layout.model, self.layout.optimizer
        shards = list(model.parameters())
        optimizer.zero_grad()
        begin()
        with SavedTensors(model) as saved:
            loss = self.forward()
        between = list(model.parameters())
        parameters = (storage_bytes(between), local_bytes(between))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        begin()
        losses: list[Tensor] = []
        peak = peak_during(lambda: losses.append(self.forward()), self.world.device)
        losses.pop().backward()  # type: ignore[no-untyped-call]
        # gathered parameters are plain tensors, and the shards that they were gathered from are still there
        gathered = [not isinstance(now, DTensor) for now in between]
        beside = [
            s
            for s, now_whole in zip(shards, gathered, strict=True)
            if isinstance(s, DTensor) and now_whole
        ]
        tensors = {
            "gradients": gradients(model.parameters()),
            "optimizer": state_tensors(optimizer),
            "buffers": [*model.buffers(), *beside],
        }
        measured = {"parameters": parameters[0], "activations": peak or 0}
        counted = {"parameters": parameters[1], "activations": saved.num_bytes}
        return {
            "memory": measured | {name: storage_bytes(of) for name, of in tensors.items()},
            "memory_counted": counted | {name: local_bytes(of) for name, of in tensors.items()},
        }

    def summarize(self, told: Sequence[BySource]) -> Explanation:
        """Return each component's bytes, the largest over ranks, and every rank's in the details."""
        metrics: dict[str, MetricValue] = {}
        for name in COMPONENTS:
            measured, counted = (
                [one[source][name] for one in told] for source in ("memory", "memory_counted")
            )
            metrics |= make_values(
                {f"memory.{name}": max(measured)}, f"{_HOW[name]}, largest over ranks"
            )
            metrics |= make_values({f"memory_counted.{name}": max(counted)}, "largest over ranks")
            if name in self.formula:
                metrics |= make_values({f"memory_formula.{name}": self.formula[name]})
        by_rank = {name: [one["memory"][name] for one in told] for name in COMPONENTS}
        return Explanation(metrics=metrics, details={"memory_by_rank": by_rank}, notes=self.notes)


_MOST_POINTS = 160


class OverTime:
    """The probe of memory over a step's time, by torch's allocator for the device."""

    share = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def observe(self, step: Step, begin: ResetFn, budget_seconds: float) -> MemoryOverTime | None:
        begin()
        with profiling(self._device, memory=True) as profiler, record_function(STEP):
            step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        events = trace_events(profiler)
        start, stop = next(
            (one.start_ns, one.stop_ns) for one in events if one.name == STEP and not one.is_device
        )
        changes = [one for one in allocations_at(profiler, self._device) if start <= one[0] <= stop]
        points = curve(((at - start) // 1000, num_bytes) for at, num_bytes in changes)
        phases = [
            (name, (a - start) // 1000, (b - start) // 1000) for name, (a, b) in list_phases(events)
        ]
        if len(points) < 2:
            return None
        return MemoryOverTime(rank=0, points=points, phases=tuple(phases[:_MOST_POINTS]))

    def summarize(self, told: Sequence[MemoryOverTime | None]) -> Explanation:
        known = [
            msgspec.structs.replace(one, rank=rank)
            for rank, one in enumerate(told)
            if one is not None
        ]
        highest = max(known, key=lambda one: one.peak[1], default=None)
        return Explanation(details=highest.as_details if highest else {})


def curve(
    changes: Iterable[tuple[int, int]], most: int = _MOST_POINTS
) -> tuple[tuple[int, int], ...]:
    """Return the running sum of changes at their times, the highest within each of ``most`` equal parts, and the last.

    What happens in the same microsecond is one point.
    """
    held, points = 0, dict[int, int]()
    for at, change in changes:
        held += change
        points[at] = max(points.get(at, held), held)
    if not points:
        return ()
    first, last = min(points), max(points)
    width = (last - first) / most + 1
    kept: dict[int, tuple[int, int]] = {}
    for point in points.items():
        part = int((point[0] - first) / width)
        kept[part] = max(kept.get(part, point), point, key=lambda one: one[1])
    return tuple(sorted({**dict(kept.values()), last: held}.items()))


def largest_of(told: Sequence[BySource], how: Mapping[str, str]) -> dict[str, MetricValue]:
    """Return each component's bytes on the rank with most of it, from each source of ``how``, which says where from."""
    metrics: dict[str, MetricValue] = {}
    for source, words in how.items():
        most = {
            f"{source}.{part}": max(one[source][part] for one in told)
            for part in COMPONENTS
            if part in told[0][source]
        }
        metrics |= make_values(most, f"{words}, largest over ranks".removeprefix(", "))
    return metrics


def local_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the elements on this rank, whatever storages hold them."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that tensors hold on this rank, each once; a DTensor counts by its local part.

    A tensor without memory, such as one on the meta device, counts 0.
    """
    return sum(_storages(tensors).values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state on this rank; a ZeroRedundancyOptimizer has it in the one it wraps."""
    mine = getattr(optimizer, "optim", optimizer)
    if isinstance(mine, MasterAdamW):
        return mine.held()
    return [
        value
        for state in mine.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class SavedTensors:
    """A context around a forward pass that counts what is saved for backward, without the module's own parameters.

    These are asked for again at the end: FSDP swaps gathered parameters in. What selective checkpointing keeps is in
    torch's own caches, and counts as well. ``num_bytes`` is known after the context: what was saved and freed
    meanwhile, as FSDP frees gathered parameters, counts nothing. Backward belongs outside: the context keeps what it
    saw alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._excluded = module, list(module.parameters())
        self._kept: list[
            Tensor
        ] = []  # not by address yet: what FSDP frees, later tensors take the place of
        self._hooks = saved_tensors_hooks(self._note, lambda saved: saved)
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes saved, each storage once; an error before the context has ended."""
        if self._num_bytes is None:
            raise RuntimeError("saved tensors are counted when their context ends")
        return self._num_bytes

    def __enter__(self) -> "SavedTensors":
        self._caches: list[Any] = []
        watchers.append(self._caches)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        watchers.pop()
        for kept in kept_in(self._caches):
            self._note(kept)
        left_out = _storages([*self._excluded, *self._module.parameters()])
        self._num_bytes = sum(
            size for key, size in _storages(self._kept).items() if key not in left_out
        )
        for seen in (self._kept, self._excluded, self._caches):
            seen.clear()

    def _note(self, saved: Tensor) -> Tensor:
        self._kept.extend(tensor.detach() for tensor in _plain(saved))
        return saved


def peak_during(step: Callable[[], object], device: torch.device) -> int | None:
    """Run ``step`` and return how many bytes its peak stands above what was allocated at its start; None if unknown.

    CUDA: the caching allocator's own peak. CPU: the peak of the sum of the profiler's allocations, which sees torch's
    allocator in this thread and in backward's, neither other threads nor other libraries; not for a timed step.
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
    return max(accumulate(allocations(profiler), initial=0))


def _storages(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """Return the bytes of storages by where they are; a storage without memory is none."""
    storages = [
        (part.device, part.untyped_storage()) for tensor in tensors for part in _plain(tensor)
    ]
    return {(device, s.data_ptr()): s.nbytes() for device, s in storages if s.data_ptr()}


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own under a DTensor, or under one whose collective is under way."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # a DTensor names its mesh as well
                yield from _plain(part)
    else:
        yield tensor
