"""``parbench check`` on every node of an allocation at once, with all that the node has."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.check.hosts import Answer, read, together
from bench.launch.processes import PARBENCH, terminated_as_interrupted
from bench.machine.slurm_allocation import srun_words
from bench.text import last_line, parse_duration

BUDGET = "40s"
_MORE_SECONDS = 120.0


def check_command(nodes: Sequence[str], folder: Path, out: Path, environ: Mapping[str, str]) -> list[str]:
    """Return srun's words: one task a node, bound to no core, whose output is a file of the node's name."""
    words = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]
    words += ["--cpu-bind=none", f"--output={folder}/%N.out", f"--error={folder}/%N.err"]
    return [*srun_words(environ, *words), *PARBENCH, "check", "--json", "--budget", BUDGET, "--out", str(out)]


def check_nodes(nodes: Sequence[str], out: Path, environ: Mapping[str, str]) -> tuple[Answer, ...]:
    """Check the nodes at once and compare their devices; a node that did not answer says why."""
    with tempfile.TemporaryDirectory(prefix="parbench-check-", dir=Path.cwd()) as folder, terminated_as_interrupted():
        command, seconds = check_command(nodes, Path(folder), out, environ), parse_duration(BUDGET) + _MORE_SECONDS
        try:
            done = subprocess.run(command, env=dict(environ), capture_output=True, timeout=seconds, check=False)
            problem = last_line(done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            problem = f"no answer within {seconds:.0f} s"
        return together([_answer(node, Path(folder), problem) for node in nodes])


def _answer(node: str, folder: Path, problem: str) -> Answer:
    out, err = (folder / f"{node}.{kind}" for kind in ("out", "err"))
    told = err.read_bytes() if err.exists() else b""
    found = read(node, out.read_bytes() if out.exists() else b"", told or problem.encode(), 4)
    # what it says of itself, under the name that Slurm has for it
    return found if found.health is None or found.health.host == node else Answer(host=node, health=found.health)
