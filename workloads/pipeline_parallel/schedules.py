"""Pipeline schedules as data: what each rank does in which order, when such an order exists, what it holds. Pure.

r is the rank, P the ranks, M the microbatches, v the chunks (stages of a rank). Where stages are looped, chunk c of
rank r is stage c P + r; in the V, rank r has the stages r and 2P-1-r.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, cast

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError, format_choices

Actions = tuple[Action, ...]
Order = tuple[Actions, ...]  # by rank
Result = tuple[int, Literal["F", "I", "W"], int]
"""What an action leaves behind for others: a stage's output ("F"), its input's gradient ("I"), its weights' ("W")."""


def result(action: Action) -> Result:
    """Return what others wait for of ``action``: of a full backward that is its input gradient."""
    return action.stage, "I" if action.kind == "B" else action.kind, action.microbatch


def message(action: Action, num_stages: int) -> Result | None:
    """Return what ``action`` needs of the stage beside it: a forward the output before, a backward the gradient after.

    None for the first stage's forward, the last one's backward, and a weight gradient, which need nobody.
    """
    if action.kind == "F":
        return (action.stage - 1, "F", action.microbatch) if action.stage > 0 else None
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return action.stage + 1, "I", action.microbatch
    return None


def needs(action: Action, num_stages: int) -> tuple[Result, ...]:
    """Return all that ``action`` needs: of its own stage the forward or the input gradient before, and the message."""
    received = message(action, num_stages)
    others = () if received is None else (received,)
    if action.kind == "F":
        return others
    return ((action.stage, "I" if action.kind == "W" else "F", action.microbatch), *others)


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
        return self.ranks * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is an input gradient (I) and a weight gradient (W) of its own."""
        return any(action.kind in ("I", "W") for rank in range(self.ranks) for action in self.actions_of(rank))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(stage for stage, holder in self._rank_by_stage.items() if holder == rank))

    def actions_of(self, rank: int) -> Actions:
        return self.order[rank]

    @cached_property
    def _rank_by_stage(self) -> Mapping[int, int]:
        return {action.stage: rank for rank in range(self.ranks) for action in self.actions_of(rank)}


def peak_held(schedule: Schedule, rank: int, of_stage: Callable[[int], float]) -> float:
    """Return the most that a rank holds at once: what a stage's microbatch weighs, from F until B or W."""
    held = peak = 0.0
    for action in schedule.actions_of(rank):
        if action.kind == "F":
            held += of_stage(action.stage)
            peak = max(peak, held)
        elif action.kind in ("B", "W"):
            held -= of_stage(action.stage)
    return peak


def _looped_bfs(r: int, p: int, m: int, v: int) -> Actions:
    """All microbatches through one chunk before the next one, back in reverse (breadth first, arXiv 2211.05953)."""
    there = [(stage, i) for stage in range(r, p * v, p) for i in range(m)]
    return (*(Action(stage, "F", i) for stage, i in there), *(Action(stage, "B", i) for stage, i in reversed(there)))


def _round_of(p: int, m: int) -> int:
    """Return how many microbatches a chunk takes before the next has its turn: P, or up to 2P-1 to come out even.

    Where that does not divide M, an interleaved order of whole rounds does not exist.
    """
    return m // max(1, m // p)


