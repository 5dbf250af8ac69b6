"""Synthetic runs over several nodes for the tests of reports/: hosts, switches, groups, pairs; and a sweep of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import RankState, Record, WorldInfo
from parbench.bench.results.runs import Run
from tests.support.report_rows import matrix_case
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    METHOD,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    rate_metric,
    seconds_metric,
    step_case,
    write_run,
)

WITHIN_RATE, SWITCH_RATE, FAR_RATE = 4e9, 1e9, 0.5e9
EMULATION = "emulated: 4 nodes on one machine of 2 cores, links of 200mbit"


def make_hosts(num_nodes: int, each: int, placement: str = "block") -> list[str]:
    names = [f"n{i}" for i in range(1, num_nodes + 1)]
    return [name for name in names for _ in range(each)] if placement == "block" else names * each


def make_environment(hosts: Sequence[str], placement: str = "block", **more: Any) -> dict[str, Any]:
    """Return what the run's environment tells of its nodes: n1 and n2 are under leaf1, n3 and n4 under leaf2."""
    if len(set(hosts)) < 2:
        return {**ENVIRONMENT, **more}
    switches = {host: f"spine.leaf{(int(host[1:]) + 1) // 2}.{host}" for host in set(hosts)}
    slurm = {"job": "17", "nodelist": "n[1-4]", "placement": placement}
    return {**ENVIRONMENT, "hosts": list(hosts), "switches": switches, "slurm": slurm, **more}


def make_world(hosts: Sequence[str]) -> WorldInfo:
    return WorldInfo(size=len(hosts), nodes=len(set(hosts)), backend="gloo", device="cpu")


def make_rates(size_bytes: int, busbw: float) -> dict[str, MetricValue]:
    return {
        "time": seconds_metric(20e-6 + size_bytes / busbw),
        "algbw": rate_metric(size_bytes / (20e-6 + size_bytes / busbw)),
        "busbw": MetricValue(
            value=size_bytes / (20e-6 + size_bytes / busbw),
            unit="B/s",
            better="higher",
            method=METHOD,
        ),
    }


def make_group_case(size_bytes: int, name: str = "all_reduce", **params: Any) -> Case:
    given: dict[str, Any] = {
        "size_bytes": size_bytes,
        "dtype": "float32",
        "mode": "blocking",
        **params,
    }
    return make_case(f"collective.{name}", f"parbench.bench.operations.collectives:{name}", given)


def pair_rate(one: str, other: str) -> float:
    if one == other:
        return WITHIN_RATE
    return SWITCH_RATE if (int(one[1:]) + 1) // 2 == (int(other[1:]) + 1) // 2 else FAR_RATE


def group_records(
    hosts: Sequence[str], sizes: Iterable[int] = (1 << 16, 1 << 20, 1 << 22)
) -> list[Record]:
    """Return an all_reduce by node, across nodes, alone and together, and over the world."""
    world = make_world(hosts)
    names = list(dict.fromkeys(hosts))
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    across = [list(ranks) for ranks in zip(*nodes, strict=True)]
    records = []
    for size in sizes:
        records.append(
            ok_record(make_group_case(size), world=world, metrics=make_rates(size, FAR_RATE * 1.1))
        )
        for group, members, rate in (("node", nodes, WITHIN_RATE), ("across", across, FAR_RATE)):
            for i, ranks in enumerate(members):
                for together in (False, True):
                    more: dict[str, Any] = {"concurrent": True} if together else {}
                    case = make_group_case(size, group=group, group_index=i, **more)
                    share = rate / (len(members) if together and group == "across" else 1)
                    details = {"group_size": len(ranks), "group_ranks": ranks}
                    records.append(
                        ok_record(
                            case, world=world, metrics=make_rates(size, share), details=details
                        )
                    )
    return records


def pair_records(hosts: Sequence[str]) -> list[Record]:
    world = make_world(hosts)
    ranks = range(len(hosts))
    ends = [(a, b) for a in ranks for b in ranks if a != b]
    return [
        ok_record(
            matrix_case(a, b),
            world=world,
            metrics=make_rates(1 << 20, pair_rate(hosts[a], hosts[b]) * (1 + 0.01 * b)),
        )
        for a, b in ends
    ]


def make_rank_environment(hosts: Sequence[str]) -> dict[str, Any]:
    return {
        f"rank {rank}": {"host": {"name": host}, "process": {"affinity": str(rank % 2)}}
        for rank, host in enumerate(hosts)
    }


