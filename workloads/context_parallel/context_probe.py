"""The probe of attention over ranks: the bytes of each direction, and the balance of the work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parbench.bench.results.details import AttentionDetails
from parbench.bench.results.metrics import make_values
from parbench.bench.world.benchmark import Explanation
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.costs.communication_pattern import attention_bytes, bytes_by_axis
from parbench.workloads.costs.step_spec import RankView
from parbench.workloads.step.probe import ResetFn, Step
from parbench.workloads.step.sent_bytes import record_calls

BytesByDirection = Mapping[str, Mapping[str, float]]
"""Bytes of "forward" and "backward" by axis."""


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """Compares the bytes that attention sends for one microbatch with the analytical ones."""

    groups: Mapping[str, dist.ProcessGroup]
    """The groups of all axes of the step."""
    view: RankView
    split: SequenceSplit
    zero_grad: Callable[[], None]
    forward: Callable[[], Tensor]
    """Returns the loss of a microbatch."""
    share = 0.1

    def observe(self, step: Step, reset: ResetFn, budget_seconds: float) -> BytesByDirection:
        self.zero_grad()
        reset()
        losses: list[Tensor] = []
        forward_calls = record_calls(lambda: losses.append(self.forward()), self.groups)
        backward_calls = record_calls(losses.pop().backward, self.groups)
        return {"forward": bytes_by_axis(forward_calls), "backward": bytes_by_axis(backward_calls)}

    def summarize(self, samples: Sequence[BytesByDirection]) -> Explanation:
        metrics = make_values({"load_balance": self.split.compute_load_balance()})
        layer_bytes = attention_bytes(self.view)
        for axis in layer_bytes["forward"]:
            for direction, expected in self._expect_bytes(layer_bytes, axis).items():
                sent = samples[0][direction].get(axis, 0.0)
                values = {
                    f"bytes_sent.{axis}.{direction}": sent,
                    f"bytes_expected.{axis}.{direction}": expected,
                    f"bytes_ratio.{axis}.{direction}": sent / expected if expected else None,
                }
                metrics |= make_values(values, "one microbatch")
        shape = self.view.spec.shape
        details = AttentionDetails(
            method=self.split.method.name,
            sequence=self.split.sequence,
            tokens_per_rank=self.split.sequence // self.split.ranks,
            attention_bytes={**layer_bytes, "per": "layer and microbatch"},
            # Above 1 + 1/g ranks, Ulysses sends less in forward than a ring.
            crossover_ranks=1 + shape.heads / shape.kv_heads,
        )
        return Explanation(metrics=metrics, details=details.as_details)

    def _expect_bytes(self, layer_bytes: BytesByDirection, axis: str) -> dict[str, float]:
        """Return the bytes of a microbatch; backward recomputes the forward pass of some layers."""
        layers = self.view.layers
        forward = layers * layer_bytes["forward"][axis]
        backward = layers * layer_bytes["backward"][axis]
        repeated = (self.view.spec.forward_passes - 1) * forward
        return {"forward": forward, "backward": backward + repeated}
