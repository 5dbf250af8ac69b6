"""The communication of one layer for one microbatch, by its attention or by its experts. Pure."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerCall:
    """Equal communication calls that one layer makes on one rank for one microbatch.

    ``forward`` and ``backward`` are the numbers of these calls in the two passes.
    """

    axis: str
    """The name of the mesh axis under which reports list the calls."""
    ranks: int
    """The number of ranks in the process group of a call."""
    op: str
    """The name of the operation, such as ``all_gather``."""
    size: str
    """The equation of the bytes of one call as text. The convention is that of nccl-tests.

    Its symbols are the keys of ``RankView.symbols``. Routing of experts is balanced.
    """
    purpose: str
    """The tensors that the calls move, such as ``tokens to experts``, for reports."""
    forward: int = 0
    """The number of calls in the layer's forward pass of one microbatch."""
    backward: int = 0
    """The number of calls in the layer's backward pass of one microbatch."""
    pairs: Literal["sent", "received"] | None = None
    """The pairs of token and expert on which the calls' bytes depend: sent or received by the rank.

    None means that the bytes do not depend on the routing.
    """
    ends_forward: bool = False
    """True if no saved tensor of the layer depends on the result of the calls.

    Recomputation stops before such calls.
    """
