"""The runs of a screening: rounds of pairs, their command, and the records they leave."""

import io
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np
import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.options import Options as RunOptions
from parbench.bench.plan.options import make_plan as plan_run
from parbench.bench.results.records import (
    Culprit,
    CulpritCause,
    RankState,
    Record,
    Status,
    WorldInfo,
)
from parbench.bench.results.runs import Run, create_run, load_run, open_writer, write_run_info
from parbench.bench.text import UserError
from parbench.slurm.screen import measure as screen_measure
from parbench.slurm.screen.measure import (
    Setup,
    find_blamed_nodes,
    make_cases,
    measure_rounds,
    read_exchanges,
    read_measurement,
)
from tests.support.fakes import make_plan
from tests.support.refusals import usage_error

NODES = ("n1", "n2", "n3", "n4")
PAIRWISE = next(definition for definition in DEFINITIONS if definition.name == "p2p.pairwise")
PAIRS_OF_ROUND = ("0-3 1-2", "0-2 1-3", "0-1 2-3")
WORLD = WorldInfo(size=4, nodes=4, backend="gloo", device="cpu")
SETUP = Setup(size="1M", rails=1, timeout="20s")
HOSTS = tuple(f"{node}.cluster" for node in NODES)


def test_plan_has_the_pairs_of_all_rails() -> None:
    rounds = [((0, 1),), ((0, 1),)]
    options = RunOptions(entries=make_cases(rounds, replace(SETUP, rails=2)))
    plan = plan_run(options, DEFINITIONS, WorldSpec(nproc=4, backend="gloo", device="cpu"))
    assert plan.skipped == ()
    assert [case.params["pairs"] for case in plan.cases] == ["0-2 1-3", "0-2 1-3"]
    assert [case.params.get("repeat", 0) for case in plan.cases] == [0, 1]
    assert {case.params["direction"] for case in plan.cases} == {"in_turn"}


def make_case(index: int) -> Case:
    return PAIRWISE.build_case({"size_bytes": 1 << 20, "round": index, "direction": "in_turn"})


def make_record(index: int, status: Status = "ok", **fields: Any) -> Record:
    """Build the record of a round; a good record lists its pairs."""
    defaults = {
        "world": WORLD,
        "repetition": 0,
        "details": {"pairs": PAIRS_OF_ROUND[index]} if status == "ok" else {},
        "started": "2026-01-02T03:04:05.678Z",
        "seconds": 1.0,
    }
    return Record(**{**defaults, "case": make_case(index), "status": status, **fields})


def encode_samples(milliseconds: list[list[int]]) -> bytes:
    """Encode the duration of each iteration of two steps, by rank."""
    durations = np.array(milliseconds) * 1_000_000
    file = io.BytesIO()
    np.savez(file, ranks=np.arange(4), duration_ns=durations, steps_per_sample=2)
    return file.getvalue()


ONE_MILLISECOND = encode_samples([[1], [1], [1], [1]])


def write_run(
    parent: Path,
    records: Sequence[Record],
    samples: bytes | None = None,
    hosts: Sequence[str] = HOSTS,
    *,
    number: int = 0,
) -> Run:
    """Write a run of three rounds; ``samples`` are those of the round ``number``."""
    cases = [make_case(index) for index in range(3)]
    plan = make_plan(cases, nproc=4, notes=("emulated",))
    path, info = create_run(parent, plan, "1")
    write_run_info(path, msgspec.structs.replace(info, environment={"hosts": list(hosts)}))
    with open_writer(path) as writer:
        for record in records:
            writer.write(record)
        if samples is not None:
            writer.write_file(f"samples/{cases[number].id}-0.npz", samples)
    return load_run(path)


def test_exchange_takes_the_median_of_the_slower_rank(tmp_path: Path) -> None:
    samples = encode_samples([[10, 30, 20], [5, 5, 5], [7, 5, 6], [20, 10, 30]])
    run = write_run(tmp_path, [make_record(0)], samples)
    first, second = read_exchanges(run, run.records[0], 7, 1)
    assert first.nodes == (0, 3)
    assert first.seconds == 0.015, "the time of one step"
    assert second.nodes == (1, 2)
    assert second.seconds == 0.003
    assert first.round == second.round == 7


