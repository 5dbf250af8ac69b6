"""Which tokens of a sequence a rank takes, over ``cp`` and then ``tp``, and attention that reaches all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from workloads.context_parallel.attention_kernel import Kernel
from workloads.context_parallel.context_step import core_of
from workloads.context_parallel.exchange_plan import ContextPlan
from workloads.context_parallel.recorder import Recorder
from workloads.mesh.mesh_case import Hybrid
from workloads.model.shapes import Shape
from workloads.model.transformer import Attention, rotate


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Positions of a sequence: ``attended`` are those of this rank's part of ``cp``, ``mine`` its run of them."""

    attended: tuple[int, ...]
    mine: tuple[int, ...]


def tokens_of(hybrid: Hybrid, sequence: int, coordinate: Mapping[str, int]) -> Tokens:
    """Return the positions of the rank at a coordinate."""
    attended = plan_of(hybrid, sequence).tokens(coordinate["cp"])
    each = len(attended) // hybrid.size("tp")
    first = coordinate["tp"] * each
    return Tokens(attended=tuple(attended), mine=tuple(attended[first : first + each]))


def plan_of(hybrid: Hybrid, sequence: int) -> ContextPlan:
    """Return how sequences are dealt out over ``cp``."""
    cp = hybrid.size("cp")
    ulysses = cp if hybrid.cp_method == "ulysses" else 1
    return ContextPlan(method=hybrid.cp_method, mask="causal", sequence=sequence, ranks=cp, ulysses=ulysses)


def reach_all(
    model: nn.Module,
    hybrid: Hybrid,
    shape: Shape,
    groups: Mapping[str, dist.ProcessGroup],
    coordinate: Mapping[str, int],
    kernel: Kernel,
    device: torch.device,
) -> None:
    """Let every attention reach the keys of its group of ``cp`` by a kernel, and turn its own by where they stand."""
    plan = plan_of(hybrid, shape.sequence)
    places = torch.tensor(plan.tokens(coordinate["cp"]), device=device)
    for module in model.modules():
        if isinstance(module, Attention):
            if "cp" in groups:
                module.core = core_of(plan, coordinate["cp"], device, groups, kernel, Recorder(device))
            if module.rotate is not None:
                module.rotate = partial(rotate, positions=places)
