"""Whether parbench explain names the fault that was planted in a real step, by its traces alone.

python tests/studies/explained_traces.py                 # every fault once, on two ranks: about two minutes
python tests/studies/explained_traces.py --rounds 3 --folder traces

Each step is profiled by PyTorch's profiler on both ranks; arithmetic is waits of known length. The slow link is the
loopback of a network namespace, shaped by tc (as root); it is held against the fits of a run on the same loopback
before it was shaped.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE / "support")]

from profiled import PLANTED  # noqa: E402
from ranks import Ranks  # noqa: E402

from parbench.bench.results.runs import load_run  # noqa: E402
from parbench.reports.traces.causes import causes_of  # noqa: E402
from parbench.reports.traces.explained import ceiling_of_run  # noqa: E402
from parbench.reports.traces.steps import read_job  # noqa: E402

SLOW_LINK = "slow link"
SHAPED = "tc qdisc add dev lo root tbf rate 200mbit burst 256kb latency 400ms"
MEASURED = "parbench run --only all_reduce --sizes 16K:4M:x4 --nproc 2 --launches 2 --budget 40s"


def plant(kind: str, folder: Path) -> None:
    """Write the traces of a step with a fault, on this network."""
    folder.mkdir(parents=True, exist_ok=True)
    with Ranks(2) as ranks:
        ranks.call("profiled:profile_steps", kind=kind, folder=str(folder))


def plant_on_slow_link(folder: Path) -> Path:
    """Measure a loopback of one's own, shape it, write a step's traces on it, and return the run's folder."""
    runs = folder.with_suffix(".runs")
    script = (
        f"ip link set lo up && export GLOO_SOCKET_IFNAME=lo && {MEASURED} --out {runs} && {SHAPED}"
        f" && {sys.executable} {__file__} --plant '{SLOW_LINK}' --folder {folder}"
    )
    subprocess.run(["unshare", "--net", "bash", "-c", script], check=True, stdout=subprocess.DEVNULL)
    return next(path for path in runs.iterdir() if path.is_dir() and not path.is_symlink())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=PLANTED, default=list(PLANTED))
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.plant:
        plant(asked.plant, asked.folder)
        return 0
    base, named, claimed = asked.folder or Path(tempfile.mkdtemp()), 0, 0
    for number in range(asked.rounds):
        for kind in asked.only:
            folder = base / f"{number}" / kind.replace(" ", "-")
            ceiling = None
            if kind == SLOW_LINK:
                ceiling = ceiling_of_run(load_run(plant_on_slow_link(folder)))
            else:
                plant(kind, folder)
            found = causes_of(read_job([folder]), *([ceiling] if ceiling else []))
            first = f"{found[0].kind}, {found[0].cost:.0%}: {found[0].sentence}" if found else "nothing"
            right = not found if kind == "clean" else bool(found) and found[0].kind == kind
            if kind in ("late rank", "slow rank"):
                right = right and found[0].sentence.startswith("rank 1 ")
            named += right and kind != "clean"
            claimed += kind == "clean" and not right
            print(f"{'right' if right else 'WRONG'}  planted {kind}: {first}", flush=True)
    planted = asked.rounds * sum(kind != "clean" for kind in asked.only)
    print(f"first line right: {named}/{planted}; clean steps of which something was claimed: {claimed}; traces: {base}")
    return int(named < 0.9 * planted or claimed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
