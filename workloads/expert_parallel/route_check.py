"""Whether routers chose what one process's would: its own scores, held against the routes that ranks took."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.expert_parallel.moe_layer import mixtures

# scores of two experts that are nearer than this may come out in another order, where sums are rounded otherwise
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def count_misrouted(scores: Tensor, routes: Tensor, near: float) -> int:
    """Return how many tokens left an expert out whose score (T, E) is better, by more than ``near``, than one taken.

    A token that took an expert twice counts too.
    """
    worst_taken = scores.gather(1, routes).amin(1)
    best_left = scores.scatter(1, routes, -1.0).amax(1)
    twice = (routes.sort(1).values.diff(dim=1) == 0).any(1)
    return int(((best_left - worst_taken > near) | twice).sum())


def count_misrouted_in(
    model: nn.Module, forward: Callable[[], object], chosen: Mapping[int, Tensor], dtype: torch.dtype
) -> int:
    """Return how many tokens of a forward pass took, in all layers together, what the model's routers would not."""
    scores: dict[int, Tensor] = {}

    def keeping(number: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            scores[number] = output

        return keep

    hooks = [mixture.router.register_forward_hook(keeping(n)) for n, mixture in enumerate(mixtures(model))]
    with torch.no_grad():
        forward()
    for hook in hooks:
        hook.remove()
    return sum(count_misrouted(scores[n], routes, NEAR[dtype]) for n, routes in chosen.items())
