"""What to look at first: each finding on runs that show it alone, nothing where nothing is, and their order."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import reports_fixtures as fixtures
from nodes_fixtures import group_records, hosts_of, pair_records, rates_of
from nodes_fixtures import run_of as run_on
from report_rows import found_in, found_of, matrix_case, run_of
from reports_fixtures import (
    collective,
    comm_call,
    curve_records,
    make_plan,
    make_run,
    mixture_record,
    ok,
    pipeline_record,
    plain,
    step,
    write_run,
)
from traced import run_with, timeline, traced_record

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.plan.cases import make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Arrival, Interval, Record
from parbench.bench.results.runs import LaunchInfo, Run, load_run
from parbench.bench.results.samples import samples_name
from parbench.reports.analysis.findings import MOST, Finding, look_at_first


def seen(*records: Record) -> list[Finding]:
    return list(look_at_first(found_in(*records)))


def kinds(*records: Record) -> list[str]:
    return [one.kind for one in seen(*records)]


def only(*records: Record) -> Finding:
    (found,) = seen(*records)
    return found


def training(
    parts: Mapping[str, float] | None = None, name: str = "fsdp", launches: int = 3, **more: Any
) -> list[Record]:
    """Return launches of a step of 100 ms whose parts are these shares of it, by default with little to say of it."""
    shares = {"compute": 0.9, "exposed_comm.dp": 0.04, "idle": 0.06, **(parts or {})}
    metrics = fixtures.step_metrics(0.1) | {key: plain(0.1 * share, "s") for key, share in shares.items()}
    given, details = more.pop("params", {"shape": "tiny", "microbatch": 4}), more.pop("details", {})
    case = make_case(f"workload.{name}", f"workloads.{name}:prepare", given, more.pop("defaults", {}))
    metrics |= more.pop("metrics", {})
    return [ok(case, launch, 0.1, metrics=metrics, details=details, **more) for launch in range(launches)]


def arrived(launch: int = 0, **told: Any) -> Arrival:
    who = dict.fromkeys(("late_rank", "share", "last_out_rank", "last_out_share"))
    return Arrival(method="c", uncertainty=0.0, **{**who, **told})


def late(
    launch: int = 0, rank: int | None = 2, share: float = 0.8, skew: float = 3e-4, transfer: float = 7e-5
) -> Record:
    arrival = arrived(late_rank=rank, share=share)
    metrics = fixtures.collective_metrics(collective(), 1e-3)
    metrics |= {"skew": fixtures.seconds_metric(skew), "transfer": fixtures.seconds_metric(transfer)}
    return ok(collective(), launch, metrics=metrics, arrival=arrival)


def test_nothing_is_claimed_of_a_quiet_run_and_scatter_alone_is_no_finding() -> None:
    pairs = [ok(matrix_case(0, 1)), ok(matrix_case(1, 0))]
    assert seen(ok(collective()), *training(), *pairs, *curve_records("broadcast")) == []
    assert seen(ok(collective(), grade="very noisy"), ok(step(), grade="very noisy")) == []


def test_one_rank_is_called_late_where_launches_agree_beyond_chance() -> None:
    def told(*ranks: int | None, **more: float) -> list[str]:
        return [one.sentence for one in seen(*(late(launch, rank, **more) for launch, rank in enumerate(ranks)))]

    # four ranks: three launches of three are 4 / 64 by chance, two of two are 4 / 16
    assert told(2, 2, 2) == [
        "Rank 2 arrives last in 3 of 3 launches, by 300 us (median of cases), 30.0 % of their time"
    ]
    assert told(2, 2) == told(2) == told(2, 2, 1) == told(None, None, None) == []
    assert told(2, 2, 1, 2, 2)[0].startswith("Rank 2 arrives last in 4 of 5 launches, by 300 us")
    assert told(2, 2, 2, share=0.4) == told(2, 2, 2, skew=5e-5) == []
    assert told(2, 2, 2, transfer=4e-4) == [], "no farther apart than a barrier leaves ranks"
    assert told(2, 2, 2, skew=6e-4, transfer=4e-3) != [], "farther than any barrier"


def test_a_launch_whose_cases_disagree_names_no_rank_nor_do_ranks_with_unlike_work() -> None:
    cases = [collective(size_bytes=1024 * (i + 1)) for i in range(4)]
    one = late()

    def told(*ranks: int) -> list[str]:
        arrivals = [arrived(late_rank=rank, share=0.8) for rank in ranks]
        told = zip(cases, arrivals, strict=True)
        return kinds(*(ok(case, i, metrics=one.metrics, arrival=arrival) for case, arrival in told for i in range(3)))

    assert [told(2, 2, 2, 1), told(2, 2, 1, 1), told(2, 2, 3, 1)] == [["late rank"], [], []]
    staged = [pipeline_record(launch=i) for i in range(3)]
    skew = {"skew": plain(0.01, "s")} | {f"idle_{cause}": plain(0.0, "s") for cause in ("schedule", "imbalance", "p2p")}
    arrival = arrived(late_rank=2, share=0.8)
    assert kinds(*(msgspec.structs.replace(one, metrics=one.metrics | skew, arrival=arrival) for one in staged)) == []


def run_with_exits(folder: Path, lag_ns: int, launches: int = 3, case: Any = None) -> Run:
    """Write a run of four ranks of which rank 1 leaves last, so much after the others."""
    case = case or collective()
    arrival = arrived(last_out_rank=1, last_out_share=0.9)
    records = [ok(case, launch, 1e-3, arrival=arrival) for launch in range(launches)]
    path = write_run(folder, make_run(make_plan([case], launches=launches), records))
    exits = np.full((4, 9), 1_000_000)
    exits[1] += lag_ns
    for record in records:
        np.savez(path / samples_name(record), ranks=np.arange(4), exit_ns=exits, duration_ns=exits)
    return load_run(path)


def test_a_rank_that_is_done_last_of_an_operation_in_which_all_do_the_same_is_slow(tmp_path: Path) -> None:
    (one,) = look_at_first(found_of(run_with_exits(tmp_path / "slow", 400_000)))
    assert (one.kind, one.command) == ("slow rank", "parbench doctor")
    assert one.sentence.startswith("Rank 1 is done last in 3 of 3 launches, by 400 us")
    assert one.cost == pytest.approx(0.4)
    for name, lag_ns, case in (("quick", 50_000, None), ("root", 400_000, collective("broadcast"))):
        assert look_at_first(found_of(run_with_exits(tmp_path / name, lag_ns, case=case))) == ()
    assert look_at_first(found_of(run_with_exits(tmp_path / "two", 400_000, launches=2))) == (), "4 of 16 by chance"


def test_a_rank_that_computes_longer_in_every_launch_is_slow_where_others_wait(tmp_path: Path) -> None:
    world = msgspec.structs.replace(fixtures.WORLD, size=2)

    def run(name: str, longer_us: float, waits: float = 2e-3, launches: int = 5) -> Run:
        first, last = timeline().ranks
        longer = Interval("compute", "compute", 9800.0, 9800.0 + longer_us)
        last = msgspec.structs.replace(last, intervals=(*last.intervals, longer))
        told = {"exposed_comm.dp": plain(1e-3, "s"), "straggler_wait": plain(waits, "s")}
        traces = []
        for launch in range(launches):
            one = traced_record(launch=launch)
            one = msgspec.structs.replace(one, world=world, metrics=one.metrics | told)
            traces.append((one, msgspec.structs.replace(timeline(), ranks=(first, last))))
        return run_with(tmp_path / name, traces)

    (one,) = look_at_first(found_of(run("slow", 3000.0)))
    assert one.sentence == (
        "Rank 1 computes 1.50 times as long as the others in 5 of 5 launches of ddp, "
        "which wait 20.0 % of the step for it"
    )
    for name, found in (
        ("alike", run("alike", 100.0)),
        ("nobody waits", run("quick", 3000.0, waits=1e-4)),
        ("two ranks in four launches, by chance", run("few", 3000.0, launches=4)),
    ):
        assert look_at_first(found_of(found)) == (), name


def test_one_bucket_leaves_nothing_to_overlap() -> None:
    def told(count: int = 1, exposed: float = 0.3, num_bytes: int = 8 << 20, **more: Any) -> list[Finding]:
        details = {"comm_calls": [comm_call(num_bytes=num_bytes, count=count)]}
        params = {"shape": "tiny", "microbatch": 4, "bucket_mb": 25.0, **more}
        return seen(
            *training({"exposed_comm.dp": exposed, "compute": 0.9 - exposed}, "ddp", params=params, details=details)
        )

    (one,) = told()
    assert one.words == (
        "ddp sends all gradients (8.00 MiB) in one bucket after backward, where nothing hides them: 31.2 % of the step "
        "is exposed -> parbench run --only ddp --set bucket_mb=2,25"
    )
    assert (one.kind, one.sure) == ("one bucket", 1.0)
    assert told(exposed=0.04) == told(count=4, exposed=0.1) == []
    assert [one.kind for one in told(num_bytes=4)] == ["exposed communication"], "too few to divide"
    params = {"shape": "tiny", "microbatch": 4}
    exposed, calls = {"exposed_comm.dp": 0.3, "compute": 0.6}, {"comm_calls": [comm_call()]}
    one = only(
        *training(exposed, "ddp", params={**params, "bucket_mb": 25.0}, details=calls),
        *training(None, "ddp", params={**params, "bucket_mb": 1.0}),
    )
    assert (one.kind, one.command) == ("one bucket", ""), "the run holds the answer"
    assert told(hidden=64)[0].command == "parbench run --only ddp --set hidden=64 --set bucket_mb=2,25"


def test_what_else_a_steps_own_settings_expose() -> None:
    exposed = {"exposed_comm.dp": 0.3, "compute": 0.64}
    (one,) = seen(*training(exposed, defaults={"prefetch": "default"}))
    assert (one.kind, one.command) == ("no prefetch", "parbench run --only fsdp --set prefetch=default,explicit")
    assert kinds(*training(exposed, params={"prefetch": "explicit"})) == ["exposed communication"]
    each: dict[str, Any] = {"params": {"accumulation": 8, "microbatch": 1}, "defaults": {"no_sync": False}}
    (one,) = seen(*training(exposed, "ddp", **each))
    assert one.words == (
        "ddp sums gradients after each of its 8 microbatches: 30.0 % of the step is exposed -> "
        "parbench run --only ddp --set accumulation=8 --set microbatch=1 --set no_sync=false,true"
    )
    assert one.cost == pytest.approx(0.3 * 7 / 8)
    each["defaults"] = {"no_sync": True}
    assert kinds(*training(exposed, "ddp", **each)) == ["exposed communication"]
    overlap = {"overlap": plain(0.1, "")}
    told = only(*training(exposed, "tp", metrics=overlap), *training({"exposed_comm.dp": 0.5, "compute": 0.44}, "cp"))
    assert told.sentence == "cp: 50.0 % of the step is exposed; also tp 30.0 %"
    assert only(*training(exposed, metrics=overlap)).sentence.endswith("10.0 % of its communication hidden")
    idle = only(*training({"idle": 0.4, "compute": 0.56}))
    assert (idle.kind, idle.command) == ("small microbatches", "parbench run --only fsdp --set microbatch=4,16")
    assert seen(*training({"idle": 0.4, "compute": 0.56}, defaults={"compute": "timed:20ms"})) == []


def staged(causes: Mapping[str, float], **more: Any) -> list[Record]:
    record = pipeline_record(**more)
    found = {f"idle_{cause}": plain(share * 0.02, "s") for cause, share in causes.items()}
    metrics = record.metrics | {f"idle_{cause}": plain(0.0, "s") for cause in ("schedule", "imbalance", "p2p")} | found
    return [msgspec.structs.replace(record, metrics=metrics)]


def test_a_pipeline_is_told_what_its_ranks_wait_for() -> None:
    one = only(*staged({"imbalance": 0.2}, split="3+1", layers_by_stage=[3, 1]))
    assert one.kind == "uneven stages"
    assert one.sentence == "pp: uneven stages (3+1 layers) cost 20.0 % of the step"
    assert "--set split=3+1,2+2" in one.command
    assert only(*staged({"imbalance": 0.2})).command == "", "layers are even already"
    one = only(*staged({"schedule": 0.3}, microbatches=2))
    assert (one.kind, one.sure) == ("pipeline bubble", 0.5), "one launch"
    assert one.sentence == "pp: ranks wait for 30.0 % of the step as it has only 2 microbatches on 2 ranks"
    assert "--set microbatches=2,8" in one.command
    assert kinds(*staged({"p2p": 0.2})) == ["small microbatches"]
    assert seen(*staged({"schedule": 0.1, "imbalance": 0.04, "p2p": 0.04})) == []
    doubtful = MetricValue(value=0.004, unit="s", low=-0.001, high=0.009)
    (record,) = staged({})
    unsure = msgspec.structs.replace(record, metrics=record.metrics | {"idle_imbalance": doubtful})
    assert seen(unsure) == [], "an interval that holds zero"


def test_hot_experts_are_told_by_what_balanced_routes_would_save() -> None:
    one = only(mixture_record(routing="zipf"))
    assert one.sentence == "ep_layer: hot experts cost 20.0 % of the step: the fullest rank gets 1.35 times the mean"
    assert one.command == "parbench run --only ep_layer --set experts=8 --set routing=zipf --set capacity=0,1.25"
    assert seen(mixture_record()) == []
    record = mixture_record(routing="zipf")
    doubtful = MetricValue(value=1.25, low=0.9, high=1.7)
    assert seen(msgspec.structs.replace(record, metrics=record.metrics | {"imbalance_slowdown": doubtful})) == []
    waits = {"compute": plain(0.01, "s"), "exposed_comm.ep": plain(0.01, "s")}
    hot, even = mixture_record(routing="zipf"), mixture_record()
    assert kinds(msgspec.structs.replace(hot, metrics=hot.metrics | waits)) == ["hot experts"], (
        "the others' waits are of it"
    )
    assert kinds(msgspec.structs.replace(even, metrics=even.metrics | waits)) == ["exposed communication"]


def test_a_slow_link_and_all_links_of_a_rank_are_named() -> None:
    ends = [(a, b) for a in range(4) for b in range(4) if a != b]

    def told(slow: Sequence[tuple[int, int]], launches: int = 1) -> Finding:
        return only(
            *(ok(matrix_case(*both), i, 5e-3 if both in slow else 1e-3) for both in ends for i in range(launches))
        )

    one = told([(2, 1)])
    assert one.sentence == "The link from rank 2 to 1 reach 0.315 GB/s, others 1.57 GB/s (median)".replace(
        "reach", "reaches"
    )
    assert one.cost == pytest.approx(0.8)
    assert one.sure == 0.5
    assert told([(2, 1)], 3).sure == 1.0
    assert told([both for both in ends if 3 in both]).sentence.startswith("All links of rank 3 reach 0.315 GB/s")
    scattered = [
        ok(matrix_case(*both), i, 9e-3 if both == (2, 1) and not i else 1e-3) for both in ends for i in range(3)
    ]
    assert seen(*scattered) == [], "slow in one launch of three"


def test_links_and_groups_are_held_against_those_of_their_kind() -> None:
    """Between nodes they are slower, which is no finding; one slower than its like is."""
    hosts = hosts_of(4, 2)

    def told(records: Sequence[Record]) -> list[str]:
        return [one.sentence for one in look_at_first(found_of(run_on(records, hosts))) if one.kind.startswith("slow ")]

    links = pair_records(hosts)
    alone = [one for one in group_records(hosts, [1 << 22]) if "concurrent" not in one.case.params]
    assert told(links) == told(alone) == []
    slow = [(one.case.params["source"], one.case.params["target"]) for one in links].index((0, 7))
    links[slow] = msgspec.structs.replace(links[slow], metrics=rates_of(1 << 20, 0.1e9))
    (link,) = told(links)
    assert link.startswith("The link from rank 0 to 7 reaches 0.09")
    assert link.endswith("others 0.510 GB/s (median, other switch)")
    member = [one.details.get("group_ranks") == [4, 5] for one in alone].index(True)
    alone[member] = msgspec.structs.replace(alone[member], metrics=rates_of(1 << 22, 2e9))
    (group,) = told(alone)
    assert group.startswith("Group node 4,5 reaches 1.98 GB/s in all_reduce 4M, the other")

    def of_group(number: int, seconds: float) -> Record:
        return ok(collective(group="pairs", group_index=number), seconds=seconds, details={"group_ranks": [number]})

    assert only(of_group(0, 1e-3), of_group(1, 1e-3), of_group(2, 1.5e-3)).sentence.startswith("Group pairs 2 reaches")
    assert seen(of_group(0, 1e-3), of_group(1, 1.05e-3)) == []


def test_a_size_far_above_its_fit_is_told_and_one_below_it_is_not() -> None:
    def told(seconds: float) -> list[Finding]:
        odd = ok(collective(size_bytes=1 << 22), seconds=seconds)
        return seen(*(odd if record.case.id == odd.case.id else record for record in curve_records()))

    (one,) = told(4e-3)
    assert one.sentence.startswith(
        "all_reduce 4M blocking float32 takes 182 % longer than its fitted curve (4.00 ms, 1.42"
    )
    assert one.command == "parbench run --only all_reduce --sizes 1M:16M:x2"
    assert told(0.5e-3) == []
    curves = [msgspec.structs.replace(one, launch=i) for one in curve_records() for i in range(3)]
    odd = collective(size_bytes=1 << 22)
    once = [ok(odd, i, seconds=40e-3) if (one.case.id, one.launch) == (odd.id, i) else one
            for one in curves for i in (1,)]  # fmt: skip
    assert kinds(*once) == [], "one launch of three"


def test_a_part_that_takes_longer_than_the_whole_is_told_where_launches_agree() -> None:
    def told(seconds: float, scatter: float = 0.01, launches: int = 4) -> list[Finding]:
        whole = [ok(collective(size_bytes=1 << 20), i, 1e-3) for i in range(launches)]
        part = collective("reduce_scatter", 1 << 20)
        return seen(*whole, *(ok(part, i, seconds * (1 + scatter * (i % 2))) for i in range(launches)))

    (one,) = told(2e-3)
    assert one.sentence.startswith("reduce_scatter 1M blocking float32 takes 2.01 ms, all_reduce 1.00 ms, which")
    assert one.command == "parbench run --only reduce_scatter --only all_reduce --sizes 1M --launches 10"
    assert told(0.9e-3) == told(1.3e-3, scatter=1.0) == told(2e-3, launches=2) == []


def test_loads_and_odd_bytes_are_named_where_they_matter() -> None:
    base, beside = collective(), collective(background="gemm")
    launches = range(3)
    slowed = only(*(ok(base, i) for i in launches), *(ok(beside, i, seconds=3e-3) for i in launches))
    assert slowed.sentence == "all_reduce 1K blocking float32 takes 3.00 times as long beside gemm"
    assert seen(*(ok(base, i) for i in launches), *(ok(beside, i, seconds=(1 + i) * 1e-3) for i in launches)) == []
    metrics = fixtures.step_metrics(1e-2) | {"bytes_ratio.dp": plain(2.0, ""), "bytes_ratio.tp": plain(1.0, "")}
    assert only(ok(step(), metrics=metrics)).sentence == "ddp sends 2.000 times the bytes on dp that theory expects"


def test_other_work_is_named_where_launches_scatter_or_half_of_them_had_it_beside_them() -> None:
    def told(factor: float, *others: float) -> list[str]:
        run = run_of(*(ok(collective(), i, 1e-3 * factor**i) for i in range(3)), launches=3)
        loads = [HostLoad(cores=2, other_cores=cores) for cores in others]
        known = tuple(LaunchInfo(launch=i, seconds=1.0, load=load) for i, load in enumerate(loads))
        run = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, launches=known))
        return [one.sentence for one in look_at_first(found_of(run))]

    (sentence,) = told(1.2, 0.0, 1.5, 0.0)
    work = "in launch 2 other processes kept 1.5 of 2 cores busy"
    assert re.fullmatch(rf"Launches scatter by 2.* % beside other work: {work}", sentence)
    (steady,) = told(1.001, 1.0, 1.5, 0.0)
    assert steady.startswith(f"Launches ran beside other work: {work}"), "all may be slowed alike"
    assert told(1.001, 0.0, 1.5, 0.0) == told(1.2, 0.1, 0.1, 0.1) == told(1.2) == []


def test_those_that_surely_cost_most_come_first_and_no_more_than_six() -> None:
    small = training({"exposed_comm.dp": 0.1, "compute": 0.84}, "ddp", params={"bucket_mb": 25.0}, details={
        "comm_calls": [comm_call()]
    })  # fmt: skip
    large = training({"exposed_comm.dp": 0.3, "compute": 0.64}, "fsdp", defaults={"prefetch": "default"})
    unsure = staged({"imbalance": 0.4, "schedule": 0.35})
    found = seen(*small, *large, *unsure)
    assert [one.kind for one in found] == ["no prefetch", "uneven stages", "pipeline bubble", "one bucket"]
    many = [late(i) for i in range(3)] + [mixture_record(routing="zipf"), *curve_records("broadcast")]
    ends = [(a, b) for a in range(3) for b in range(3) if a != b]
    many += [ok(matrix_case(*both), seconds=5e-3 if both == (2, 1) else 1e-3) for both in ends]
    found = seen(*small, *large, *unsure, *many, *training({"idle": 0.4, "compute": 0.56}, "tp"))
    assert len(found) == MOST
    assert "one bucket" not in {one.kind for one in found}, "the cheapest of seven"