def _alternating(r: int, p: int, m: int, v: int, *, warmup: int, weight_lag: int | None = None) -> Actions:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then what is left of the backwards.

    Without a lag backwards are whole. With one, a backward is its input gradient alone, and its weight gradient comes
    ``weight_lag`` backwards later.
    """
    size, chunks = _round_of(p, m), range(v)
    rounds = [range(start, min(start + size, m)) for start in range(0, m, size)]
    forwards = [Action(chunk * p + r, "F", i) for one in rounds for chunk in chunks for i in one]
    backwards = [(chunk * p + r, i) for one in rounds for chunk in reversed(chunks) for i in one]
    weights = [Action(stage, "W", i) for stage, i in backwards]
    actions = forwards[:warmup]
    for count, (stage, i) in enumerate(backwards):
        actions += forwards[warmup + count : warmup + count + 1]
        actions.append(Action(stage, "B" if weight_lag is None else "I", i))
        if weight_lag is not None and count >= weight_lag:
            actions.append(weights[count - weight_lag])
    return (*actions, *(weights[-weight_lag:] if weight_lag else ()))


def _interleaved_zb(r: int, p: int, m: int, v: int) -> Actions:
    """Interleaved with split backwards: P-1-r forwards past the rounds, weights r backwards late; ZB-H1 at v = 1.

    arXiv 2401.10241, figure 2: 1F1B's warm-up and memory, the later ranks' weight gradients fill the end.
    """
    return _alternating(r, p, m, v, warmup=(v - 1) * _round_of(p, m) + p - 1 - r, weight_lag=r)


def _zb_v(r: int, p: int, m: int, v: int) -> Actions:
    """ZB-V (arXiv 2401.10241, section 6; 2405.15362): forwards and both gradients in turn on a V.

    Written for at least 2P-1 microbatches, which fill the pipeline; where there are fewer, the rest is left out.
    """
    first, second = r, 2 * p - 1 - r
    written = _write(
        [
            (first, "F" * (2 * (p - r) - 1)),
            *[(second, "F"), (first, "F")] * r,
            *[(second, "FIW")] * (p - r),
            *[(first, "FIW"), (second, "FIW")] * (max(0, m - (2 * p - 1)) + r),
            *[(first, "IW"), (second, "FIW")] * (p - 1 - r),
            *[(first, "I"), (second, "I")] * r,
            *[(first, "IW")] * (p - r),
            *[(second, "W" * r), (first, "W" * r)],
        ]
    )
    return tuple(action for action in written if action.microbatch < m)


def _dualpipe_v(r: int, p: int, m: int, v: int) -> Actions:
    """DualPipeV, with the two halves of each overlapped forward and backward one after the other.

    DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half, as in github.com/deepseek-ai/DualPipe; the steps are its.
    """
    first, second, after = r, 2 * p - 1 - r, p - 1 - r
    return _write(
        [
            (first, "F" * (2 * after)),  # step 1
            *[(first, "F"), (second, "F")] * (r + 1),  # step 2
            *[(second, "IWF")] * after,  # step 3
            *[(first, "F"), (second, "B"), (second, "F"), (first, "B")] * (m - 2 * p + r + 1),  # step 4, the main one
            *[(second, "BF"), (first, "B")] * after,  # step 5
            # step 6: whole backwards in its first half, weights later in its second
            *((first if count % 2 else second, "B" if count <= r else "I") for count in range(2 * (r + 1))),
            *[(None, "W"), (first, "I")] * after,  # step 7
            (None, "W" * (r + 1)),  # step 8
        ]
    )


def _write(script: Iterable[tuple[int | None, str]]) -> Actions:
    """Return the actions of a script of stages and kinds: each takes its stage's next microbatch.

    W is the oldest weight gradient that an I still owes, of that stage or of any (None); nothing where none is owed.
    """
    actions: list[Action] = []
    owed: list[Action] = []
    taken: Counter[tuple[int, bool]] = Counter()
    for stage, kinds in script:
        for kind in kinds:
            if kind == "W":
                due = next((one for one in owed if stage in (None, one.stage)), None)
                if due is not None:
                    owed.remove(due)
                    actions.append(Action(due.stage, "W", due.microbatch))
            elif stage is not None:
                actions.append(Action(stage, cast(ActionKind, kind), taken[stage, kind == "F"]))
                taken[stage, kind == "F"] += 1
                owed += [actions[-1]] if kind == "I" else []
    return tuple(actions)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How a rank's actions are made of r, P, M and v, and what these must be; without a least chunks are fixed."""

    make: Callable[[int, int, int, int], Actions]
    chunks: int = 1
    least_chunks: int = 0
    in_rounds: bool = False
    fills_stages: bool = False


_FAMILIES: Mapping[str, _Family] = {
    # one microbatch after the other goes all the way there and back, so that only one rank works at a time
    "naive": _Family(make=lambda r, p, m, v: _write([(r, "FB" * m)])),
    # all forwards, then all backwards (GPipe, arXiv 1811.06965)
    "gpipe": _Family(make=lambda r, p, m, v: _write([(r, "F" * m + "B" * m)])),
    # PipeDream-flush, arXiv 2104.04473: P-1-r forwards of warm-up
    "1f1b": _Family(make=lambda r, p, m, v: _alternating(r, p, m, v, warmup=p - 1 - r)),
    # arXiv 2104.04473: of warm-up a round of every chunk but one, and 2 (P-1-r) forwards
    "interleaved": _Family(
        make=lambda r, p, m, v: _alternating(r, p, m, v, warmup=(v - 1) * _round_of(p, m) + 2 * (p - 1 - r)),
        chunks=2,
        least_chunks=2,
        in_rounds=True,
    ),
    "looped_bfs": _Family(make=_looped_bfs, chunks=2, least_chunks=2),
    "zb_h1": _Family(make=_interleaved_zb),
    # arXiv 2401.10241, figure 3: ZB-H1 with twice the warm-up and lag, so that 2P-1 are held everywhere
    "zb_h2": _Family(make=lambda r, p, m, v: _alternating(r, p, m, v, warmup=2 * (p - 1 - r), weight_lag=2 * r)),
    "interleaved_zb": _Family(make=_interleaved_zb, chunks=2, least_chunks=1, in_rounds=True),
    "zb_v": _Family(make=_zb_v, chunks=2),
    "dualpipe_v": _Family(make=_dualpipe_v, chunks=2, fills_stages=True),
}
NAMES = tuple(_FAMILIES)


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise UserError(f"schedule({name}) is not {format_choices(NAMES, name)}")
    return _FAMILIES[name]


