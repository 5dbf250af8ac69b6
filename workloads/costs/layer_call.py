"""The communication of one layer for one microbatch, by its attention or by its experts. Pure."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerCall:
    """Equal calls of one layer for one microbatch."""

    axis: str  # the name of the axis in metrics
    ranks: int
    op: str
    size: str
    """An equation for the bytes of one call, as nccl-tests counts them.

    Its symbols are the keys of ``RankView.symbols``. Routing of experts is balanced.
    """
    purpose: str  # the tensors that the calls move, for reports
    forward: int = 0  # calls in a forward pass
    backward: int = 0  # calls in a backward pass
    pairs: Literal["sent", "received"] | None = None
    """The pairs of token and expert that the calls move, if their number depends on the routing."""
    ends_forward: bool = False
    """True if no saved tensor of the layer depends on the result of the calls."""
