"""Attention over keys that come block by block: outputs merged by their log-sum-exp, in float32.

Two blocks' outputs o and log-sum-exps l become l' = log(e^l1 + e^l2), o' = e^(l1 - l') o1 + e^(l2 - l') o2 (online
softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).
"""

import torch
from torch import Tensor


class Merged:
    """The attention of queries (b, a, s, d) over all blocks added so far; rows that no block had are 0 and -inf."""

    def __init__(self, queries: Tensor) -> None:
        self._dtype = queries.dtype
        self._out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        self._lse = torch.full(queries.shape[:3], -torch.inf, dtype=torch.float32, device=queries.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a block's output (b, a, r, d) and finite log-sum-exp (b, a, r) into some rows."""
        before = self._lse[:, :, rows]
        after = torch.logaddexp(before, lse.float())
        kept, added = (before - after).exp(), (lse.float() - after).exp()
        self._out[:, :, rows] = self._out[:, :, rows] * kept.unsqueeze(-1) + out.float() * added.unsqueeze(-1)
        self._lse[:, :, rows] = after

    def output(self) -> Tensor:
        """Return the attention in the queries' type."""
        return self._out.to(self._dtype)

    def lse(self) -> Tensor:
        """Return the log-sum-exp (b, a, s), float32."""
        return self._lse
