"""torchrun, as a child that ends with its driver and tells how each rank ended, in a file and not in a log."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from bench.launch.processes import die_with_parent
from bench.text import replace_file


def main() -> int:
    die_with_parent(signal.SIGTERM)
    driver = int(os.environ["PARBENCH_DRIVER_PID"])
    if os.getppid() != driver:
        return 1  # the driver had ended before we could ask to be told
    threading.Thread(target=_outlive_briefly, args=(driver,), daemon=True).start()
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        replace_file(Path(os.environ["PARBENCH_EXITS"]), msgspec.json.encode(exits))  # read as soon as it is there
        return 1
    return 0


def _outlive_briefly(driver: int) -> None:
    """End this process for good soon after its driver: torchrun may wait half a minute for ranks that are gone."""
    while os.getppid() == driver:
        time.sleep(1.0)
    time.sleep(5.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
