"""The actions of forked ranks in tests of the fork server, instead of a driver's job.

The fork server imports this module. Rank ``R`` does what its variable ``PARBENCH_ACT_R`` names.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from parbench.bench.launch.processes import exit_now
from parbench.bench.rank import worker
from parbench.bench.world import accelerator


def act() -> None:
    rank = os.environ["RANK"]
    folder = Path("/proc/self/fd/1").readlink().parent
    write_pid(folder / f"{rank}.pid", os.getpid())
    match os.environ[f"PARBENCH_ACT_{rank}"]:
        case "look":
            print(json.dumps(describe_process()))
            exit_now(0)
        case "leave a child":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            write_pid(folder / "child", child.pid)
            os._exit(0)
        case "raise":
            raise RuntimeError("the roof is on fire")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            threading.Event().wait()


def write_pid(path: Path, pid: int) -> None:
    """Write the file in one step, for a test that waits for it."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(str(pid))
    partial.replace(path)


def describe_process() -> dict[str, object]:
    return {
        "world": [os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]],
        "message": os.environ.get("PARBENCH_MESSAGE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "torch_threads": torch.get_num_threads(),
        "random": random.random(),
        "numpy_random": np.random.random(),
        "session": os.getsid(0),
        "stdin": sys.stdin.read(),
    }


worker.main = act
# The fork server then starts a new Python, as where an import has initialized CUDA.
accelerator.has_lost_devices = lambda: "PARBENCH_ACT_LOST" in os.environ
