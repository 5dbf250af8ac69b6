"""Functions that ranks on stub GPUs run: cases and single steps, with marks in the trace."""

import ctypes
from typing import Any

from parbench.bench.plan.cases import load_catalogue
from parbench.bench.plan.plan import Measure
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun, make_benchmark
from parbench.bench.world.world import World
from parbench.cli import DEFINITIONS

MEASURE = Measure(warmup=2, min_iterations=3, max_iterations=3)
SECONDS_PER_CASE = 20.0
STEPS_MEASURED_BY_DDP = 10


def mark(text: str) -> None:
    """Write a line without spaces into the trace of this process."""
    ctypes.CDLL("libfakecuda.so").fake_cuda_mark(text.encode())


def measure_case(
    world: World, name: str, params: dict[str, Any], label: str, alone: bool = False
) -> tuple[str, str, dict[str, Any]]:
    """Measure a case between two marks, and return its status, reason and details."""
    definitions = {definition.name: definition for definition in load_catalogue(DEFINITIONS)}
    mark(f"{label}:start")
    case_run = CaseRun(definitions[name].build_case(params), world, MEASURE, Progress(), None)
    outcome = case_run.run_block(SECONDS_PER_CASE, is_only=alone)
    mark(f"{label}:end")
    return outcome.status, outcome.reason, outcome.details


def measure_cases(
    world: World, name: str, params_of_cases: list[dict[str, Any]], label: str
) -> list[tuple[str, str]]:
    """Measure cases one after the other, and return their status and reason."""
    outcomes = []
    for number, params in enumerate(params_of_cases):
        status, reason, _ = measure_case(world, name, params, f"{label}:{number}")
        outcomes.append((status, reason))
    return outcomes


def take_step(world: World, name: str, params: dict[str, Any], label: str) -> None:
    """Take a step between two marks, after the steps that DistributedDataParallel measures."""
    definitions = {definition.name: definition for definition in load_catalogue(DEFINITIONS)}
    benchmark = make_benchmark(definitions[name].build_case(params), world, fault=None)
    for _ in range(STEPS_MEASURED_BY_DDP + 1):
        benchmark.reset()
        benchmark.step()
    benchmark.reset()
    world.sync()
    mark(f"{label}:start")
    benchmark.step()
    mark(f"{label}:end")
    world.sync()
    benchmark.close()
