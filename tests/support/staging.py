"""Lets gloo carry CUDA tensors in every call, by way of host memory: so tests run two ranks on one GPU.

By itself gloo carries them in some calls alone, and NCCL wants a GPU for each rank. Calls are staged beneath whatever
counts or silences them, so that the product meets a plain group on gloo.
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

CALLS = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_"),
    *(
        "allgather_into_tensor_coalesced_",
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
    ),
    *("broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_", "reduce_scatter_"),
    *("reduce_scatter_tensor_coalesced_", "scatter_", "send"),
)
_libraries: list[torch.library.Library] = []


def stage() -> None:
    """From now on every c10d call of this process with CUDA tensors is staged."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that gloo's own kernels are overridden
        for name in CALLS:
            library.impl(name, staged(getattr(torch.ops.c10d, name)), "CUDA")  # type: ignore[no-untyped-call]
    _libraries.append(library)  # which takes its kernels back when it is freed


def staged(
    operator: Callable[..., Any], to_host: Callable[[Tensor], Tensor] = Tensor.cpu
) -> Callable[..., Any]:
    """Return ``operator`` of c10d made with copies; its results come back before the work that it returns is done."""
    receives = "send" not in str(operator)

    def call(*args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        copies = [
            to_host(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]  # once the stream is there
        here = tree_unflatten(copies, spec)
        result = operator(*here)
        alone = isinstance(result, torch.ScriptObject)
        work = dist.Work.unbox(result if alone else result[-1])
        outputs, copied = tree_leaves(args[0]), tree_leaves(here[0])

        def bring_back() -> list[Tensor]:
            work.wait()
            for output, copy in zip(outputs, copied, strict=True) if receives else ():
                output.data.copy_(copy)
                if output.is_cuda:
                    torch.cuda.current_stream(output.device).synchronize()
            return outputs

        done = _later(bring_back)
        return done if alone else (args[0], done)

    return call


def _later(action: Callable[[], list[Tensor]]) -> object:
    """Return work that is done when ``action`` is, in a thread of its own, so that one that waits holds up no other."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def act() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            future.set_exception(error)  # type: ignore[arg-type]

    threading.Thread(target=act, daemon=True).start()
    return _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
