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
"""Arguments that are options of ``parbench run``. Others are parameters of the case."""


@pytest.fixture
def parbench(request: pytest.FixtureRequest) -> Callable[..., tuple[Record, ...]]:
    """Measure one case as the benchmark of this test.

    Example: ``parbench("all_reduce", mode="blocking", size_bytes="1M", nproc=2)``.

    The arguments are the name of a case or ``module:function``, its parameters, and options of ``parbench run``: nproc,
    repetitions, budget, backend, device, preset, timeout, group and mesh. The result is one
    record for each repetition that the budget allowed. The test fails if the case fails, hangs,
    computes wrongly, cannot run here or was not measured at all.
    """

    def measure(case: str | None = None, **arguments: object) -> tuple[Record, ...]:
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
    """Return a timer for pytest-benchmark whose rounds last as long as the given durations."""
    times = iter([time for duration in durations for time in (0.0, duration)])

    def parbench() -> float:  # pytest-benchmark stores this name
        return next(times)

    return parbench


def build_options(case: str | None, arguments: Mapping[str, object]) -> list[str]:
    """Return the options of ``parbench run`` for the arguments of the fixture."""
    options = [] if case is None else [case]
    for name, value in arguments.items():
        if name in OPTIONS:
            options += [f"--{name}", str(value)]
        else:
            options += ["--set", f"{name}={value}"]
    return options


def run_parbench(options: Sequence[str]) -> tuple[Record, ...]:
    """Return the records of ``parbench run``. The test fails if there is no run."""
    with tempfile.TemporaryDirectory(prefix="parbench-") as folder:
        command = [*PARBENCH, "run", *options, "--out", folder, "--format=json"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        for path in Path(folder).glob("*/run.json"):
            return load_run(path.parent).records
    message = process.stderr.strip() or f"parbench run ended with {process.returncode}"
    pytest.fail(message, pytrace=False)


def select_measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records of the repetitions for which the budget sufficed.

    The test fails if there are none, if there is more than one case, or if a repetition went wrong.
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
    """Return the facts that pytest-benchmark stores next to the times."""
    metrics = []
    for record in records:
        metrics.append({name: metric.value for name, metric in record.metrics.items()})
    return {
        "case": msgspec.to_builtins(records[0].case),
        "world": msgspec.to_builtins(records[0].world),
        "repetitions": len(records),
        "metrics": metrics,
        "notes": list(dict.fromkeys(note for record in records for note in record.notes)),
    }
