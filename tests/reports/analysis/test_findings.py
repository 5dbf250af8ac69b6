"""Findings: each kind on runs that show only it, quiet runs without any, and their order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Arrival, Interval, Record
from parbench.bench.results.runs import LaunchInfo, Run, load_run
from parbench.bench.results.samples import samples_name
from parbench.reports.analysis.findings import MOST, Finding, look_at_first
from tests.support import reports_fixtures as fixtures
from tests.support.nodes_fixtures import group_records, make_hosts, make_rates, pair_records
from tests.support.nodes_fixtures import make_node_run as run_on
from tests.support.report_rows import analyze_records, analyze_run, matrix_case, run_from_records
from tests.support.reports_fixtures import (
    collective_case,
    comm_call,
    counted_metric,
    curve_records,
    expert_record,
    make_plan,
    make_run,
    ok_record,
    pipeline_record,
    step_case,
    write_run,
)
from tests.support.traced import make_timeline, traced_record, write_traced_run

EXPOSED = {"exposed_comm.dp": 0.3, "compute": 0.64}
IDLE = {"idle": 0.4, "compute": 0.56}
RANK_PAIRS = [(a, b) for a in range(4) for b in range(4) if a != b]


def findings(*records: Record) -> list[Finding]:
    return list(look_at_first(analyze_records(*records)))


def kinds(*records: Record) -> list[str]:
    return [finding.kind for finding in findings(*records)]


def only(*records: Record) -> Finding:
    (finding,) = findings(*records)
    return finding


def with_values(record: Record, metrics: Mapping[str, MetricValue]) -> Record:
    return msgspec.structs.replace(record, metrics={**record.metrics, **metrics})


def training(
    shares: Mapping[str, float] | None = None,
    name: str = "fsdp",
    params: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    metrics: Mapping[str, MetricValue] | None = None,
    details: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Return three repetitions of a step of 100 ms with these shares, quiet by default."""
    shares = {"compute": 0.9, "exposed_comm.dp": 0.04, "idle": 0.06, **(shares or {})}
    values = fixtures.step_metrics(0.1) | dict(metrics or {})
    values |= {key: counted_metric(0.1 * share, "s") for key, share in shares.items()}
    params = params or {"shape": "tiny", "microbatch": 4}
    case = make_case(f"workload.{name}", f"workloads.{name}:prepare", params, defaults or {})
    return [ok_record(case, i, 0.1, metrics=values, details=dict(details or {})) for i in range(3)]


def arrival_of(**fields: Any) -> Arrival:
    unknown = dict.fromkeys(("late_rank", "share", "last_out_rank", "last_out_share"))
    return Arrival(method="c", uncertainty=0.0, **{**unknown, **fields})


def late(
    launch: int = 0,
    rank: int | None = 2,
    share: float = 0.8,
    skew: float = 3e-4,
    transfer: float = 7e-5,
    case: Case | None = None,
) -> Record:
    case = case or collective_case()
    metrics = fixtures.collective_metrics(collective_case(), 1e-3)
    metrics |= {
        "skew": fixtures.seconds_metric(skew),
        "transfer": fixtures.seconds_metric(transfer),
    }
    arrival = arrival_of(late_rank=rank, share=share)
    return ok_record(case, launch, metrics=metrics, arrival=arrival)


def late_ranks(*ranks: int | None, **fields: Any) -> list[Record]:
    return [late(i, rank, **fields) for i, rank in enumerate(ranks)]


def test_quiet_run_has_no_finding() -> None:
    pairs = [ok_record(matrix_case(0, 1)), ok_record(matrix_case(1, 0))]
    assert (
        kinds(ok_record(collective_case()), *training(), *pairs, *curve_records("broadcast")) == []
    )
    assert (
        kinds(
            ok_record(collective_case(), grade="very noisy"),
            ok_record(step_case(), grade="very noisy"),
        )
        == []
    )


def test_late_rank_is_named_with_its_skew() -> None:
    finding = only(*late_ranks(2, 2, 2))
    assert finding.kind == "late rank"
    for fact in ("Rank 2", "3 of 3", "300 us", "30.0 %"):
        assert fact in finding.sentence
    assert "4 of 5" in only(*late_ranks(2, 2, 1, 2, 2)).sentence


