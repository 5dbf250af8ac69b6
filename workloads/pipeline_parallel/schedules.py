"""Pipeline schedules as data: each is a name, an order of actions by rank, and the rules of when it exists."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bench.results.details import Action
from bench.text import UserError, did_you_mean, listed
from workloads.pipeline_parallel import orders
from workloads.pipeline_parallel.actions import Order, parse_csv


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who does what in which order; ``chunks`` are the stages of a rank. What is checked and simulated is what runs."""

    name: str
    order: Order
    ranks: int
    microbatches: int
    chunks: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is an input gradient (I) and a weight gradient (W) of its own."""
        return any(action.kind in ("I", "W") for rank in range(self.ranks) for action in self.actions_of(rank))

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs ``stage``."""
        return self._rank_by_stage[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that ``rank`` runs, the first one first."""
        return tuple(sorted(stage for stage, holder in self._rank_by_stage.items() if holder == rank))

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """Return what ``rank`` does, without the steps in which it does nothing."""
        return tuple(action for action in self.order[rank] if action is not None)

    @cached_property
    def _rank_by_stage(self) -> Mapping[int, int]:
        return {action.stage: rank for rank in range(self.ranks) for action in self.actions_of(rank)}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How a rank's actions are made of r, P, M and v, and what these must be; no ``most_chunks`` is any number."""

    make: Callable[[int, int, int, int], orders.Actions]
    default_chunks: int = 1
    least_chunks: int = 1
    most_chunks: int | None = 1
    splits_backward: bool = False
    in_rounds: bool = False
    fills_stages: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "naive": _Family(make=lambda r, p, m, v: orders.naive(r, m)),
    "gpipe": _Family(make=lambda r, p, m, v: orders.gpipe(r, m)),
    "1f1b": _Family(make=lambda r, p, m, v: orders.one_f_one_b(r, p, m)),
    "interleaved": _Family(make=orders.interleaved, default_chunks=2, least_chunks=2, most_chunks=None, in_rounds=True),
    "looped_bfs": _Family(make=orders.looped_bfs, default_chunks=2, least_chunks=2, most_chunks=None),
    "zb_h1": _Family(make=orders.interleaved_zb, splits_backward=True),
    "zb_h2": _Family(make=lambda r, p, m, v: orders.zb_h2(r, p, m), splits_backward=True),
    "interleaved_zb": _Family(
        make=orders.interleaved_zb, default_chunks=2, most_chunks=None, splits_backward=True, in_rounds=True
    ),
    "zb_v": _Family(
        make=lambda r, p, m, v: orders.zb_v(r, p, m),
        default_chunks=2,
        least_chunks=2,
        most_chunks=2,
        splits_backward=True,
    ),
    "dualpipe_v": _Family(
        make=lambda r, p, m, v: orders.dualpipe_v(r, p, m),
        default_chunks=2,
        least_chunks=2,
        most_chunks=2,
        splits_backward=True,
        fills_stages=True,
    ),
}
NAMES = tuple(_FAMILIES)


def default_chunks(name: str) -> int:
    """Return the stages of a rank where nothing else is asked."""
    return _family(name).default_chunks


def splits_backward(name: str) -> bool:
    """Return whether the schedule runs input and weight gradients apart."""
    return _family(name).splits_backward


def make_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 0) -> Schedule:
    """Return the named schedule; ``chunks`` 0 is its own default. ``UserError`` by equation where it does not exist.

    Where torch 2.13 has a class it runs the same order, which a test holds; only its print of 1F1B is off by one on the
    last rank. DualPipeV's overlapped pairs stand here one after the other, each sent as it ends.
    """
    stages_of_rank = require_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    family = _family(name)
    order = tuple(family.make(rank, ranks, microbatches, stages_of_rank) for rank in range(ranks))
    return Schedule(name=name, order=order, ranks=ranks, microbatches=microbatches, chunks=stages_of_rank)


def require_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 0) -> int:
    """Return the stages of a rank of a schedule that exists; ``UserError`` by equation where it does not."""
    family = _family(name)
    stages_of_rank = chunks or family.default_chunks
    _refuse(name, family, ranks, microbatches, stages_of_rank)
    return stages_of_rank


def _refuse(name: str, family: _Family, ranks: int, microbatches: int, chunks: int) -> None:
    if ranks < 2:
        raise UserError(f"{name} needs ranks({ranks}) >= 2: one rank is no pipeline")
    if microbatches < 1:
        raise UserError(f"{name} needs microbatches({microbatches}) >= 1")
    if chunks < family.least_chunks or chunks > (family.most_chunks or chunks):
        rule = f"== {family.most_chunks}" if family.most_chunks else f">= {family.least_chunks}"
        raise UserError(f"{name} needs chunks({chunks}) {rule}")
    if family.fills_stages and microbatches < ranks * chunks:
        raise UserError(f"{name} needs microbatches({microbatches}) >= stages({ranks * chunks})")
    rounds = max(1, microbatches // ranks)
    if family.in_rounds and microbatches % rounds:
        raise UserError(
            f"{name} needs microbatches({microbatches}) % rounds({rounds}) == 0, "
            f"where rounds = microbatches({microbatches}) // ranks({ranks})"
        )


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise UserError(f"schedule({name}) is not {listed(NAMES)}{did_you_mean(name, NAMES)}")
    return _FAMILIES[name]


def schedule_from_csv(text: str, name: str = "custom") -> Schedule:
    """Return the schedule in torch's compute-only CSV; whether it can run is for ``schedule_check`` to say.

    Ranks are its rows; microbatches and stages are counted from what it names. Every rank must have as many stages.
    """
    order = parse_csv(text)
    actions = [action for row in order for action in row if action is not None]
    stages = [len({action.stage for action in row if action is not None}) for row in order]
    if len(set(stages)) > 1:
        least, most = stages.index(min(stages)), stages.index(max(stages))
        raise UserError(
            f"{name} needs as many stages on every rank: "
            f"stages of rank {least}({stages[least]}) != stages of rank {most}({stages[most]})"
        )
    microbatches = max(action.microbatch for action in actions) + 1
    return Schedule(name=name, order=order, ranks=len(order), microbatches=microbatches, chunks=stages[0])
