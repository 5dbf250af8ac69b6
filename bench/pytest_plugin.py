"""A pytest plug-in with the fixture ``parbench``, which measures a case for pytest-benchmark.

pytest-benchmark chooses its rounds in each process separately, and a collective hangs if ranks run
different numbers of rounds. So ``parbench run`` measures the case, and its samples are replayed
through the public interface of pytest-benchmark. The stored result is its own JSON, for
``--benchmark-json``, ``--benchmark-compare`` and ``pytest-benchmark compare``.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

    The result is one record for each repetition that the budget allowed. The test fails if the case
    fails, hangs, computes wrongly, cannot run here or was not measured at all.
    """

    def measure(case: str | None = None, **arguments: object) -> tuple[Record, ...]:
        """Measure a case, replay its samples in pytest-benchmark, and return its records.

        ``case`` is None if the arguments name what to measure, for example a preset. ``arguments``
        are parameters of the case and options of ``parbench run``.
        """
        if not request.config.pluginmanager.has_plugin("benchmark"):
            message = "the fixture parbench needs pytest-benchmark: pip install pytest-benchmark"
            pytest.fail(message, pytrace=False)
        records = select_measured(run_parbench(build_options(case, arguments)))
        seconds = [value for record in records for value in record.samples.values]
        marker = request.node.get_closest_marker("benchmark")
        options = {} if marker is None else dict(marker.kwargs)
        options["timer"] = make_timer(seconds)
        request.node.add_marker(pytest.mark.benchmark(**options), append=False)
        # Requested only now: pytest-benchmark warns about a fixture that a failed test did not use.
        benchmark = request.getfixturevalue("benchmark")
        benchmark.extra_info.update(build_extra_info(records))
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


def build_options(case: str | None, arguments: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments of ``parbench run`` for the arguments of the fixture.

    ``case`` is the name of the case, None without one.
    """
    options = [] if case is None else [case]
    for name, value in arguments.items():
        if name in OPTIONS:
            options += [f"--{name}", str(value)]
        else:
            options += ["--set", f"{name}={value}"]
    return options


def run_parbench(options: Sequence[str]) -> tuple[Record, ...]:
    """Run ``parbench run`` with these arguments in a temporary folder, and return its records.

    The test fails with its error message if the command made no run.
    """
    with tempfile.TemporaryDirectory(prefix="parbench-") as folder:
        command = [*PARBENCH, "run", *options, "--out", folder, "--format=json"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        for path in Path(folder).glob("*/run.json"):
            return load_run(path.parent).records
    message = process.stderr.strip() or f"parbench run ended with {process.returncode}"
    pytest.fail(message, pytrace=False)


def select_measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records with status ok, without the repetitions that the time budget left out.

    The test fails if there are none, if the records are of several cases, or if a repetition
    failed, hung, was wrong or could not run.
    """
    labels = sorted({record.case.label for record in records})
    if len(labels) != 1:
        message = f"a test measures one case, and this names {len(labels)}: {'; '.join(labels)}"
        pytest.fail(message, pytrace=False)
    measured = []
    for record in records:
        if record.status == "ok":
            measured.append(record)
        elif not record.is_out_of_budget:
            message = f"{record.case.label}: {record.status}: {record.reason}"
            pytest.fail(message, pytrace=False)
    if not measured:
        pytest.fail(f"{labels[0]}: the budget ended before it was measured", pytrace=False)
    return tuple(measured)


def build_extra_info(records: Sequence[Record]) -> dict[str, Any]:
    """Return the facts that pytest-benchmark stores next to the times, in JSON types.

    The keys are ``case``, ``world`` (the ranks) and ``metrics`` (a dict of values by name for each
    repetition).
    """
    metrics = []
    for record in records:
        metrics.append({name: metric.value for name, metric in record.metrics.items()})
    return {
        "case": msgspec.to_builtins(records[0].case),
        "world": msgspec.to_builtins(records[0].world),
        "metrics": metrics,
    }
