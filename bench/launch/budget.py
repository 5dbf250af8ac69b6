"""The time budget of a run, divided among its repetitions and their blocks. Without torch.

A case is a benchmark with values for its parameters. A repetition starts all ranks, which then
measure the cases. If cases need different environment variables, each group of cases with equal
variables has its own start of ranks.

The samples of a small operation are taken in several blocks, with blocks of other cases between
them, in random order. A disturbance of the machine then affects a part of every case instead of all
samples of one case.

The default budget of a run is chosen in ``bench/plan/options.py``.
"""

import math
import time
from collections.abc import Iterable, Sequence
from random import Random

from parbench.bench.launch.messages import Block
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Measure, get_case_weight
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run

RESERVE = 1.1
"""The factor between the needed time and a suggested time budget, because speed varies."""
BLOCKS = 10
"""The number of blocks into which the samples of a small operation are split.

Other cases are measured between them. The second-smallest and the second-largest median of ten
blocks enclose the true median with a probability of 97.9 %.
"""
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


class TimeBudget:
    """Divides the time of a run equally among the starts of all ranks that are still to come.

    Starts for which the remaining time does not suffice are left out. The time that a start needs
    at least is known after the first one.
    """

    def __init__(self, seconds: float, num_starts: int) -> None:
        """Begin the time of the run now.

        ``seconds`` is the time budget of the run. ``num_starts`` is the number of planned starts of
        all ranks.
        """
        self._num_starts = num_starts
        self.num_completed = 0
        """The number of starts that have ended."""
        self._least_seconds = 0.0
        """The least time that a start of all ranks has needed so far, 0 before the first one."""
        self._end = time.monotonic() + seconds
        # The last cases may take a little longer rather than be left out after all others.
        self._last_end = self._end + min(0.1 * seconds, 5.0)

    def compute_remaining_seconds(self) -> float:
        """Return the seconds from now on in which cases may still begin, at least 0.

        The limit is later than the end of the budget, by a tenth of it or 5 s, whichever is less.
        """
        return max(self._last_end - time.monotonic(), 0.0)

    def count_fitting(self) -> int:
        """Return the number of starts of all ranks still to come that fit into the remaining time.

        Before the first start has begun, all planned starts count.
        """
        num_to_come = self._num_starts - self.num_completed
        if not self._least_seconds:
            return num_to_come
        return min(num_to_come, int(self.compute_remaining_seconds() / self._least_seconds))

    def compute_deadline(self, began: float) -> float:
        """Return the ``time.monotonic()`` at which the current start of all ranks should end.

        All starts that fit into the time from ``began`` to the end of the budget get an equal part
        of it. ``began`` is the ``time.monotonic()`` at which the launcher started the ranks, all of
        which have started now.
        """
        if not self.num_completed:
            self._least_seconds = time.monotonic() - began
        return began + (self._end - began) / max(self.count_fitting(), 1)

    def complete_start(self, seconds: float, records: Iterable[Record]) -> None:
        """Count a start of all ranks as completed, and note the time that it needed at least.

        ``seconds`` is the time that the start took, and ``records`` are the results of its cases.
        The time that it needed at least is ``seconds`` without the samples of each case beyond the
        first ``min_iterations``.
        """
        for record in records:
            values = record.samples.values
            steps = int(record.details.get("steps_per_sample", 1))
            extra_share = 1 - Measure().min_iterations / max(len(values), 1)
            seconds -= max(extra_share, 0.0) * steps * sum(values)
        if self.num_completed:
            seconds = min(seconds, self._least_seconds)
        self._least_seconds = max(seconds, 0.001)
        self.num_completed += 1


def estimate_run_seconds(run: Run) -> float:
    """Return the expected seconds to measure every case of a run in every repetition.

    The estimate is the time that the run has taken, multiplied by the number of planned
    measurements and divided by the number of completed ones. A measurement is one case in one
    repetition. The result is 0 if the run has taken no time yet.
    """
    plan = run.info.plan
    num_made = sum(not record.is_out_of_budget for record in run.records)
    seconds = sum(info.seconds for info in run.info.repetitions)
    return seconds * plan.repetitions * len(plan.cases) / max(num_made, 1)


def format_budget(seconds: float) -> str:
    """Return a value of ``--budget``, such as ``90s`` or ``7m``, for a run that takes ``seconds``.

    A reserve of 10 % is added to ``seconds``. The sum is rounded up to a multiple of 10 s, or of
    1 min if it is at least 3 min.
    """
    needed = round(RESERVE * seconds, 3)
    return f"{10 * math.ceil(needed / 10)}s" if needed < 180 else f"{math.ceil(needed / 60)}m"


def make_blocks(cases: Sequence[Case], seed: str, *, shuffles_single: bool = False) -> list[Block]:
    """Return the blocks of one start of all ranks in an order that depends only on ``seed``.

    A block is a run of samples of one case, without samples of other cases between them. An
    operation with a small message has ten blocks, which are spread over the repetition in random
    order. Any other case has a single block, at a random position among the blocks of operations.

    Args:
        cases: the cases to measure.
        seed: the seed of the random order.
        shuffles_single: True if the cases with a single block are in random order, so that a short
            budget leaves out different cases in each repetition. Otherwise they are in the order of
            ``cases``.
    """
    random = Random(seed)
    interleaved = _choose_interleaved_cases(cases)
    blocks = []
    for _ in range(BLOCKS):
        for index in random.sample(interleaved, len(interleaved)):
            blocks.append(Block(case=index, weight=get_case_weight(cases[index]) / BLOCKS))
    single = [index for index in range(len(cases)) if index not in interleaved]
    if shuffles_single:
        random.shuffle(single)
    positions = sorted(random.randint(0, len(blocks)) for _ in single)
    # From the end, so that earlier positions stay as they are.
    for position, index in zip(reversed(positions), reversed(single), strict=True):
        blocks.insert(position, Block(case=index, weight=get_case_weight(cases[index])))
    return blocks


def _choose_interleaved_cases(cases: Sequence[Case]) -> list[int]:
    """Return the indices in ``cases`` of the cases to measure in several blocks, by ascending size.

    They are the operations with the smallest messages, up to a sum of message sizes of 512 MiB. The
    limit exists because these cases stay in memory between their blocks.
    """
    sizes = []
    for case in cases:
        size = case.all_params.get("size_bytes")
        sizes.append(size if isinstance(size, int) else _DEFAULT_BYTES)
    interleaved = []
    free_bytes = _MAX_INTERLEAVED_BYTES
    for index in sorted(range(len(cases)), key=sizes.__getitem__):
        free_bytes -= sizes[index]
        if free_bytes >= 0 and cases[index].kind in _INTERLEAVED_KINDS:
            interleaved.append(index)
    return interleaved
