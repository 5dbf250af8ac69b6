"""Print how often the first thing to look at is the one that was planted: ten real runs, one fault in each.

    python tests/studies/look_at_first.py FOLDER [--only "one bucket" ...]

Each run takes 15 to 40 s on two cores; compute is timed, so that steps are real where ranks outnumber cores. Bars: the
first line names the fault in nine of ten, and nothing is claimed where nothing was planted. That run comes first: what
the machine did before it would be a busy neighbour. Runs stay in FOLDER, and are not measured again where they are.
"""

import argparse
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import support_path  # noqa: F401 - finds the next
from clusters import PARBENCH, in_cluster

from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from parbench.reports.sections.one_run import report_of

BAR = 9
_RANKS, _STEP = "--only all_reduce --sizes 64K:1M:x4 --launches 5", "--set compute=timed:20ms --launches 3"
_BUSY_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault, what ``parbench run`` is told, and the kind of finding that names it; a busy machine has spinners."""

    fault: str
    words: str
    kind: str = ""
    link: str = ""
    spinners: int = 0


PLANTED = (
    Planted(fault="nothing", words="--only ddp --set compute=timed:20ms --set bucket_mb=1 " + _RANKS),
    Planted(fault="one late rank", kind="late rank", words=f"{_RANKS} --inject late:1:3ms"),
    Planted(fault="a slow rank", kind="slow rank", words=f"{_RANKS} --inject slow:1:60%"),
    Planted(fault="one bucket", kind="one bucket", words=f"--only ddp --set shape=small {_STEP}"),
    Planted(fault="no prefetch", kind="no prefetch", words=f"--only fsdp {_STEP}"),
    Planted(fault="unbalanced stages", kind="uneven stages", words=f"--only pp --set split=3+1 {_STEP}"),
    Planted(fault="hot experts", kind="hot experts", words=f"--only ep_step --set routing=hot_rank:4 {_STEP}"),
    Planted(
        fault="small microbatches",
        kind="small microbatches",
        words="--only ddp --set accumulation=8 --set microbatch=1 --set compute=timed:5ms --launches 3",
    ),
    Planted(fault="a slow link", kind="slow link", words="--only matrix --sizes 1M --launches 3", link="n3:100mbit"),
    Planted(fault="a busy neighbour", kind="busy machine", words=_RANKS, spinners=2),
)


def _spin() -> None:
    while True:
        pass


@contextmanager
def spinning(count: int) -> Iterator[None]:
    workers = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count * (os.cpu_count() or 1))]
    for worker in workers:
        worker.start()
    time.sleep(_BUSY_SECONDS if workers else 0.0)
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def measure(one: Planted, out: Path) -> None:
    words = ["run", *one.words.split(), "--budget", "40s", "--out", str(out)]
    with spinning(one.spinners):
        if one.link:
            line = " ".join([PARBENCH, *words, "--launcher srun --ntasks-per-node 1"])
            words = ["salloc", "-Q", "--nodes", "4", "--exclusive", "sh", "-c", line]
            done = in_cluster(words, link="400mbit", slow=[one.link], timeout=300, variables={"OMP_NUM_THREADS": "1"})
        else:
            done = subprocess.run([PARBENCH, *words], capture_output=True, text=True, check=False)
    if not list(out.glob("*/run.json")):
        raise UserError(f"{one.fault}: {' '.join((done.stderr or done.stdout).split())[-300:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[one.fault for one in PLANTED])
    asked = parser.parse_args()
    right = 0
    for one in (one for one in PLANTED if one.fault in asked.only):
        out = asked.folder / one.fault.replace(" ", "-")
        if not list(out.glob("*/run.json")):
            measure(one, out)
        found = report_of(load_run(next(iter(out.glob("*/run.json"))).parent)).findings
        named = found[0].kind == one.kind if found else not one.kind
        right += named
        print(f"{one.fault}: {'named' if named else 'NOT named'}")
        print(
            "".join(f"    {i}. {other.words}\n" for i, other in enumerate(found, start=1)) or "    nothing stands out\n"
        )
    print(f"{right} of {len(asked.only)} are named (bar {BAR} of {len(PLANTED)})")


if __name__ == "__main__":
    main()
