"""The reference of a step: one process with its model, or with a small one if that does not fit.

``check_memory`` of each rank is compared with the memory that is free before the step is built.
"""

from parbench.bench.machine.machine import count_available_memory_bytes
from parbench.bench.plan.cases import Params
from parbench.bench.plan.params import Value
from parbench.bench.world import accelerator
from parbench.bench.world.world import World
from parbench.workloads.costs.memory import compute_rank_memory, make_activations_equation
from parbench.workloads.costs.parameter_table import count_parameters
from parbench.workloads.costs.step_spec import RankView, StepSpec

FRAGMENTATION_MARGIN = 0.9
"""The fraction of free memory that may be used, because an allocator leaves gaps."""
_REFERENCE_BYTES = 24
"""The bytes per parameter of the references of the check.

They are six float32 numbers: the weights of the step and of two references, gradients, and the two
moments of AdamW.
"""
_MAX_HEAD_SIZE = 16
"""The maximum head size of the small model, the result of ``shrink_model``."""
_MAX_TOKENS = 64
"""The maximum sequence length of the small model, the result of ``shrink_model``.

It is rounded down to a multiple of twice the number of ranks, and is at least this multiple.
"""
_MAX_VOCABULARY = 512
"""The maximum vocabulary size of the small model, the result of ``shrink_model``."""


def does_reference_fit(world: World, spec: StepSpec) -> bool:
    """Return True if every rank has memory for its step and for a single-process reference.

    Each rank compares the needed bytes with 90 % of its free bytes. All ranks call it and get the
    same result.
    """
    num_bytes = check_memory(spec.make_rank_view(world.rank))
    return all(world.gather(num_bytes <= FRAGMENTATION_MARGIN * count_free_bytes(world)))


def count_free_bytes(world: World) -> float:
    """Return the bytes that this rank can allocate now.

    On a GPU they are the free bytes of the device, on a CPU those of the host. Both are divided by
    the number of ranks that share them.
    """
    local_ranks = world.hosts.count(world.hosts[world.global_rank])
    if world.device.type != "cuda":
        return count_available_memory_bytes() / local_ranks
    ranks_per_gpu = -(-local_ranks // accelerator.count_devices())
    return accelerator.count_free_bytes(world.device) / ranks_per_gpu


def check_memory(view: RankView) -> float:
    """Return an upper bound in bytes of one rank's memory while its step is verified.

    It includes the step's own memory, the weights, gradients and AdamW state of references, and the
    activations and two tensors of logits of one process that runs the global batch in float32.
    """
    spec = view.spec
    models = _REFERENCE_BYTES * count_parameters(spec.shape, spec.moe)
    moe = spec.moe and spec.moe.on_one_rank()
    single = StepSpec(shape=spec.shape, moe=moe, microbatch=spec.global_batch, bytes_per_element=4)
    logits = 2.0 * spec.tokens * spec.shape.vocabulary * 4
    activations = make_activations_equation(single.make_rank_view(0)).value
    return compute_rank_memory(view).total + models + activations + logits


def shrink_model(spec: StepSpec, params: Params) -> dict[str, Value]:
    """Return the sizes of a small model that can run on the same mesh, keyed by parameter name.

    The small model is checked against a single-process reference if the reference of the full model
    does not fit in memory. Its sizes replace those in ``params``, the parameters of the benchmark.
    The small model has all heads, but
    a smaller hidden size, vocabulary and sequence length. It has one layer for each pipeline stage,
    at least two, or all layers if ``params`` sets the layers of each stage. Every axis of the mesh
    divides the sequence length.
    """
    shape = spec.shape
    head_size = min(shape.head_size, _MAX_HEAD_SIZE)
    hidden = shape.heads * head_size
    stages = 2 if spec.pipeline is None else spec.pipeline.size.num_stages
    tokens_per_unit = 2 * spec.ranks
    tokens = tokens_per_unit * max(1, _MAX_TOKENS // tokens_per_unit)
    small: dict[str, Value] = {
        "layers": shape.layers
        if params.get("layers_per_stage")
        else min(shape.layers, max(2, stages)),
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
