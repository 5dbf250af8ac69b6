"""A check finds slow and wrong devices, slow links and missing results in the records of a run."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from parbench.bench.check.cases import QUANTITIES, get_quantity_name, make_options
from parbench.bench.check.health import (
    Device,
    Health,
    add_run,
)
from parbench.bench.check.show import render
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case, load_catalogue
from parbench.bench.plan.options import make_plan
from parbench.bench.results.records import Record, SkipReason, WorldInfo
from parbench.bench.results.runs import Run, RunInfo, make_samples_path
from parbench.cli import DEFINITIONS
from tests.support.fakes import make_plan as make_fake_plan

CATALOGUE = load_catalogue(DEFINITIONS)
NUM_RANKS = 4
NUM_REPETITIONS = 3
ROUNDS = ["0-3 1-2", "0-2 1-3", "0-1 2-3"]
Failures = dict[str, dict[str, Any]]
"""Fields of the records by the name of a quantity."""


def plan_cases(device: str, num_ranks: int) -> tuple[Case, ...]:
    options = make_options(device, num_ranks, budget="40s", inject=None)
    backend = "nccl" if device == "cuda" else "gloo"
    spec = WorldSpec(nproc=num_ranks, backend=backend, device=device)
    return make_plan(options, CATALOGUE, spec).cases


def build_record(case: Case, repetition: int = 0) -> Record:
    details: dict[str, Any] = {"size_bytes": 1 << 20}
    if "m" in case.all_params:
        details = {"m": 1000}
    if case.name == "p2p.pairwise":
        details["pairs"] = ROUNDS[int(str(case.all_params["round"])) % len(ROUNDS)]
    return Record(
        case=case,
        world=WorldInfo(size=NUM_RANKS, nodes=1, backend="nccl", device="cuda"),
        repetition=repetition,
        status="ok",
        details=details,
        started="2026-01-01T00:00:00Z",
        seconds=1.0,
    )


def write_samples(folder: Path, record: Record, duration_by_rank: Mapping[int, float]) -> None:
    """Write nine equal samples of each rank, in ms."""
    nanoseconds = np.array(list(duration_by_rank.values())) * 1e6
    durations = np.repeat(nanoseconds[:, None], 9, axis=1).astype(np.int64)
    names = ("arrival_ns", "exit_ns", "duration_ns", "issue_ns")
    arrays: dict[str, Any] = dict.fromkeys(names, durations)
    arrays["ranks"] = np.array(list(duration_by_rank))
    arrays["steps_per_sample"] = np.array(1)
    content = io.BytesIO()
    np.savez(content, **arrays)
    path = folder / make_samples_path(record)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content.getvalue())


def compute_durations(
    record: Record, slowdowns: Mapping[int, float], slow_pair: str
) -> dict[int, float]:
    """Return the duration of each measured rank; repetitions differ by 10 %."""
    repetition = 1 + record.repetition / 10
    durations = {rank: repetition * slowdowns.get(rank, 1.0) for rank in range(NUM_RANKS)}
    if get_quantity_name(record) == "all ranks":
        return dict.fromkeys(durations, max(durations.values()))
    for pair in str(record.details.get("pairs", "")).split():
        first, second = map(int, pair.split("-"))
        slowest = max(durations[first], durations[second])
        if pair == slow_pair:
            slowest *= 1.4
        durations[first] = slowest
        durations[second] = slowest
    return durations


def build_run(
    folder: Path,
    slowdowns: Mapping[int, float] | None = None,
    *,
    slow_pair: str = "",
    failures: Failures | None = None,
    num_repetitions: int = NUM_REPETITIONS,
) -> Run:
    """Write a run, in which ranks are slower by factors."""
    cases = plan_cases("cuda", NUM_RANKS)
    records = []
    for case in cases:
        for repetition in range(num_repetitions):
            record = build_record(case, repetition)
            failure = (failures or {}).get(get_quantity_name(record), {})
            if not failure:
                durations = compute_durations(record, slowdowns or {}, slow_pair)
                write_samples(folder, record, durations)
            records.append(replace(record, **failure))
    plan = make_fake_plan(cases, nproc=NUM_RANKS, repetitions=NUM_REPETITIONS, device="cuda")
    info = RunInfo(
        id="1",
        started="",
        host="n1",
        parbench="1",
        plan=plan,
        environment={},
    )
    return Run(path=folder, info=info, records=tuple(records))


def list_devices(host: str = "n1") -> list[Device]:
    gpu = Device(
        host=host,
        name="",
        uuid="",
        kind="NVIDIA H100",
        rank=0,
    )
    devices = []
    for rank in range(NUM_RANKS):
        uuid = f"{host}-{rank}"
        devices.append(replace(gpu, name=f"GPU {rank}", uuid=uuid, rank=rank))
    return devices


def check_run(run: Run, host: str = "n1") -> Health:
    return add_run(Health(host=host, device="cuda"), list_devices(host), run)


def list_verdicts(health: Health) -> list[str]:
    return [device.verdict for device in health.devices]


def list_quantities(device: str, num_ranks: int) -> list[str]:
    return [get_quantity_name(build_record(case)) for case in plan_cases(device, num_ranks)]


def test_every_quantity_is_planned() -> None:
    names = list_quantities("cuda", 8)
    assert names.count("pairs") == 7
    on_cores = list_quantities("cpu", 2)
    for quantity in QUANTITIES:
        assert quantity.name in names
        assert (quantity.name in on_cores) == bool(quantity.cpu_size)


def test_single_device_has_no_communication() -> None:
    assert {"pairs", "all ranks"}.isdisjoint(list_quantities("cuda", 1))


def test_slow_device_is_bad(tmp_path: Path) -> None:
    health = check_run(build_run(tmp_path, {2: 1.25}))
    assert health.exit_code == 1
    assert health.bad_names == ["GPU 2"]
    assert health.links == ()
    [reason] = health.devices[2].reasons
    for fact in (
        "slower than its peers: bfloat16 by 20 %",
        "to device by 20 %",
        "pairs by 20 %",
    ):
        assert fact in reason.text
    assert "bad  GPU 2" in render([health])


def test_slow_link_is_bad_and_its_devices_are_not(tmp_path: Path) -> None:
    health = check_run(build_run(tmp_path, slow_pair="1-3"))
    assert health.exit_code == 1
    assert health.bad_names == ["link GPU 1 - GPU 3"]
    assert "29 % slower than other links" in health.links[0].text
    assert list_verdicts(health) == ["ok", "ok", "ok", "ok"]
    # A MiB in 1.1 ms, the median of the repetitions.
    assert health.bus_bandwidth == pytest.approx((1 << 20) / 1.1e-3, rel=0.01)


WRONG_ON_ONE: Failures = {
    "float32": {"status": "wrong", "reason": "results differ", "wrong_by_rank": {1: 3}},
    "all ranks": {"status": "wrong", "reason": "results differ", "wrong_by_rank": {0: 1, 1: 1}},
}
OUT_OF_BUDGET: dict[str, Any] = {
    "status": "skipped",
    "reason": "out of time",
    "skip_reason": SkipReason.OUT_OF_BUDGET,
}


def test_device_with_wrong_results_is_bad(tmp_path: Path) -> None:
    """Its case is skipped in later repetitions, and its results spread to other ranks."""
    run = build_run(tmp_path, failures=WRONG_ON_ONE)
    skipped = {
        "status": "skipped",
        "skip_reason": SkipReason.EARLIER_FAILURE,
        "wrong_by_rank": {},
    }
    records = [
        replace(record, **skipped) if record.status == "wrong" and record.repetition else record
        for record in run.records
    ]
    health = check_run(replace(run, records=tuple(records)))
    assert health.exit_code == 1
    assert list_verdicts(health) == ["ok", "bad", "ok", "ok"]
    assert health.devices[1].reasons[0].text == "wrong results in compute.gemm"
    assert health.problems == ()


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("all ranks", WRONG_ON_ONE["all ranks"]),
        ("pairs", {"status": "hang", "reason": "rank 3 did not arrive"}),
        ("copy", OUT_OF_BUDGET),
    ],
)
def test_failure_of_no_single_device_is_a_problem(
    tmp_path: Path, name: str, failure: dict[str, Any]
) -> None:
    run = build_run(tmp_path, failures={name: failure})
    health = check_run(run)
    assert health.exit_code == 4
    assert health.verdict == "did not run"
    assert list_verdicts(health) == ["ok", "ok", "ok", "ok"]
    assert len(health.problems) == 1
    assert failure["reason"] in health.problems[0]
    budget = f"{2 * run.info.plan.budget_seconds:.0f}s"
    has_advice = health.problems[0].endswith(f"parbench check --budget {budget}")
    assert has_advice == (name == "copy")


def test_two_repetitions_name_no_device(tmp_path: Path) -> None:
    health = check_run(build_run(tmp_path, {2: 1.25}, num_repetitions=2))
    assert health.exit_code == 4
    assert list_verdicts(health) == ["ok", "ok", "ok", "ok"]
    assert "measurements: the check ended early" in health.problems[0]
