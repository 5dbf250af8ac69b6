"""How fast parbench itself is, as a step of one's own and as benchmarks of pytest: the same tasks.

parbench run --target tool_speed:prepare --set task=help,list,plan,append,load,compare,page --nproc 1 --allow-single \
    --launches 5 --budget 20m --timeout 10m --preset smoke   # in tests/studies, before a change and after it
parbench compare BASE NEW                                    # exit code 1 where a task became slower
python -m pytest tests/studies/tool_speed.py --benchmark-json=speed.json

What the tasks read is made once, under /dev/shm where there is one: how fast a disk is, is not asked.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest
import support_path  # noqa: F401 - finds the next
from report_cost import synthetic

from parbench.bench.plan.options import Options, plan_run
from parbench.bench.results.records import SCHEMA
from parbench.bench.results.runs import load_run, open_writer, runs_in
from parbench.cli import DEFINITIONS

if TYPE_CHECKING:
    from parbench.bench.world.benchmark import Benchmark

Task = Literal["help", "list", "plan", "append", "load", "compare", "page"]
MEMORY = Path("/dev/shm")


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
        Options(only=("all_reduce",), settings={"size_bytes": "4K:40000K:+4K", "mode": "blocking"}, nproc=2),
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