@pytest.mark.parametrize(
    "records",
    [
        late_ranks(2, 2),
        late_ranks(2, 2, 1),
        late_ranks(None, None, None),
        late_ranks(2, 2, 2, share=0.4),
        late_ranks(2, 2, 2, skew=5e-5),
        late_ranks(2, 2, 2, transfer=4e-4),
    ],
    ids=["two-by-chance", "disagree", "unknown", "low-share", "small-skew", "barrier-skew"],
)
def test_late_rank_needs_agreement_and_skew(records: list[Record]) -> None:
    assert kinds(*records) == []


def test_late_rank_skew_beyond_any_barrier_counts() -> None:
    assert kinds(*late_ranks(2, 2, 2, skew=6e-4, transfer=4e-3)) == ["late rank"]


@pytest.mark.parametrize(
    ("ranks", "expected"), [((2, 2, 2, 1), ["late rank"]), ((2, 2, 1, 1), []), ((2, 2, 3, 1), [])]
)
def test_late_rank_needs_a_majority_of_cases(ranks: Sequence[int], expected: list[str]) -> None:
    cases = [collective_case(size_bytes=1024 * (i + 1)) for i in range(4)]
    pairs = list(zip(cases, ranks, strict=True))
    records = [late(i, rank, case=case) for case, rank in pairs for i in range(3)]
    assert kinds(*records) == expected


def test_late_rank_ignores_pipeline_stages() -> None:
    idle = {f"idle_{cause}": counted_metric(0.0, "s") for cause in ("schedule", "imbalance", "p2p")}
    skewed = [
        with_values(pipeline_record(launch=i), idle | {"skew": counted_metric(0.01, "s")})
        for i in range(3)
    ]
    arrival = arrival_of(late_rank=2, share=0.8)
    assert kinds(*(msgspec.structs.replace(record, arrival=arrival) for record in skewed)) == []


def run_with_exits(folder: Path, lag_ns: int, launches: int = 3, case: Case | None = None) -> Run:
    """Write a run of four ranks in which rank 1 leaves `lag_ns` after the others."""
    case = case or collective_case()
    arrival = arrival_of(last_out_rank=1, last_out_share=0.9)
    records = [ok_record(case, launch, 1e-3, arrival=arrival) for launch in range(launches)]
    path = write_run(folder, make_run(make_plan([case], launches=launches), records))
    exits = np.full((4, 9), 1_000_000)
    exits[1] += lag_ns
    for record in records:
        np.savez(path / samples_name(record), ranks=np.arange(4), exit_ns=exits, duration_ns=exits)
    return load_run(path)


def test_slow_rank_leaves_a_symmetric_operation_last(tmp_path: Path) -> None:
    (finding,) = look_at_first(analyze_run(run_with_exits(tmp_path / "slow", 400_000)))
    assert (finding.kind, finding.command) == ("slow rank", "parbench doctor")
    assert finding.cost == pytest.approx(0.4)
    for fact in ("Rank 1", "3 of 3", "400 us"):
        assert fact in finding.sentence
    small_lag = run_with_exits(tmp_path / "quick", 50_000)
    rooted = run_with_exits(tmp_path / "root", 400_000, case=collective_case("broadcast"))
    two_by_chance = run_with_exits(tmp_path / "two", 400_000, launches=2)
    for run in (small_lag, rooted, two_by_chance):
        assert look_at_first(analyze_run(run)) == ()


def run_with_compute(folder: Path, longer_us: float, wait: float = 2e-3, launches: int = 5) -> Run:
    """Write a traced run of two ranks in which rank 1 computes longer in every repetition."""
    first, last = make_timeline().ranks
    longer = Interval("compute", "compute", 9800.0, 9800.0 + longer_us)
    last = msgspec.structs.replace(last, intervals=(*last.intervals, longer))
    trace = msgspec.structs.replace(make_timeline(), ranks=(first, last))
    metrics = {
        "exposed_comm.dp": counted_metric(1e-3, "s"),
        "straggler_wait": counted_metric(wait, "s"),
    }
    world = msgspec.structs.replace(fixtures.WORLD, size=2)
    records = [with_values(traced_record(launch=i), metrics) for i in range(launches)]
    traces = [(msgspec.structs.replace(record, world=world), trace) for record in records]
    return write_traced_run(folder, traces)


def test_slow_rank_computes_longer_while_others_wait(tmp_path: Path) -> None:
    (finding,) = look_at_first(analyze_run(run_with_compute(tmp_path / "slow", 3000.0)))
    for fact in ("Rank 1", "1.50 times", "5 of 5", "ddp", "20.0 %"):
        assert fact in finding.sentence
    alike = run_with_compute(tmp_path / "alike", 100.0)
    without_wait = run_with_compute(tmp_path / "quick", 3000.0, wait=1e-4)
    by_chance = run_with_compute(tmp_path / "few", 3000.0, launches=4)
    for run in (alike, without_wait, by_chance):
        assert look_at_first(analyze_run(run)) == ()


