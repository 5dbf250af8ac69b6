"""An operation without a world, for what judges or disturbs one."""

from typing import Any

import torch

from parbench.bench.operations.operation import Operation
from parbench.bench.world.benchmark import Description


def filling(found: float = 2.0, **more: Any) -> Operation:
    """Return what fills its four elements with ``found`` where 2 is expected."""
    output = torch.empty(4)
    return Operation(
        call=lambda: output.fill_(found),
        restore=lambda: output.fill_(float("nan")),
        output=output,
        expected=lambda: torch.full((4,), 2.0),
        description=Description(headline="here"),
        **more,
    )
