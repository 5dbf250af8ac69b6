"""Synthetic runs over several nodes, and a sweep of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import RankState, Record, WorldInfo
from parbench.bench.results.runs import Run
from tests.support.reports.report_rows import matrix_case
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    collective_case,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    rate_metric,
    seconds_metric,
    step_case,
    write_run,
)

WITHIN_RATE = 4e9
SWITCH_RATE = 1e9
FAR_RATE = 0.5e9
LEAVES = {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2", "n4": "leaf2"}
EMULATION = "4 nodes on one machine of 2 cores, links of 200mbit"


def make_hosts(num_nodes: int, ranks_per_node: int, distribution: str = "block") -> list[str]:
    """Return the host of each rank: n1, n2 and so on."""
    hosts = [f"n{i}" for i in range(1, num_nodes + 1)]
    if distribution == "cyclic":
        return hosts * ranks_per_node
    return [host for host in hosts for _ in range(ranks_per_node)]


def make_environment(hosts: Sequence[str], distribution: str = "block") -> dict[str, Any]:
    """Return the environment of a run on these hosts, of which each leaf switch connects two."""
    if len(set(hosts)) == 1:
        return ENVIRONMENT
    return {
        **ENVIRONMENT,
        "hosts": list(hosts),
        "switches": {host: f"spine.{LEAVES[host]}.{host}" for host in set(hosts)},
        "slurm": {"job": "17", "nodelist": "n[1-4]", "distribution": distribution},
    }


def make_world(hosts: Sequence[str]) -> WorldInfo:
    return WorldInfo(
        size=len(hosts),
        nodes=len(set(hosts)),
        backend="gloo",
        device="cpu",
    )


def make_rates(size_bytes: int, busbw: float) -> dict[str, MetricValue]:
    """Return the metrics of a message with 20 us of latency; all rates are equal."""
    seconds = 20e-6 + size_bytes / busbw
    rate = rate_metric(size_bytes / seconds)
    return {"time": seconds_metric(seconds), "algbw": rate, "busbw": rate}


def group_record(hosts: Sequence[str], size: int, rate: float, **fields: Any) -> Record:
    """Return an all_reduce; `group_ranks` is a detail, other fields are parameters."""
    details = {}
    if "group_ranks" in fields:
        ranks = fields.pop("group_ranks")
        details = {"group_size": len(ranks), "group_ranks": ranks}
    case = collective_case(size_bytes=size, **fields)
    metrics = make_rates(size, rate)
    return ok_record(case, world=make_world(hosts), metrics=metrics, details=details)


def group_records(
    hosts: Sequence[str], sizes: Iterable[int] = (1 << 16, 1 << 20, 1 << 22)
) -> list[Record]:
    """Return an all_reduce over the world, within each node and across nodes.

    The groups run alone and concurrently, in which case those across nodes share their links.
    """
    names = list(dict.fromkeys(hosts))
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    across = [list(ranks) for ranks in zip(*nodes, strict=True)]
    records = []
    for size in sizes:
        records.append(group_record(hosts, size, FAR_RATE * 1.1))
        for i, ranks in enumerate(nodes):
            group: dict[str, Any] = {"group": "node", "group_index": i, "group_ranks": ranks}
            records.append(group_record(hosts, size, WITHIN_RATE, **group))
            group["concurrent"] = True
            records.append(group_record(hosts, size, WITHIN_RATE, **group))
        for i, ranks in enumerate(across):
            group = {"group": "across", "group_index": i, "group_ranks": ranks}
            records.append(group_record(hosts, size, FAR_RATE, **group))
            group["concurrent"] = True
            records.append(group_record(hosts, size, FAR_RATE / len(across), **group))
    return records


def pair_rate(source: str, target: str) -> float:
    if source == target:
        return WITHIN_RATE
    return SWITCH_RATE if LEAVES[source] == LEAVES[target] else FAR_RATE


def pair_records(hosts: Sequence[str]) -> list[Record]:
    """Return the records of all pairs of ranks; rates grow by 1 % with each receiving rank."""
    records = []
    for source, source_host in enumerate(hosts):
        for target, target_host in enumerate(hosts):
            if source != target:
                rate = pair_rate(source_host, target_host) * (1 + 0.01 * target)
                metrics = make_rates(1 << 20, rate)
                case = matrix_case(source, target)
                records.append(ok_record(case, world=make_world(hosts), metrics=metrics))
    return records


def make_rank_environment(hosts: Sequence[str]) -> dict[str, Any]:
    environment = {}
    for rank, host in enumerate(hosts):
        process = {"affinity": str(rank % 2)}
        environment[f"rank {rank}"] = {"host": {"name": host}, "process": process}
    return environment


def make_node_run(
    records: Iterable[Record],
    hosts: Sequence[str],
    distribution: str = "block",
    emulation: str = "",
) -> Run:
    """Return a run of these records on these hosts, each record with the facts of its ranks."""
    environment = make_rank_environment(hosts) if len(set(hosts)) > 1 else {}
    placed = []
    for record in records:
        placed.append(replace(record, environment=environment, emulation=emulation))
    plan = replace(make_plan([record.case for record in placed]), nproc=len(hosts))
    run = make_run(plan, placed, make_environment(hosts, distribution))
    return replace(run, info=replace(run.info, host=hosts[0]))


def sample_node_run(distribution: str = "block") -> Run:
    """Return an emulated run of groups, pairs and a step on four nodes of two ranks."""
    hosts = make_hosts(4, 2, distribution)
    step = ok_record(step_case(), world=make_world(hosts))
    records = [*group_records(hosts), *pair_records(hosts), step]
    return make_node_run(records, hosts, distribution, EMULATION)


def scaling_run(
    num_nodes: int,
    ranks_per_node: int = 1,
    distribution: str = "block",
    factor: float = 1.0,
    emulation: str = "",
) -> Run:
    """Return a run of two sizes and a step; rates fall with the nodes, and cyclic halves them."""
    hosts = make_hosts(num_nodes, ranks_per_node, distribution)
    share = 1.0
    if num_nodes > 1:
        share = 0.25 / num_nodes
        share /= 2 if distribution == "cyclic" else 1
    records = [group_record(hosts, size, factor * 4e9 * share) for size in (1 << 16, 1 << 22)]
    seconds = 0.01 / share**0.25 / factor
    metrics = {
        "step_time": seconds_metric(seconds),
        "tokens_per_second": rate_metric(1024 * len(hosts) / seconds, "tokens/s"),
    }
    records.append(ok_record(step_case(), world=make_world(hosts), metrics=metrics))
    return make_node_run(records, hosts, distribution, emulation)


def failed_node_run() -> Run:
    """Return a run on four nodes whose only case hangs, because n3 does not arrive."""
    hosts = make_hosts(4, 1)
    ranks = []
    for rank, host in enumerate(hosts):
        ranks.append(
            RankState(
                rank=rank,
                host=host,
                pid=40 + rank,
                state="waiting",
            )
        )
    reason = "timed out after 10 s: rank 2 (n3) did not arrive"
    case = collective_case(size_bytes=1 << 22)
    record = failed_record(case, 0, "hang", reason, world=make_world(hosts), ranks=ranks)
    return make_node_run([record], hosts)


def make_sweep_point(number: int, label: str, **fields: Any) -> dict[str, Any]:
    """Return a point as sweep.json has it, with fields that no report reads."""
    unread = {"repeat": 1, "variables": {"A": "1"}, "seconds": 60.0}
    usual = {"distribution": "block", "environment": ""}
    return {"id": f"{number:012x}", "label": label, **unread, **usual, **fields}


def write_sweep(folder: Path, points: Sequence[tuple[dict[str, Any], Sequence[Run]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sweep = {
        "schema": 1,
        "name": "links",
        "mode": "one",
        "points": [point for point, _ in points],
    }
    (folder / "sweep.json").write_bytes(msgspec.json.encode(sweep))
    for point, runs in points:
        for run in runs:
            write_run(folder / "runs" / str(point["id"]), run)
    return folder


def sample_sweep(folder: Path) -> Path:
    """Write a sweep of 1, 2 and 4 nodes in two environments.

    The run of one more point failed, and another point has not run.
    """
    points: list[tuple[dict[str, Any], Sequence[Run]]] = []
    for environment, factor in (("plain", 1.0), ("tuned", 1.2)):
        for nodes in (4, 2, 1):
            label = f"{nodes} nodes x 2, {environment}"
            run = scaling_run(nodes, 2, "block", factor, EMULATION)
            point = make_sweep_point(len(points), label, environment=environment)
            points.append((point, [run]))
    points.append((make_sweep_point(98, "4 nodes x 1"), [failed_node_run()]))
    points.append((make_sweep_point(99, "8 nodes x 1"), []))
    return write_sweep(folder, points)
