"""The axes of a step's mesh: their sizes, and the groups of ranks along them. Pure.

``dp`` replicates parameters, ``fsdp`` shards them, ``pp`` splits layers into stages, ``cp`` splits
sequences, and ``tp`` splits the matrices of a layer and the tokens between its blocks. They
multiply to the number of ranks. ``ep`` and ``etp`` lie inside other axes and do not multiply.

**Experts.** The ranks of one stage, counted in the order dp, fsdp, cp, tp with the innermost axis
fastest, form a sequence. ``etp`` takes neighbors of ``tp`` and splits each expert among them.
``ep`` takes blocks of neighbors of what remains and spreads experts over them. Ranks with the same
experts are replicas, called ``edp``. With fsdp > 1 the replicas within a rank of ``dp`` are called
``efsdp`` and shard the experts, and the replicas of a shard differ in ``dp`` only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parbench.bench.plan.groups import INSIDE, parse_mesh
from parbench.bench.text import UserError, format_choices

AXES = ("dp", "fsdp", "pp", "cp", "tp")
"""The axes that multiply to the number of ranks, outermost first by default."""
EXPERT_AXES = ("dp", "fsdp", "cp", "tp")
"""The axes whose ranks share the experts of a stage."""

Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The size of each axis, and the order of the axes that multiply."""

    dp: int = 1
    fsdp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    order: tuple[str, ...] = AXES  # all of AXES, outermost first

    @staticmethod
    def parse(text: str, ranks: int = 1) -> "ParallelDims":
        """Return the axes of a text such as ``dp=2,tp=2``. An empty text is ``dp`` over all ranks.

        Raises ``UserError`` if an axis is not known.
        """
        return ParallelDims.from_sizes(parse_mesh(text) if text else {"dp": ranks})

    @staticmethod
    def from_sizes(sizes: Mapping[str, int]) -> "ParallelDims":
        """Return axes with these sizes, outermost first. Axes that are missing have one rank."""
        for name in sizes:
            if name not in (*AXES, *INSIDE):
                raise UserError(
                    f"mesh axis {name!r} is not {format_choices((*AXES, *INSIDE), name)}"
                )
        first = [name for name in sizes if name in AXES]
        order = (*first, *(name for name in AXES if name not in sizes))
        return ParallelDims(order=order).resize(**sizes)

    def resize(self, **changes: Any) -> "ParallelDims":
        """Return a copy with the axis sizes or the ``order`` in ``changes``."""
        return replace(self, **changes)

    @property
    def ranks(self) -> int:
        """The number of ranks: the product of all axes except ``ep`` and ``etp``."""
        return self.dp * self.fsdp * self.pp * self.cp * self.tp

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of some axes."""
        product = 1
        for axis in axes:
            product *= getattr(self, axis)
        return product

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes above 1 by axis, outermost axis first, then ``ep`` and ``etp``."""
        every = {name: self.size(name) for name in (*self.order, *INSIDE)}
        return {name: size for name, size in every.items() if size > 1}

    @property
    def label(self) -> str:
        """The mesh as users write it, without axes of one rank."""
        return ",".join(f"{name}={size}" for name, size in (self.sizes or {"dp": 1}).items())

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards parameters."""
        return self.fsdp > 1

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which FSDP shards parameters. Ranks of ``cp`` hold the same parameters."""
        return ("fsdp", "cp") if self.is_sharded else ()

    @property
    def shard_size(self) -> int:
        """The number of ranks that shard each parameter."""
        return self.size(*self.shard_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are all-reduced."""
        return ("dp",) if self.is_sharded else ("dp", "cp")

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the loss is averaged."""
        return self.dp * self.fsdp * self.cp

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that have the same experts of a stage."""
        return self.size(*EXPERT_AXES) // (self.ep * self.etp)

    @property
    def expert_shards(self) -> int:
        """The number of ranks over which FSDP shards an expert: ``efsdp``."""
        return self.expert_replicas // self.dp if self.is_sharded else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis except ``ep`` and ``etp``, keyed by axis."""
        coordinate = {}
        for name in reversed(self.order):
            rank, coordinate[name] = divmod(rank, self.size(name))
        return coordinate

    def index(self, rank: int, *axes: str) -> int:
        """Return the position of a rank in its group along some axes, the last of them fastest."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[axis]
        return index

    def groups(self, *axes: str) -> Groups:
        """Return the groups of ranks that differ only on some axes, each sorted by ``index``."""
        others = [name for name in self.order if name not in axes]
        groups = self._group(lambda rank: (self.index(rank, *others),))
        return [sorted(ranks, key=lambda rank: self.index(rank, *axes)) for ranks in groups]

    def expert_position(self, rank: int) -> "ExpertPosition":
        """Return the stage, the replica, the ``ep`` rank and the ``etp`` rank of a global rank."""
        index, etp = divmod(self.index(rank, *EXPERT_AXES), self.etp)
        edp, ep = divmod(index, self.ep)
        return ExpertPosition(self.index(rank, "pp"), edp, ep, etp)

    def expert_groups(self, axis: str) -> Groups:
        """Return the groups of ranks along ``ep``, ``etp``, ``edp`` or ``efsdp``.

        Along ``ep`` ranks have other experts, along ``etp`` other parts of them. Along ``edp``
        they have the same, ordered by dp and then ``efsdp``.
        """
        if axis == "efsdp":
            shards = self.expert_shards
            return [
                replicas[start : start + shards]
                for replicas in self.expert_groups("edp")
                for start in range(0, len(replicas), shards)
            ]
        groups = self._group(lambda rank: self.expert_position(rank)._replace(**{axis: 0}))
        return [sorted(ranks, key=self.expert_position) for ranks in groups]

    def _group(self, key: Callable[[int], tuple[int, ...]]) -> Groups:
        """Return groups of ranks. Ranks with equal ``key(rank)`` are one group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            groups.setdefault(key(rank), []).append(rank)
        return list(groups.values())

    def find_broken_rule(self, ranks: int, experts: int = 0) -> str | None:
        """Return the first equation that the axes do not satisfy, None if they satisfy all.

        ``ranks`` is the world size. ``experts`` is the number of routed experts, 0 for a dense
        model.
        """
        if self.ranks != ranks:
            axes = [name for name in self.order if self.size(name) > 1]
            return f"{self._format_product(axes or ['dp'])} != world size({ranks})"
        if not experts:
            return self._find_unused_expert_axis()
        if self.tp % self.etp:
            return f"tp({self.tp}) % etp({self.etp}) != 0"
        if experts % self.ep:
            return f"experts({experts}) % ep({self.ep}) != 0"
        axes = ["fsdp", "cp", "tp"] if self.is_sharded else ["dp", "cp", "tp"]
        if self.size(*axes) % (self.ep * self.etp):
            product = self._format_product(axes)
            divisor = self._format_product(["ep", "etp"] if self.etp > 1 else ["ep"])
            return f"({product}) % ({divisor}) != 0"
        return None

    def _find_unused_expert_axis(self) -> str | None:
        """Return the rule that ``ep`` or ``etp`` breaks without experts, otherwise None."""
        for axis in INSIDE:
            if self.size(axis) > 1:
                return f"{axis}({self.size(axis)}) > 1 without experts: set experts=N"
        return None

    def _format_product(self, axes: Iterable[str]) -> str:
        """Return the product of axis sizes as text, such as ``dp(2) * tp(4)``."""
        return " * ".join(f"{axis}({self.size(axis)})" for axis in axes)


def compute_chunk_size(size: int, ranks: int, index: int) -> int:
    """Return the size of chunk ``index`` if a size is split over ranks as ``torch.chunk`` does.

    The last chunks may be smaller than the others, or empty.
    """
    largest = -(-size // ranks)
    return max(0, min(largest, size - index * largest))


class ExpertPosition(NamedTuple):
    """The position of a rank among the ranks of its pipeline stage that share the experts."""

    stage: int  # the position along pp
    edp: int  # the replica: the position along dp, then along efsdp
    ep: int
    etp: int
