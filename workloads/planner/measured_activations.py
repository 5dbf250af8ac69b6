"""What a measured step keeps for backward, tensor by tensor, as ``workloads.step.memory`` counts it. Pure.

The planner's dry runs take the layers and logits of a large cluster; here is all that this suite's model keeps: norms'
statistics, rotary tables, the ends. b s h a f V are microbatch, sequence, hidden size, heads, inner size of the FFN and
vocabulary, e the bytes of an element, t the ranks that split a layer, g = a_kv / a. A layer keeps, in b s h:

* gpt: its norms' inputs 2 and outputs 2; q, k, v and attention's output (2 + 2g) / t; before and after GELU 2f/(ht).
* llama: the same, and 4f/(ht) for gate, SiLU, up and their product.

On a CPU torch's RMSNorm is made of elementary operations: it keeps its input and that over its root mean square in
float32. Rotated queries are laid out by head, and so is what attention makes of them: it is copied once more. Only
CUDA's kernel for float32 (memory-efficient attention, for as many key heads as query heads) lays it out by token.
"""

from dataclasses import dataclass

from workloads.costs.activations import activation_bytes_of
from workloads.mesh.axes import coordinate_of, mesh_of
from workloads.model.shapes import Shape, parse_compute
from workloads.pipeline_parallel.pipeline_case import pipeline_of
from workloads.pipeline_parallel.schedules import peak_held
from workloads.planner.measured_calls import Step

_FLOAT_BYTES = 4
_TOKEN_BYTES = 8
_WHOLE = ("ddp", "zero1", "zero2", "zero3", "hsdp")
_SPLIT = ("tp", "tp_sp", "tp_fsdp")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass of one microbatch: layers split over ``tp``, what lies between them too if ``sequence_parallel``.

    ``timed`` is compute that waits: without attention's heads and positions.
    """

    shape: Shape
    microbatch: int
    element_bytes: int
    checkpointing: str = "none"
    timed: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.microbatch * self.shape.sequence

    @property
    def hidden_bytes(self) -> float:
        """One activation between layers, whole: b s h e."""
        return float(self.tokens * self.shape.hidden * self.element_bytes)

    @property
    def between(self) -> int:
        """Over how many ranks the activations between the blocks lie."""
        return self.tp if self.sequence_parallel else 1


def activations_of(step: Step) -> float | None:
    """Return the bytes that the fullest rank of a step keeps for backward at once.

    None where that is not known: of another kind of step, and under selective checkpointing, which no hook sees.
    """
    if step.name not in (*_WHOLE, *_SPLIT, "pp", "hybrid") or _checkpointing(step) == "selective":
        return None
    if step.name == "hybrid":
        return _on_mesh(step)
    taken = _pass_of(step)
    if step.name == "pp":
        return _pipelined(step, taken)
    drawn = step.ranks // taken.tp * taken.microbatch * step.microbatches
    ends = embedding_bytes(taken, drawn=drawn) + head_bytes(taken)
    return taken.shape.layers * layer_bytes(taken) + ends


def _pass_of(step: Step) -> Pass:
    return Pass(
        shape=step.shape,
        microbatch=int(step.params["microbatch"]),
        element_bytes=step.element_bytes,
        checkpointing=_checkpointing(step),
        timed=_is_timed(step),
        tp=int(step.params.get("tp", step.ranks)) if step.name in _SPLIT else 1,
        sequence_parallel=step.name == "tp_sp",
        device=step.device,
    )


def _checkpointing(step: Step) -> str:
    return str(step.params["checkpointing"])


def _is_timed(step: Step) -> bool:
    return parse_compute(str(step.params["compute"])) is not None


def _on_mesh(step: Step) -> float | None:
    """Return the fullest rank's of a dense model with real compute."""
    if int(step.params["experts"]) or _is_timed(step):
        return None
    mesh = mesh_of(str(step.params["mesh"]), step.ranks)
    return max(
        activation_bytes_of(
            step.shape,
            mesh,
            coordinate_of(mesh, rank),
            microbatch=int(step.params["microbatch"]),
            microbatches=step.microbatches,
            element_bytes=step.element_bytes,
            schedule=str(step.params["schedule"]),
            chunks=int(step.params["chunks"]),
            split=str(step.params["split"]),
            checkpointing=_checkpointing(step),
            fused_norms=step.device != "cpu",
        )
        for rank in range(step.ranks)
    )


def _pipelined(step: Step, taken: Pass) -> float:
    """Return the most that any rank's order of actions keeps at once, each microbatch what its stage does."""
    pipeline = pipeline_of(step.params, step.shape, step.ranks)
    last = pipeline.schedule.num_stages - 1

    def of_stage(stage: int) -> float:
        ends = (embedding_bytes(taken) if stage == 0 else 0.0) + (head_bytes(taken) if stage == last else 0.0)
        return pipeline.layers_by_stage[stage] * layer_bytes(taken) + ends

    return max(peak_held(pipeline.schedule, rank, of_stage) for rank in range(step.ranks))


def layer_bytes(taken: Pass) -> float:
    """Return what one layer keeps; with full checkpointing its input alone."""
    if taken.checkpointing == "full":
        return taken.hidden_bytes / taken.between
    shape = taken.shape
    ffn = (4 if shape.recipe == "llama" else 2) * shape.ffn / shape.hidden
    return 2 * norm_bytes(taken) + _attention_bytes(taken) + taken.hidden_bytes * ffn / taken.tp


def _attention_bytes(taken: Pass) -> float:
    """Return q, k, v, the result and its log-sum-exp, 4 b s a / t, and llama's 8 s d of rotary tables."""
    if taken.timed:
        return taken.hidden_bytes / taken.tp
    shape = taken.shape
    rotary = shape.recipe == "llama"
    by_token = taken.device != "cpu" and taken.element_bytes == _FLOAT_BYTES
    copies = 1 if rotary and shape.heads > taken.tp and not by_token else 0
    split = taken.hidden_bytes * (2 + 2 * shape.kv_heads / shape.heads + copies)
    split += _FLOAT_BYTES * taken.tokens * shape.heads
    return split / taken.tp + (2 * _FLOAT_BYTES * shape.sequence * shape.head_size if rotary else 0)


def norm_bytes(taken: Pass) -> float:
    """Return a norm's input, its statistics of each token, and its output, which lies whole on every rank."""
    stat = taken.element_bytes if taken.device == "cpu" else _FLOAT_BYTES
    if taken.shape.recipe == "gpt":
        own = taken.hidden_bytes + 2 * stat * taken.tokens
    elif taken.device == "cpu":
        own = _FLOAT_BYTES * taken.tokens * (2 * taken.shape.hidden + 1)
    else:
        own = taken.hidden_bytes + _FLOAT_BYTES * taken.tokens
    return own / taken.between + taken.hidden_bytes


def embedding_bytes(taken: Pass, *, drawn: int = 0) -> float:
    """Return the tokens, and gpt's positions; tokens that are cut from ``drawn`` sequences with targets keep those."""
    shape = taken.shape
    tokens = drawn * (shape.sequence + 1) if drawn else taken.tokens
    return _TOKEN_BYTES * float(tokens + (shape.sequence if shape.recipe == "gpt" else 0))


def head_bytes(taken: Pass) -> float:
    """Return the last norm, the log-softmax of the logits, b s V e, the targets, and how many they are."""
    logits = taken.tokens * taken.shape.vocabulary * taken.element_bytes
    return norm_bytes(taken) + logits + _TOKEN_BYTES * taken.tokens + taken.element_bytes
