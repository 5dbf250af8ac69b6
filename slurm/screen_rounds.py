"""Who meets whom: first a tournament's rounds, then rounds that put suspects beside good partners. Pure."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from bench.plan.groups import Pair, format_pairs, num_rounds, round_pairs

_REPEATS_OF_THREE = 4
_MEETINGS = 4  # of a suspect link: two may be disturbed by chance


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Rounds to be measured, as the values of the parameters of ``p2p.pairwise``; all rounds come ``repeats`` times."""

    parameter: str
    values: tuple[str, ...]
    repeats: int

    def settings(self) -> list[str]:
        """Return the words of ``--set``, repeats outermost: what disturbs one time spares another."""
        repeat = ",".join(map(str, range(self.repeats)))
        return [f"repeat={repeat}", f"{self.parameter}={','.join(self.values)}"]

    def __len__(self) -> int:
        return len(self.values) * self.repeats


def tournament(n: int, rounds: int) -> Turns:
    """Return at least ``rounds`` rounds of ``n`` nodes: some of a large tournament, a small one as a whole and often.

    Three nodes meet one pair at a time, and need more to tell noise.
    """
    turns = num_rounds(n)
    indices = tuple(str(index) for index in range(min(turns, rounds)))
    return Turns(parameter="round", values=indices, repeats=_repeats(n, -(-rounds // turns)))


def _repeats(n: int, wanted: int) -> int:
    return max(wanted, _REPEATS_OF_THREE) if n == 3 else wanted


def confirmation(n: int, nodes: Set[int], links: Set[Pair], rounds: int) -> Turns:
    """Return rounds in which each suspect node meets good partners only, and each suspect link stands by itself.

    Beside them good nodes meet, to be measured against; where too few are left for that they meet in rounds between.
    """
    good = [rank for rank in range(n) if rank not in nodes]
    at_once = min(len(nodes), max(1, len(good) - 2))
    turns: list[tuple[Pair, ...]] = []
    for k in range(min(rounds, len(good))):
        rotated = [*good[k:], *good[:k]]
        for some in _parts(sorted(nodes), at_once):
            turns.append((*zip(some, rotated, strict=False), *_couples(rotated[len(some) :])))
        for apart in _disjoint(links):
            left = [rank for rank in rotated if all(rank not in pair for pair in apart)]
            turns.append((*apart, *_met(left, k)))
        if links or len(good) - at_once < 2:
            turns.append(_met(good, k))
    ordered = (tuple(sorted((min(pair), max(pair)) for pair in turn)) for turn in turns)
    texts = tuple(dict.fromkeys(format_pairs(turn) for turn in ordered if turn))
    rarest = min((sum(format_pairs((link,)) in text.split() for text in texts) for link in links), default=_MEETINGS)
    wanted = max(2 if len(good) < rounds else 1, -(-_MEETINGS // max(rarest, 1)))
    return Turns(parameter="pairs", values=texts, repeats=_repeats(n, wanted))


def _met(ranks: Sequence[int], index: int) -> tuple[Pair, ...]:
    return tuple((ranks[a], ranks[b]) for a, b in round_pairs(len(ranks), index % num_rounds(len(ranks))))


def _parts(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[i : i + size] for i in range(0, len(ranks), max(size, 1))]


def _couples(ranks: Sequence[int]) -> list[Pair]:
    return list(zip(ranks[::2], ranks[1::2], strict=False))


def _disjoint(links: Iterable[Pair]) -> list[list[Pair]]:
    """Return the links in groups in which no node is twice."""
    groups: list[list[Pair]] = []
    for pair in sorted(links):
        free = next((group for group in groups if not any(set(pair) & set(other) for other in group)), None)
        if free is None:
            groups.append([pair])
        else:
            free.append(pair)
    return groups
