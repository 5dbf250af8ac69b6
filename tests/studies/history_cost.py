"""What a long history costs: 2,000 runs of 200 series, listed and checked as commands. Prints seconds.

python tests/studies/history_cost.py [RUNS SERIES]
"""

import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import support_path  # noqa: F401 - finds the next
from reports_fixtures import ENVIRONMENT, WORLD, collective, make_info, make_plan

from parbench.reports.history.database import open_history
from parbench.reports.history.entries import About, Entry
from parbench.reports.regression.environment import Identity, Point

LIMITS_SECONDS = {"list": 1.0, "check": 5.0}


def build(file: Path, num_runs: int, num_series: int) -> float:
    rng = random.Random(0)
    around = {"host.name": "node-a", "host.cpu_model": "Example CPU"}
    cases = [collective(f"op{i // 20}", 1024 << (i % 20)) for i in range(num_series)]
    identities = [Identity(case=case, world=WORLD, around=around) for case in cases]
    info = make_info(make_plan(cases[:1]), ENVIRONMENT)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    facts = {f"calls.dp.{name}": [float(i)] for i, name in enumerate(("all_gather", "all_reduce", "reduce_scatter"))}

    def seconds() -> float:
        return 1e-3 * rng.lognormvariate(0, 0.01)

    begun = time.monotonic()
    with open_history(file, create=True) as history:
        for i in range(num_runs):
            started = (first + timedelta(days=i)).isoformat().replace("+00:00", "Z")
            run = msgspec.structs.replace(info, id=f"run-{i:05}", started=started)
            points = tuple(
                Point(series=one, status="ok", seconds=seconds(), launches=5, beside={}, facts=facts)
                for one in identities
            )
            history.add(
                Entry(
                    run=run,
                    about=About(branch="main"),
                    points=points,
                    info_json=msgspec.json.encode(run),
                    records_jsonl=b"",
                )
            )
    return (time.monotonic() - begun) / num_runs


def timed(file: Path, *words: str) -> tuple[float, int]:
    command = [sys.executable, "-m", "parbench", "history", *words, "--history", str(file)]
    begun = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return time.monotonic() - begun, done.returncode


def main() -> None:
    num_runs, num_series = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (2000, 200)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "history.sqlite"
        print(f"add: {1e3 * build(file, num_runs, num_series):.1f} ms a run of {num_series} series")
        print(f"file: {file.stat().st_size / 1e6:.1f} MB for {num_runs} runs")
        slow = []
        for name, limit in LIMITS_SECONDS.items():
            seconds, code = timed(file, name)
            print(f"{name}: {seconds:.2f} s (at most {limit:.0f} s), exit code {code}")
            slow += [name] * (seconds > limit or code != 0)
    sys.exit(f"too slow or failed: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
