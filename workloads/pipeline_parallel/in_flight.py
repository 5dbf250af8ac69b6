"""What a rank of a pipeline holds at once, by its order of actions. Pure."""

from collections.abc import Callable

from workloads.pipeline_parallel.schedules import Schedule


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
