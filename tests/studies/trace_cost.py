"""What parbench explain takes of large traces: seconds, and the most memory of all its processes together.

python tests/studies/trace_cost.py [--ranks 8] [--mb 200] [--zipped] writes a trace of that size for each rank, in the
shape of NCCL ranks (python functions, nested operators, launches, kernels, collectives with their metadata), explains
them as a person would, and prints both. --ranks 1 --mb 1000 shows that memory does not grow with a file.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import support_path  # noqa: F401
from kineto_files import RankFile

LAYERS, STEP_US = 40, 100_000.0


def draw_step(file: RankFile, number: int) -> None:
    """Draw a step of layers that gather ahead, each with what surrounds its kernels on the host."""
    at, each = number * STEP_US, STEP_US / LAYERS
    file.step(number, at, at + STEP_US)
    for layer in range(LAYERS):
        begin = at + layer * each
        for deep in range(6):
            file.event("python_function", f"model.py({100 + deep}): forward", begin + deep, begin + each - deep)
        for one in range(10):
            start = begin + 20 + one * (each - 40) / 10
            file.event("cpu_op", "aten::linear", start - 18, start - 4, dims="[[4, 4096], [4096, 4096], [4096]]")
            file.kernel(start, start + (each - 60) / 10)
        file.collective("_allgather_base", begin + file.rank % 3, begin + each / 2, 1 << 22, range(file.world_size))
        file.collective("_reduce_scatter_base", begin + each / 2 + 1, begin + each, 1 << 22, range(file.world_size))


def write(folder: Path, rank: int, ranks: int, num_bytes: int, *, zipped: bool) -> int:
    """Write a rank's file of about so many bytes; return its steps."""
    file = RankFile(rank, ranks)
    draw_step(file, 0)
    steps = max(num_bytes // len(file.text()), 2)
    for number in range(1, steps):
        draw_step(file, number)
    file.write(folder, zipped=zipped)
    return steps


def resident_bytes(group: int) -> int:
    """Return the resident memory of a process group's processes, what they share counted in each."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int((path / "statm").read_text().split()[1]) * 4096
        except (OSError, IndexError):
            continue  # it has ended
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--zipped", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "traces"
        folder.mkdir()
        for rank in range(asked.ranks):
            steps = write(folder, rank, asked.ranks, asked.mb * 10**6, zipped=asked.zipped)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{asked.ranks} traces of {steps} steps, {size / 1e6:.0f} MB", flush=True)
        for form in ("tables", "html"):
            page = Path(name) / f"explained.{form}"
            command = [sys.executable, "-m", "parbench", "explain", str(folder), "--format", form, "-o", str(page)]
            began, most = time.perf_counter(), 0
            with subprocess.Popen(command, process_group=0) as running:
                while running.poll() is None:
                    most = max(most, resident_bytes(running.pid))
                    time.sleep(0.05)
            seconds = time.perf_counter() - began
            print(f"{form}: exit {running.returncode}, {seconds:.1f} s, {most / 1e6:.0f} MB at most", flush=True)


if __name__ == "__main__":
    main()