def test_rails_of_two_nodes_are_separate(tmp_path: Path) -> None:
    samples = encode_samples([[2], [4], [2], [8]])
    record = make_record(1, details={"pairs": "0-2 1-3"})
    hosts = ["n1.cluster", "n1.cluster", "n3.cluster", "n3.cluster"]
    run = write_run(tmp_path, [record], samples, hosts, number=1)
    setup = replace(SETUP, rails=2)
    measurement = read_measurement(run, ("n1", "n3"), setup)
    assert measurement.nodes == ("n1", "n3")
    first, second = measurement.exchanges
    assert (first.nodes, first.rail, first.seconds) == ((0, 1), 0, 0.001)
    assert (second.nodes, second.rail, second.seconds) == ((0, 1), 1, 0.004)
    mixed = write_run(tmp_path / "mixed", [record], samples, hosts[::2] * 2, number=1)
    assert "not in blocks of 2 ranks" in usage_error(read_measurement, mixed, NODES, setup)


@pytest.mark.parametrize("samples", [b"damaged", None])
def test_unreadable_samples_are_refused(samples: bytes | None, tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_record(0)], samples)
    with pytest.raises(UserError, match=rf"{make_case(0).id}-0\.npz"):
        list(read_exchanges(run, run.records[0], 0, 1))


def test_read_uses_the_hosts_of_the_ranks(tmp_path: Path) -> None:
    records = [make_record(0), make_record(1, "skipped", reason="out of time")]
    hosts = ["n1.cluster", "n3.cluster", "n2.cluster", "n4.cluster"]
    run = write_run(tmp_path, records, ONE_MILLISECOND, hosts)
    observations = read_measurement(run, NODES, SETUP)
    assert observations.nodes == ("n1", "n3", "n2", "n4")
    assert len(observations.exchanges) == 2
    assert observations.problems == ("out of time", "rounds not reached: 1")
    assert observations.silent == {}
    assert observations.notes == ("emulated",)


def make_failure(
    index: int,
    status: Status,
    cause: CulpritCause,
    culprit: int,
    silent: Collection[str] = (),
) -> Record:
    """Build the record of a failed round with one rank per node."""
    ranks = [
        RankState(
            rank=rank,
            host=host,
            pid=1,
            state="alive",
            is_silent=NODES[rank] in silent,
        )
        for rank, host in enumerate(HOSTS)
    ]
    culprits = (Culprit(rank=culprit, host=HOSTS[culprit], cause=cause),)
    reason = f"round {index} broke"
    return make_record(index, status, reason=reason, ranks=ranks, culprits=culprits)


def test_read_blames_only_the_first_failure(tmp_path: Path) -> None:
    hang = make_failure(0, "hang", "absent", culprit=1)
    death = make_failure(1, "failed", "died", culprit=2)
    observations = read_measurement(write_run(tmp_path, [hang, death]), NODES, SETUP)
    assert observations.silent == {"n2": hang.reason}
    assert observations.problems[:2] == (hang.reason, death.reason)


@pytest.mark.parametrize(
    ("status", "cause", "silent", "blamed"),
    [
        ("hang", "absent", [], {"n3"}),
        ("hang", "absent", ["n4"], {"n4"}),
        ("hang", "absent", NODES, set()),
        ("failed", "died", [], {"n3"}),
        ("failed", "terminated", [], set()),
        ("failed", "raised", [], set()),
    ],
)
def test_failure_blames_hosts(
    status: Status, cause: CulpritCause, silent: Sequence[str], blamed: set[str]
) -> None:
    record = make_failure(0, status, cause, culprit=2, silent=silent)
    blamed_nodes = find_blamed_nodes(record, NODES)
    assert blamed_nodes == dict.fromkeys(blamed, record.reason)


def test_screenings_at_once_read_their_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another screening with the same --out finishes during the measurement."""

    def run_child(command: list[str]) -> CompletedProcess[str]:
        out = Path(command[command.index("--out") + 1])
        write_run(out, [make_record(0)], ONE_MILLISECOND)
        if out.parent.name == "first":
            measure_rounds(NODES, [((0, 1),)], SETUP, tmp_path / "second" / "rounds")
        return CompletedProcess(command, 0)

    read: list[Path] = []

    def load(path: Path) -> Run:
        read.append(path.parent)
        return load_run(path)

    monkeypatch.setattr(screen_measure, "run_child", run_child)
    monkeypatch.setattr(screen_measure, "load_run", load)
    measurement = measure_rounds(NODES, [((0, 1),)], SETUP, tmp_path / "first" / "rounds")
    assert len(measurement.exchanges) == 2
    assert read == [tmp_path / "second" / "rounds", tmp_path / "first" / "rounds"]


def test_measurement_without_a_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        screen_measure, "run_child", lambda command: CompletedProcess(command, 2)
    )
    error = usage_error(measure_rounds, NODES, [((0, 1),)], SETUP, tmp_path / "rounds")
    assert "ended with 2 and left no run" in error
