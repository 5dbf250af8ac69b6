"""Dispatch and combine alone: a microbatch's tokens to the ranks of their experts and back, packing included."""

import torch

from bench.launch.control_channel import Work
from bench.plan.params import Value
from bench.world.subject import Description
from bench.world.world import World
from workloads.expert_parallel.expert_scope import Passing, Scope


def prepare(world: World, **params: Value) -> "DispatchStep":
    """Return the step; scores are taken before it is timed."""
    return DispatchStep(world, params)


class DispatchStep(Scope):
    """The forward way there and back; experts give back what they get, and nothing has gradients."""

    claim = "ep_dispatch: forward dispatch and combine alone; no claim about a layer, a step, or what compute hides"
    backward = False

    def step(self) -> None:
        """Send tokens to their experts and back."""
        self.layer.chosen[0] = self._chosen
        with torch.no_grad():
            self._out = self.layer.route(self.x.flatten(0, 1), self._weights, self._chosen)

    def check(self) -> int:
        """Return how many elements of the last step are not token times weights, and how many are misplaced."""
        kept = torch.zeros_like(self._weights, dtype=torch.bool)
        slots = self.moe.slots(len(self._weights))
        for expert in range(self.moe.experts):
            takes = self._chosen == expert
            kept |= takes if slots is None else takes & (takes.any(1).cumsum(0) <= slots)[:, None]
        scale = (self._weights.float() * kept).sum(1, keepdim=True)
        expected = self.x.flatten(0, 1).float() * scale
        limit = 4 * torch.finfo(self.x.dtype).eps * self.moe.top_k * expected.abs()
        return int((~((self._out.float() - expected).abs() <= limit)).sum()) + self.count_misplaced()

    def describe(self) -> Description:
        """Return the rate at which pairs of token and expert come and go."""
        found = super().describe()
        pairs = self._num_tokens * self.moe.top_k * self._world.size
        work = (Work(name="pairs_per_second", amount=pairs),)
        return Description(headline=found.headline, work=work, details=found.details, notes=found.notes)

    def _draw(self) -> None:
        super()._draw()
        self.layer.experts = Passing(self.moe.etp)  # type: ignore[assignment]
        with torch.no_grad():
            scores = self.layer.router(self.x.flatten(0, 1))
            given = self.layer.given
            self._chosen = scores.topk(self.moe.top_k).indices if given is None else given
            self._weights = scores.gather(1, self._chosen.clamp(min=0)).to(self.x.dtype)
        self._out = torch.full_like(self.x.flatten(0, 1), torch.nan)
