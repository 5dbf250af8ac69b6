"""What a step leaves behind once it is closed: no thread of a group, and no tensor of its model."""

import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

from bench.world import World
from workloads.definitions import DEFINITIONS

STEPS = {definition.name.removeprefix("workload."): definition for definition in DEFINITIONS}
MORE: dict[str, dict[str, Any]] = {"pp": {"layers": 4, "microbatches": 4}, "cp": {"method": "zigzag"}}


def count() -> tuple[int, int]:
    """Return the threads of this process, and the tensors that Python knows."""
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir())), sum(
        issubclass(type(one), torch.Tensor) for one in gc.get_objects()
    )


def left_behind(world: World, name: str) -> list[tuple[int, int]]:
    """Count after each of three subjects that took a step; a first one may fill what is kept for good."""
    module, _, function = STEPS[name].target.partition(":")
    case = STEPS[name].case({"shape": "tiny", **MORE.get(name, {})})
    counts = []
    for _ in range(3):
        subject = getattr(importlib.import_module(module), function)(world, **case.params)
        subject.reset()
        subject.step()
        world.barrier()
        subject.close()
        del subject
        counts.append(count())
    return counts


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_closed_leaves_nothing_behind(two_ranks: Ranks, name: str) -> None:
    for first, *others in two_ranks.call("test_left_behind:left_behind", name=name):
        threads, tensors = zip(first, *others, strict=True)
        assert threads[-1] <= threads[1], threads
        assert tensors[-1] <= tensors[1], tensors
