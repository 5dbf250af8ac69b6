"""How fast parbench itself is, as a step of one's own and as benchmarks of pytest: the same tasks.

parbench run --target tests.studies.tool_speed:prepare --nproc 1 --allow-single \
    --set task=help,list,plan,append,load,compare,page \
    --launches 5 --budget 20m --timeout 10m --preset smoke   # before a change and after it
parbench compare BASE NEW                                    # exit code 1 where a task became slower
python -m pytest tests/studies/tool_speed.py --benchmark-json=speed.json

What the tasks read is made once, under /dev/shm where there is one: how fast a disk is, is not asked.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.plan.options import Options, plan_run
from parbench.bench.results.records import SCHEMA, Arrival, Record, WorldInfo
from parbench.bench.results.runs import load_run, open_writer, runs_in
from parbench.cli import DEFINITIONS
from tests.support.reports_fixtures import (
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
MEMORY = Path("/dev/shm")
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
MODES, DTYPES = ("blocking", "pipelined"), ("float32", "bfloat16")
STEPS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "tp_sp", "tp_fsdp")


def cases_of(number: int) -> list[Case]:
    steps = [
        step_case(STEPS[i % len(STEPS)], hidden=64 * (i // len(STEPS) + 1))
        for i in range(number // 10)
    ]
    sizes = (1024 * (i + 1) for i in range(number))
    every = (
        collective_case(op, size, mode=m, dtype=d)
        for size in sizes
        for op in OPERATIONS
        for m in MODES
        for d in DTYPES
    )
    return [*(case for case, _ in zip(every, range(number - len(steps)), strict=False)), *steps]


def records_of(cases: list[Case], ranks: int, launches: int) -> Iterator[Record]:
    world = WorldInfo(size=ranks, nodes=max(1, ranks // 8), backend="nccl", device="cuda")
    arrival = Arrival(
        method="ping-pong",
        uncertainty=1e-6,
        late_rank=3,
        share=0.7,
        last_out_rank=1,
        last_out_share=0.6,
    )
    for launch in range(launches):
        for case in cases:
            seconds = (20e-6 + float(case.params.get("size_bytes", 1e6)) / 3e9) * (
                1 + 0.01 * (launch % 7)
            )
            more: dict[str, Any] = {"world": world, "arrival": arrival, "n": 5}
            if case.name.startswith("step."):
                more["metrics"] = training_metrics(seconds)
                more["details"] = {"comm_calls": [], "bytes_by_rank": list(range(ranks))}
            yield ok_record(case, launch, seconds, **more)


def synthetic(folder: Path, number: int, ranks: int, launches: int) -> Path:
    cases = cases_of(number)
    run = make_run(make_plan(cases, launches=launches), records_of(cases, ranks, launches))
    pairs = {f"{i}-{j}": "other node" for i in range(ranks) for j in range(i + 1, ranks)}
    info = msgspec.structs.replace(run.info, environment={"locality": pairs})
    return write_run(folder, msgspec.structs.replace(run, info=info))


def made(cases: int, launches: int, copy: str = "") -> Path:
    """Return a run of so many cases and launches, from before if there is one."""
    base = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    folder = base / f"parbench-tool-speed-{SCHEMA}" / f"{cases}-{launches}{copy}"
    found = runs_in(folder)
    return found[0] if found else synthetic(folder, cases, 8, launches)


def command(*words: object, codes: tuple[int, ...] = (0,)) -> Callable[[], None]:
    line = [sys.executable, "-m", "parbench", *map(str, words)]

    def run() -> None:
        done = subprocess.run(line, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode in codes, (line, done.returncode)

    return run


def append(run: Path, folder: Path) -> Callable[[], None]:
    """Write a run's records anew, 100,000 of them."""
    records = load_run(run).records
    (folder / "records.jsonl").touch()

    def write() -> None:
        (folder / "records.jsonl").write_bytes(b"")
        with open_writer(folder) as writer:
            for record in records:
                writer.write(record)

    return write


def planned() -> None:
    plan = plan_run(
        Options(
            only=("all_reduce",),
            settings={"size_bytes": "4K:40000K:+4K", "mode": "blocking"},
            nproc=2,
        ),
        DEFINITIONS,
        None,
    )
    assert len(plan.cases) == 10_000


def task_of(name: str, folder: Path) -> Callable[[], Any]:
    """Return what is timed, once what it reads is there."""
    match name:
        case "help":
            return command("--help")
        case "list":
            return command("list")
        case "plan":
            return planned
        case "append":
            return append(made(1_000, 100), folder)
        case "load":
            run = made(1_000, 100)
            return lambda: load_run(run)
        case "compare":
            return command("compare", made(10_000, 2), made(10_000, 2, "-new"), codes=(0, 3))
        case "page":
            return command("report", made(500, 5), "-o", folder / "page.html")
    raise ValueError(name)


@pytest.mark.parametrize("name", get_args(Task))
def test_speed(name: str, benchmark: Any, tmp_path: Path) -> None:
    benchmark.pedantic(task_of(name, tmp_path), rounds=3, warmup_rounds=1)


def prepare(world: object, *, task: Task = "help") -> "Benchmark":
    from parbench.bench.world.benchmark import Benchmark

    class Step(Benchmark):
        def __init__(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            self.do = task_of(task, Path(self.folder.name))

        def step(self) -> None:
            self.do()

        def close(self) -> None:
            self.folder.cleanup()

    return Step()
