"""Whether a long run stays as it began: ``python -m tests.studies.soak [--cases 500] [--plot soak.svg]``.

One launch of so many steps of one's own, each prepared, measured, explained and closed on the same ranks. Prints the
memory, open files and threads of the driver and of each rank around the first fifth and the last of the cases, and
exits with 1 where files or threads grew, or memory by more than 4 KB a case.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from parbench.bench.text import format_table
from tests.support.paths import environment

NAMES = ("memory MB", "files", "threads")
MOST_BYTES_A_CASE = 4_000
Sample = tuple[int, tuple[float, float, float]]  # cases done; what NAMES say


def family(driver: psutil.Process) -> dict[str, psutil.Process]:
    found = {"driver": driver}
    for server in driver.children():
        ranks = sorted(server.children(), key=lambda one: one.pid)
        found |= {f"rank {number}": one for number, one in enumerate(ranks)}
    return found


def watch(driver: psutil.Process, folder: Path) -> dict[str, list[Sample]]:
    """Return what each process held while the run lasted, twice a second."""
    seen: dict[str, list[Sample]] = {}
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        done = sum(file.read_bytes().count(b"\n") for file in folder.glob("*/records.jsonl"))
        try:
            for name, one in family(driver).items() if done else ():
                held = one.memory_info().rss / 1e6, float(one.num_fds()), float(one.num_threads())
                seen.setdefault(name, []).append((done, held))
        except psutil.Error:
            continue
        time.sleep(0.5)
    return seen


def around(samples: Sequence[Sample], low: float, high: float) -> list[float]:
    """Return the medians of what was held while these shares of the cases were done."""
    last = samples[-1][0]
    part = [held for done, held in samples if low * last <= done <= high * last]
    return [median(values) for values in zip(*part, strict=True)]


def plot(seen: dict[str, list[Sample]], cases: int) -> str:
    """Return an SVG: a panel for each of NAMES, a line for each process, from zero, over cases done."""
    panels = []
    for panel, title in enumerate(NAMES):
        top, most = (
            40 + 200 * panel,
            1.1 * max(held[panel] for samples in seen.values() for _, held in samples),
        )
        panels.append(f'<text x="60" y="{top - 8}">{title}, up to {most / 1.1:.0f}</text>')
        panels.append(f'<path d="M60 {top}V{top + 150}H760" stroke="#888" fill="none"/>')
        for number, (name, samples) in enumerate(seen.items()):
            points = " ".join(
                f"{60 + 700 * done / cases:.1f},{top + 150 - 150 * held[panel] / most:.1f}"
                for done, held in samples
            )
            colour = ("#1f77b4", "#d62728", "#2ca02c")[number % 3]
            panels.append(
                f'<polyline points="{points}" stroke="{colour}" fill="none" stroke-width="1.5"/>'
            )
            panels.append(
                f'<text x="{300 + 120 * number}" y="{top - 8}" fill="{colour}">{name}</text>'
            )
    body = "\n".join([*panels, f'<text x="640" y="630">{cases} cases</text>'])
    style = "font-family='sans-serif' font-size='13'"
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="640" {style}>\n{body}\n</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    numbers = ",".join(map(str, range(asked.cases)))
    with tempfile.TemporaryDirectory() as folder:
        words = [
            str(Path(sys.executable).with_name("parbench")),
            "run",
            "--preset",
            "smoke",
            "--nproc",
            "2",
        ]
        words += [
            "--launches",
            "1",
            "--budget",
            asked.budget,
            "--target",
            "tests.support.faults:tangled",
        ]
        words += ["--set", f"number={numbers}", "--out", folder]
        with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL) as run:
            seen = watch(psutil.Process(run.pid), Path(folder))
            code = run.wait()
    if asked.plot:
        asked.plot.write_text(plot(seen, asked.cases))
    rows, grew = [("process", "held", "first fifth", "last fifth")], code != 0
    for name, samples in seen.items():
        first, last = around(samples, 0.05, 0.25), around(samples, 0.8, 1.0)
        for title, before, after in zip(NAMES, first, last, strict=True):
            rows.append((name, title, f"{before:.1f}", f"{after:.1f}"))
            most = MOST_BYTES_A_CASE * asked.cases / 1e6 if title == NAMES[0] else 0
            grew |= after - before > most
    print(format_table(rows, right=(2, 3)))
    print(
        f"{max(done for samples in seen.values() for done, _ in samples)} of {asked.cases} cases, exit code {code}"
    )
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
