"""Compare predicted with measured steps on four nodes whose links have a known rate.

    python -m tests.studies.shaped_links FOLDER [--link 200mbit]

Collectives are measured on two nodes of a Slurm cluster on this machine, then steps on four nodes.
Their compute is simulated, so that its time is known. ``parbench plan validate STEPS --links
COLLECTIVES`` predicts each step from the fits at two nodes. It takes about 20 minutes on a quiet
machine. Runs stay in FOLDER and are not measured again.
"""

import argparse
import json
import subprocess
from pathlib import Path

from parbench.bench.results.stats import median
from tests.support.slurm.clusters import PARBENCH, run_in_cluster

OPERATIONS = (
    "collective.all_reduce",
    "collective.all_gather",
    "collective.reduce_scatter",
    "p2p.unidirectional",
)
# Activations of 512 KiB and more: smaller ones pass within the burst that a shaped link allows.
# Four ranks share two cores, so waits are long and messages large.
STEP = 'shape = "tiny", microbatch = 16, compute = "simulated:200ms"'
TENSOR_STEP = 'shape = "tiny", microbatch = 64, compute = "simulated:300ms"'
STEPS = (
    ("ddp", f"{STEP}, bucket_mb = [1, 25]"),
    ("fsdp", f"{STEP}, reshard = false"),
    ("fsdp", f'{STEP}, prefetch = ["default", "explicit"]'),
    ("tp", TENSOR_STEP),
    ("tp_sp", TENSOR_STEP),
    ("pp", f'{STEP}, schedule = ["gpipe", "1f1b", "zb_h1"]'),
)


def format_collectives() -> str:
    """Return the plan of the operations over sizes."""
    cases = [
        f'[[case]]\nname = "{name}"\nset = {{ size_bytes = "128K:16M:x2", mode = "blocking" }}\n'
        for name in OPERATIONS
    ]
    return "\n".join(['repetitions = 3\nbudget = "5m"\n', *cases])


def format_steps() -> str:
    """Return the plan of the steps."""
    cases = [
        f'[[case]]\nname = "workload.{name}"\nset = {{ {settings} }}\n'
        for name, settings in STEPS
    ]
    return "\n".join(['repetitions = 1\nbudget = "15m"\ntimeout = "240s"\n', *cases])


def measure(folder: Path, link: str) -> None:
    (folder / "two.toml").write_text(format_collectives())
    (folder / "four.toml").write_text(format_steps())
    run = f"{PARBENCH} run --launcher srun --nproc 1"
    lines = [
        f"{run} --nodes {nodes} --cases {name}.toml --out {name}"
        for nodes, name in ((2, "two"), (4, "four"))
    ]
    script = "set -e\n" + "\n".join(lines)
    completed = run_in_cluster(
        ["salloc", "-Q", "--nodes", "4", "--exclusive", "sh", "-c", script],
        link=link,
        timeout=1800,
        cwd=folder,
        # Threads of OpenMP would compute on cores that belong to other ranks.
        variables={"OMP_NUM_THREADS": "1"},
    )
    (folder / "log.txt").write_text(completed.stdout + completed.stderr)
    if completed.returncode:
        raise SystemExit(f"exit code {completed.returncode}: see {folder / 'log.txt'}")


def read_predictions(folder: Path) -> list[tuple[str, float, float]]:
    """Return the label of each step, its predicted and its measured seconds."""
    [two] = (folder / "two").glob("2*")
    [four] = (folder / "four").glob("2*")
    command = [PARBENCH, "plan", "validate", str(four), "--links", str(two), "--format=json"]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    predictions = []
    for row in json.loads(completed.stdout)["rows"]:
        [time] = [part for part in row["components"] if part["name"] == "step_time"]
        predictions.append((row["label"], time["predicted"], time["measured"]))
    return predictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", default="200mbit", help="rate of every node's link")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "four").exists():
        measure(options.folder.resolve(), options.link)
    predictions = read_predictions(options.folder)
    print(
        f"{'step on 4 nodes, from fits at 2':80} {'predicted':>9} {'measured':>9} {'error':>7}"
    )
    errors = []
    for label, predicted, measured in predictions:
        errors.append(abs(predicted / measured - 1))
        error = predicted / measured - 1
        print(f"{label:80} {predicted:8.3f}s {measured:8.3f}s {error:+7.1%}")
    print(f"median {median(errors):.1%}, largest {max(errors):.1%} of {len(errors)} steps")


if __name__ == "__main__":
    main()
