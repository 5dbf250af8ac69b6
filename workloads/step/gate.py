"""How a step is verified: against a single process of its size, or by a small model where that does not fit in memory.

The choice compares ``check_memory`` of each rank with the memory that is free before the step is built.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from parbench.bench.machine.machine import available_memory_bytes
from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Value
from parbench.bench.world.world import World
from parbench.workloads.costs.check_memory import FRAGMENTATION_MARGIN, check_memory
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.costs.strategies import Strategy
from parbench.workloads.model.shapes import SMALL, WHOLE
from parbench.workloads.step.training_step import LayOut, TrainingStep

Step = TypeVar("Step", bound=TrainingStep)
_HEAD_SIZE, _TOKENS, _VOCABULARY = 16, 64, 512


def prepared(
    lay_out: LayOut, strategy: Strategy, *, outlined: bool = False
) -> Callable[..., TrainingStep]:
    """Return a function that builds the verified step of a layout; see ``behind_gate``."""

    def make(world: World, params: Params) -> TrainingStep:
        return TrainingStep(world, params, lay_out, strategy, outlined=outlined)

    return behind_gate(make, strategy)


def behind_gate(make: Callable[[World, Params], Step], strategy: Strategy) -> Callable[..., Step]:
    """Return a function that builds a step, after a small model was verified where the reference does not fit."""

    def build(world: World, **params: Value) -> Step:
        spec = strategy(params, world.size, world.device.type)
        check = str(params.get("check", "auto"))
        if check == "auto":
            fits = check_memory(spec.at(world.rank)) <= FRAGMENTATION_MARGIN * free_bytes(world)
            check = WHOLE if all(world.gather(fits)) else SMALL
        if check == WHOLE or spec.timed:
            return make(world, {**params, "check": WHOLE})
        small = make(world, {**params, **small_shape(spec, params, world.size), "check": WHOLE})
        small.reset()
        small.step()
        wrong, differences = (
            small.check(),
            [f"on a small model: {text}" for text in small.differences()],
        )
        small.close()
        step = make(world, {**params, "check": SMALL})
        step.small_model_wrong, step.small_model_differences = wrong, tuple(differences)
        return step

    return build


def free_bytes(world: World) -> float:
    """Return the memory that this rank can still have: of its device, or its share of what the host has free."""
    mine = world.hosts.count(world.hosts[world.global_rank])
    if world.device.type != "cuda":
        return available_memory_bytes() / mine
    unused = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    free = torch.cuda.mem_get_info(world.device)[0] + unused
    return free / -(-mine // torch.cuda.device_count())


def small_shape(spec: StepSpec, params: Params, ranks: int) -> dict[str, Value]:
    """Return what makes of a step's parameters a small one: as many heads and stages, else narrower, fewer and shorter.

    What divides among ranks still does: all heads are there, and tokens are a multiple of what any axes can ask.
    """
    shape = spec.shape
    head = min(shape.head_size, _HEAD_SIZE)
    stages = 2 if spec.pipeline is None else spec.pipeline.order.num_stages
    small: dict[str, Value] = {
        "layers": shape.layers if params.get("split") else min(shape.layers, max(2, stages)),
        "hidden": shape.heads * head,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn": min(shape.ffn, 2 * shape.heads * head),
        "sequence": min(shape.sequence, 2 * ranks * max(1, _TOKENS // (2 * ranks))),
        "vocabulary": min(shape.vocabulary, _VOCABULARY),
    }
    return small | ({"expert_ffn": 0} if "expert_ffn" in params else {})
