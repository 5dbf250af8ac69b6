"""Compare how much data-parallel communication ``ddp`` and a mesh of ``dp`` and ``tp`` hide.

    python -m tests.studies.mesh_overlap FOLDER [--rounds 2] [--link 100mbit]

Two nodes of a Slurm cluster on this machine have links of a known rate, which ``dp`` uses. ``tp``
stays inside a node. Compute is simulated. The script prints two shares of the time of the
all_reduces on ``dp``, each the mean over ranks: the one in which a rank computes or waits for
``tp``, and the one in which it computes. It exits with 1 if the median of the first one is less
than 0.9 times that of ``ddp``. Each round takes two minutes.
"""

import argparse
from pathlib import Path
from statistics import fmean, median

from parbench.bench.results.records import RankTimeline
from parbench.bench.results.runs import load_run, load_timeline
from parbench.bench.results.spans import Span, difference, length
from tests.support.slurm.clusters import PARBENCH, run_in_cluster

# A rank of the mesh has half of the weights, so that both steps have the same number of buckets.
STEPS = {
    "ddp": "ddp --nproc 1 --set bucket_mb=0.5",
    "hybrid dp=2,tp=2": "hybrid --nproc 2 --mesh dp=2,tp=2 --set bucket_mb=0.25",
}
SETTINGS = (
    "--set layers=8 --set microbatch=1 --set microbatches=1 --set compute=simulated:800ms "
    "--repetitions 1 --timeout 240s"
)


def measure(folder: Path, rounds: int, link: str) -> None:
    """Run the steps in turn. Each round has its own folder of runs, which has one per step."""
    lines = [
        f"{PARBENCH} run {case} {SETTINGS} --launcher srun --nodes 2 --out round-{number}/{index}"
        for number in range(rounds)
        for index, case in enumerate(STEPS.values())
    ]
    completed = run_in_cluster(
        ["salloc", "-Q", "--nodes", "2", "--exclusive", "sh", "-ec", "\n".join(lines)],
        link=link,
        timeout=600 * rounds,
        cwd=folder,
        variables={"OMP_NUM_THREADS": "1"},
        nodes=2,
    )
    (folder / "log.txt").write_text(completed.stdout + completed.stderr)
    if completed.returncode:
        raise SystemExit(f"exit code {completed.returncode}: see {folder / 'log.txt'}")


def compute_hidden_shares(timeline: RankTimeline) -> tuple[float, float]:
    """Return the share of ``dp`` that ``tp`` or compute hides, and that which compute hides."""
    spans: dict[str, list[Span]] = {"comm dp": [], "comm tp": [], "compute": []}
    for interval in timeline.intervals:
        if interval.stream in spans:
            spans[interval.stream].append(
                (round(1e3 * interval.start_us), round(1e3 * interval.stop_us))
            )
    data = spans["comm dp"]
    exposed = difference(data, spans["compute"])
    shared = difference(exposed, spans["comm tp"])
    return 1 - length(shared) / length(data), 1 - length(exposed) / length(data)


def read_shares(path: Path) -> tuple[float, float]:
    """Return the two shares of a run with one step, the means over ranks."""
    run = load_run(path)
    [record] = run.records
    timeline = load_timeline(run, record)
    assert timeline is not None, record.reason
    hidden, by_compute = zip(*map(compute_hidden_shares, timeline.ranks), strict=True)
    return fmean(hidden), fmean(by_compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", default="100mbit", help="rate of every node's link")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "log.txt").exists():
        measure(options.folder.resolve(), options.rounds, options.link)
    medians = []
    for index, name in enumerate(STEPS):
        paths = sorted(options.folder.glob(f"round-*/{index}/2*"))
        hidden, by_compute = zip(*map(read_shares, paths), strict=True)
        medians.append(median(hidden))
        rounds = ", ".join(f"{share:.3f}" for share in hidden)
        print(f"{name:18} {medians[-1]:.3f} ({rounds}), by compute {median(by_compute):.3f}")
    ddp, mesh = medians
    print(f"mesh / ddp {mesh / ddp:.3f}")
    raise SystemExit(mesh < 0.9 * ddp)


if __name__ == "__main__":
    main()
