"""The interface to accelerators, where it adds to torch."""

import ctypes
from typing import Any

import pytest

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
