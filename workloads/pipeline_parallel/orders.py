"""The order in which a rank of a pipeline works through its stages and microbatches, one function per family.

r is the rank, P the ranks, M the microbatches, v the chunks (stages of a rank). Where stages are looped, chunk c of
rank r is stage c P + r; in the V, rank r has the stages r and 2P-1-r.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from bench.results.details import Action, ActionKind

Actions = tuple[Action, ...]


def naive(rank: int, microbatches: int) -> Actions:
    """One microbatch after the other goes all the way there and back, so that only one rank works at a time."""
    return tuple(action for m in range(microbatches) for action in (Action(rank, "F", m), Action(rank, "B", m)))


def gpipe(rank: int, microbatches: int) -> Actions:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    return _each(rank, "F", range(microbatches)) + _each(rank, "B", range(microbatches))


def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """All microbatches through one chunk before the next one, back in reverse (breadth first, arXiv 2211.05953)."""
    stages = range(rank, ranks * chunks, ranks)
    there = [action for stage in stages for action in _each(stage, "F", range(microbatches))]
    back = [action for stage in reversed(stages) for action in _each(stage, "B", reversed(range(microbatches)))]
    return tuple(there + back)


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Actions:
    """1F1B (PipeDream-flush, arXiv 2104.04473): P-1-r forwards of warm-up."""
    return _alternating(rank, ranks, microbatches, 1, warmup=ranks - 1 - rank)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """Interleaved 1F1B (arXiv 2104.04473): of warm-up a round of every chunk but one, and 2 (P-1-r) forwards."""
    ahead = (chunks - 1) * microbatches_per_round(ranks, microbatches)
    return _alternating(rank, ranks, microbatches, chunks, warmup=ahead + 2 * (ranks - 1 - rank))


def interleaved_zb(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    """Interleaved with split backwards: P-1-r forwards past the rounds, weights r backwards late; ZB-H1 at v = 1.

    arXiv 2401.10241, figure 2: 1F1B's warm-up and memory, the later ranks' weight gradients fill the end.
    """
    ahead = (chunks - 1) * microbatches_per_round(ranks, microbatches)
    return _alternating(rank, ranks, microbatches, chunks, warmup=ahead + ranks - 1 - rank, weight_lag=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Actions:
    """ZB-H2 (arXiv 2401.10241, figure 3): ZB-H1 with twice the warm-up and lag, so that 2P-1 are held everywhere."""
    return _alternating(rank, ranks, microbatches, 1, warmup=2 * (ranks - 1 - rank), weight_lag=2 * rank)


def _alternating(
    rank: int, ranks: int, microbatches: int, chunks: int, *, warmup: int, weight_lag: int | None = None
) -> Actions:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then what is left of the backwards.

    Without a lag backwards are whole. With one, a backward is its input gradient alone, and its weight gradient comes
    ``weight_lag`` backwards later.
    """
    forwards = [Action(stage, "F", m) for stage, m in _by_rounds(rank, ranks, microbatches, range(chunks))]
    backwards = _by_rounds(rank, ranks, microbatches, range(chunks - 1, -1, -1))
    actions = forwards[:warmup]
    for count, (stage, microbatch) in enumerate(backwards):
        actions += forwards[warmup + count : warmup + count + 1]
        actions.append(Action(stage, "B" if weight_lag is None else "I", microbatch))
        if weight_lag is not None and count >= weight_lag:
            actions.append(Action(backwards[count - weight_lag][0], "W", backwards[count - weight_lag][1]))
    if weight_lag:
        actions += [Action(stage, "W", microbatch) for stage, microbatch in backwards[-weight_lag:]]
    return tuple(actions)


def microbatches_per_round(ranks: int, microbatches: int) -> int:
    """Return how many microbatches a chunk takes before the next has its turn: P, or up to 2P-1 to come out even.

    Where that does not divide M, an interleaved order of whole rounds does not exist.
    """
    return microbatches // max(1, microbatches // ranks)


