"""What is left of gradients after all microbatches: sums over the ranks that hold the same parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workloads.costs.parameter_table import Kind
from workloads.step.layout import local


def by_kind(model: nn.Module, *, split: bool) -> dict[Kind, list[nn.Parameter]]:
    """Return parameters by what sums their gradients are; see ``hybrid_tensors``."""
    found: dict[Kind, list[nn.Parameter]] = {"split": [], "whole": [], "routed": []}
    for name, parameter in model.named_parameters():
        found[_kind(name, split=split)].append(parameter)
    return found


def _kind(name: str, *, split: bool) -> Kind:
    if ".ffn.experts." in name:
        return "routed"
    mixture = ".ffn.router." in name or ".ffn.shared." in name
    blocks = ".attention." in name or (".ffn." in name and not mixture)
    return "split" if split and blocks else "whole"


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums by axis, one all_reduce each; ``shards`` are the ranks over which FSDP has taken the mean already."""

    parameters: Mapping[Kind, Sequence[nn.Parameter]]
    groups: Mapping[str, dist.ProcessGroup]
    shards: int

    def take(self) -> None:
        """Sum over ``tp`` what it does not split, over ``dp`` all but experts, over ``edp`` those."""
        whole, split, routed = (gradients_of(self.parameters[kind]) for kind in ("whole", "split", "routed"))
        for axis, gradients in (("tp", whole), ("dp", [*split, *whole]), ("edp", routed)):
            if axis in self.groups and gradients:
                sum_together(gradients, self.groups[axis])
        if self.shards > 1:
            for gradient in routed:
                gradient /= self.shards


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of gradients, those of no elements too: all ranks must call alike."""
    missing = [parameter for parameter in parameters if parameter.grad is None]
    assert not missing, "every parameter is used in every step"
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors of one type over a group, as one."""
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together, group=group)
    summed = torch.split(together, [gradient.numel() for gradient in gradients])
    for gradient, values in zip(gradients, summed, strict=True):
        gradient.copy_(values.view_as(gradient))
