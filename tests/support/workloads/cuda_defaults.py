"""Let torch choose on the CPU what it chooses on CUDA, to run that code without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.optim import optimizer
from torch.utils import _foreach_utils


@contextmanager
def use_cuda_defaults() -> Iterator[None]:
    """Let optimizers update tensors on the CPU as on CUDA, as lists (``foreach``).

    It applies to this process: call it in the function that ranks run.
    """
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    with patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: devices):
        yield
