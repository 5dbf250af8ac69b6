"""Attention of a single process under other masks than the causal one, to compare with."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_fully(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over all keys: q (b, a, s, d), k and v (b, a_kv, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def attend_documents(q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int]) -> Tensor:
    """Return attention over keys that are not later and of the query's document; these start at ``starts``."""
    positions = torch.arange(q.shape[2], device=q.device)
    documents = torch.searchsorted(torch.tensor(starts, device=q.device), positions, right=True)
    seen = (documents[:, None] == documents) & (positions[:, None] >= positions)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
