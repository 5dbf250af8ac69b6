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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from parbench.bench.plan.groups import INSIDE, parse_mesh
from parbench.bench.text import UserError, format_list

AXES = ("dp", "fsdp", "pp", "cp", "tp")
"""The axes that multiply to the number of ranks, outermost first by default."""
EXPERT_AXES = ("dp", "fsdp", "cp", "tp")
"""The axes whose ranks share the experts of a stage."""

Groups = list[list[int]]
"""Disjoint groups of global ranks, which together contain every rank."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The mesh of a training step: the number of ranks along each axis, and the axes' order.

    The sizes of ``dp`` to ``tp`` multiply to the number of ranks. ``ep`` and ``etp`` do not: they
    group the ranks of one pipeline stage, which differ in ``dp``, ``fsdp``, ``cp`` and ``tp``, in
    another way. ``etp`` divides ``tp``. ``ep`` * ``etp`` divides ``dp`` * ``cp`` * ``tp``, with
    FSDP ``fsdp`` * ``cp`` * ``tp``.
    """

    dp: int = 1
    """The number of replicas of parameters, or with FSDP of their shards."""
    fsdp: int = 1
    """The number of data ranks that shard parameters with FSDP, 1 without FSDP.

    With FSDP, the ranks of ``cp`` shard parameters too.
    """
    pp: int = 1
    """The number of pipeline ranks."""
    cp: int = 1
    """The number of ranks that share a sequence (context parallelism)."""
    tp: int = 1
    """The number of ranks that split the matrices of a layer (tensor parallelism)."""
    ep: int = 1
    """The number of ranks that hold different routed experts (expert parallelism)."""
    etp: int = 1
    """The number of ranks that split each routed expert."""
    order: tuple[str, ...] = AXES
    """All of ``AXES``, outermost first. Neighboring ranks differ in the last axis."""

    @staticmethod
    def parse(text: str, ranks: int = 1) -> "ParallelDims":
        """Return the mesh that a text such as ``dp=2,tp=2`` describes, outermost axis first.

        Missing axes have size 1 and are innermost. An empty text means ``dp`` over all ``ranks``.
        Otherwise ``ranks`` is not used or checked. Raises ``UserError`` if an axis is not known.
        """
        sizes = parse_mesh(text) if text else {"dp": ranks}
        allowed = (*AXES, *INSIDE)
        for name in sizes:
            if name not in allowed:
                raise UserError(f"mesh axis {name!r} is not allowed: choose {format_list(allowed)}")
        first = [name for name in sizes if name in AXES]
        order = (*first, *(name for name in AXES if name not in sizes))
        return ParallelDims(order=order).resize(**sizes)

    def resize(self, **changes: Any) -> "ParallelDims":
        """Return a copy of the mesh in which ``changes`` replaces axis sizes or the ``order``.

        The keys are names of fields.
        """
        return replace(self, **changes)

    @property
    def ranks(self) -> int:
        """The number of ranks: the product of all axes except ``ep`` and ``etp``."""
        return self.dp * self.fsdp * self.pp * self.cp * self.tp

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of the named axes, 1 without axes."""
        product = 1
        for axis in axes:
            product *= getattr(self, axis)
        return product

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes with more than one rank, keyed by name of the axis.

        The outermost axis comes first, and ``ep`` and ``etp`` come last.
        """
        every = {name: self.size(name) for name in (*self.order, *INSIDE)}
        return {name: size for name, size in every.items() if size > 1}

    @property
    def label(self) -> str:
        """The mesh as text that users write, such as ``dp=2,tp=4``, without axes of one rank.

        For a single rank it is ``dp=1``.
        """
        return ",".join(f"{name}={size}" for name, size in (self.sizes or {"dp": 1}).items())

    @property
    def is_sharded(self) -> bool:
        """True if FSDP shards parameters."""
        return self.fsdp > 1

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which FSDP shards parameters, empty without FSDP.

        ``cp`` is one of them, because its ranks use the same parameters.
        """
        return ("fsdp", "cp") if self.is_sharded else ()

    @property
    def shard_size(self) -> int:
        """The number of ranks that shard each parameter, 1 without FSDP.

        For the parameters of routed experts, it is ``expert_shards``.
        """
        return self.size(*self.shard_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are all-reduced, except those of routed experts.

        Without FSDP they are ``dp`` and ``cp``, whose ranks all hold the same parameters. With FSDP
        only ``dp`` remains, because FSDP shards over ``cp`` too. A reduce_scatter over
        ``shard_axes`` then precedes the all_reduce.
        """
        return ("dp",) if self.is_sharded else ("dp", "cp")

    @property
    def data_ranks(self) -> int:
        """The number of ranks with different tokens of the batch, over which the loss is averaged.

        It is dp * fsdp * cp. The ranks of a ``cp`` group count, because they have different tokens
        of the same sequences. The ranks of ``tp`` and ``pp`` work on the same tokens.
        """
        return self.dp * self.fsdp * self.cp

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that have the same parts of the same routed experts (``edp``)."""
        return self.size(*EXPERT_AXES) // (self.ep * self.etp)

    @property
    def expert_shards(self) -> int:
        """The number of ranks over which FSDP shards routed experts (``efsdp``), 1 without FSDP."""
        return self.expert_replicas // self.dp if self.is_sharded else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of a global rank along each axis except ``ep`` and ``etp``.

        The keys are the names of the axes, and indices start at 0.
        """
        coordinate = {}
        for name in reversed(self.order):
            rank, coordinate[name] = divmod(rank, self.size(name))
        return coordinate

    def index(self, rank: int, *axes: str) -> int:
        """Return the index of a global rank in its group along the named axes, from 0.

        The group has the ranks that differ only on these axes. The last axis varies fastest.
        """
        coordinate = self.coordinate(rank)
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[axis]
        return index

    def groups(self, *axes: str) -> Groups:
        """Return the groups of global ranks that differ only on the named axes.

        The ranks of a group are sorted by their ``index`` along these axes.
        """
        others = [name for name in self.order if name not in axes]
        groups = self._group(lambda rank: (self.index(rank, *others),))
        return [sorted(ranks, key=lambda rank: self.index(rank, *axes)) for ranks in groups]

    def expert_coordinate(self, rank: int) -> dict[str, int]:
        """Return the indices of a global rank along ``pp``, ``edp``, ``ep`` and ``etp``, by axis.

        Ranks with equal ``ep`` and ``etp`` have the same parts of the same experts, and differ in
        ``edp``.
        """
        index, etp = divmod(self.index(rank, *EXPERT_AXES), self.etp)
        edp, ep = divmod(index, self.ep)
        return {"pp": self.index(rank, "pp"), "edp": edp, "ep": ep, "etp": etp}

    def expert_groups(self, axis: str) -> Groups:
        """Return the groups of global ranks along ``ep``, ``etp``, ``edp`` or ``efsdp``.

        The ranks of an ``ep`` group have different experts. Those of an ``etp`` group have
        different parts of the same experts. The ranks of an ``edp`` group have the same parts of
        the same experts, ordered by their index along dp and then along ``efsdp``. An ``efsdp``
        group has the ranks of an ``edp`` group over which FSDP shards the experts. Without FSDP,
        each of its groups has one rank.
        """
        if axis == "efsdp":
            shards = self.expert_shards
            return [
                replicas[start : start + shards]
                for replicas in self.expert_groups("edp")
                for start in range(0, len(replicas), shards)
            ]
        groups = self._group(lambda rank: tuple({**self.expert_coordinate(rank), axis: 0}.values()))
        return [
            sorted(ranks, key=lambda rank: self.expert_coordinate(rank)[axis]) for ranks in groups
        ]

    def _group(self, key: Callable[[int], tuple[int, ...]]) -> Groups:
        """Return groups of all global ranks, in which ranks with equal ``key(rank)`` are together.

        Groups and their ranks are in ascending order of ranks.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            groups.setdefault(key(rank), []).append(rank)
        return list(groups.values())

    def find_broken_rule(self, ranks: int, experts: int = 0) -> str | None:
        """Return the first violation of a rule about the mesh, None if the mesh is possible.

        The text is the violation that is true, with the numbers in parentheses. For example,
        ``experts(8) % ep(3) != 0`` means that 3 ``ep`` ranks cannot share 8 experts equally.
        ``ranks`` is the world size, which the mesh must have. ``experts`` is the number of routed
        experts in a layer, 0 for a dense model.
        """
        if self.ranks != ranks:
            axes = [name for name in self.order if self.size(name) > 1]
            return f"{self._format_product(axes or ['dp'])} != world size({ranks})"
        unused = [axis for axis in INSIDE if self.size(axis) > 1]
        if not experts and unused:
            return f"{self._format_product(unused)} > 1 without experts (run: --set experts=N)"
        if not experts:
            return None
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

    def _format_product(self, axes: Iterable[str]) -> str:
        """Return the product of the sizes of ``axes`` as text, such as ``dp(2) * tp(4)``."""
        return " * ".join(f"{axis}({self.size(axis)})" for axis in axes)


def compute_chunk_size(size: int, ranks: int, index: int) -> int:
    """Return the number of elements on the rank ``index`` if ``torch.chunk`` splits a dimension.

    ``size`` is the number of elements of the dimension, which is split over ``ranks`` ranks. The
    last ranks may have fewer elements than the others, or none.
    """
    largest = -(-size // ranks)
    return max(0, min(largest, size - index * largest))
