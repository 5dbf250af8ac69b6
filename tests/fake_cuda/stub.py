"""Commands on a machine with stub GPUs, and their traces."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parbench.bench.results.records import Record, read_records
from tests.fake_cuda.build import Installation
from tests.fake_cuda.traces import Trace, read_traces
from tests.support import nvidia
from tests.support.paths import environment
from tests.support.ranks import Ranks

TIMEOUT_SECONDS = 300
SHARED_MEMORY = "/dev/shm"
VALUES = {"FAKE_CUDA_VALUES": "1", "FAKE_CUDA_DATA_BYTES": str(4 << 20)}
NVLINKS = [True] * 18


def shared_memory() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for communicators, which is removed even if ranks were killed."""
    return tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="fake_cuda-")


@dataclass(frozen=True)
class Session:
    """A finished command: what it printed, its records and the traces of its processes."""

    returncode: int
    output: str
    records: list[Record]
    traces: list[Trace]


@dataclass(frozen=True)
class Stub:
    """A machine with stub GPUs; ``variables`` are settings of the stub that README.md lists.

    With ``has_values`` operators have results, and torch caches memory. Otherwise results are
    zeros, because torch takes new memory for each tensor.
    """

    installation: Installation
    folder: Path
    num_gpus: int = 2
    variables: dict[str, str] = field(default_factory=dict)
    has_values: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment in which torch believes in the GPUs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        gpu = {**nvidia.H100, **nvidia.describe_links(NVLINKS)}
        library = nvidia.install(self.folder, nvidia.gpus(gpu, self.num_gpus))[
            "LD_LIBRARY_PATH"
        ]
        folders = [str(self.installation.python.parent), os.environ["PATH"]]
        variables = {
            "PATH": os.pathsep.join(folders),
            "LD_LIBRARY_PATH": f"{library}:{self.installation.libraries}",
            "FAKE_CUDA_GPUS": str(self.num_gpus),
            "FAKE_CUDA_TRACE": str(self.folder / "trace"),
            **(VALUES if self.has_values else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
            **self.variables,
        }
        return {**environment(), **variables}

    def parbench(self, *arguments: str) -> Session:
        """Run a command of parbench in the folder."""
        return self.run([str(self.installation.python), "-m", "parbench", *arguments])

    def run(self, command: Sequence[str]) -> Session:
        with shared_memory() as shared:
            completed = subprocess.run(
                command,
                cwd=self.folder,
                env={**self.environment(), "FAKE_CUDA_FOLDER": shared},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        files = sorted(self.folder.glob("runs/*Z-*/records.jsonl"))
        records = [record for file in files for record in read_records(file)]
        traces = read_traces(self.folder)
        return Session(completed.returncode, completed.stdout, records, traces)


class RanksOnStub(Ranks):
    """NCCL ranks, one on each stub GPU, whose traces can be read between calls."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self._shared = shared_memory()
        variables = {**stub.environment(), "FAKE_CUDA_FOLDER": self._shared.name}
        python = str(stub.installation.python)
        super().__init__(
            stub.num_gpus, "cuda", backend="nccl", python=python, variables=variables
        )

    def _start(self) -> None:
        Path(self._shared.name).mkdir(exist_ok=True)  # ranks start again after a rank died
        super()._start()

    def close(self) -> None:
        super().close()
        self._shared.cleanup()

    def traces(self) -> list[Trace]:
        """Return the traces of the present ranks, by rank."""
        processes = {process.pid for process in self._processes}
        traces = read_traces(self.stub.folder)
        return [trace for trace in traces if trace.process in processes]
