"""Time parbench itself: each task is a case of a custom benchmark.

parbench run tests.studies.tool_speed:prepare --nproc 1 \
    --set task=help,list,plan,append,load,compare,page \
    --repetitions 5 --budget 20m --timeout 10m --preset smoke   # before a change and after it
parbench compare BASE NEW    # exit code 1 if a task became slower

The input of the tasks is created once, in /dev/shm if it exists, so no disk is timed.
"""

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from parbench.bench.plan.cases import Case
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.results.records import SCHEMA, Record, WorldInfo
from parbench.bench.results.runs import list_runs, load_run, open_writer
from parbench.cli import DEFINITIONS
from tests.support.reports.late import find_stragglers
from tests.support.reports.reports_fixtures import (
    collective_case,
    make_plan,
    make_run,
    ok_record,
    step_case,
    training_metrics,
    write_run,
)

if TYPE_CHECKING:
    from parbench.bench.world.benchmark import Benchmark

Task = Literal["help", "list", "plan", "append", "load", "compare", "page"]
SHARED_MEMORY = Path("/dev/shm")
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
MODES = ("blocking", "pipelined")
DTYPES = ("float32", "bfloat16")
STEPS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "tp_sp", "tp_fsdp")


def make_cases(number: int) -> list[Case]:
    steps = [
        step_case(STEPS[i % len(STEPS)], hidden=64 * (i // len(STEPS) + 1))
        for i in range(number // 10)
    ]
    sizes = (1024 * (i + 1) for i in range(number))
    collectives = [
        collective_case(operation, size, mode=mode, dtype=dtype)
        for size, operation, mode, dtype in itertools.islice(
            itertools.product(sizes, OPERATIONS, MODES, DTYPES), number - len(steps)
        )
    ]
    return [*collectives, *steps]


def make_records(cases: list[Case], ranks: int, repetitions: int) -> Iterator[Record]:
    world = WorldInfo(size=ranks, nodes=max(1, ranks // 8), backend="nccl", device="cuda")
    arrival = find_stragglers(late_rank=3)
    for repetition in range(repetitions):
        for case in cases:
            size_bytes = float(case.params.get("size_bytes", 1e6))
            variation = 1 + 0.01 * (repetition % 7)
            seconds = (20e-6 + size_bytes / 3e9) * variation
            fields: dict[str, Any] = {"world": world, "arrival": arrival, "n": 5}
            if case.name.startswith("step."):
                fields["metrics"] = training_metrics(seconds)
                fields["details"] = {"comm_calls": [], "bytes_by_rank": list(range(ranks))}
            yield ok_record(case, repetition, seconds, **fields)


def write_synthetic_run(folder: Path, number: int, ranks: int, repetitions: int) -> Path:
    cases = make_cases(number)
    run = make_run(
        make_plan(cases, repetitions=repetitions), make_records(cases, ranks, repetitions)
    )
    pairs = {f"{i}-{j}": "other node" for i in range(ranks) for j in range(i + 1, ranks)}
    info = msgspec.structs.replace(run.info, environment={"locality": pairs})
    return write_run(folder, msgspec.structs.replace(run, info=info))


def find_or_write_run(cases: int, repetitions: int, copy: str = "") -> Path:
    """Return a run of a number of cases and repetitions; an earlier one is reused."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    folder = base / f"parbench-tool-speed-{SCHEMA}" / f"{cases}-{repetitions}{copy}"
    runs = list_runs(folder)
    return runs[0] if runs else write_synthetic_run(folder, cases, 8, repetitions)


def make_command(*arguments: object, codes: tuple[int, ...] = (0,)) -> Callable[[], None]:
    args = [sys.executable, "-m", "parbench", *map(str, arguments)]

    def run() -> None:
        completed = subprocess.run(args, stdout=subprocess.DEVNULL, check=False)
        assert completed.returncode in codes, (args, completed.returncode)

    return run


def make_append(run: Path, folder: Path) -> Callable[[], None]:
    """Return a function that writes the records of a run again."""
    records = load_run(run).records
    (folder / "records.jsonl").touch()

    def write() -> None:
        (folder / "records.jsonl").write_bytes(b"")
        with open_writer(folder) as writer:
            for record in records:
                writer.write(record)

    return write


def plan_many_cases() -> None:
    plan = plan_run(
        Options(
            names=("all_reduce",),
            settings={"size_bytes": "4K:40000K:+4K", "mode": "blocking"},
            nproc=2,
        ),
        DEFINITIONS,
        None,
    )
    assert len(plan.cases) == 10_000


def prepare_task(name: Task, folder: Path) -> Callable[[], Any]:
    """Prepare the input of a task and return the function that is timed."""
    match name:
        case "help":
            return make_command("--help")
        case "list":
            return make_command("list")
        case "plan":
            return plan_many_cases
        case "append":
            return make_append(find_or_write_run(1_000, 100), folder)
        case "load":
            run = find_or_write_run(1_000, 100)
            return lambda: load_run(run)
        case "compare":
            return make_command(
                "compare",
                find_or_write_run(10_000, 2),
                find_or_write_run(10_000, 2, "-new"),
                codes=(0, 3),
            )
        case "page":
            return make_command("report", find_or_write_run(500, 5), "-o", folder / "page.html")


def prepare(world: object, *, task: Task = "help") -> "Benchmark":
    from parbench.bench.world.benchmark import Benchmark

    class Step(Benchmark):
        def __init__(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            self.run_task = prepare_task(task, Path(self.folder.name))

        def step(self) -> None:
            self.run_task()

        def close(self) -> None:
            self.folder.cleanup()

    return Step()