def default_chunks(name: str) -> int:
    return _family(name).chunks


@lru_cache
def splits_backward(name: str) -> bool:
    return make_schedule(name, ranks=2, microbatches=4).splits_backward


def require_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 0) -> int:
    """Return the stages of a rank of a schedule that exists; ``UserError`` by equation where it does not."""
    family = _family(name)
    chunks = chunks or family.chunks
    least, given, rounds = family.least_chunks, f"microbatches({microbatches})", max(1, microbatches // max(1, ranks))
    rules = (
        (ranks >= 2, f"ranks({ranks}) >= 2: one rank is no pipeline"),
        (microbatches >= 1, f"{given} >= 1"),
        (least or chunks == family.chunks, f"chunks({chunks}) == {family.chunks}"),
        (chunks >= least, f"chunks({chunks}) >= {least}"),
        (not family.fills_stages or microbatches >= ranks * chunks, f"{given} >= stages({ranks * chunks})"),
        (
            not family.in_rounds or microbatches % rounds == 0,
            f"{given} % rounds({rounds}) == 0, where rounds = {given} // ranks({ranks})",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise UserError(f"{name} needs {rule}")
    return chunks


def make_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 0) -> Schedule:
    """Return the named schedule; ``chunks`` 0 is its own default. ``UserError`` by equation where it does not exist.

    Where torch 2.13 has a class it runs the same order, which a test holds; only its print of 1F1B is off by one on the
    last rank. DualPipeV's overlapped pairs stand here one after the other, each sent as it ends.
    """
    chunks = require_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order = tuple(_FAMILIES[name].make(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return Schedule(name=name, order=order, ranks=ranks, microbatches=microbatches, chunks=chunks)


def schedule_from_csv(text: str, name: str = "custom") -> Schedule:
    """Return the schedule in torch's compute-only CSV; whether it can run is for ``simulation.check`` to say.

    Ranks are its rows; microbatches and stages are counted from what it names. Every rank must have as many stages.
    """
    order = parse_csv(text)
    stages = [len({action.stage for action in row}) for row in order]
    if len(set(stages)) > 1:
        least, most = stages.index(min(stages)), stages.index(max(stages))
        raise UserError(
            f"{name} needs as many stages on every rank: "
            f"stages of rank {least}({stages[least]}) != stages of rank {most}({stages[most]})"
        )
    microbatches = 1 + max(action.microbatch for row in order for action in row)
    return Schedule(name=name, order=order, ranks=len(order), microbatches=microbatches, chunks=stages[0])


def parse_csv(text: str) -> Order:
    """Return the order in torch's compute-only CSV; ``UserError`` names the row and the cell that cannot be read.

    An empty cell is a step in which a rank does nothing. ``(1F0;2B3)OVERLAP_F_B`` is read as its two actions in
    sequence, which is how torch runs it by default.
    """
    rows = list(csv.reader(text.splitlines()))
    while rows and not rows[-1]:
        rows.pop()
    if not any(cell.strip() for row in rows for cell in row):
        raise UserError("the schedule is empty: a row per rank with actions such as 0F0,0B0 is needed")
    order: list[list[Action]] = [[] for _ in rows]
    for rank, row in enumerate(rows):
        for step, cell in enumerate(row):
            overlap = re.fullmatch(r"\(([^()]*)\)OVERLAP_F_B", cell.strip())
            try:
                parts = overlap[1].split(";") if overlap else [cell] if cell.strip() else []
                order[rank] += [Action.parse(part) for part in parts]
            except UserError as error:
                raise UserError(f"rank {rank}, step {step}: {error}") from None
    return tuple(tuple(row) for row in order)
