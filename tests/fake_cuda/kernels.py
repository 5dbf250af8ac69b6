"""Results of operators on stub GPUs, computed by the CPU.

Kernels of the stub do nothing. With FAKE_CUDA_VALUES=1 each operator that launches kernels is also
computed on the device's memory, which is memory of the host. torch calls ``register`` at the end of
its import, because ``build.py`` installs it as an extension of torch.
"""

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

VARIABLE = "FAKE_CUDA_VALUES"
MAX_ELEMENTS = 1 << 22
"""Operators on larger tensors have no results."""

NOT_COMPUTED = (
    "empty",
    "as_strided",
    "set_",
    "resize_",
    "view",
    "_local_scalar_dense",
    "record_stream",
)
"""First parts of the names of operators that compute nothing, or need no kernel."""

COMPOSITE = ("copy_",)
"""Operators that launch kernels without a registration for CUDA."""

COUNTING = ("nonzero", "_unique2", "unique_dim", "unique_consecutive")
"""Operators whose kernels count the elements of the result. The count is read by the host."""


class Local(threading.local):
    """A flag of a thread: it is within the kernel of an operator."""

    is_nested = False


local = Local()


@functools.cache
def load_stub() -> ctypes.CDLL:
    return ctypes.CDLL("libfakecuda.so")


