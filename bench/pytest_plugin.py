"""A pytest plug-in: the fixture ``parbench`` measures a distributed case and hands its samples to pytest-benchmark.

pytest-benchmark chooses its rounds in each process by itself, which a collective does not survive. So the case is
measured by ``parbench run``, and its samples are replayed through pytest-benchmark's public interface: what it stores
is its own JSON, for ``--benchmark-json``, ``--benchmark-compare`` and ``pytest-benchmark compare``.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.launch.processes import PARBENCH
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run

OPTIONS = ("nproc", "launches", "budget", "backend", "device", "preset", "timeout", "target", "group", "mesh")


@pytest.fixture
def parbench(request: pytest.FixtureRequest) -> Callable[..., tuple[Record, ...]]:
    """Measure one case as this test's benchmark: ``parbench("all_reduce", mode="blocking", size_bytes="1M", nproc=2)``.

    Takes a case's name, its parameters, and by their names the options of ``parbench run``: nproc, launches, budget,
    backend, device, preset, timeout, target, group, mesh. Returns a record for each launch; a case that fails, hangs or
    computes wrongly fails the test.
    """

    def measure(case: str | None = None, **given: object) -> tuple[Record, ...]:
        if not request.config.pluginmanager.has_plugin("benchmark"):
            pytest.fail("the fixture parbench needs pytest-benchmark: pip install pytest-benchmark", pytrace=False)
        records = one_case(run(words_of(case, given)))
        seconds = [value for record in records for value in record.samples.values]
        marked = request.node.get_closest_marker("benchmark")
        options = {**(marked.kwargs if marked else {}), "timer": clock_of(seconds)}
        request.node.add_marker(pytest.mark.benchmark(**options), append=False)
        benchmark = request.getfixturevalue("benchmark")  # not before: one that a failed test leaves unused warns
        benchmark.extra_info.update(extra_info(records))
        benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)
        return records

    return measure


def clock_of(seconds: Iterable[float]) -> Callable[[], float]:
    """Return a clock that shows durations in turn; pytest-benchmark stores it by its name."""
    times = iter([time for duration in seconds for time in (0.0, duration)])

    def parbench() -> float:
        return next(times)

    return parbench


def words_of(case: str | None, given: dict[str, object]) -> list[str]:
    words = [] if case is None else ["--only", case]
    for name, value in given.items():
        words += [f"--{name}", str(value)] if name in OPTIONS else ["--set", f"{name}={value}"]
    return words


def run(words: Sequence[str]) -> tuple[Record, ...]:
    with tempfile.TemporaryDirectory(prefix="parbench-") as folder:
        command = [*PARBENCH, "run", *words, "--out", folder, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for path in Path(folder).glob("*/run.json"):
            return load_run(path.parent).records
    pytest.fail(done.stderr.strip() or f"parbench run ended with {done.returncode}", pytrace=False)


def one_case(records: Sequence[Record]) -> tuple[Record, ...]:
    labels = sorted({record.case.label for record in records})
    if len(labels) != 1:
        pytest.fail(f"a test measures one case, and this names {len(labels)}: {'; '.join(labels)}", pytrace=False)
    for record in records:
        if record.status != "ok":
            pytest.fail(f"{record.case.label}: {record.status}: {record.reason}", pytrace=False)
    return tuple(records)


def extra_info(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "case": msgspec.to_builtins(records[0].case),
        "world": msgspec.to_builtins(records[0].world),
        "launches": len(records),
        "metrics": [{name: metric.value for name, metric in record.metrics.items()} for record in records],
        "notes": list(dict.fromkeys(note for record in records for note in record.notes)),
    }
