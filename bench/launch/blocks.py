"""The order in which a repetition visits its cases. Without torch.

A case that is cheap to keep ready is visited several times, with all other cases between, in random order. What slows
a machine for a while then affects a part of every case, and not all of one.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

from parbench.bench.launch.messages import Job
from parbench.bench.plan.cases import Case

VISITS = 10
"""The second from either end of ten medians enclose the true one 97.9 times in a hundred."""
_MAX_READY_BYTES = 512 << 20
"""The size of all cases together that are kept ready. An operation holds several times its size."""
_DEFAULT_BYTES = 1 << 20
_REVISITED_KINDS = ("collective", "p2p", "memory", "compute")
"""A step's model is large and slow to prepare, and the size of a custom step is not known."""


def order_of_visits(cases: Sequence[Case], seed: int, repetition: int, more: int = 0) -> tuple[list[int], list[int]]:
    """Return the visits as indices into ``cases``, each once or ``VISITS`` times, and those of ``more`` extra passes.

    Cases with a single visit come in the order of ``cases`` in the first repetition, then in random order, so that a
    budget that is too small does not leave out the same cases in each. The order depends on the seed and the
    repetition only.
    """
    random = Random(f"{seed} {repetition}")
    revisited = _choose_revisited(cases)
    revisited_set = set(revisited)
    visits = [index for _ in range(VISITS) for index in random.sample(revisited, len(revisited))]
    single = [index for index in range(len(cases)) if index not in revisited_set]
    if repetition:
        random.shuffle(single)
    positions = sorted(random.randint(0, len(visits)) for _ in single)
    order = _insert(visits, list(zip(positions, single, strict=True)))
    extra = [index for _ in range(more) for index in random.sample(revisited, len(revisited))]
    return order, extra


def spread_over_visits(job: Job, amounts: Sequence[float]) -> list[float]:
    """Return each visit's part of its case's amount; none for those that only time left over is for."""
    regular = job.visits[: len(job.visits) - job.more]
    counts = Counter(regular)
    return [amounts[index] / counts[index] for index in regular] + [0.0] * job.more


def _choose_revisited(cases: Sequence[Case]) -> list[int]:
    """Return the cases that are kept ready between several visits, the smallest first."""
    revisited = []
    free_bytes = _MAX_READY_BYTES
    for index in sorted(range(len(cases)), key=lambda index: _num_bytes(cases[index])):
        free_bytes -= _num_bytes(cases[index])
        if free_bytes >= 0 and cases[index].name.partition(".")[0] in _REVISITED_KINDS:
            revisited.append(index)
    return revisited


def _insert(visits: Sequence[int], insertions: Sequence[tuple[int, int]]) -> list[int]:
    """Return the visits with others before the given positions, which are in ascending order."""
    order: list[int] = []
    last = 0
    for position, index in insertions:
        order += visits[last:position]
        order.append(index)
        last = position
    return order + list(visits[last:])


def _num_bytes(case: Case) -> int:
    size = case.whole.get("size_bytes", _DEFAULT_BYTES)
    return size if isinstance(size, int) else _DEFAULT_BYTES
