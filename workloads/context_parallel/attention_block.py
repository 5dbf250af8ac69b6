"""A rank's queries on blocks of keys and values: tile by tile, merged forward, summed backward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.context_parallel.attention_kernel import Kernel, num_pairs
from workloads.context_parallel.online_softmax import Merged
from workloads.context_parallel.recorder import Recorder
from workloads.context_parallel.tiles import Tile


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What backward needs of the queries (b, a, s, d): output and log-sum-exp over all blocks, output's gradient."""

    q: Tensor
    out: Tensor
    lse: Tensor
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a rank computes: its kernel, and the tiles of each step."""

    kernel: Kernel
    recorder: Recorder
    tiles: Sequence[Sequence[Tile]]

    def forward(self, step: int, q: Tensor, kv: Tensor, merged: Merged) -> None:
        """Add to ``merged`` the attention of queries over a block of keys and values (2, b, a_kv, t, d)."""
        for tile in self.tiles[step]:
            rows, columns = _rows(tile), _columns(tile)
            queries, keys, values = q[:, :, rows], kv[0, :, :, columns], kv[1, :, :, columns]
            self.recorder.computed("forward", step, num_pairs(queries, keys, tile.causal))
            merged.add(rows, *self.kernel.forward(queries, keys, values, tile.causal))

    def backward(self, step: int, tiles: Sequence[Tile], saved: Saved, kv: Tensor, dq: Tensor) -> Tensor:
        """Return the gradients of a block of keys and values, and add those of the queries to ``dq``; both float32."""
        d_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for tile in tiles:
            rows, columns = _rows(tile), _columns(tile)
            queries, keys, values = saved.q[:, :, rows], kv[0, :, :, columns], kv[1, :, :, columns]
            self.recorder.computed("backward", step, num_pairs(queries, keys, tile.causal))
            out, lse, gradient = saved.out[:, :, rows], saved.lse[:, :, rows], saved.gradient[:, :, rows]
            of_q, of_k, of_v = self.kernel.backward(gradient, queries, keys, values, out, lse, tile.causal)
            dq[:, :, rows] += of_q
            d_kv[0, :, :, columns] += of_k
            d_kv[1, :, :, columns] += of_v
        return d_kv


def _rows(tile: Tile) -> slice:
    return slice(tile.query_start, tile.query_stop)


def _columns(tile: Tile) -> slice:
    return slice(tile.key_start, tile.key_stop)
