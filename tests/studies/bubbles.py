"""Print how large the bubble of each schedule is: measured with timed compute, and by closed form.

    python -m tests.studies.bubbles [SCHEDULE ...]

Four ranks, eight microbatches, actions of 100 ms for a rank's whole share; the closed form takes them as equal. Each
schedule takes about 45 s.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from parbench.workloads.pipeline_parallel import bubbles, schedules

RANKS, MICROBATCHES, SECONDS = 4, 8, 0.1
METRICS = ("bubble_fraction", "bubble_fraction_simulated", "bubble_fraction_span", "step_time")
SHOWN = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zb_v")


def measure(names: list[str]) -> dict[str, dict[str, float]]:
    settings = {"schedule": ",".join(names), "layers": 8, "compute": f"timed:{SECONDS * 1000:g}ms"}
    command = [
        str(Path(sys.executable).with_name("parbench")),
        "run",
        "--only",
        "workload.pp",
        "--preset",
        "smoke",
    ]
    command += [
        "--nproc",
        str(RANKS),
        "--budget",
        f"{45 * len(names)}s",
        "--timeout",
        "90s",
        "--json",
    ]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        record["case"]["params"]["schedule"]: {
            name: metric["value"] for name, metric in record["metrics"].items()
        }
        for record in records
    }


def closed_form(name: str) -> float:
    """Return the makespan bubble over the whole where F = I = W."""
    form = bubbles.closed_form(
        name,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        chunks=schedules.default_chunks(name),
        f=SECONDS,
        i=SECONDS,
        w=SECONDS,
    )
    assert form.makespan_bubble_seconds is not None, f"{name} has no closed form at equal times"
    return bubbles.fraction_of(
        form.makespan_bubble_seconds, MICROBATCHES, SECONDS, SECONDS, SECONDS
    )


def main() -> None:
    names = sys.argv[1:] or list(SHOWN)
    seen = measure(names)
    print(
        f"{RANKS} ranks, {MICROBATCHES} microbatches, {SECONDS * 1000:g} ms actions: bubble / makespan"
    )
    print(
        f"{'schedule':16} {'measured':>8} {'simulated':>9} {'formula':>8} {'apart':>7} {'span':>7} {'step':>9}"
    )
    for name in names:
        one, form = seen[name], closed_form(name)
        measured, simulated, span, step = (one[metric] for metric in METRICS)
        print(
            f"{name:16} {measured:8.4f} {simulated:9.4f} {form:8.4f} {measured - form:+7.4f} {span:7.4f} "
            f"{step * 1e3:6.0f} ms"
        )


if __name__ == "__main__":
    main()
