"""The tokens of a rank: their positions in each sequence, in attention and between blocks.

``cp`` splits a sequence for attention, and with sequence parallelism ``tp`` splits what remains
between blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from parbench.bench.world.world import World
from parbench.workloads.context_parallel.attention_kernel import choose_kernel
from parbench.workloads.context_parallel.attention_methods import build_attention
from parbench.workloads.context_parallel.sequence_split import SequenceSplit, split_sequence
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.mesh.mesh import Partition
from parbench.workloads.model.transformer import DTYPES, Core


@dataclass(frozen=True)
class TokenPositions:
    """The positions in a sequence of the tokens that a rank holds, inside and outside of blocks.

    A block is the attention or the FFN of a layer. Inside of blocks, ``cp`` splits the sequence.
    Outside of blocks, ``tp`` also splits it if sequence parallelism is used.
    """

    split: SequenceSplit | None
    """The distribution of a sequence over ``cp``, None with one ``cp`` rank."""
    attended: list[int]
    """The positions of the tokens that this rank holds at the input and output of attention."""
    between_blocks: list[int]
    """The positions of the tokens that this rank holds outside of blocks."""
    by_source: list[list[int]]
    """For each rank that shares the sequence, its positions outside of blocks.

    The ranks are those of ``cp``, and with sequence parallelism of ``tp``, where ``tp`` is fastest.
    """

    @staticmethod
    def make(spec: StepSpec, rank: int) -> "TokenPositions":
        """Return the token positions of the global rank ``rank`` in a training step."""
        dims = spec.dims
        split = None
        attended = [list(range(spec.shape.sequence))]
        if dims.cp > 1:
            split = split_sequence(
                spec.cp_method,
                spec.shape,
                ranks=dims.cp,
                ulysses=spec.ulysses,
                tp=dims.tp,
            )
            attended = [split.list_tokens(cp_rank) for cp_rank in range(dims.cp)]
        tp = dims.tp if spec.sequence_parallel else 1
        size = spec.shape.sequence // dims.cp // tp
        by_source = [
            positions[start * size : (start + 1) * size]
            for positions in attended
            for start in range(tp)
        ]
        cp_index = dims.index(rank, "cp")
        tp_index = dims.index(rank, "tp") if tp > 1 else 0
        return TokenPositions(
            split=split,
            attended=attended[cp_index],
            between_blocks=by_source[cp_index * tp + tp_index],
            by_source=by_source,
        )

    def list_context_groups(self, dims: ParallelDims) -> dict[str, Partition]:
        """Return the groups of all global ranks that exchange data in attention, keyed by axis.

        The axes are ``cp``, or ``ulysses`` and ``ring``. The result is empty with one ``cp`` rank.
        """
        partitions: dict[str, Partition] = {}
        if self.split is None:
            return partitions
        for ranks in dims.groups("cp"):
            groups = self.split.method.list_axis_groups(ranks, self.split.ulysses)
            for axis, parts in groups.items():
                partitions[axis] = [*partitions.get(axis, []), *parts]
        return partitions

    def make_attention(
        self, spec: StepSpec, world: World, groups: Mapping[str, dist.ProcessGroup]
    ) -> Core | None:
        """Return the function (q, k, v) -> output of attention that ``cp`` ranks compute together.

        The result is None with one ``cp`` rank, because each layer then has its own attention.
        ``groups`` has this rank's process groups by axis.
        """
        if self.split is None:
            return None
        kernel = choose_kernel(world.device, DTYPES[spec.bytes_per_element], spec.shape.head_size)
        cp_rank = spec.dims.index(world.rank, "cp")
        return build_attention(self.split, cp_rank, world.device, groups, kernel)
