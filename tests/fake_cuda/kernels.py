"""Results of integer operators on stub GPUs, computed by the CPU.

Kernels of the stub do nothing. Routing of tokens and exchange of shapes need the values of integers, so
these operators are also computed on the device's memory, which is memory of the host. torch calls
``register`` at the end of its import if FAKE_CUDA_INTEGERS=1. Floating-point values stay what they are.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

VARIABLE = "FAKE_CUDA_INTEGERS"
MAX_ELEMENTS = 1 << 20
"""Larger results of comparisons are zeros."""

OPERATORS = """
    add sub mul div floor_divide remainder neg abs bitwise_and bitwise_or bitwise_not logical_not logical_and
    logical_or eq ne lt le gt ge where clamp minimum maximum masked_fill masked_fill_ fill_ zero_ arange cat
    copy_ _to_copy index index_put_ _index_put_impl_ nonzero cumsum sort argsort bincount repeat_interleave
    scatter scatter_ scatter_add scatter_add_ gather index_select index_add_ sum all any min max amin amax
    topk argmax argmin searchsorted histc unique_dim flip roll add_ sub_ mul_ isin
""".split()

Kernel = Callable[..., Any]


def register() -> None:
    """Compute the operators whenever they get or return integers; called by torch."""
    if os.environ.get(VARIABLE) != "1":
        return
    library = torch.library.Library("aten", "IMPL")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for full_name in registered:
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        if full_name.startswith("aten::") and name in OPERATORS:
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            kernel = torch.library.get_kernel(operator, "CUDA")
            function = functools.partial(compute, operator, kernel)
            library.impl(operator, function, "CUDA", allow_override=True, with_keyset=True)
    globals()["_library"] = library  # the registration ends with the object


def compute(operator: Any, kernel: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch the kernel, which has no effect, then compute integers where it would have."""
    results = kernel.call_boxed(keyset, *args, **kwargs)
    tensors = [leaf for leaf in tree_flatten((args, kwargs, results))[0] if is_on_device(leaf)]
    if not any(has_integers(tensor) for tensor in tensors):
        return results
    settle()
    host_args, host_kwargs = tree_map(host_view, (args, kwargs))
    host_kwargs.pop("device", None)
    return tree_map(store, results, operator(*host_args, **host_kwargs))


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def has_integers(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def host_view(value: Any) -> Any:
    """Return a tensor of the CPU with the memory of a tensor of the device."""
    if not is_on_device(value):
        return value
    storage = value.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=value.dtype)
    return view.set_(flat, value.storage_offset(), value.shape, value.stride())


def store(result: Any, expected: Any) -> Any:
    """Give a result of the device the expected values; return another if its shape depends on values."""
    if not is_on_device(result) or not isinstance(expected, Tensor):
        return result
    if result.shape != expected.shape:
        result = torch.empty(expected.shape, dtype=expected.dtype, device=result.device)
    target = host_view(result)
    if target.data_ptr() != expected.data_ptr():
        target.copy_(expected)
    return result


def settle() -> None:
    """Wait until the contents of the device's memory are known, which other ranks may send."""
    ctypes.CDLL("libfakecuda.so").fake_cuda_settle()