def register() -> None:
    """Compute the operators that have a kernel for CUDA; called by torch."""
    if os.environ.get(VARIABLE) != "1":
        return
    import torch

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = [name.removeprefix("aten::") for name in registered if name.startswith("aten::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # kernels are overridden
        for name in (*names, *COMPOSITE):
            if not name.startswith(NOT_COMPUTED):
                implement(library, name)
        for name, function in ATTENTION.items():
            library.impl(  # type: ignore[no-untyped-call]
                name, function, "CUDA", allow_override=True
            )
    torch.backends.cuda.enable_cudnn_sdp(False)
    globals()["_library"] = library  # the registration ends with the object


def implement(library: Any, name: str) -> None:
    import torch

    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    kernel = torch.library.get_kernel(operator, "CUDA")
    arguments = operator._schema.arguments
    tensor_places = [place for place, argument in enumerate(arguments) if is_tensor(argument)]
    function = functools.partial(compute, operator, kernel, tensor_places)
    library.impl(operator, function, "CUDA", allow_override=True, with_keyset=True)


def bind_arguments(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an operator on the CPU by name, with its defaults."""
    arguments = operator.default._schema.arguments
    values = {argument.name.rstrip("_"): argument.default_value for argument in arguments}
    values |= dict(zip(values, args, strict=False)) | kwargs
    return {name: to_host(value) for name, value in values.items()}


def attend(name: str, tensors: str, *args: Any, **kwargs: Any) -> Any:
    """Compute attention on the CPU from these tensors of an operator's arguments.

    ``name`` is that of the operator without its prefix.
    """
    import torch

    torch.zeros(1, device="cuda")  # stands for the kernel
    settle()
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
    direction = "_backward" if name.endswith("_backward") else ""
    on_cpu = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
    values = bind_arguments(operator, args, kwargs)
    return to_device(
        on_cpu(
            *(values[tensor] for tensor in tensors.split()),
            values["dropout_p"],
            values["is_causal"],
            attn_mask=values.get("attn_bias"),
            scale=values["scale"],
        )
    )


INPUTS = "query key value"
RESULTS = f"grad_out {INPUTS} out logsumexp"


def efficient_attention(*args: Any, **kwargs: Any) -> Any:
    return (*attend("efficient_attention", INPUTS, *args, **kwargs), *random_state())


def efficient_attention_backward(*args: Any, **kwargs: Any) -> Any:
    return (*attend("efficient_attention_backward", RESULTS, *args, **kwargs), None)


def flash_attention(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    result = attend("flash_attention", INPUTS, query, key, *args, **kwargs)
    seed, offset = random_state()
    return (*result, None, None, query.shape[2], key.shape[2], seed, offset, seed)


def flash_attention_backward(*args: Any, **kwargs: Any) -> Any:
    return attend("flash_attention_backward", RESULTS, *args, **kwargs)


def random_state() -> tuple[Any, Any]:
    import torch

    state = torch.empty((), dtype=torch.int64, device="cuda")
    return state, state


ATTENTION = {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
}
"""Fused attention, which has other operators on the CPU."""


def is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def compute(
    operator: Any,
    kernel: Any,
    tensor_places: Sequence[int],
    keyset: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Launch the kernel, which has no effect, then compute what it would have."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_map

    settle()
    args = wrap_numbers(args, tensor_places)
    if operator._schema.name.removeprefix("aten::") in COUNTING and "out" not in kwargs:
        torch.cuda.current_stream().synchronize()
        return to_device(operator(*map(to_host, args), **kwargs))
    is_nested, local.is_nested = local.is_nested, True
    try:
        results = kernel.call_boxed(keyset, *args, **kwargs)
    finally:
        local.is_nested = is_nested
    if is_nested and operator._schema.is_mutable:
        return results  # the outer operator is computed as a whole
    leaves = tree_flatten((args, kwargs, results))[0]
    if any(is_on_device(leaf) and leaf.numel() > MAX_ELEMENTS for leaf in leaves):
        return results
    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    if operator is torch.ops.aten.native_layer_norm_backward.default:
        # The CPU keeps statistics in the type of the input, and CUDA in float32.
        gradient, data, shape, mean, deviation, *rest = host_args
        statistics = (mean.to(data.dtype), deviation.to(data.dtype))
        host_args = (gradient, data, shape, *statistics, *rest)
    try:
        expected = operator(*host_args, **host_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        report_once(operator, error)
        return results
    if isinstance(results, list | tuple):
        return type(results)(map(store, results, expected))
    return store(results, expected)


def wrap_numbers(args: tuple[Any, ...], tensor_places: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with a tensor for each number that the operator takes as a tensor.

    The tensor has the type of the first one, so that it does not change the result's type.
    """
    import torch

    wrapped = list(args)
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
    for place in tensor_places:
        if place < len(args) and isinstance(args[place], int | float):
            is_alike = dtypes[0].is_floating_point or not isinstance(args[place], float)
            dtype = dtypes[0] if is_alike and dtypes[0] != torch.bool else None
            wrapped[place] = torch.tensor(args[place], dtype=dtype)
    return tuple(wrapped)


@functools.cache
def report_once(operator: object, error: Exception) -> None:
    load_stub().fake_cuda_mark(f"not-computed:{operator}".encode())


def is_on_device(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_cuda


def to_host(value: Any) -> Any:
    """Return the CPU counterpart of an argument; a tensor keeps its memory."""
    import torch

    if is_on_device(value):
        return host_view(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return torch.Generator().manual_seed(value.initial_seed())
    return value


def host_view(tensor: Any) -> Any:
    """Return a tensor of the CPU with the memory of a tensor of the device."""
    import torch

    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(flat, tensor.storage_offset(), tensor.shape, tensor.stride())


def store(result: Any, expected: Any) -> Any:
    """Give a result the expected values; return another if its shape depends on values."""
    import torch

    if not is_on_device(result) or not isinstance(expected, torch.Tensor):
        return result
    if result.shape != expected.shape:
        result = torch.empty(expected.shape, dtype=expected.dtype, device=result.device)
    target = host_view(result)
    if target.data_ptr() != expected.data_ptr():
        target.copy_(expected)
    return result


def to_device(results: Any) -> Any:
    """Return new tensors of the device."""
    import torch

    if not isinstance(results, torch.Tensor):
        return tuple(map(to_device, results))
    result = torch.empty(results.shape, dtype=results.dtype, device="cuda")
    return store(result, results)


def settle() -> None:
    """Wait until the contents of memory are known that other ranks send to the current stream."""
    import torch

    device = torch.cuda.current_device()
    load_stub().fake_cuda_settle(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)))
