"""The memory of a step by component: as measured, as counted and by formula."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parbench.bench.results.details import COMPONENTS
from parbench.bench.results.metrics import MetricValue, make_value
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.model.transformer import list_kept_tensors, watchers
from parbench.workloads.probes.probe import ResetFn, Step
from parbench.workloads.torch_internals import list_allocations, open_profiler

BytesByComponent = Mapping[str, float]
"""Bytes on one rank, keyed by component: one of ``COMPONENTS``, such as ``activations``."""
MemoryBySource = Mapping[str, BytesByComponent]
"""The bytes of each component on one rank, keyed by the way in which they were determined.

The keys are ``memory`` (measured), ``memory_counted`` (the sizes of tensors) and
``memory_formula`` (analytical).
"""


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """Measures the memory of a training step on this rank, by component.

    Two other figures are reported with it: the added sizes of the tensors, and the analytical
    bytes.
    """

    world: World
    """All ranks of the step."""
    model: nn.Module
    """The module with this rank's parameters and buffers."""
    optimizer: torch.optim.Optimizer
    """The optimizer, whose state tensors are measured."""
    forward_backward: Callable[[], object]
    """Runs forward and backward of all microbatches of a step, without the optimizer."""
    count_activations: Callable[[], float]
    """Runs forward passes, and returns the bytes that microbatches in flight save for backward."""
    formula: BytesByComponent
    """The analytical bytes of this rank, by component. Components without a formula are missing."""
    share = 0.0
    """0, because this probe always runs the same number of passes and needs no time budget."""

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> MemoryBySource:
        """Return the measured, counted and analytical bytes of each component on this rank.

        Parameters, gradients, optimizer state and buffers are the tensors that exist between steps.
        The parameters that FSDP has gathered after forward count as buffers. Measured activations
        are the peak of forward and backward above the memory at their start.

        ``budget_seconds`` and ``step`` are not used: the probe always runs ``forward_backward``
        three times and ``count_activations`` once. ``reset`` resets the benchmark before the first
        and before the second (measured) run of ``forward_backward``.
        """
        parameters: list[Tensor] = list(self.model.parameters())
        reset()
        self.forward_backward()
        reset()
        peak = peak_during(self.forward_backward, self.world.device)
        saved = self.count_activations()
        gathered = [
            parameter
            for shard, parameter in zip(parameters, self.model.parameters(), strict=True)
            if parameter is not shard
        ]
        tensors: dict[str, list[Tensor]] = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": list_optimizer_state(self.optimizer),
            "buffers": [*self.model.buffers(), *gathered],
        }
        num_bytes = {name: sum(_find_storages(parts).values()) for name, parts in tensors.items()}
        self.forward_backward()  # ends what the counted passes began, such as FSDP's gathers
        self.optimizer.zero_grad()
        return {
            "memory": {**num_bytes, "activations": peak},
            "memory_counted": {**num_bytes, "activations": saved},
            "memory_formula": self.formula,
        }

    def summarize(self, samples: Sequence[MemoryBySource]) -> Explanation:
        """Return metrics of the bytes of each component: measured, counted and by formula.

        Each is the maximum over ranks. Their names are such as ``memory.gradients``,
        ``memory_counted.gradients`` and ``memory_formula.gradients``. A component without a formula
        has no third metric. ``samples`` are the results of ``observe`` on all ranks.
        """
        metrics: dict[str, MetricValue] = {}
        for source, component in product(samples[0], COMPONENTS):
            if component in samples[0][source]:
                name = f"{source}.{component}"
                largest = max(sample[source][component] for sample in samples)
                metrics[name] = make_value(name, largest, "maximum over ranks")
        return Explanation(metrics=metrics)


def list_optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the state tensors of an optimizer on this rank, such as Adam's moments.

    If the optimizer wraps another one, these are the tensors of the inner optimizer.
    """
    inner = getattr(optimizer, "optim", optimizer)
    values = [value for state in inner.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def count_saved_bytes(module: nn.Module, forward: Callable[[], object]) -> int:
    """Run a forward pass and return the bytes of the tensors that it saves for backward.

    A storage that several tensors share counts once. The parameters of ``module`` do not count,
    gathered ones included, nor does memory that is freed before the pass ends. The tensors that
    selective checkpointing saves do count.
    """
    saved: list[Tensor] = []
    caches: list[Any] = []
    parameters = list(module.parameters())

    def save(tensor: Tensor) -> Tensor:
        """Remember a tensor that autograd saves, and return it unchanged."""
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
    storages = _find_storages([*saved, *list_kept_tensors(caches)])
    return sum(num_bytes for key, num_bytes in storages.items() if key not in excluded)


def peak_during(step: Callable[[], object], device: torch.device) -> int:
    """Run a step and return the peak of the device's allocated bytes, less those at the start.

    On CUDA it is the peak of the caching allocator. On the CPU it is the peak of torch's
    allocations in this thread and in the thread of backward, as the profiler records them. The
    profiler makes the step slower.
    """
    if device.type == "cuda":
        return accelerator.measure_peak_bytes(step, device)
    with open_profiler(device, memory=True) as profiler:
        step()
    changes = [num_bytes for _, num_bytes in list_allocations(profiler, device)]
    return max(accumulate(changes, initial=0))


def _find_storages(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """Return the bytes of each storage of some tensors, keyed by device and address.

    Several tensors may share a storage. Tensors on the meta device have none.
    """
    storages = {}
    for tensor in tensors:
        for part in _list_parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr():
                storages[part.device, storage.data_ptr()] = storage.nbytes()
    return storages


def _list_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a DTensor or a tensor whose collective is in progress.

    A plain tensor yields itself.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # the mesh of a DTensor is not
            yield from _list_parts(part)
