"""Padded batches: the loss is the mean over the tokens of the global batch that are not padding.

Data ranks have different numbers of such tokens, so the mean of their mean losses is not the mean
over tokens. As in Megatron and torchtitan, ranks divide their summed losses by a sum over ranks.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.transformer import NO_TARGET, make_generator


def pad_sequences(tokens: Tensor, padding: float, seed: int, step: int) -> Tensor:
    """Return tokens (sequences, s + 1) in which ``NO_TARGET`` replaces the end of each sequence.

    ``padding`` is the mean fraction of s that is replaced. The length of each sequence's padding is
    uniform between 0 and twice this fraction of s. It is drawn from ``seed`` and the number of the
    ``step``. Each sequence keeps at least one token with a target.
    """
    if not padding:
        return tokens
    num_sequences, width = tokens.shape
    max_padded = min(width - 2, round(2 * padding * (width - 1)))
    generator = make_generator(seed, f"padding {step}")
    num_padded = torch.randint(max_padded + 1, (num_sequences, 1), generator=generator)
    positions = torch.arange(width)
    return torch.where(positions >= width - num_padded, NO_TARGET, tokens)


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not padding, as an int64 scalar tensor."""
    return (targets != NO_TARGET).sum()


def compute_loss_weight(
    spec: StepSpec, targets: Iterable[Tensor], groups: Mapping[str, dist.ProcessGroup]
) -> Tensor:
    """Return the factor by which a microbatch's loss, the sum over its tokens, is multiplied.

    With this factor, the mean of the losses over microbatches and data ranks equals the mean loss
    of all tokens with a target. ``targets`` holds the target ids (b, s) of each of this rank's
    microbatches. ``groups`` has this rank's process groups, keyed by mesh axis.
    """
    count = torch.stack([count_targets(microbatch) for microbatch in targets]).sum()
    for axis in ("fsdp", "dp"):
        if axis in groups:
            dist.all_reduce(count, group=groups[axis])
    return spec.dims.data_ranks * spec.microbatches / count
