"""The reference of a step: one process with its model, or with a small one if that does not fit.

``check_memory`` of each rank is compared with the memory that is free before the step is built.
"""

from parbench.bench.machine.machine import count_available_memory_bytes
from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Value
from parbench.bench.world import accelerator
from parbench.bench.world.world import World
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.step.check_memory import FRAGMENTATION_MARGIN, check_memory

_MAX_HEAD_SIZE = 16
_MIN_TOKENS = 64
_MAX_VOCABULARY = 512


def does_reference_fit(world: World, spec: StepSpec) -> bool:
    """Return True if every rank has memory for the step and its single-process reference.

    All ranks take part in the call.
    """
    num_bytes = check_memory(spec.rank_view(world.rank))
    return all(world.gather(num_bytes <= FRAGMENTATION_MARGIN * count_free_bytes(world)))


def count_free_bytes(world: World) -> float:
    """Return the bytes that this rank can allocate, on its device or as its share of the host."""
    local_ranks = world.hosts.count(world.hosts[world.global_rank])
    if world.device.type != "cuda":
        return count_available_memory_bytes() / local_ranks
    ranks_per_gpu = -(-local_ranks // accelerator.count_devices())
    return accelerator.count_free_bytes(world.device) / ranks_per_gpu


def shrink_model(spec: StepSpec, params: Params) -> dict[str, Value]:
    """Return the parameters of a small model that runs on the same mesh.

    It has all heads and as many layers as the pipeline has stages, but is narrower and shorter. Its
    tokens are a multiple of what any axis requires.
    """
    shape = spec.shape
    head_size = min(shape.head_size, _MAX_HEAD_SIZE)
    hidden = shape.heads * head_size
    stages = 2 if spec.pipeline is None else spec.pipeline.size.num_stages
    tokens_per_unit = 2 * spec.ranks
    tokens = tokens_per_unit * max(1, _MIN_TOKENS // tokens_per_unit)
    small: dict[str, Value] = {
        "layers": shape.layers if params.get("split") else min(shape.layers, max(2, stages)),
        "hidden": hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn": min(shape.ffn, 2 * hidden),
        "sequence": min(shape.sequence, tokens),
        "vocabulary": min(shape.vocabulary, _MAX_VOCABULARY),
    }
    if "expert_ffn" in params:
        small["expert_ffn"] = 0
    return small
