"""What forked ranks do in tests of the fork server, which imports this: their ``ACT_<rank>``, not a driver's job."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from parbench.bench.rank import worker


def act() -> None:
    rank, folder = os.environ["RANK"], Path("/proc/self/fd/1").readlink().parent
    (folder / f".{rank}.pid").write_text(str(os.getpid()))
    (folder / f".{rank}.pid").replace(folder / f"{rank}.pid")
    doing = os.environ[f"ACT_{rank}"]
    if doing == "look":
        names = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
        threads = len(list(Path("/proc/self/task").iterdir()))
        seen = {
            "variables": {
                name: os.environ[name]
                for name in os.environ
                if name in names or name.startswith("ACT_")
            },
            "threads": threads,
            "parallel": torch.get_num_threads(),
            "cuda": torch.cuda._is_in_bad_fork(),
            "chance": random.random(),
            "numpy_chance": np.random.random(),
            "address": torch.empty(1 << 22).data_ptr(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "stdin": sys.stdin.read(),
        }
        print(json.dumps(seen))
        sys.exit(0)
    elif doing == "litter":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        (folder / "child").write_text(str(child.pid))
        (folder / "child").rename(folder / "child.pid")
        os._exit(0)
    elif doing == "raise":
        raise RuntimeError("the roof is on fire")
    elif doing == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif doing == "wait":
        while not (folder / "go").exists():
            time.sleep(0.01)
        sys.exit(7)
    threading.Event().wait()


worker.main = act
vars(sys.modules["__main__"])["lost_cuda"] = lambda: (
    "ACT_LOST" in os.environ
)  # as where CUDA was asked for at import
