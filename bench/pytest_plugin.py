"""A pytest plug-in with the fixture ``parbench``, which measures a case for pytest-benchmark.

pytest-benchmark chooses its rounds in each process separately, and a collective hangs if ranks run
different numbers of rounds. So ``parbench run`` measures the case, and its samples are replayed
through the public interface of pytest-benchmark. The stored result is its own JSON, for
``--benchmark-json``, ``--benchmark-compare`` and ``pytest-benchmark compare``.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from parbench.bench.launch.processes import PARBENCH
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run

OPTIONS = (
    "nproc",
    "repetitions",
    "budget",
    "backend",
    "device",
    "preset",
    "timeout",
    "group",
    "mesh",
)
"""The keyword arguments of the fixture that are options of ``parbench run``.

Other keyword arguments are parameters of the benchmark.
"""


@pytest.fixture
def parbench(request: pytest.FixtureRequest) -> Callable[..., tuple[Record, ...]]:
    """Measure one case as the benchmark of this test.

    Example: ``parbench("all_reduce", mode="blocking", size_bytes="1M", nproc=2)``.

    The arguments are the name of a case or ``module:function``, its parameters, and options of
    ``parbench run``: nproc, repetitions, budget, backend, device, preset, timeout, group and mesh.

    The result is one record for each measured repetition. If the time budget ends early, it has
    fewer than ``repetitions``. The test fails if no repetition is measured, or if the case fails,
    hangs, computes wrongly or cannot run here.
    """

    def measure(case: str, **arguments: object) -> tuple[Record, ...]:
        """Measure a case, replay its samples in pytest-benchmark, and return its records.

        ``arguments`` are parameters of the case and options of ``parbench run``.
        """
        records = measure_case(case, arguments)
        seconds = [value for record in records for value in record.samples.values]
        marker = request.node.get_closest_marker("benchmark")
        options = {} if marker is None else dict(marker.kwargs)
        options["timer"] = make_timer(seconds)
        request.node.add_marker(pytest.mark.benchmark(**options), append=False)
        # The fixture of pytest-benchmark reads the marker, so it is requested only now.
        benchmark = request.getfixturevalue("benchmark")
        benchmark.extra_info["case"] = msgspec.to_builtins(records[0].case)
        benchmark.extra_info["world"] = msgspec.to_builtins(records[0].world)
        benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)
        return records

    return measure


def make_timer(durations: Iterable[float]) -> Callable[[], float]:
    """Return a clock for pytest-benchmark that makes each round last as long as a measured sample.

    ``durations`` are the seconds of the samples in their order. pytest-benchmark calls the clock
    twice in each round.
    """
    times = iter([time for duration in durations for time in (0.0, duration)])

    def parbench() -> float:  # pytest-benchmark stores this name
        """Return the next time in seconds: 0 at the start of a round, then its duration."""
        return next(times)

    return parbench


def measure_case(case: str, arguments: Mapping[str, object]) -> tuple[Record, ...]:
    """Measure a case by ``parbench run`` in a temporary folder, and return its records.

    ``arguments`` are those of the fixture ``parbench``. The test fails if the command made no run,
    if the arguments select several cases, or if a repetition failed or is wrong. Repetitions that
    the time budget left out are not returned, and the test fails if no other was measured.
    """
    with tempfile.TemporaryDirectory(prefix="parbench-") as folder:
        command = [*PARBENCH, "run", *build_options(case, arguments), "--out", folder]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(folder).glob("*/run.json"))
        if not files:
            pytest.fail(process.stderr.strip(), pytrace=False)
        records = load_run(files[0].parent).records
    if len({record.case.id for record in records}) > 1:
        pytest.fail("a test measures one case, and these arguments select several", pytrace=False)
    records = tuple(record for record in records if not record.is_out_of_budget) or records
    for record in records:
        if record.status != "ok":
            pytest.fail(f"{record.case.label}: {record.status}: {record.reason}", pytrace=False)
    return records


def build_options(case: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments of ``parbench run`` for the arguments of the fixture.

    ``case`` is the name of the case. ``arguments`` are options of ``parbench run`` and parameters
    of the case by name, which become ``--NAME VALUE`` and ``--set NAME=VALUE``.
    """
    options = [case]
    for name, value in arguments.items():
        if name in OPTIONS:
            options += [f"--{name}", str(value)]
        else:
            options += ["--set", f"{name}={value}"]
    return options
