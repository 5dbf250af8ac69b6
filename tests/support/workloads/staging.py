"""Let gloo carry CUDA tensors in every call, so that tests run two ranks on one GPU.

Gloo carries them only in some calls, and NCCL needs a GPU per rank. The operators of c10d copy
through host memory. They are replaced below the level where parbench counts calls, so the product
sees an ordinary gloo group.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

OPERATORS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)
_libraries: list[torch.library.Library] = []
"""Libraries whose kernels are active; a library removes its kernels when it is freed."""


def stage() -> None:
    """Stage every later c10d call of this process that has CUDA tensors."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns that the kernels of gloo are overridden.
        warnings.simplefilter("ignore", UserWarning)
        for name in OPERATORS:
            operator = stage_operator(getattr(torch.ops.c10d, name))
            library.impl(name, operator, "CUDA")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def stage_operator(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a c10d operator that works on copies; its work ends after results are copied back."""
    has_output = "send" not in str(operator)

    def call(*args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        copies = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        host_args = tree_unflatten(copies, spec)
        result = operator(*host_args)
        returns_only_work = isinstance(result, torch.ScriptObject)
        work = dist.Work.unbox(result if returns_only_work else result[-1])
        outputs = tree_leaves(args[0])
        host_outputs = tree_leaves(host_args[0])

        def copy_back() -> list[Tensor]:
            work.wait()
            if has_output:
                for output, host_output in zip(outputs, host_outputs, strict=True):
                    output.data.copy_(host_output)
                    if output.is_cuda:
                        torch.cuda.current_stream(output.device).synchronize()
            return outputs

        staged_work = start_work(copy_back)
        return staged_work if returns_only_work else (args[0], staged_work)

    return call


def start_work(action: Callable[[], list[Tensor]]) -> object:
    """Return a c10d work that is done after an action, which runs in its own thread."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            future.set_exception(error)  # type: ignore[arg-type]

    threading.Thread(target=run, daemon=True).start()
    return _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
