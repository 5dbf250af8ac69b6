"""All pipeline schedules. To add one, add it to ``_ALL_SCHEDULES``. Pure.

In formulas, P are the ranks, M the microbatches and v the stages per rank. F, I and W are the
seconds of a rank's forward pass, input gradient and weight gradient of one microbatch. B is I + W.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import cast

from parbench.bench.results.details import Action, ActionKind
from parbench.bench.text import UserError, format_list
from parbench.workloads.pipeline_parallel.order import PipelineSize
from parbench.workloads.pipeline_parallel.schedule import (
    AnalyticalBubble,
    PassSeconds,
    Schedule,
    list_v_stages,
)


def list_breadth_first(rank: int, size: PipelineSize) -> list[Action]:
    """Return a rank's actions in GPipe or looped BFS: all forward passes, then all backward passes.

    A stage runs all its microbatches before the next stage of the rank runs. Backward passes are in
    the reverse order of the forward passes.
    """
    passes = [
        (stage, microbatch)
        for stage in range(rank, size.num_stages, size.ranks)
        for microbatch in range(size.microbatches)
    ]
    forwards = [Action(stage, "F", microbatch) for stage, microbatch in passes]
    backwards = [Action(stage, "B", microbatch) for stage, microbatch in reversed(passes)]
    return forwards + backwards


def find_partial_round(size: PipelineSize) -> str:
    """Return the violation of interleaving's rule by a size, otherwise an empty text.

    With several stages per rank, the number of ranks must divide the number of microbatches, as in
    Megatron-LM. ``microbatches(5) % ranks(4) != 0`` means that 4 ranks do not divide 5.
    """
    if size.stages_per_rank == 1 or size.microbatches % size.ranks == 0:
        return ""
    return f"microbatches({size.microbatches}) % ranks({size.ranks}) != 0"


def alternate_passes(
    rank: int, size: PipelineSize, warmup: int, weight_delay: int | None = None
) -> list[Action]:
    """Return a rank's actions: a warm-up of forward passes, then forward and backward in turn.

    ``warmup`` is the number of forward passes before the first pair. After the last forward pass,
    the remaining backward passes follow. With a ``weight_delay`` of None, backward passes are not
    split. Otherwise each is an input gradient (I) and a weight gradient (W), and ``weight_delay``
    is the number of further input gradients between the I and the W of a microbatch.

    The forward passes of a rank with several stages are in rounds: each of its stages runs as many
    microbatches as there are ranks, one stage after the other. Backward passes are in the same
    rounds, with the stages in reverse order.
    """
    stages = range(rank, size.num_stages, size.ranks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    weights: list[Action] = []
    backward_kind: ActionKind = "B" if weight_delay is None else "I"
    for start in range(0, size.microbatches, size.ranks):
        microbatches = range(start, min(start + size.ranks, size.microbatches))
        for stage in stages:
            forwards += [Action(stage, "F", i) for i in microbatches]
        for stage in reversed(stages):
            backwards += [Action(stage, backward_kind, i) for i in microbatches]
            weights += [Action(stage, "W", i) for i in microbatches]
    actions = forwards[:warmup]
    for step, backward in enumerate(backwards):
        actions += forwards[warmup + step : warmup + step + 1]
        actions.append(backward)
        if weight_delay is not None and step >= weight_delay:
            actions.append(weights[step - weight_delay])
    if weight_delay:
        actions += weights[-weight_delay:]
    return actions


def list_1f1b(rank: int, size: PipelineSize) -> list[Action]:
    """Return a rank's actions in 1F1B: a warm-up, then one forward and one backward pass in turn.

    The warm-up is one forward pass for each later rank.
    """
    return alternate_passes(rank, size, warmup=size.ranks - 1 - rank)


def list_interleaved(rank: int, size: PipelineSize) -> list[Action]:
    """Return a rank's actions in interleaved 1F1B, with several stages per rank.

    The source is Megatron-LM, arXiv 2104.04473.
    """
    other_stages = (size.stages_per_rank - 1) * size.ranks
    return alternate_passes(rank, size, warmup=other_stages + 2 * (size.ranks - 1 - rank))


def list_zero_bubble(rank: int, size: PipelineSize, delay: int = 1) -> list[Action]:
    """Return a rank's actions in ZB-H1 or ZB-H2: 1F1B with split backward passes.

    ``delay`` 1 is ZB-H1, which has the warm-up and the memory of 1F1B. Delayed weight gradients
    fill the last bubbles of 1F1B. ``delay`` 2 is ZB-H2, which has twice the warm-up and twice the
    delay of weight gradients. This also fills the first bubbles, with more microbatches in flight.
    The source is arXiv 2401.10241. Several stages per rank interleave as in Megatron-LM.
    """
    other_stages = (size.stages_per_rank - 1) * size.ranks
    warmup = other_stages + delay * (size.ranks - 1 - rank)
    return alternate_passes(rank, size, warmup, weight_delay=delay * rank)


class ActionWriter:
    """Builds the list of a rank's actions from stages and kinds, and numbers the microbatches.

    The forward passes of a stage are for the microbatches 0, 1, 2 and so on, in the order in which
    they are added. So are its backward passes, where full backward passes and input gradients are
    counted together.
    """

    def __init__(self) -> None:
        """Make a writer without actions."""
        self.actions: list[Action] = []
        """The actions so far, in the order in which the rank runs them."""
        self._pending_weights: list[tuple[int, int]] = []
        """The weight gradients whose input gradient is in the list: stage and microbatch."""
        self._next_microbatch: Counter[tuple[int, bool]] = Counter()
        """The next microbatch, keyed by (stage, True for forward passes or False for backward)."""

    def add(self, stage: int, kinds: str) -> None:
        """Append one action of a stage for each letter of ``kinds``, such as "FIW".

        F is a forward pass, B a full backward pass, I an input gradient, and W a weight gradient. A
        W is for the first microbatch of this stage whose I is in the list and whose W is not. If
        there is no such microbatch, the W is left out.
        """
        for kind in kinds:
            if kind == "W":
                self.add_weights(stage)
                continue
            microbatch = self._next_microbatch[stage, kind == "F"]
            self._next_microbatch[stage, kind == "F"] += 1
            self.actions.append(Action(stage, cast(ActionKind, kind), microbatch))
            if kind == "I":
                self._pending_weights.append((stage, microbatch))

    def add_weights(self, stage: int | None = None) -> None:
        """Append the oldest weight gradient that is due and not yet in the list.

        A weight gradient is due once the input gradient of its stage and microbatch is in the list.
        ``stage`` selects a stage, and None allows all stages of the rank. If none is due, nothing
        is appended.
        """
        for pending in self._pending_weights:
            if stage in (None, pending[0]):
                self._pending_weights.remove(pending)
                self.actions.append(Action(pending[0], "W", pending[1]))
                return


def list_zb_v(rank: int, size: PipelineSize) -> list[Action]:
    """Return a rank's actions in ZB-V, with two stages per rank and split backward passes.

    The order is that for at least 2P - 1 microbatches on P ranks. With fewer microbatches, the
    actions of the missing microbatches are left out. The source is arXiv 2401.10241, section 6.
    """
    ranks = size.ranks
    first, second = rank, 2 * ranks - 1 - rank
    writer = ActionWriter()
    writer.add(first, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        writer.add(second, "F")
        writer.add(first, "F")
    writer.add(second, "FIW" * (ranks - rank))
    for _ in range(max(0, size.microbatches - (2 * ranks - 1)) + rank):
        writer.add(first, "FIW")
        writer.add(second, "FIW")
    for _ in range(ranks - 1 - rank):
        writer.add(first, "IW")
        writer.add(second, "FIW")
    for _ in range(rank):
        writer.add(first, "I")
        writer.add(second, "I")
    writer.add(first, "IW" * (ranks - rank))
    writer.add(second, "W" * rank)
    writer.add(first, "W" * rank)
    return [action for action in writer.actions if action.microbatch < size.microbatches]


def list_dualpipe_v(rank: int, size: PipelineSize) -> list[Action]:
    """Return a rank's actions in DualPipeV, with two stages per rank, in its eight steps.

    Where DualPipeV overlaps a forward and a backward pass, they run here one after the other. The
    source is github.com/deepseek-ai/DualPipe.
    """
    first, second = rank, 2 * size.ranks - 1 - rank
    later_ranks = size.ranks - 1 - rank
    writer = ActionWriter()
    writer.add(first, "F" * (2 * later_ranks))  # step 1
    for _ in range(rank + 1):  # step 2
        writer.add(first, "F")
        writer.add(second, "F")
    writer.add(second, "IWF" * later_ranks)  # step 3
    for _ in range(size.microbatches - 2 * size.ranks + rank + 1):  # step 4
        writer.add(first, "F")
        writer.add(second, "BF")
        writer.add(first, "B")
    for _ in range(later_ranks):  # step 5
        writer.add(second, "BF")
        writer.add(first, "B")
    for step in range(2 * (rank + 1)):  # step 6: full backward passes first, then split ones
        writer.add(first if step % 2 else second, "B" if step <= rank else "I")
    for _ in range(later_ranks):  # step 7
        writer.add_weights()
        writer.add(first, "I")
    for _ in range(rank + 1):  # step 8
        writer.add_weights()
    return writer.actions


def find_broken_microbatch_rule(size: PipelineSize) -> str:
    """Return the violation if a size has fewer microbatches than stages, otherwise an empty text.

    ``microbatches(2) < stages(4)`` means that there are 2 microbatches and 4 are required.
    """
    if size.microbatches >= size.num_stages:
        return ""
    return f"microbatches({size.microbatches}) < stages({size.num_stages})"


def compute_filling_bubble(size: PipelineSize, seconds: PassSeconds) -> AnalyticalBubble | None:
    """Return the idle seconds of each rank per step, while the pipeline fills and drains.

    They are (P-1)(F+B)/v (arXiv 2104.04473), with P ranks and v stages per rank. F and B are the
    seconds of a rank's forward and backward pass of one microbatch through all its stages, from
    ``seconds``. The result is None for v > 1 and fewer microbatches than ranks.
    """
    chunks = size.stages_per_rank
    if chunks > 1 and size.microbatches < size.ranks:
        return None
    idle = (size.ranks - 1) * seconds.total / chunks
    return AnalyticalBubble(idle, "(P-1)(F+B)" + ("/v" if chunks > 1 else ""))


def compute_zb_h_bubble(
    size: PipelineSize, seconds: PassSeconds, delay: int = 1
) -> AnalyticalBubble | None:
    """Return the idle seconds of each rank per step in ZB-H1 (``delay`` 1) or ZB-H2 (``delay`` 2).

    In ZB-H1 they are (P-1) max(F, I, F+I-W), in ZB-H2 (P-1) max(F, I-F, F+I-2W), divided by the
    number of stages per rank. P are the ranks. F, I and W are the seconds of a rank's forward pass,
    input gradient and weight gradient of one microbatch, from ``seconds``. The last term in each
    maximum is the formula of arXiv 2401.10241, table 2. It is valid only if W is short. The other
    terms, for longer W, were found with the simulator. The result is None unless there are more
    than ``delay`` (P-1) microbatches.
    """
    steps = size.ranks - 1
    if size.microbatches <= delay * steps:
        return None
    forward, input_gradient = seconds.forward, seconds.input_gradient
    longest = max(
        forward,
        input_gradient - (delay - 1) * forward,
        forward + input_gradient - delay * seconds.weight_gradient,
    )
    formula = "(P-1)max(F, I, F+I-W)" if delay == 1 else "(P-1)max(F, I-F, F+I-2W)"
    formula += "/v" if size.stages_per_rank > 1 else ""
    return AnalyticalBubble(steps / size.stages_per_rank * longest, formula)


def compute_v_bubble(size: PipelineSize, seconds: PassSeconds) -> AnalyticalBubble | None:
    """Return the idle seconds of each rank per step in ZB-V and in DualPipeV: (P-1)F/2.

    P are the ranks, and F, I and W the seconds of a rank's forward pass, input gradient and weight
    gradient of one microbatch. The result is None unless F = I = W and there are at least 2P - 1
    microbatches. In DualPipeV, forward and backward passes run in sequence here. Where they overlap,
    DeepSeek's formula is (P-1)(F&B + B - 3W) / 2, where F&B is the time of both together.
    """
    if size.microbatches < 2 * size.ranks - 1 or not seconds.is_equal:
        return None
    idle = (size.ranks - 1) * seconds.forward / 2
    return AnalyticalBubble(idle, "(P-1)F/2 at F = I = W")


_ALL_SCHEDULES = (
    # arXiv 1811.06965
    Schedule(
        name="gpipe",
        list_actions=list_breadth_first,
        compute_bubble=compute_filling_bubble,
    ),
    # PipeDream-Flush, arXiv 2104.04473
    Schedule(
        name="1f1b",
        list_actions=list_1f1b,
        compute_bubble=compute_filling_bubble,
    ),
    # arXiv 2104.04473
    Schedule(
        name="interleaved",
        list_actions=list_interleaved,
        stages_per_rank=2,
        min_stages_per_rank=2,
        find_broken_rule=find_partial_round,
        compute_bubble=compute_filling_bubble,
    ),
    # arXiv 2211.05953
    Schedule(
        name="looped_bfs",
        list_actions=list_breadth_first,
        stages_per_rank=2,
        min_stages_per_rank=2,
        compute_bubble=compute_filling_bubble,
    ),
    # arXiv 2401.10241, figure 2
    Schedule(
        name="zb_h1",
        list_actions=list_zero_bubble,
        splits_backward=True,
        compute_bubble=compute_zb_h_bubble,
    ),
    # arXiv 2401.10241, figure 3
    Schedule(
        name="zb_h2",
        list_actions=partial(list_zero_bubble, delay=2),
        splits_backward=True,
        compute_bubble=partial(compute_zb_h_bubble, delay=2),
    ),
    # torch.distributed.pipelining
    Schedule(
        name="interleaved_zb",
        list_actions=list_zero_bubble,
        splits_backward=True,
        stages_per_rank=2,
        min_stages_per_rank=1,
        find_broken_rule=find_partial_round,
        compute_bubble=compute_zb_h_bubble,
    ),
    # arXiv 2401.10241, section 6, and 2405.15362
    Schedule(
        name="zb_v",
        list_actions=list_zb_v,
        splits_backward=True,
        list_stages=list_v_stages,
        stages_per_rank=2,
        compute_bubble=compute_v_bubble,
    ),
    # DualPipe (arXiv 2412.19437) cut in half, github.com/deepseek-ai/DualPipe
    Schedule(
        name="dualpipe_v",
        list_actions=list_dualpipe_v,
        splits_backward=True,
        list_stages=list_v_stages,
        stages_per_rank=2,
        find_broken_rule=find_broken_microbatch_rule,
        compute_bubble=compute_v_bubble,
    ),
)
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ALL_SCHEDULES}
"""All pipeline schedules by name."""
DEFAULT_SCHEDULE = "1f1b"
"""The name of the schedule if the user sets none."""


def find_schedule(name: str) -> Schedule:
    """Return the schedule with a name. Raises ``UserError`` with the allowed names."""
    if name not in SCHEDULES:
        raise UserError(f"schedule = {name!r} is not allowed: choose {format_list(SCHEDULES)}")
    return SCHEDULES[name]
