"""What stands out: each kind of thing is one sentence that names the cases, long lists cut; no more is said."""

from collections.abc import Sequence
from typing import Any

import msgspec
from nodes_fixtures import group_records, hosts_of, pair_records, rates_of, run_of
from reports_fixtures import (
    collective,
    collective_metrics,
    curve_records,
    make_plan,
    make_run,
    ok,
    plain,
    seconds_metric,
    step,
    step_metrics,
)

from bench.arrival import Arrival
from bench.cases import make_case
from bench.records import Record
from reports.doubts import doubts
from reports.findings import find
from reports.summary import summarize


def doubted(*records: Record) -> tuple[str, ...]:
    run = make_run(make_plan([record.case for record in records]), records)
    return doubts(find(run, summarize(run)))


def pair(source: int, target: int, seconds: float = 1e-3) -> Record:
    params: dict[str, Any] = {
        "size_bytes": 1 << 20,
        "dtype": "float32",
        "mode": "blocking",
        "source": source,
        "target": target,
    }
    return ok(make_case("p2p.matrix", "m:f", params), seconds=seconds)


def late(share: float = 0.8, skew: float = 3e-4, rank: int | None = 2) -> Record:
    arrival = Arrival(method="c", uncertainty=0.0, late_rank=rank, share=share, last_out_rank=None, last_out_share=None)
    metrics = collective_metrics(collective(), 1e-3) | {"skew": seconds_metric(skew)}
    return ok(collective(), metrics=metrics, arrival=arrival)


def test_a_quiet_run_has_none() -> None:
    assert doubted(ok(collective()), ok(step()), pair(0, 1), pair(1, 0), *curve_records("broadcast")) == ()


def test_wild_scatter_is_named() -> None:
    (told,) = doubted(ok(collective(), grade="wild"), ok(step(), grade="wild"), ok(collective("gather"), grade="noisy"))
    assert told == (
        "Wild scatter, the interquartile range over 40 % of the median: all_reduce 1K blocking float32; ddp."
    )


def test_long_lists_are_cut_and_say_how_many_more() -> None:
    (told,) = doubted(*(ok(collective(size_bytes=1024 * (i + 1)), grade="wild") for i in range(9)))
    assert told.endswith("6K blocking float32 and 3 more.")


def test_a_slow_link_is_named_with_its_rate() -> None:
    told = doubted(*(pair(a, b, 5e-3 if (a, b) == (2, 1) else 1e-3) for a in range(3) for b in range(3) if a != b))
    assert told == ("Links below 70 % of the median, 1.57 GB/s: rank 2 to 1 at 0.315 GB/s.",)


def test_a_slow_group_is_named() -> None:
    def member(number: int, seconds: float) -> Record:
        return ok(collective(group="pairs", member=number), seconds=seconds, details={"group_ranks": [number]})

    (told,) = doubted(member(0, 1e-3), member(1, 1e-3), member(2, 1.5e-3))
    assert told.startswith("Slower than the other groups by more than a tenth: pairs 2: all_reduce")
    assert doubted(member(0, 1e-3), member(1, 1.05e-3)) == ()


def nodes_doubted(*records: Record, hosts: Sequence[str]) -> tuple[str, ...]:
    run = run_of(records, hosts)
    return doubts(find(run, summarize(run)))


def test_links_are_held_against_those_that_are_as_far() -> None:
    """Between nodes they are slower, which is no doubt; one slower than its like is."""
    hosts = hosts_of(4, 2)
    records = pair_records(hosts)
    assert nodes_doubted(*records, hosts=hosts) == ()
    slow = next(i for i, one in enumerate(records) if one.case.params["source"] == 0 and one.case.params["target"] == 7)
    records[slow] = msgspec.structs.replace(records[slow], metrics=rates_of(1 << 20, 0.1e9))
    (told,) = nodes_doubted(*records, hosts=hosts)
    assert told.startswith("Links (other switch) below 70 % of the median, 0.510 GB/s: rank 0 to 7 at 0.09")


def test_groups_are_held_against_those_of_their_kind() -> None:
    hosts = hosts_of(4, 2)
    alone = [one for one in group_records(hosts, [1 << 22]) if "together" not in one.case.params]
    assert nodes_doubted(*alone, hosts=hosts) == ()
    slow = [one.details.get("group_ranks") == [4, 5] for one in alone].index(True)
    alone[slow] = msgspec.structs.replace(alone[slow], metrics=rates_of(1 << 22, 2e9))
    (told,) = nodes_doubted(*alone, hosts=hosts)
    assert told.startswith("Slower than the other groups by more than a tenth: node 4,5: all_reduce")


def test_what_a_load_slows_beyond_its_interval_is_named() -> None:
    (told,) = doubted(ok(collective()), ok(collective(beside="gemm"), seconds=3e-3))
    assert told == "Slower beside others, by more than the interval: all_reduce 1K blocking float32 beside gemm x 3.00."
    assert doubted(ok(collective()), ok(collective(beside="gemm"), seconds=1.05e-3)) == ()


def test_a_straggler_is_named_only_where_it_matters() -> None:
    (told,) = doubted(late())
    assert told.endswith("for a tenth of the time or more: rank 2, by 300 us: all_reduce 1K blocking float32.")
    assert doubted(late(share=0.4)) == doubted(late(skew=5e-5)) == doubted(late(rank=None)) == ()


def test_sizes_off_the_curve_are_named() -> None:
    records = curve_records()
    odd = collective(size_bytes=4096)
    slow: dict[str, Any] = {"seconds": 300e-6}
    told = doubted(*(ok(odd, **slow) if record.case.id == odd.id else record for record in records))
    assert any("Sizes that the fit does not explain: all_reduce 1K blocking float32 at 4K, +" in one for one in told)


def test_bytes_that_theory_does_not_expect_are_named() -> None:
    metrics = step_metrics(1e-2) | {"bytes_ratio.dp": plain(2.0, ""), "bytes_ratio.tp": plain(1.0, "")}
    assert doubted(ok(step(), metrics=metrics)) == ("Bytes sent are not those expected: ddp on dp x 2.000.",)
