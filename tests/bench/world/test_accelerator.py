"""The interface to accelerators, where it adds to torch."""

import ctypes
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbench.bench.text import UserError
from parbench.bench.world import accelerator
from parbench.bench.world.accelerator import find_library_version


class LoadedNccl:
    """A loaded library of NCCL 2.29.7."""

    def __init__(self, name: str) -> None:
        assert name == "libtorch_cuda.so"

    def ncclGetVersion(self, number: Any) -> int:  # noqa: N802 - the name in the library
        number._obj.value = 22907
        return 0


def test_nccl_version_is_that_of_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", LoadedNccl)
    assert find_library_version() == "2.29.7"


class FakeNccl:
    """A process group and its backend, which notes what happens to its memory pool."""

    def __init__(self, has_allocator: bool) -> None:
        self.has_allocator = has_allocator
        self.events: list[str] = []

    def _get_backend(self, device: torch.device) -> "FakeNccl":
        return self

    @property
    def mem_allocator(self) -> object:
        if not self.has_allocator:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")
        return object()

    def register_mem_pool(self, pool: object) -> None:
        self.events.append("registered")

    def deregister_mem_pool(self, pool: object) -> None:
        self.events.append("deregistered")


@pytest.fixture
def _fake_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", nullcontext)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)


@pytest.mark.usefixtures("_fake_pools")
def test_buffers_are_registered_until_resources_close() -> None:
    group: Any = FakeNccl(has_allocator=True)
    with ExitStack() as resources:
        with accelerator.allocate_registered(group, torch.device("cpu"), resources):
            group.events.append("allocated")
        assert group.events == ["allocated", "registered"]
    assert group.events[2:] == ["deregistered"]


@pytest.mark.usefixtures("_fake_pools")
def test_gpus_without_multicast_refuse_registration() -> None:
    group: Any = FakeNccl(has_allocator=False)
    context = accelerator.allocate_registered(group, torch.device("cpu"), ExitStack())
    with pytest.raises(UserError, match="only on GPUs with multicast"):
        context.__enter__()
