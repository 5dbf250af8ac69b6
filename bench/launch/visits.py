"""In which order a launch visits its cases. Without torch.

What is cheap to keep ready is visited several times, with all other cases between, in an order of chance: what slows a
machine for a while then falls on a part of every case, and not on all of one.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

from parbench.bench.launch.control_channel import Job
from parbench.bench.plan.cases import Case

VISITS = 10  # the second from either end of ten medians hold the true one between them 97.9 times in a hundred
_KEPT_BYTES = 512 << 20  # of all cases together, times what an operation holds: input, output and reference
_USUAL_BYTES = 1 << 20


def order_of_visits(cases: Sequence[Case], seed: int, launch: int, more: int = 0) -> tuple[list[int], list[int]]:
    """Return the places of cases, each once or ``VISITS`` times; the same for the same seed and launch.

    What is visited once comes in the order of ``cases`` in the first launch, then in one of chance, so that a budget
    that is too small does not leave out the same ones in each. With them, ``more`` passes over what is visited often.
    """
    random, kept, left = Random(f"{seed} {launch}"), list[int](), _KEPT_BYTES
    for place in sorted(range(len(cases)), key=lambda place: _num_bytes(cases[place])):
        left -= _num_bytes(cases[place])
        # a step's model is large and slow to prepare, and what a user's own step holds is not known
        if left >= 0 and cases[place].name.partition(".")[0] in ("collective", "p2p", "memory", "compute"):
            kept.append(place)
    visits = [place for _ in range(VISITS) for place in random.sample(kept, len(kept))]
    once = [place for place in range(len(cases)) if place not in kept]
    if launch:
        random.shuffle(once)
    before = sorted(random.randint(0, len(visits)) for _ in once)
    for turn, place in zip(reversed(before), reversed(once), strict=True):
        visits.insert(turn, place)
    return visits, [place for _ in range(more) for place in random.sample(kept, len(kept))]


def spread_over_visits(job: Job, amounts: Sequence[float]) -> list[float]:
    """Return each visit's part of its case's amount; none for those that only time left over is for."""
    usual = job.visits[: len(job.visits) - job.more]
    counts = Counter(usual)
    return [amounts[index] / counts[index] for index in usual] + [0.0] * job.more


def _num_bytes(case: Case) -> int:
    size = case.whole.get("size_bytes", _USUAL_BYTES)
    return size if isinstance(size, int) else _USUAL_BYTES