def make_node_run(
    records: Iterable[Record],
    hosts: Sequence[str],
    placement: str = "block",
    notes: Sequence[str] = (),
    **more: Any,
) -> Run:
    """Return a run of these records on these hosts, each record with what its ranks do not share."""
    own = make_rank_environment(hosts) if len(set(hosts)) > 1 else {}
    told = [
        msgspec.structs.replace(one, environment=own, notes=[*one.notes, *notes]) for one in records
    ]
    run = make_run(
        make_plan([one.case for one in told]), told, make_environment(hosts, placement, **more)
    )
    plan = msgspec.structs.replace(run.info.plan, nproc=len(hosts))
    return msgspec.structs.replace(
        run, info=msgspec.structs.replace(run.info, plan=plan, host=hosts[0])
    )


def sample_node_run(
    placement: str = "block", notes: Sequence[str] = (EMULATION,), **more: Any
) -> Run:
    hosts = make_hosts(4, 2, placement)
    records = [
        *group_records(hosts),
        *pair_records(hosts),
        ok_record(step_case(), world=make_world(hosts)),
    ]
    return make_node_run(records, hosts, placement, notes, **more)


def scaling_run(
    num_nodes: int, each: int = 1, placement: str = "block", factor: float = 1.0, **more: Any
) -> Run:
    """Return a run of two operations and a step, whose rates fall with the nodes; cyclic halves them."""
    hosts = make_hosts(num_nodes, each, placement)
    world = make_world(hosts)
    share = (1.0 if num_nodes == 1 else 0.25 / num_nodes) / (
        2 if placement == "cyclic" and num_nodes > 1 else 1
    )
    records = [
        ok_record(
            make_group_case(size), world=world, metrics=make_rates(size, factor * 4e9 * share)
        )
        for size in (1 << 16, 1 << 22)
    ]
    seconds = 0.01 / share**0.25 / factor
    tokens = rate_metric(1024 * len(hosts) / seconds, "tokens/s")
    records.append(
        ok_record(
            step_case(),
            world=world,
            metrics={"step_time": seconds_metric(seconds), "tokens_per_second": tokens},
        )
    )
    return make_node_run(records, hosts, placement, **more)


def failed_node_run() -> Run:
    hosts = make_hosts(4, 1)
    ranks = [
        RankState(rank=i, host=host, pid=40 + i, state="waiting") for i, host in enumerate(hosts)
    ]
    reason = "no end within 10 s: rank 2 (n3) did not arrive"
    return make_node_run(
        [
            failed_record(
                make_group_case(1 << 22), 0, "hang", reason, world=make_world(hosts), ranks=ranks
            )
        ],
        hosts,
    )


def make_sweep_point(number: int, label: str, **more: Any) -> dict[str, Any]:
    """Return a point as sweep.json has it, with fields that no report reads."""
    told = {
        "placement": "block",
        "environment": "",
        "repeat": 1,
        "variables": {"A": "1"},
        "seconds": 60.0,
    }
    return {"id": f"{number:012x}", "label": label, **told, **more}


def write_sweep(folder: Path, points: Sequence[tuple[dict[str, Any], Sequence[Run]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"schema": 1, "name": "links", "mode": "one", "points": [point for point, _ in points]}
    (folder / "sweep.json").write_bytes(msgspec.json.encode(told))
    for point, runs in points:
        for run in runs:
            write_run(folder / "runs" / str(point["id"]), run)
    return folder


def sample_sweep(folder: Path) -> Path:
    """Write a sweep of 1, 2 and 4 nodes x 2 ranks, block and cyclic, in two environments; a point lost, one not run."""
    points: list[tuple[dict[str, Any], Sequence[Run]]] = []
    for environment, factor in (("plain", 1.0), ("tuned", 1.2)):
        for nodes in (4, 2, 1):
            for placement in ("block", "cyclic"):
                if nodes == 1 and placement == "cyclic":
                    continue
                label = f"{nodes} nodes x 2, {placement}, {environment}"
                more = {"placement": placement, "environment": environment}
                run = scaling_run(nodes, 2, placement, factor, notes=[EMULATION])
                points.append((make_sweep_point(len(points), label, **more), [run]))
    points.append((make_sweep_point(98, "4 nodes x 1, block"), [failed_node_run()]))
    points.append((make_sweep_point(99, "8 nodes x 1, block"), []))
    return write_sweep(folder, points)
