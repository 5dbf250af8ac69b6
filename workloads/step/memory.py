"""Memory of a training step as counted: bytes that tensors hold, that backward needs, and the peak of a step."""

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from workloads.model.optimizer import MasterAdamW

_Key = tuple[torch.device, int]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that tensors hold on this rank, each once; a DTensor counts by its local part.

    A tensor without memory, such as one on the meta device, counts 0.
    """
    return sum(_storages(list(tensors)).values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state on this rank; a ZeroRedundancyOptimizer has it in the one it wraps."""
    local = getattr(optimizer, "optim", optimizer)
    if isinstance(local, MasterAdamW):
        return local.held()
    return [value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that parameters have."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class SavedTensors:
    """A context around a forward pass that counts what is saved for backward, without the parameters themselves.

    ``exclude`` is parameters, or the module that has them, which is asked again at the end: FSDP swaps gathered
    parameters in. ``num_bytes`` is known after the context: what was saved and freed meanwhile, as FSDP frees gathered
    parameters, counts nothing. Backward belongs outside: the context keeps what it saw alive.
    """

    def __init__(self, exclude: nn.Module | Iterable[Tensor] = ()) -> None:
        self._module = exclude if isinstance(exclude, nn.Module) else None
        self._excluded = list(exclude.parameters() if isinstance(exclude, nn.Module) else exclude)
        self._kept: list[Tensor] = []  # not by address yet: what FSDP frees, later tensors take the place of
        self._hooks = saved_tensors_hooks(self._note, lambda saved: saved)
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes saved, each storage once; an error before the context has ended."""
        if self._num_bytes is None:
            raise RuntimeError("saved tensors are counted when their context ends")
        return self._num_bytes

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if self._module is not None:
            self._excluded.extend(self._module.parameters())
        left_out = _storages(self._excluded)
        held = _storages(self._kept)
        self._num_bytes = sum(num_bytes for key, num_bytes in held.items() if key not in left_out)
        self._kept.clear()
        self._excluded.clear()

    def _note(self, saved: Tensor) -> Tensor:
        self._kept.extend(tensor.detach() for tensor in _plain(saved))
        return saved


def peak_during(step: Callable[[], None], device: torch.device) -> int | None:
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
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        return peak_of(_allocations(profiler))
    return None


def peak_of(changes: Iterable[int]) -> int:
    """Return the highest point, at least 0, of the running sum of allocations (positive) and frees (negative)."""
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _allocations(profiler: profile) -> list[int]:
    """Return the bytes of each allocation and free on the CPU, in order of time."""
    results = getattr(profiler.profiler, "kineto_results", None)
    assert results is not None, "a profiler that has stopped has results"
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    return [num_bytes for _, num_bytes in sorted(events, key=lambda event: event[0])]


def _storages(tensors: Iterable[Tensor]) -> dict[_Key, int]:
    plain = (part for tensor in tensors for part in _plain(tensor))
    return {_key(part): part.untyped_storage().nbytes() for part in plain if part.untyped_storage().data_ptr()}


def _key(tensor: Tensor) -> _Key:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own under a DTensor, or under one whose collective is under way."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # a DTensor names its mesh as well
                yield from _plain(part)
    else:
        yield tensor