def bucketed(
    count: int = 1,
    exposed: float = 0.3,
    num_bytes: int = 8 << 20,
    bucket_mb: float = 25.0,
    **params: Any,
) -> list[Record]:
    details = {"comm_calls": [comm_call(num_bytes=num_bytes, count=count)]}
    params = {"shape": "tiny", "microbatch": 4, "bucket_mb": bucket_mb, **params}
    shares = {"exposed_comm.dp": exposed, "compute": 0.9 - exposed}
    return training(shares, "ddp", params, details=details)


def test_one_bucket_leaves_nothing_to_overlap() -> None:
    finding = only(*bucketed())
    assert (finding.kind, finding.sure) == ("one bucket", 1.0)
    assert finding.command == "parbench run --only ddp --set bucket_mb=2,25"
    assert "8.00 MiB" in finding.sentence
    assert "31.2 %" in finding.sentence
    assert kinds(*bucketed(exposed=0.04)) == kinds(*bucketed(count=4, exposed=0.1)) == []
    assert kinds(*bucketed(num_bytes=4)) == ["exposed communication"], "too small to divide"
    assert "--set hidden=64 --set bucket_mb=2,25" in only(*bucketed(hidden=64)).command


def test_one_bucket_proposes_no_command_that_was_run() -> None:
    small = {"shape": "tiny", "microbatch": 4, "bucket_mb": 1.0}
    finding = only(*bucketed(), *training(None, "ddp", small))
    assert (finding.kind, finding.command) == ("one bucket", "")


def test_no_prefetch_is_found_where_it_is_a_default() -> None:
    finding = only(*training(EXPOSED, defaults={"prefetch": "default"}))
    assert finding.kind == "no prefetch"
    assert finding.command == "parbench run --only fsdp --set prefetch=default,explicit"
    assert kinds(*training(EXPOSED, params={"prefetch": "explicit"})) == ["exposed communication"]


def test_gradient_sum_of_each_microbatch_is_found() -> None:
    params = {"accumulation": 8, "microbatch": 1}
    finding = only(*training(EXPOSED, "ddp", params, {"no_sync": False}))
    assert finding.command.endswith(
        "--set accumulation=8 --set microbatch=1 --set no_sync=false,true"
    )
    assert finding.cost == pytest.approx(0.3 * 7 / 8)
    skipped = training(EXPOSED, "ddp", params, {"no_sync": True})
    assert kinds(*skipped) == ["exposed communication"]


def test_exposed_communication_names_the_worst_first() -> None:
    overlap = {"overlap": counted_metric(0.1, "")}
    worse = training({"exposed_comm.dp": 0.5, "compute": 0.44}, "cp")
    sentence = only(*training(EXPOSED, "tp", metrics=overlap), *worse).sentence
    assert sentence.index("cp: 50.0 %") < sentence.index("tp 30.0 %")
    assert "10.0 % of its communication" in only(*training(EXPOSED, metrics=overlap)).sentence


def test_idle_step_suggests_larger_microbatches() -> None:
    finding = only(*training(IDLE))
    assert finding.kind == "small microbatches"
    assert finding.command == "parbench run --only fsdp --set microbatch=4,16"
    assert kinds(*training(IDLE, defaults={"compute": "timed:20ms"})) == []


def staged(causes: Mapping[str, float], **details: Any) -> Record:
    """Return a pipeline step of 20 ms with these shares of idle time, zero by default."""
    shares = {"schedule": 0.0, "imbalance": 0.0, "p2p": 0.0, **causes}
    idle = {f"idle_{cause}": counted_metric(share * 0.02, "s") for cause, share in shares.items()}
    return with_values(pipeline_record(**details), idle)


def test_pipeline_idle_time_is_named_by_its_cause() -> None:
    uneven = only(staged({"imbalance": 0.2}, split="3+1", layers_by_stage=[3, 1]))
    assert uneven.kind == "uneven stages"
    assert "20.0 %" in uneven.sentence
    assert "--set split=3+1,2+2" in uneven.command
    assert only(staged({"imbalance": 0.2})).command == "", "layers are even already"
    bubble = only(staged({"schedule": 0.3}, microbatches=2))
    assert (bubble.kind, bubble.sure) == ("pipeline bubble", 0.5)
    assert "30.0 %" in bubble.sentence
    assert "--set microbatches=2,8" in bubble.command
    assert kinds(staged({"p2p": 0.2})) == ["small microbatches"]


