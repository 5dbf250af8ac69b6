"""What a rank of the pipeline holds of the model, and how many microbatches are in flight there. Pure.

Sources: arXiv 2104.04473 for 1F1B and the interleaved order, arXiv 2401.10241 for zero bubble; a test counts both in
the orders of ``workloads.pipeline``.
"""

from dataclasses import dataclass

from workloads.costs.parameter_table import stages_of_rank
from workloads.planner.ask import Ask
from workloads.planner.models import Model


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's layers, and whether it holds the embedding or the head; ``in_flight`` counts whole microbatches."""

    pp_rank: int
    layers: int
    embedding: bool
    head: bool
    in_flight: float

    @property
    def words(self) -> str:
        """Which rank, for people."""
        ends = [name for name, held in (("embedding", self.embedding), ("head", self.head)) if held]
        return f"pp rank {self.pp_rank}: {self.layers} layers" + (f" with {' and '.join(ends)}" if ends else "")


def parts_of(ask: Ask) -> tuple[Part, ...]:
    """Return the ranks that differ: the first, the fullest of those between, the last."""
    ranks = sorted({0, min(1, ask.pp - 1), ask.pp - 1})
    return tuple(_part(ask, rank) for rank in ranks)


def stages_of(ask: Ask, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank: dealt out in turn, or down and up again where the schedule folds them."""
    return stages_of_rank(ask.schedule, ask.pp, ask.stages_per_rank, rank) if ask.pp > 1 else (0,)


def sends_of(ask: Ask, part: Part) -> int:
    """Return the messages that a rank sends for one microbatch: one to each neighbouring stage on another rank."""
    stages, last = stages_of(ask, part.pp_rank), ask.pp * ask.stages_per_rank - 1
    beside = [other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last]
    return sum(other not in stages for other in beside)


def in_flight(schedule: str, *, rank: int, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the microbatches whose activations a rank holds at once, a rank's whole part each.

    GPipe and LoopedBFS hold all M; 1F1B P - r; interleaved 1F1B (2(P-r) - 1 + (v-1)P) / v; ZB-H1,
    its interleaved kin and ZB-V hold P everywhere, ZB-H2 2P - 1, DualPipeV P + 1/2.
    """
    if ranks == 1:
        return 1
    if schedule in ("gpipe", "looped_bfs", "naive"):
        return 1 if schedule == "naive" else microbatches
    held = {
        "1f1b": ranks - rank,
        "interleaved": (2 * (ranks - rank) - 1 + (chunks - 1) * ranks) / chunks,
        "zb_h2": 2 * ranks - 1,
        "dualpipe_v": ranks + 0.5,
    }.get(schedule, ranks)
    return float(min(held, microbatches))


def _part(ask: Ask, rank: int) -> Part:
    stages, last = stages_of(ask, rank), ask.pp * ask.stages_per_rank - 1
    return Part(
        pp_rank=rank,
        layers=len(stages) * (ask.model.shape.layers // (last + 1)),
        embedding=0 in stages,
        head=last in stages,
        in_flight=in_flight(
            ask.schedule, rank=rank, ranks=ask.pp, microbatches=ask.microbatches, chunks=ask.stages_per_rank
        ),
    )


def elements_of(ask: Ask, part: Part) -> tuple[float, float]:
    """Return the dense and the expert parameters of a rank before ``fsdp`` shards them: after pp, tp and ep."""
    model = ask.model
    whole = whole_of_layer(model)
    layer = whole + (model.dense_layer_parameters - whole) / ask.tp
    experts = part.layers * model.num_experts // ask.ep * model.expert_parameters
    return part.layers * layer + end_elements(ask, part), float(experts)


def summed_elements(ask: Ask, part: Part) -> float:
    """Return the dense parameters whose gradients the ranks of ``tp`` must sum: each saw its part of a sequence.

    These are norms and a router, 2h a layer for llama and 4h for gpt, and embedding and head where they are whole. The
    bias after a row-split product is whole too, but its gradient comes summed.
    """
    shape = ask.model.shape
    norm = (2 if shape.recipe == "gpt" else 1) * shape.hidden
    ends = (norm if part.head else 0) if ask.sharded_vocabulary else end_elements(ask, part)
    return part.layers * (2 * norm + shape.hidden * ask.model.num_experts) + ends


def whole_of_layer(model: Model) -> int:
    """Return what of a layer ``tp`` does not split: norms, a router, biases after a row-split product; 2h or 6h."""
    return (2 if model.shape.recipe == "llama" else 6) * model.shape.hidden + model.shape.hidden * model.num_experts


def end_elements(ask: Ask, part: Part) -> float:
    """Return the parameters of the embedding, the last norm and the head that a rank holds."""
    shape = ask.model.shape
    tables = shape.hidden * (shape.vocabulary + (shape.sequence if shape.recipe == "gpt" else 0))
    split = ask.tp if ask.sharded_vocabulary else 1
    norm = (2 if shape.recipe == "gpt" else 1) * shape.hidden
    head = shape.hidden * shape.vocabulary / split + norm
    return (tables / split if part.embedding else 0.0) + (head if part.head else 0.0)
