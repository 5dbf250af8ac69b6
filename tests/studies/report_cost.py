"""How large a report is and how long it takes to build: ``python tests/studies/report_cost.py [RUN]``.

Prints a line for RUN if one is given, else for a run as large as ``parbench run`` makes by default, then for 64 ranks x
500 cases and for 100,000 records, each beside its limit; exits with 1 if one is exceeded.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import support_path  # noqa: F401 - finds the next
from reports_fixtures import collective, make_plan, make_run, ok, step, training_metrics, write_run

from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Arrival, Record, WorldInfo
from parbench.reports.render.show import build

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
MODES, DTYPES = ("blocking", "pipelined"), ("float32", "bfloat16")
STEPS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "tp_sp", "tp_fsdp")


def cases_of(number: int) -> list[Case]:
    steps = [step(STEPS[i % len(STEPS)], hidden=64 * (i // len(STEPS) + 1)) for i in range(number // 10)]
    sizes = (1024 * (i + 1) for i in range(number))
    every = (
        collective(op, size, mode=m, dtype=d) for size in sizes for op in OPERATIONS for m in MODES for d in DTYPES
    )
    return [*(case for case, _ in zip(every, range(number - len(steps)), strict=False)), *steps]


def records_of(cases: list[Case], ranks: int, launches: int) -> Iterator[Record]:
    world = WorldInfo(size=ranks, nodes=max(1, ranks // 8), backend="nccl", device="cuda")
    arrival = Arrival(method="ping-pong", uncertainty=1e-6, late_rank=3, share=0.7, last_out_rank=1, last_out_share=0.6)
    for launch in range(launches):
        for case in cases:
            seconds = (20e-6 + float(case.params.get("size_bytes", 1e6)) / 3e9) * (1 + 0.01 * (launch % 7))
            more: dict[str, Any] = {"world": world, "arrival": arrival, "n": 5}
            if case.name.startswith("step."):
                more["metrics"] = training_metrics(seconds)
                more["details"] = {"comm_calls": [], "bytes_by_rank": list(range(ranks))}
            yield ok(case, launch, seconds, **more)


def synthetic(folder: Path, number: int, ranks: int, launches: int) -> Path:
    cases = cases_of(number)
    run = make_run(make_plan(cases, launches=launches), records_of(cases, ranks, launches))
    pairs = {f"{i}-{j}": "other node" for i in range(ranks) for j in range(i + 1, ranks)}
    info = msgspec.structs.replace(run.info, environment={"locality": pairs})
    return write_run(folder, msgspec.structs.replace(run, info=info))


def measured(title: str, run: Path, most_seconds: float, most_bytes: float) -> bool:
    began = time.perf_counter()
    num_bytes = len(build([run], "html")[0])
    seconds = time.perf_counter() - began
    records = sum(1 for _ in (run / "records.jsonl").open("rb"))
    kept = seconds < most_seconds and num_bytes < most_bytes
    told = f"{records:>8} {seconds:>9.1f} {most_seconds:>9.0f} {num_bytes / 1e6:>9.2f} {most_bytes / 1e6:>9.0f}"
    print(f"{title:<28}{told}  {'kept' if kept else 'EXCEEDED'}", flush=True)
    return kept


def main() -> int:
    print(f"{'run':<28}{'records':>8} {'seconds':>9} {'limit':>9} {'MB':>9} {'limit':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else synthetic(folder / "node", 60, 2, 5)
        kept = [
            measured("node run", given, 10, 1e6),
            measured("64 ranks x 500 cases", synthetic(folder / "large", 500, 64, 5), 60, 5e6),
            measured("500 cases x 200 launches", synthetic(folder / "long", 500, 64, 200), 60, 5e6),
        ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