def test_pipeline_idle_time_must_matter() -> None:
    assert kinds(staged({"schedule": 0.1, "imbalance": 0.04, "p2p": 0.04})) == []
    reaches_zero = MetricValue(value=0.004, unit="s", low=-0.001, high=0.009)
    assert kinds(with_values(staged({}), {"idle_imbalance": reaches_zero})) == []


def test_hot_experts_cost_what_balance_would_save() -> None:
    hot, even = expert_record(routing="zipf"), expert_record()
    finding = only(hot)
    assert finding.kind == "hot experts"
    assert "20.0 %" in finding.sentence
    assert "1.35 times" in finding.sentence
    assert finding.command.endswith("--set experts=8 --set routing=zipf --set capacity=0,1.25")
    assert kinds(even) == []
    uncertain = MetricValue(value=1.25, low=0.9, high=1.7)
    assert kinds(with_values(hot, {"imbalance_slowdown": uncertain})) == []


def test_hot_experts_explain_exposed_communication() -> None:
    waits = {"compute": counted_metric(0.01, "s"), "exposed_comm.ep": counted_metric(0.01, "s")}
    assert kinds(with_values(expert_record(routing="zipf"), waits)) == ["hot experts"]
    assert kinds(with_values(expert_record(), waits)) == ["exposed communication"]


def links(slow: Sequence[tuple[int, int]], launches: int = 1) -> list[Record]:
    seconds = {pair: 5e-3 if pair in slow else 1e-3 for pair in RANK_PAIRS}
    return [
        ok_record(matrix_case(*pair), i, seconds[pair])
        for pair in RANK_PAIRS
        for i in range(launches)
    ]


def test_slow_link_is_named_with_both_rates() -> None:
    finding = only(*links([(2, 1)]))
    for fact in ("from rank 2 to 1", "0.315 GB/s", "1.57 GB/s"):
        assert fact in finding.sentence
    assert finding.cost == pytest.approx(0.8)
    assert finding.sure == 0.5
    assert only(*links([(2, 1)], 3)).sure == 1.0
    assert "links of rank 3" in only(*links([pair for pair in RANK_PAIRS if 3 in pair])).sentence
    once = [
        *links([(2, 1)]),
        *(msgspec.structs.replace(r, launch=i) for r in links([]) for i in (1, 2)),
    ]
    assert kinds(*once) == [], "slow in one repetition of three"


def slow_sentences(records: Sequence[Record], hosts: list[str]) -> list[str]:
    all_findings = look_at_first(analyze_run(run_on(records, hosts)))
    return [finding.sentence for finding in all_findings if finding.kind.startswith("slow ")]


def test_links_are_compared_within_their_locality() -> None:
    hosts = make_hosts(4, 2)
    records = pair_records(hosts)
    assert slow_sentences(records, hosts) == []
    pairs = [(record.case.params["source"], record.case.params["target"]) for record in records]
    slow = pairs.index((0, 7))
    records[slow] = msgspec.structs.replace(records[slow], metrics=make_rates(1 << 20, 0.1e9))
    (sentence,) = slow_sentences(records, hosts)
    for fact in ("from rank 0 to 7", "0.510 GB/s", "other switch"):
        assert fact in sentence


def test_groups_are_compared_with_groups_of_their_kind() -> None:
    hosts = make_hosts(4, 2)
    every = group_records(hosts, [1 << 22])
    records = [record for record in every if "concurrent" not in record.case.params]
    assert slow_sentences(records, hosts) == []
    slow = [record.details.get("group_ranks") for record in records].index([4, 5])
    records[slow] = msgspec.structs.replace(records[slow], metrics=make_rates(1 << 22, 2e9))
    (sentence,) = slow_sentences(records, hosts)
    for fact in ("node 4,5", "1.98 GB/s", "all_reduce 4M"):
        assert fact in sentence


def test_group_without_nodes_is_compared_by_time() -> None:
    def group(index: int, seconds: float) -> Record:
        case = collective_case(group="pairs", group_index=index)
        return ok_record(case, seconds=seconds, details={"group_ranks": [index]})

    assert "pairs 2" in only(group(0, 1e-3), group(1, 1e-3), group(2, 1.5e-3)).sentence
    assert kinds(group(0, 1e-3), group(1, 1.05e-3)) == []


