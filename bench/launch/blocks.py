"""The order of the blocks of samples in a repetition. Without torch.

A case is a benchmark with values for its parameters. A repetition starts all ranks, which then
measure the cases. If cases need different environment variables, each group of cases with equal
variables has its own start of ranks.

The samples of a small operation are taken in several blocks, with blocks of other cases between
them, in random order. A disturbance of the machine then affects a part of every case instead of all
samples of one case.
"""

from collections.abc import Sequence
from random import Random

from parbench.bench.plan.cases import Case

BLOCKS = 10
"""The number of blocks into which the samples of a small operation are split.

Other cases are measured between them. The second-smallest and the second-largest median of ten
blocks enclose the true median with a probability of 97.9 %.
"""
MAX_SEPARATE_CASES = 2
"""The number of cases up to which each case of a repetition has a single block."""
_MAX_INTERLEAVED_BYTES = 512 << 20
"""The largest sum of message sizes in bytes of all cases that are measured in several blocks.

They stay in memory between their blocks, and an operation allocates several times its message size.
"""
_DEFAULT_BYTES = 1 << 20
"""The size in bytes that is assumed for a case without the parameter ``size_bytes``."""
_INTERLEAVED_KINDS = ("collective", "p2p", "memory", "compute")
"""The kinds of cases that are measured in several blocks. A kind is the first part of a name.

A training step is not among them, because its model is large and slow to prepare. A custom step is
not, because its size is unknown.
"""


def make_blocks(cases: Sequence[Case], seed: str) -> list[int]:
    """Return the index of each block's case, in an order that depends only on ``seed``.

    A block is a run of samples of one case, without samples of other cases between them. An
    operation with a small message has ten blocks, which are spread over the repetition in random
    order. Any other case has a single block, at a random position. One or two cases have single
    blocks, because the first samples of a block are slower than later ones.
    """
    random = Random(seed)
    interleaved = _choose_interleaved_cases(cases) if len(cases) > MAX_SEPARATE_CASES else []
    blocks = []
    for _ in range(BLOCKS):
        blocks += random.sample(interleaved, len(interleaved))
    for index in range(len(cases)):
        if index not in interleaved:
            blocks.insert(random.randint(0, len(blocks)), index)
    return blocks


def _choose_interleaved_cases(cases: Sequence[Case]) -> list[int]:
    """Return the indices in ``cases`` of the cases to measure in several blocks, by ascending size.

    They are the operations with the smallest messages, up to a sum of message sizes of 512 MiB. The
    limit exists because these cases stay in memory between their blocks.
    """
    sizes = {}
    for index, case in enumerate(cases):
        if case.kind in _INTERLEAVED_KINDS:
            sizes[index] = int(case.all_params.get("size_bytes", _DEFAULT_BYTES))
    interleaved = []
    free_bytes = _MAX_INTERLEAVED_BYTES
    for index in sorted(sizes, key=sizes.__getitem__):
        free_bytes -= sizes[index]
        if free_bytes >= 0:
            interleaved.append(index)
    return interleaved
