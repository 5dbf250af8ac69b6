"""Processes of this machine, as /proc lists them."""

from pathlib import Path


def find_processes(text: str) -> list[int]:
    """Return the ids of processes that have a text in their arguments or variables."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            content = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue  # the process has ended
        if text.encode() in content:
            pids.append(int(process.name))
    return pids
