"""The order in which a repetition measures its cases, in blocks. Without torch.

A case that is cheap to keep ready has several blocks, with those of all other cases between, in
random order. What slows a machine for a while then affects a part of every case, not all of one.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

from parbench.bench.launch.messages import Block
from parbench.bench.plan.cases import Case

BLOCKS = 10
"""The second from either end of ten medians enclose the true one 97.9 times in a hundred."""
_MAX_INTERLEAVED_BYTES = 512 << 20
"""The size of all cases together that are kept ready. An operation holds several times its size."""
_DEFAULT_BYTES = 1 << 20
_INTERLEAVED_KINDS = ("collective", "p2p", "memory", "compute")
"""A step's model is large and slow to prepare, and the size of a custom step is not known."""


def order_blocks(
    cases: Sequence[Case], seed: int, repetition: int, num_extra: int = 0
) -> tuple[list[int], list[int]]:
    """Return the case of each block, and of those of extra passes, as indices into ``cases``.

    A case has 1 or ``BLOCKS`` blocks. Cases with one come in the order of ``cases`` in the first
    repetition, then in random order, so that a budget that is too small does not leave out the
    same cases in each. The order depends on the seed and the repetition only.
    """
    random = Random(f"{seed} {repetition}")
    ready = _choose_interleaved_cases(cases)
    passes = [random.sample(ready, len(ready)) for _ in range(BLOCKS)]
    single = [index for index in range(len(cases)) if index not in set(ready)]
    if repetition:
        random.shuffle(single)
    order = [index for cases_of_pass in passes for index in cases_of_pass]
    positions = sorted(random.randint(0, len(order)) for _ in single)
    # From the end, so that earlier positions stay as they are.
    for position, index in zip(reversed(positions), reversed(single), strict=True):
        order.insert(position, index)
    extra = [index for _ in range(num_extra) for index in random.sample(ready, len(ready))]
    return order, extra


def make_blocks(
    order: Sequence[int],
    extra: Sequence[int],
    weights: Sequence[float],
    costs: Sequence[float],
) -> list[Block]:
    """Return the blocks, each with its part of its case's weight and cost; extra ones have none."""
    counts = Counter(order)
    blocks = []
    for index in order:
        count = counts[index]
        weight = weights[index] / count
        blocks.append(Block(case=index, weight=weight, cost_seconds=costs[index] / count))
    return blocks + [Block(case=index) for index in extra]


def _choose_interleaved_cases(cases: Sequence[Case]) -> list[int]:
    """Return the cases that have several blocks, the smallest first; they stay prepared between."""
    ready = []
    free_bytes = _MAX_INTERLEAVED_BYTES
    for index in sorted(range(len(cases)), key=lambda index: _num_bytes(cases[index])):
        free_bytes -= _num_bytes(cases[index])
        if free_bytes >= 0 and cases[index].name.partition(".")[0] in _INTERLEAVED_KINDS:
            ready.append(index)
    return ready


def _num_bytes(case: Case) -> int:
    size = case.all_params.get("size_bytes", _DEFAULT_BYTES)
    return size if isinstance(size, int) else _DEFAULT_BYTES
