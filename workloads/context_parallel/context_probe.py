"""The probe of attention over ranks: the bytes of each direction, and the balance of the work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parbench.bench.results import details
from parbench.bench.results.metrics import make_values
from parbench.bench.world.benchmark import Explanation
from parbench.workloads.context_parallel.attention_kernel import Kernel
from parbench.workloads.context_parallel.sequence_split import SequenceSplit
from parbench.workloads.costs.communication_pattern import bytes_by_axis
from parbench.workloads.model.shapes import Shape
from parbench.workloads.step.probe import ResetFn, Step
from parbench.workloads.step.sent_bytes import record_calls

BytesByDirection = Mapping[str, Mapping[str, float]]
"""Bytes of "forward" and "backward" by axis."""


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """Compares the bytes that attention sends for one microbatch with the analytical ones."""

    groups: Mapping[str, dist.ProcessGroup]
    """The groups of all axes of the step."""
    split: SequenceSplit
    expected: BytesByDirection
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
        for direction, expected_by_axis in self.expected.items():
            for axis, expected in expected_by_axis.items():
                sent = samples[0][direction].get(axis, 0.0)
                values = {
                    f"bytes_sent.{axis}.{direction}": sent,
                    f"bytes_expected.{axis}.{direction}": expected,
                    f"bytes_ratio.{axis}.{direction}": sent / expected if expected else None,
                }
                metrics |= make_values(values, "one microbatch")
        return Explanation(metrics=metrics)


def compute_expected_bytes(
    layer_bytes: BytesByDirection, *, layers: int, recomputations: float
) -> BytesByDirection:
    """Return the bytes of a microbatch from those of one layer.

    Backward runs the forward pass of a checkpointed layer again: ``recomputations`` per layer.
    """
    forward, backward = layer_bytes["forward"], layer_bytes["backward"]
    return {
        "forward": {axis: layers * sent for axis, sent in forward.items()},
        "backward": {
            axis: layers * (sent + recomputations * forward[axis])
            for axis, sent in backward.items()
        },
    }


def make_attention_details(
    split: SequenceSplit, shape: Shape, layer_bytes: BytesByDirection, kernel: Kernel
) -> details.AttentionDetails:
    """Return the details of a record. ``layer_bytes`` are of one layer and microbatch."""
    return details.AttentionDetails(
        method=split.method.name,
        mask=split.mask,
        token_order=split.method.order.name,
        sequence=split.sequence,
        tokens_per_rank=split.sequence // split.ranks,
        attention_bytes={**layer_bytes, "per": "layer and microbatch"},
        # Above 1 + 1/g ranks, Ulysses sends less in forward than a ring.
        crossover_ranks=1 + shape.heads / shape.kv_heads,
        balance_limit=split.balance_limit if split.mask == "causal" else None,
        kernel=kernel.name,
    )
