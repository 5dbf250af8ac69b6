"""Print how far training steps on four nodes are from what two nodes foretold, over links of known rate.

    python tests/studies/shaped_prediction.py FOLDER [--link 200mbit]

In a Slurm cluster on this machine: collectives on two nodes, then steps on four, their compute timed and so known
beforehand. ``parbench plan --validate STEPS --fits COLLECTIVES`` predicts each step: no number of the larger run goes
into it. Bars: every step within 12 %, the median within 5 %. Takes about 20 minutes on a quiet machine; both runs stay
in FOLDER, and are not measured again where they are there.
"""

import argparse
import json
import subprocess
from pathlib import Path

import support_path  # noqa: F401 - finds the next
from clusters import PARBENCH, in_cluster

from parbench.bench.results.stats import median

EACH, MEDIAN = 0.12, 0.05

_CALLS = ("collective.all_reduce", "collective.all_gather", "collective.reduce_scatter", "p2p.unidirectional")
# activations of 512 KiB and more: smaller ones would pass within the burst that a shaped link allows. The Python of
# four ranks shares two cores: waits are long, and messages of split layers large, for it to matter little.
_COMMON = 'shape = "tiny", microbatch = 16, compute = "timed:200ms"'
_SPLIT = 'shape = "tiny", microbatch = 64, compute = "timed:300ms"'
_STEPS = (
    ("ddp", f"{_COMMON}, bucket_mb = [1, 25]"),
    ("fsdp", f"{_COMMON}, reshard = false"),
    ("fsdp", f'{_COMMON}, prefetch = ["default", "explicit"]'),
    ("tp", _SPLIT),
    ("tp_sp", _SPLIT),
    ("pp", f'{_COMMON}, schedule = ["gpipe", "1f1b", "zb_h1"]'),
)


def collectives() -> str:
    cases = [
        f'[[case]]\nname = "{name}"\nset = {{ size_bytes = "128K:16M:x2", mode = "blocking" }}\n' for name in _CALLS
    ]
    return "\n".join(['launches = 3\nbudget = "5m"\n', *cases])


def steps() -> str:
    cases = [f'[[case]]\nname = "workload.{name}"\nset = {{ {settings} }}\n' for name, settings in _STEPS]
    return "\n".join(['launches = 1\nbudget = "15m"\ntimeout = "240s"\n', *cases])


def measure(folder: Path, link: str) -> None:
    (folder / "two.toml").write_text(collectives())
    (folder / "four.toml").write_text(steps())
    run = f"{PARBENCH} run --launcher srun --ntasks-per-node 1"
    lines = [f"{run} --nodes {n} --plan {name}.toml --out {name}" for n, name in ((2, "two"), (4, "four"))]
    script = "set -e\n" + "\n".join(lines)
    words = ["salloc", "-Q", "--nodes", "4", "--exclusive", "sh", "-c", script]
    # OpenMP's threads would spin on cores that belong to the other ranks
    done = in_cluster(words, link=link, timeout=1800, cwd=folder, variables={"OMP_NUM_THREADS": "1"})
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: see {folder / 'log.txt'}")


def predicted(folder: Path) -> list[tuple[str, float, float]]:
    [two], [four] = (list((folder / name).glob("2*")) for name in ("two", "four"))
    done = subprocess.run(
        [PARBENCH, "plan", "--validate", four, "--fits", two, "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = []
    for row in json.loads(done.stdout)["rows"]:
        time = next(each for each in row["components"] if each["name"] == "step_time")
        found.append((row["label"], time["predicted"], time["measured"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", default="200mbit", help="the rate of every node's link")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not (asked.folder / "four").exists():
        measure(asked.folder, asked.link)
    rows = predicted(asked.folder)
    print(f"{'step on 4 nodes, from fits at 2':96} {'predicted':>9} {'measured':>9} {'error':>7}")
    for label, one, other in rows:
        print(f"{label:96} {one:8.3f}s {other:8.3f}s {one / other - 1:+7.1%}")
    errors = [abs(one / other - 1) for _, one, other in rows]
    middle, worst = median(errors), max(errors)
    print(f"median {middle:.1%} (bar {MEDIAN:.0%}), largest {worst:.1%} (bar {EACH:.0%}), {len(rows)} steps")


if __name__ == "__main__":
    main()
