"""A dry run: what one step on a mesh would hold, send and take, without a GPU or a process group. Pure."""

from dataclasses import dataclass

from workloads.planner.ask import Ask
from workloads.planner.hardware import Hardware
from workloads.planner.link_time import Seconds, by_hardware
from workloads.planner.rank_memory import RankMemory, memory_of
from workloads.planner.stage_flops import model_flops_per_token, stage_flops
from workloads.planner.stage_parts import Part, parts_of
from workloads.planner.step_time import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Held:
    """One kind of rank, and what it holds."""

    part: Part
    memory: RankMemory


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A step as predicted; ``ranks`` are those that differ."""

    ask: Ask
    hardware: Hardware
    ranks: tuple[Held, ...]
    time: StepTime

    @property
    def fullest(self) -> Held:
        """The rank that holds most."""
        return max(self.ranks, key=lambda held: held.memory.total)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory holds it."""
        return self.fullest.memory.total <= self.hardware.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.ask.tokens / self.time.seconds

    @property
    def model_flops_per_second(self) -> float:
        """Of one GPU, as PaLM counts them."""
        return self.tokens_per_second * model_flops_per_token(self.ask.model) / self.ask.world

    @property
    def mfu(self) -> float:
        """The share of the dense bfloat16 peak."""
        return self.model_flops_per_second / self.hardware.flops_per_second

    @property
    def executed_share(self) -> float:
        """The share of that peak in what the busiest rank executes: half of attention, and what is computed again."""
        flops = max(stage_flops(self.ask, held.part).total for held in self.ranks)
        return flops * self.ask.microbatches / self.time.seconds / self.hardware.flops_per_second

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader must know of the numbers, one sentence each."""
        if self.mfu <= 1:
            return ()
        return (
            f"MFU {self.mfu:.1%} is above 100%: it counts attention whole, of which a causal mask leaves half; what is "
            f"executed is {self.executed_share:.1%} of the peak",
        )

    @property
    def missing(self) -> str:
        """What a step that does not fit lacks, in numbers."""
        fullest = self.fullest
        return (
            f"{self.ask.model.name} with {self.ask.mesh_text} needs {fullest.memory.total / 1e9:,.1f} GB on "
            f"{fullest.part.words} ({fullest.memory.state / 1e9:,.1f} GB of state, "
            f"{fullest.memory.activations / 1e9:,.1f} GB of activations, {fullest.memory.buffers / 1e9:,.1f} GB of "
            f"buffers) > {self.hardware.usable_bytes / 1e9:,.1f} GB usable of {self.hardware.memory_bytes / 1e9:,.0f}"
        )


def dry_run(ask: Ask, hardware: Hardware, *, seconds: Seconds | None = None, exact: bool = True) -> DryRun:
    """Return the predicted step; ``seconds`` tells a call's time, by default ``hardware``'s latency and bandwidth.

    ``exact`` simulates pipelines of moderate size action by action.
    """
    parts = parts_of(ask)
    return DryRun(
        ask=ask,
        hardware=hardware,
        ranks=tuple(Held(part=part, memory=memory_of(ask, part)) for part in parts),
        time=step_time(ask, parts, hardware, seconds or by_hardware(hardware), exact=exact),
    )
