"""The single process's attention under other masks is the formula's."""

import pytest
import torch
from torch import Tensor

from workloads.context.dense_attention import attend_documents, attend_fully


def drawn(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, heads, 7, 4), torch.randn(2, kv_heads, 7, 4), torch.randn(2, kv_heads, 7, 4)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.double() @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    out: Tensor = scores.softmax(dim=-1) @ v
    return out


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_a_full_mask_sees_every_key(kv_heads: int) -> None:
    q, k, v = drawn(6, kv_heads)
    expected = formula(q, k, v, torch.ones(7, 7, dtype=torch.bool))
    torch.testing.assert_close(attend_fully(q, k, v).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_documents_see_what_is_not_later_and_their_own(kv_heads: int) -> None:
    q, k, v = drawn(6, kv_heads)
    document = [0, 0, 0, 1, 2, 2, 2]
    seen = torch.tensor([[document[i] == document[j] and j <= i for j in range(7)] for i in range(7)])
    found = attend_documents(q, k, v, starts=(0, 3, 4))
    torch.testing.assert_close(found.double(), formula(q, k, v, seen), rtol=0, atol=1e-6)
    assert torch.equal(found[:, :, 3], v.repeat_interleave(6 // kv_heads, dim=1)[:, :, 3])  # alone in its document
