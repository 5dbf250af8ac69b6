"""Record where a CUDA device would make the host wait, on a machine without one.

On CUDA an operation only starts the device's work. A few return after all earlier work is done,
because the host reads a result or gives data to the device. In a training step each of them
drains the queue. On the CPU nothing waits, so ``HostReads`` records the operations by name:

* operators whose result or whose size depends on values: ``item``, ``nonzero``, ``bincount``,
  indexing by booleans, and ``repeat_interleave`` without ``output_size``,
* tensors that are made of Python data, such as an index that is a list,
* ``tolist``, ``cpu``, ``numpy``, and ``to`` with a device. These are methods of ``Tensor`` that
  no operator shows, because on the CPU they copy nothing.

torch's optimizers count steps in tensors on the host, even on CUDA. What ``torch.optim`` does
with a tensor of no dimensions is therefore not recorded. Neither is ``x[mask] = 1``, which on
CUDA is ``masked_fill_`` (``_index_put_impl_`` in aten/src/ATen/native/TensorAdvancedIndexing.cpp).
``x[0] = 1`` copies the number to the device and waits: use ``fill_``. Not seen are
``torch.cuda.synchronize`` and what an operator does in C++, such as the loop over experts of
``grouped_mm`` on older GPUs.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

READING_OPERATORS = {
    "aten::_local_scalar_dense",  # item, float, int, bool and if
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::lift_fresh",  # torch.tensor of Python data
}
INDEXING_OPERATORS = {
    "aten::index.Tensor",
    "aten::_unsafe_index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}
READING_METHODS = ("tolist", "cpu", "numpy", "to")  # to only with a device
PRODUCT = ("parbench.", "tests.workloads.")


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, records in ``reads`` each operation that would make the host wait.

    An entry is the name of the operation and the line of parbench that leads to it. Reads in a
    backward pass are recorded as well, because on the CPU it runs in the thread that calls it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name in READING_METHODS:
            self._patch_method(name)
        self._patch_assignment()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # The operators that it consists of are recorded instead.
        if is_reading(func.name(), args, kwargs or {}):
            self._record(func.name(), args[0])
        return func(*args, **(kwargs or {}))

    def _patch_method(self, name: str) -> None:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if name != "to" or has_device(args, kwargs):
                self._record(name, tensor)
            return method(tensor, *args, **kwargs)

        self._patches.enter_context(patch.object(Tensor, name, read))

    def _patch_assignment(self) -> None:
        assign = Tensor.__setitem__

        def assign_or_fill(tensor: Tensor, index: Any, value: Any) -> None:
            num_reads = len(self.reads)
            assign(tensor, index, value)
            if is_mask(index) and isinstance(value, int | float):
                del self.reads[num_reads:]

        self._patches.enter_context(patch.object(Tensor, "__setitem__", assign_or_fill))

    def _record(self, name: str, tensor: Tensor) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None:
            module = str(frame.f_globals.get("__name__"))
            if module.startswith("torch.optim.") and tensor.dim() == 0:
                return
            if module.startswith(PRODUCT):
                self.reads.append(f"{name} in {module}:{frame.f_lineno}")
                return
            frame = frame.f_back
        self.reads.append(f"{name} outside of parbench")


def is_reading(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator of this name and these arguments makes the host wait on CUDA."""
    if name in INDEXING_OPERATORS:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return name in READING_OPERATORS


def is_mask(index: Any) -> bool:
    """Return True if an index consists of one boolean tensor, and slices that are ``:``."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [part for part in parts if not (isinstance(part, slice) and part == slice(None))]
    return len(masks) == 1 and isinstance(masks[0], Tensor) and masks[0].dtype == torch.bool


def has_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if ``Tensor.to`` is called with a device, which no step on one device needs."""
    target = kwargs.get("device", args[0] if args else None)
    return isinstance(target, str | torch.device | int)


def record_host_reads(step: Callable[[], object]) -> list[str]:
    """Return the operations of a step that would make the host wait; see ``HostReads``."""
    with HostReads() as recorded:
        step()
    return recorded.reads