def _by_rounds(rank: int, ranks: int, microbatches: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (stage, microbatch) in the order of rounds: in each, every chunk takes the round's microbatches."""
    size = microbatches_per_round(ranks, microbatches)
    return [
        (chunk * ranks + rank, microbatch)
        for start in range(0, microbatches, size)
        for chunk in chunks
        for microbatch in range(start, min(start + size, microbatches))
    ]


def _each(stage: int, kind: ActionKind, microbatches: Iterable[int]) -> Actions:
    return tuple(Action(stage, kind, microbatch) for microbatch in microbatches)


class _Tape:
    """A rank's actions as they are written down: each takes its stage's next microbatch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._taken: Counter[tuple[int, str]] = Counter()
        self._owed: list[tuple[int, int]] = []  # stage and microbatch of weight gradients still to come

    def add(self, stage: int, kinds: str) -> None:
        """Write down forwards (F), full backwards (B), input gradients (I) and the oldest weight gradient owed (W)."""
        for kind in kinds:
            if kind == "F":
                self.actions.append(Action(stage, "F", self._next(stage, "F")))
            elif kind == "B":
                self.actions.append(Action(stage, "B", self._next(stage, "back")))
            elif kind == "I":
                self.actions.append(Action(stage, "I", self._next(stage, "back")))
                self._owed.append((stage, self.actions[-1].microbatch))
            else:
                self.pay(stage)

    def pay(self, stage: int | None = None) -> None:
        """Write down the oldest weight gradient owed, of any stage or of one."""
        due = next((owed for owed in self._owed if stage in (None, owed[0])), None)
        if due is not None:
            self._owed.remove(due)
            self.actions.append(Action(due[0], "W", due[1]))

    def _next(self, stage: int, kind: str) -> int:
        self._taken[stage, kind] += 1
        return self._taken[stage, kind] - 1


def zb_v(rank: int, ranks: int, microbatches: int) -> Actions:
    """Return ZB-V's order (arXiv 2401.10241, section 6; 2405.15362): forwards and both gradients in turn on a V.

    Written for at least 2P-1 microbatches, which fill the pipeline; where there are fewer, the rest is left out.
    """
    first, second = rank, 2 * ranks - 1 - rank
    tape, filling = _Tape(), max(2 * ranks - 1, microbatches)
    tape.add(first, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        tape.add(second, "F")
        tape.add(first, "F")
    for _ in range(ranks - rank):
        tape.add(second, "FIW")
    for _ in range(filling - (2 * ranks - 1) + rank):
        tape.add(first, "FIW")
        tape.add(second, "FIW")
    for _ in range(ranks - 1 - rank):
        tape.add(first, "IW")
        tape.add(second, "FIW")
    for _ in range(rank):
        tape.add(first, "I")
        tape.add(second, "I")
    for _ in range(ranks - rank):
        tape.add(first, "IW")
    tape.add(second, "W" * rank)
    tape.add(first, "W" * rank)
    return tuple(action for action in tape.actions if action.microbatch < microbatches)


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Actions:
    """Return DualPipeV's order, with the two halves of each overlapped forward and backward one after the other.

    DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half, as in github.com/deepseek-ai/DualPipe; the steps are its.
    """
    first, second, after = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    tape = _Tape()
    tape.add(first, "F" * (2 * after))  # step 1
    for _ in range(rank + 1):  # step 2
        tape.add(first, "F")
        tape.add(second, "F")
    for _ in range(after):  # step 3
        tape.add(second, "IWF")
    for _ in range(microbatches - 2 * ranks + rank + 1):  # step 4, the main one
        _exchange(tape, first, second)
        _exchange(tape, second, first)
    for _ in range(after):  # step 5
        tape.add(second, "B")
        _exchange(tape, second, first)
    for count in range(2 * (rank + 1)):  # step 6: whole backwards in its first half, weights later in its second
        tape.add(first if count % 2 else second, "B" if count <= rank else "I")
    for _ in range(after):  # step 7
        tape.pay()
        tape.add(first, "I")
    for _ in range(rank + 1):  # step 8
        tape.pay()
    return tuple(tape.actions)


def _exchange(tape: _Tape, forward: int, backward: int) -> None:
    tape.add(forward, "F")
    tape.add(backward, "B")
