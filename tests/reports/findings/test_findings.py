"""Each kind of finding on a run that shows only it, its command, and its order among others."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Interval, Record
from parbench.bench.results.runs import Run
from parbench.reports.findings.finding import Finding
from parbench.reports.findings.rules import MAX_FINDINGS, apply_rules
from parbench.reports.findings.run_evidence import collect_evidence
from parbench.reports.run_data import RunData
from tests.support.reports.late import find_stragglers, late_record
from tests.support.reports.nodes_fixtures import (
    group_records,
    make_hosts,
    make_node_run,
    make_rates,
    pair_records,
)
from tests.support.reports.report_rows import (
    matrix_case,
    run_from_records,
)
from tests.support.reports.reports_fixtures import (
    WORLD,
    comm_call,
    counted_metric,
    counted_metrics,
    curve_records,
    expert_record,
    ok_record,
    pipeline_record,
    step_case,
    step_metrics,
)
from tests.support.reports.traced import make_timeline, traced_record, write_traced_run

Params = dict[str, Any]


def find_in(run: Run) -> tuple[Finding, ...]:
    return apply_rules(collect_evidence(RunData(run)))


def get_finding(records: Sequence[Record]) -> Finding:
    """Return the only finding on a run of these records."""
    (finding,) = find_in(run_from_records(*records))
    return finding


def get_kinds(records: Sequence[Record]) -> list[str]:
    return [finding.kind for finding in find_in(run_from_records(*records))]


def assert_facts(finding: Finding, *facts: str) -> None:
    for fact in facts:
        assert fact in finding.message


def repeat(case: Case, *seconds: float) -> list[Record]:
    return [ok_record(case, repetition, value) for repetition, value in enumerate(seconds)]


def with_metrics(record: Record, **metrics: MetricValue) -> Record:
    return replace(record, metrics={**record.metrics, **metrics})


def train(
    name: str = "fsdp",
    exposed: float = 0.0,
    idle: float = 0.0,
    params: Params | None = None,
    defaults: Params | None = None,
    calls: list[Params] | None = None,
    axis: str = "dp",
) -> list[Record]:
    """Return three repetitions of a step of 100 ms, of which these shares are exposed or idle."""
    params = params or {"shape": "tiny", "microbatch": 4}
    case = make_case(f"workload.{name}", f"workloads.{name}:prepare", params, defaults or {})
    seconds = {
        "compute": 0.1 * (1 - exposed - idle),
        f"exposed_comm.{axis}": 0.1 * exposed,
        "idle": 0.1 * idle,
    }
    metrics = step_metrics(0.1) | counted_metrics("s", seconds)
    details = {"comm_calls": calls or []}
    return [ok_record(case, i, 0.1, metrics=metrics, details=details) for i in range(3)]


def make_late_records(skew: float = 6e-4) -> list[Record]:
    return [late_record(repetition=repetition, skew=skew) for repetition in range(3)]


def train_buckets(count: int, num_bytes: int = 8 << 20, exposed: float = 0.3) -> list[Record]:
    params = {"shape": "tiny", "microbatch": 4, "bucket_mb": 25.0}
    calls = [comm_call(num_bytes=num_bytes, count=count)]
    return train("ddp", exposed, params=params, calls=calls)


def train_sharded(prefetch: str = "default") -> list[Record]:
    return train(exposed=0.3, defaults={"prefetch": prefetch}, axis="fsdp")


def make_pipeline(causes: dict[str, float], **details: Any) -> Record:
    """Return a pipeline step of 20 ms that is idle by these causes for these shares."""
    shares = {"schedule": 0.0, "imbalance": 0.0, "rest": 0.0, **causes}
    seconds = {f"idle_{cause}": share * 0.02 for cause, share in shares.items()}
    return with_metrics(pipeline_record(**details), **counted_metrics("s", seconds))


def link_records(*slow: tuple[int, int], repetition: int = 0) -> list[Record]:
    """Return the links between four ranks, of which some take five times as long."""
    records = []
    for pair in itertools.permutations(range(4), 2):
        seconds = 5e-3 if pair in slow else 1e-3
        records.append(ok_record(matrix_case(*pair), repetition, seconds))
    return records


def train_microbatches() -> list[Record]:
    """Return a step whose gradients are reduced after each of 8 microbatches."""
    params = {"microbatches": 8, "microbatch": 1}
    calls = [comm_call(count=8)]
    return train("ddp", 0.3, params=params, defaults={"no_sync": False}, calls=calls)


def make_outlier(*seconds: float) -> list[Record]:
    """Return a curve over sizes whose second size takes these times."""
    records = curve_records(placement="out_of_place")
    case = records[2].case
    return repeat(case, *seconds) + [
        replace(record, repetition=repetition)
        for record in records
        if record.case != case
        for repetition in range(len(seconds))
    ]


def make_uneven_pipeline() -> Record:
    return make_pipeline({"imbalance": 0.2}, layers_per_stage="3+1", layers_by_stage=[3, 1])


def make_unmeasured_pipeline() -> Record:
    """Return a pipeline step of 20 ms whose ranks share cores, so that its bubble is unknown."""
    record = make_pipeline({})
    metrics = record.metrics | counted_metrics("s", {"exposed_comm.pp": 8e-3})
    known = {name: value for name, value in metrics.items() if not name.startswith("idle_")}
    return replace(record, metrics=known)


@pytest.mark.parametrize(
    ("records", "kind", "facts"),
    [
        (make_late_records(skew=6e-4), "slow-rank", ["Rank 1", "3 of 3", "600 us", "60.0 %"]),
        (
            train_buckets(count=1),
            "one-bucket",
            ["8.00 MiB", "30.0 %", "-> parbench run ddp --nproc 4 ", "--set bucket_mb=2,25"],
        ),
        (
            train_sharded(),
            "no-prefetch",
            ["-> parbench run fsdp ", "--set prefetch=default,explicit"],
        ),
        (train_sharded(prefetch="explicit"), "exposed-communication", []),
        (train_microbatches(), "sync-per-microbatch", ["--set no_sync=false,true"]),
        (
            [*train("tp", exposed=0.3), *train("cp", exposed=0.5)],
            "exposed-communication",
            ["cp (axis dp): 50.0 %", "Also: tp (axis dp)"],
        ),
        (train(idle=0.4), "host-bound", ["-> parbench run fsdp ", "--set microbatch=4,16"]),
        (
            [make_uneven_pipeline()],
            "uneven-stages",
            ["20.0 %", "--set layers_per_stage=3+1,2+2"],
        ),
        (
            [make_pipeline({"schedule": 0.3}, microbatches=2)],
            "pipeline-bubble",
            ["30.0 %", "--set microbatches=2,8"],
        ),
        ([make_pipeline({"rest": 0.2})], "pipeline-bubble", ["20.0 %", "or for messages"]),
        ([make_unmeasured_pipeline()], "pipeline-bubble", ["28.6 %", "Stages wait"]),
        (
            train_buckets(count=40, num_bytes=16 << 10),
            "small-calls",
            ["40 reductions of 16.0 KiB"],
        ),
        (
            [
                with_metrics(record, **counted_metrics("s", {"comm_transfer.dp": 0.012}))
                for record in train("cp", exposed=0.5)
            ],
            "waiting",
            ["50.0 %", "Most of it is waiting for late ranks"],
        ),
        (
            [expert_record(routing="zipf")],
            "hot-experts",
            ["1.35 times", "--set capacity=0,1.25"],
        ),
        (link_records((2, 1)), "slow-link", ["from rank 2 to 1", "0.315 GB/s", "1.57 GB/s"]),
        (
            make_outlier(4e-3, 4e-3, 4e-3),
            "off-fit",
            ["times as long as its fit.", "-> parbench run all_reduce --sizes "],
        ),
        (make_outlier(1e-2), "off-fit", ["its fit (fewer than three repetitions)."]),
    ],
)
def test_problem_is_the_only_finding(
    records: list[Record], kind: str, facts: list[str]
) -> None:
    (finding,) = find_in(run_from_records(*records))
    assert finding.kind == kind
    for fact in facts:
        assert fact in finding.text


@pytest.mark.parametrize(
    "records",
    [
        curve_records() + train(exposed=0.04, idle=0.06),
        [make_pipeline({"schedule": 0.09, "imbalance": 0.04}), expert_record()],
        make_late_records()[:2],
        [
            *make_late_records()[:2],
            replace(make_late_records()[2], arrival=find_stragglers(late_rank=2)),
        ],
        train_buckets(count=1, exposed=0.04),
        train_buckets(count=4, exposed=0.09),
        link_records(),
        [
            *link_records((2, 1)),
            *link_records((2, 1), repetition=1),
            *link_records(repetition=2),
        ],
        make_outlier(3.5e-4),
        make_outlier(1e-4, 4e-4, 2e-3),
    ],
)
def test_small_or_uncertain_problem_is_no_finding(records: list[Record]) -> None:
    assert get_kinds(records) == []


def find_by_compute(
    folder: Path, longer_us: float, straggler_wait: float = 2e-3
) -> tuple[Finding, ...]:
    """Return the findings of traced steps of 10 ms in which rank 1 computes longer."""
    timeline = make_timeline()
    first, second = timeline.ranks
    longer = Interval("compute", "compute", 5100.0, 5100.0 + longer_us)
    second = replace(second, intervals=(*second.intervals, longer))
    timeline = replace(timeline, ranks=(first, second))
    waits = {"exposed_comm.dp": 5e-4, "straggler_wait": straggler_wait}
    traces = []
    for repetition in range(5):
        record = with_metrics(
            traced_record(repetition=repetition), **counted_metrics("s", waits)
        )
        traces.append((replace(record, world=replace(WORLD, size=2)), timeline))
    return find_in(write_traced_run(folder, traces))


def test_slow_rank_computes_longer(tmp_path: Path) -> None:
    (finding,) = find_by_compute(tmp_path / "slow", longer_us=3000.0)
    assert_facts(finding, "Rank 1", "1.43 times", "5 of 5", "ddp", "20.0 %")
    assert find_by_compute(tmp_path / "equal", longer_us=100.0) == ()
    assert find_by_compute(tmp_path / "no-wait", longer_us=3000.0, straggler_wait=1e-4) == ()


def test_rank_that_is_late_without_computing_is_named(tmp_path: Path) -> None:
    timeline = make_timeline()
    ranks = [
        replace(rank, intervals=(Interval("comm dp", "all_reduce", start, rank.stop_us),))
        for rank, start in zip(timeline.ranks, (1000.0, 9000.0), strict=True)
    ]
    timeline = replace(timeline, ranks=tuple(ranks))
    waits = {"exposed_comm.dp": 8e-3, "straggler_wait": 8e-3, "comm_transfer.dp": 4e-4}
    traces = []
    for repetition in range(3):
        record = with_metrics(traced_record(repetition), **counted_metrics("s", waits))
        traces.append((replace(record, world=replace(WORLD, size=2)), timeline))
    finding, waiting = find_in(write_traced_run(tmp_path / "late", traces))
    assert_facts(waiting, "53.3 %", "waiting")
    assert_facts(finding, "Rank 1 computes or is idle", "3 of 3 repetitions of ddp", "80.0 %")
    assert find_in(write_traced_run(tmp_path / "twice", traces[:2])) == (waiting,)


def find_slow(records: Sequence[Record]) -> list[Finding]:
    """Return the findings on slow links and groups of a run on four nodes of two ranks."""
    findings = find_in(make_node_run(records, make_hosts(4, 2)))
    return [finding for finding in findings if finding.kind.startswith("slow-")]


def test_links_are_compared_within_their_locality() -> None:
    records = pair_records(make_hosts(4, 2))
    assert find_slow(records) == []
    metrics = make_rates(1 << 20, busbw=0.1e9)
    slow = ok_record(matrix_case(0, 7), world=records[0].world, metrics=metrics)
    records = [record for record in records if record.case.id != slow.case.id]
    records.append(slow)
    (finding,) = find_slow(records)
    assert_facts(finding, "from rank 0 to 7", "0.510 GB/s", "other switch")


def test_groups_are_compared_with_groups_of_their_kind() -> None:
    records = []
    for record in group_records(make_hosts(4, 2), [1 << 22]):
        if "concurrent" in record.case.params:
            continue
        if record.details.get("group_ranks") == [4, 5]:
            record = replace(record, metrics=make_rates(1 << 22, busbw=2e9))
        records.append(record)
    (finding,) = find_slow(records)
    assert_facts(finding, "node 4,5", "1.98 GB/s", "all_reduce 4M")


def test_unexpected_bytes_have_no_share_of_the_time() -> None:
    metrics = step_metrics(1e-2)
    metrics["bytes_ratio.dp"] = counted_metric(2.0, "")
    metrics["bytes_ratio.tp"] = counted_metric(1.0, "")
    records = [ok_record(step_case(), metrics=metrics), *train(idle=0.3)]
    timed, finding = find_in(run_from_records(*records))
    assert timed.time_share == pytest.approx(0.3)
    assert finding.kind == "unexpected-bytes"
    assert finding.time_share is None
    assert "2.000 times the expected bytes on dp" in finding.message


def test_findings_are_ordered_by_cost_and_limited() -> None:
    records = train_buckets(count=1, num_bytes=1 << 20, exposed=0.1)
    records += train_sharded()
    records.append(make_pipeline({"imbalance": 0.4, "schedule": 0.35}))
    assert get_kinds(records) == [
        "uneven-stages",
        "pipeline-bubble",
        "no-prefetch",
        "one-bucket",
    ]
    records += make_late_records()
    records += train("tp", idle=0.4)
    records += link_records((2, 1))
    records.append(expert_record(routing="zipf"))
    kinds = get_kinds(records)
    assert len(kinds) == MAX_FINDINGS
    assert "one-bucket" not in kinds
