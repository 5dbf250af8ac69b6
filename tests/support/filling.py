"""A small operation that needs no process group."""

from typing import Any

import torch

from parbench.bench.operations.operation import Operation
from parbench.bench.world.benchmark import Description


def filling(value: float = 2.0, **fields: Any) -> Operation:
    """Return an operation that fills four elements with ``value`` and expects 2.

    ``fields`` are other fields of ``Operation``.
    """
    output = torch.empty(4)
    return Operation(
        call=lambda: output.fill_(value),
        restore=lambda: output.fill_(float("nan")),
        output=output,
        expected=lambda: torch.full((4,), 2.0),
        description=Description(headline="here"),
        **fields,
    )