def test_outlier_size_is_slower_than_its_fit() -> None:
    def outlier(seconds: float, launches: Sequence[int] = (0,)) -> list[Record]:
        case = collective_case(size_bytes=1 << 22)
        others = [record for record in curve_records() if record.case.id != case.id]
        usual = [msgspec.structs.replace(record, launch=i) for record in others for i in launches]
        return [*usual, *(ok_record(case, i, seconds if not i else 1.417e-3) for i in launches)]

    finding = only(*outlier(4e-3))
    assert "182 %" in finding.sentence
    assert finding.command == "parbench run --only all_reduce --sizes 1M:16M:x2"
    assert kinds(*outlier(0.5e-3)) == [], "faster than the fit"
    assert kinds(*outlier(40e-3, range(3))) == [], "one repetition of three"


def test_part_slower_than_the_whole_is_found() -> None:
    def part(seconds: float, variation: float = 0.01, launches: int = 4) -> list[Record]:
        whole = [ok_record(collective_case(size_bytes=1 << 20), i, 1e-3) for i in range(launches)]
        case = collective_case("reduce_scatter", 1 << 20)
        times = [seconds * (1 + variation * (i % 2)) for i in range(launches)]
        return [*whole, *(ok_record(case, i, time) for i, time in enumerate(times))]

    finding = only(*part(2e-3))
    assert "2.01 ms" in finding.sentence
    assert "--only reduce_scatter --only all_reduce --sizes 1M" in finding.command
    for records in (part(0.9e-3), part(1.3e-3, variation=1.0), part(2e-3, launches=2)):
        assert kinds(*records) == []


def test_background_slowdown_needs_agreement() -> None:
    def loaded(*times: float) -> list[Record]:
        case = collective_case(background="gemm")
        idle = [ok_record(collective_case(), i) for i in range(len(times))]
        return [*idle, *(ok_record(case, i, seconds) for i, seconds in enumerate(times))]

    assert "3.00 times" in only(*loaded(3e-3, 3e-3, 3e-3)).sentence
    assert kinds(*loaded(1e-3, 2e-3, 3e-3)) == []


def test_unexpected_bytes_are_named_by_axis() -> None:
    ratios = {"bytes_ratio.dp": counted_metric(2.0, ""), "bytes_ratio.tp": counted_metric(1.0, "")}
    sentence = only(ok_record(step_case(), metrics=fixtures.step_metrics(1e-2) | ratios)).sentence
    assert "2.000 times" in sentence
    assert "dp" in sentence


def loaded_run(factor: float, *other_cores: float) -> Run:
    run = run_from_records(
        *(ok_record(collective_case(), i, 1e-3 * factor**i) for i in range(3)), launches=3
    )
    loads = [HostLoad(cores=2, other_cores=cores) for cores in other_cores]
    infos = tuple(LaunchInfo(launch=i, seconds=1.0, load=load) for i, load in enumerate(loads))
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, launches=infos))


def test_other_load_is_found_with_variation_or_in_half() -> None:
    for run in (loaded_run(1.2, 0.0, 1.5, 0.0), loaded_run(1.001, 1.0, 1.5, 0.0)):
        (finding,) = look_at_first(analyze_run(run))
        assert "1.5 of 2 cores" in finding.sentence
    for run in (loaded_run(1.001, 0.0, 1.5, 0.0), loaded_run(1.2, 0.1, 0.1, 0.1), loaded_run(1.2)):
        assert look_at_first(analyze_run(run)) == ()


def test_findings_are_ordered_by_sure_cost_and_limited() -> None:
    shares, calls = {"exposed_comm.dp": 0.1, "compute": 0.84}, {"comm_calls": [comm_call()]}
    small = training(shares, "ddp", {"bucket_mb": 25.0}, details=calls)
    large = training(EXPOSED, defaults={"prefetch": "default"})
    pipeline = staged({"imbalance": 0.4, "schedule": 0.35})
    records = [*small, *large, pipeline]
    assert kinds(*records) == ["no prefetch", "uneven stages", "pipeline bubble", "one bucket"]
    records += [*late_ranks(2, 2, 2), expert_record(routing="zipf"), *training(IDLE, "tp")]
    records += [record for record in links([(2, 1)]) if 3 not in record.case.params.values()]
    assert len(kinds(*records)) == MOST
    assert "one bucket" not in kinds(*records), "the cheapest of seven"
