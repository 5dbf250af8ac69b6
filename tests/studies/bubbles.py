"""Compare the measured, simulated and analytical pipeline bubble of each schedule.

    python -m tests.studies.bubbles [SCHEDULE ...]

The measured step has simulated compute. Four ranks, eight microbatches, and actions of 200 ms for
the share of a rank. The analytical bubble assumes equal actions. Each schedule takes about two
minutes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from parbench.workloads.pipeline_parallel.schedule import PassSeconds
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES

NUM_RANKS = 4
NUM_MICROBATCHES = 8
ACTION_SECONDS = 0.2
SECONDS_PER_SCHEDULE = 140


def measure_metrics(names: list[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of a pipeline step by schedule."""
    program = str(Path(sys.executable).with_name("parbench"))
    settings = {
        "schedule": ",".join(names),
        "layers": 8,
        "compute": f"simulated:{ACTION_SECONDS * 1000:g}ms",
    }
    command = [program, "run", "workload.pp", "--preset", "smoke", "--format=json"]
    command += ["--nproc", str(NUM_RANKS), "--timeout", "90s"]
    command += ["--budget", f"{SECONDS_PER_SCHEDULE * len(names)}s"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        completed = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    metrics = {}
    for line in completed.stdout.splitlines():
        record = json.loads(line)
        schedule = record["case"]["params"]["schedule"]
        metrics[schedule] = {
            name: metric["value"] for name, metric in record["metrics"].items()
        }
    return metrics


def compute_analytical_bubble(name: str) -> float:
    """Return the bubble as a fraction of the makespan, for equal actions F, I and W."""
    size = SCHEDULES[name].size(NUM_RANKS, NUM_MICROBATCHES)
    passes = PassSeconds(ACTION_SECONDS, ACTION_SECONDS, ACTION_SECONDS)
    bubble = SCHEDULES[name].compute_bubble(size, passes)
    assert bubble is not None, name
    return bubble.seconds / (bubble.seconds + NUM_MICROBATCHES * passes.total)


def main() -> None:
    names = sys.argv[1:] or list(SCHEDULES)
    metrics = measure_metrics(names)
    print(
        f"{NUM_RANKS} ranks, {NUM_MICROBATCHES} microbatches: bubble as a fraction of makespan"
    )
    print(f"{'schedule':16} {'measured':>9} {'simulated':>9} {'analytical':>10} {'step':>9}")
    for name in names:
        measured = metrics[name]["bubble_fraction"]
        simulated = metrics[name]["bubble_fraction_simulated"]
        analytical = compute_analytical_bubble(name)
        milliseconds = 1e3 * metrics[name]["step_time"]
        print(
            f"{name:16} {measured:9.4f} {simulated:9.4f} {analytical:10.4f} {milliseconds:6.0f} ms"
        )


if __name__ == "__main__":
    main()
