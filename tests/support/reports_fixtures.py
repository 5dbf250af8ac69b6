"""Synthetic runs for the tests of reports/: made through the real plan, record and run folder."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.plan import Plan, Skipped
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import (
    Check,
    Noise,
    RankState,
    Record,
    Samples,
    Status,
    Stop,
    WorldInfo,
    encode,
)
from parbench.bench.results.runs import Run, RunInfo, create_run, open_writer, write_info
from parbench.bench.results.stats import Grade
from parbench.reports.analysis.fits import LINK, Ceiling

WORLD = WorldInfo(size=4, nodes=1, backend="gloo", device="cpu")
STARTED = "2026-01-02T03:04:05.678Z"
METHOD = "median of 120 iterations of one launch, order-statistics interval"
HOSTILE_TEXT = "<script>alert('x')</script> [bold]$x$ & \x1b[31mred"


def collective_case(operation: str = "all_reduce", size_bytes: int = 1024, **params: Any) -> Case:
    given = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking", **params}
    kind = "p2p" if operation == "sendrecv" else "collective"
    return make_case(
        f"{kind}.{operation}", f"parbench.bench.operations.collectives:{operation}", given
    )


def step_case(name: str = "ddp", **params: Any) -> Case:
    return make_case(f"step.{name}", f"workloads.{name}:prepare", {"layers": 4, **params})


def seconds_metric(value: float | None, reach: float = 0.1) -> MetricValue:
    if value is None:
        return MetricValue(value=None, unit="s", better="lower", method="unknown")
    return MetricValue(
        value=value,
        unit="s",
        better="lower",
        low=value * (1 - reach),
        high=value * (1 + reach),
        method=METHOD,
    )


def rate_metric(value: float | None, unit: str = "B/s") -> MetricValue:
    return MetricValue(value=value, unit=unit, better="higher", method=METHOD)


def collective_metrics(case: Case, seconds: float) -> dict[str, MetricValue]:
    rate = float(case.params["size_bytes"]) / seconds
    return {
        "time": seconds_metric(seconds),
        "algbw": rate_metric(rate),
        "busbw": rate_metric(rate * 1.5),
        "time_p99": seconds_metric(seconds * 2),
    }


def step_metrics(seconds: float) -> dict[str, MetricValue]:
    return {
        "step_time": seconds_metric(seconds),
        "tokens_per_second": rate_metric(4096 / seconds, "tokens/s"),
        "bytes_sent.dp": MetricValue(value=3 << 20, unit="B", better="lower", method="closed form"),
    }


def counted_metric(value: float | None, unit: str) -> MetricValue:
    return MetricValue(value=value, unit=unit, better="lower", method="counted")


def training_metrics(
    seconds: float = 0.010, axes: Sequence[str] = ("dp",)
) -> dict[str, MetricValue]:
    """Return all that a training step on these axes can know; its parts add up to 98 % of ``seconds``."""
    shares = {
        "compute": 0.6,
        "exposed_copy": 0.02,
        "idle": 0.06,
        "residual": 0.02,
        "ect": 0.33,
        "comm_wait": 0.25,
    }
    shares |= {"straggler_wait": 0.04, "compute_slowdown": 0.05}
    shares |= {f"exposed_comm.{axis}": 0.3 / len(axes) for axis in axes}
    shares |= {f"comm_transfer.{axis}": 0.2 / len(axes) for axis in axes}
    memory = {
        "parameters": 1 << 20,
        "gradients": 1 << 20,
        "optimizer": 2 << 20,
        "activations": 3 << 20,
    }
    found = step_metrics(seconds) | {
        name: counted_metric(share * seconds, "s") for name, share in shares.items()
    }
    for axis in axes:
        found |= {
            f"bytes_{name}.{axis}": counted_metric(3 << 20, "B") for name in ("sent", "expected")
        }
        found[f"bytes_ratio.{axis}"] = counted_metric(1.0, "")
    for source in ("memory", "memory_formula", "memory_counted"):
        found |= {
            f"{source}.{name}": counted_metric(num_bytes, "B") for name, num_bytes in memory.items()
        }
    found["mfu"] = rate_metric(0.345, "")
    found |= {"overlap": rate_metric(0.33, ""), "tracing_overhead": counted_metric(0.03, "")}
    return found


def comm_call(
    op: str = "all_reduce", num_bytes: int = 1 << 20, axis: str = "dp", **more: Any
) -> dict[str, Any]:
    return {"axis": axis, "op": op, "bytes": num_bytes, "ranks": 4, "count": 1, **more}


def curve_records(
    operation: str = "all_reduce", latency: float = 20e-6, **params: Any
) -> list[Record]:
    """Return an operation's records whose fit is that latency and 3 GB/s, from 1K to 16M."""
    sizes = [1024 * 4**i for i in range(8)]
    return [
        ok_record(collective_case(operation, size, **params), seconds=latency + size / 3e9)
        for size in sizes
    ]


def ok_record(
    case: Case,
    launch: int = 0,
    seconds: float = 1e-3,
    *,
    metrics: Mapping[str, MetricValue] | None = None,
    stop: Stop = "precision",
    grade: Grade = "stable",
    steady: str = "flat",
    n: int = 120,
    **more: Any,
) -> Record:
    usual = (
        collective_metrics(case, seconds) if "size_bytes" in case.params else step_metrics(seconds)
    )
    fields: dict[str, Any] = {
        "case": case,
        "world": WORLD,
        "launch": launch,
        "status": "ok",
        "stop": stop,
        "check": Check(passed=True, wrong=0),
        "samples": Samples(values=[seconds] * n),
        "metrics": dict(usual if metrics is None else metrics),
        "noise": Noise(grade=grade, spread=0.02, steady=steady),
        "started": STARTED,
        "seconds": 0.5,
    }
    return Record(**{**fields, **more})


def failed_record(
    case: Case, launch: int = 0, status: Status = "failed", reason: str = "it broke", **more: Any
) -> Record:
    fields: dict[str, Any] = {
        "case": case,
        "world": WORLD,
        "launch": launch,
        "status": status,
        "reason": reason,
    }
    return Record(**{**fields, "started": STARTED, "seconds": 0.1, **more})


def hang_record(case: Case, launch: int = 0) -> Record:
    ranks = [
        RankState(
            rank=0,
            host="node-a",
            pid=41,
            state="waiting in all_reduce",
            stack="File a.py, line 7, in step",
        ),
        RankState(
            rank=1,
            host="node-b",
            pid=42,
            state="did not arrive",
            stack="File b.py, line 9, in <listcomp>",
        ),
    ]
    return failed_record(case, launch, "hang", "rank 1 did not arrive within 60 s", ranks=ranks)


PIPELINE_MICROSECONDS = {"F": 1000, "B": 2000, "I": 1000, "W": 900}


def pipeline_case(schedule: str = "1f1b", microbatches: int = 4, **params: Any) -> Case:
    given = {"schedule": schedule, "microbatches": microbatches, "layers": 4, **params}
    return make_case(
        "workload.pp", "parbench.workloads.pipeline_parallel.pipeline_step:prepare", given
    )


def pipeline_orders(schedule: str, ranks: int, microbatches: int) -> list[list[str]]:
    """Return each rank's actions, one stage a rank: ``gpipe``, else 1F1B, its backward split for ``zb``."""
    orders = []
    for rank in range(ranks):
        ahead = microbatches if schedule == "gpipe" else min(ranks - rank, microbatches)
        order = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            order += (
                [f"{rank}I{i}", f"{rank}W{i}"] if schedule.startswith("zb") else [f"{rank}B{i}"]
            )
            order += [f"{rank}F{ahead + i}"] if ahead + i < microbatches else []
        orders.append(order)
    return orders


def pipeline_timeline(
    orders: Sequence[Sequence[str]], delay: int = 0
) -> list[list[tuple[str, int, int]]]:
    """Return when each action runs, as soon as its rank and what it needs are done; messages take ``delay``."""
    stops: dict[str, int] = {}
    ran: list[list[tuple[str, int, int]]] = [[] for _ in orders]
    while any(len(done) < len(order) for done, order in zip(ran, orders, strict=True)):
        for rank, (done, order) in enumerate(zip(ran, orders, strict=True)):
            action = order[len(done)] if len(done) < len(order) else ""
            what = action.lstrip("0123456789")
            needs = {"F": rank - 1, "B": rank + 1, "I": rank + 1}.get(what[:1], -1)
            is_first = needs in (-1, len(orders))
            if action and (is_first or f"{needs}{what}" in stops):
                start = done[-1][2] if done else 0
                start = start if is_first else max(start, stops[f"{needs}{what}"] + delay)
                stops[action] = start + PIPELINE_MICROSECONDS[what[0]]
                done.append((action, start, stops[action]))
    return ran


def pipeline_idle(
    timeline: Sequence[Sequence[tuple[str, int, int]]],
) -> list[tuple[int, int, int, str]]:
    end = max(done[-1][2] for done in timeline)
    found = []
    for rank, done in enumerate(timeline):
        starts = [0, *(stop for _, _, stop in done)]
        gaps = [
            gap
            for gap in zip(starts, [*(start for _, start, _ in done), end], strict=True)
            if gap[0] < gap[1]
        ]
        for i, (start, stop) in enumerate(gaps):
            middle = (start + stop) // 2
            found += [
                (rank, start, middle, "schedule"),
                (rank, middle, stop, ("imbalance", "p2p", "rest")[i % 3]),
            ]
    return found


def pipeline_details(
    schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, **more: Any
) -> dict[str, Any]:
    orders = pipeline_orders(schedule, ranks, microbatches)
    measured = pipeline_timeline(orders, delay=100)
    return {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": microbatches,
        "chunks": 1,
        "layers_by_stage": [2] * ranks,
        "stages_by_rank": [[rank] for rank in range(ranks)],
        "in_flight_by_rank": [ranks - rank for rank in range(ranks)],
        "activation_bytes_by_rank": [(ranks - rank) << 20 for rank in range(ranks)],
        "clock": "one host, one monotonic clock",
        "clock_uncertainty_seconds": 0.0,
        "measured": measured,
        "predicted": pipeline_timeline(orders),
        "idle": pipeline_idle(measured),
        **more,
    }


def simulated_schedule(
    schedule: str, seconds: float | None = None, chunks: int = 1, **more: Any
) -> dict[str, Any]:
    told = {
        "step_seconds": seconds,
        "bubble_fraction": 0.05,
        "in_flight": 4.0,
        "activation_bytes": 3 << 20,
    }
    known = told if seconds is not None else {}
    return {"schedule": schedule, "chunks": chunks, "measured": False, **known, **more}


def pipeline_metrics(seconds: float = 0.020) -> dict[str, MetricValue]:
    """Return all that a pipeline step can know; idle is a quarter of ``seconds``."""
    causes = {"schedule": 0.15, "imbalance": 0.05, "p2p": 0.03, "rest": 0.02}
    shares = {"compute": 0.7, "idle": 0.25, "makespan": 0.95, "non_pipeline_time": 0.05}
    shares |= {f"idle_{cause}": share for cause, share in causes.items()}
    ratios = {"bubble_fraction": 0.263, "bubble_fraction_span": 0.2, "bubble_overhead": 0.357}
    found = step_metrics(seconds) | {
        name: counted_metric(share * seconds, "s") for name, share in shares.items()
    }
    for suffix, factor in (("", 1.0), ("_simulated", 0.9), ("_formula", 0.8)):
        found |= {
            f"{name}{suffix}": counted_metric(ratio * factor, "") for name, ratio in ratios.items()
        }
    found |= {
        "in_flight": counted_metric(2.0, "microbatches"),
        "memory.activations": counted_metric(5 << 20, "B"),
    }
    return found


def pipeline_record(
    schedule: str = "1f1b", launch: int = 0, seconds: float = 0.020, **more: Any
) -> Record:
    """Return a record of a pipeline step; ``more`` changes its details, or its parameters if they are of the model."""
    params = {name: more.pop(name) for name in ("split", "hidden") if name in more}
    details = {"pipeline": pipeline_details(schedule, **more)}
    case = pipeline_case(schedule, more.get("microbatches", 4), **params)
    return ok_record(case, launch, seconds, metrics=pipeline_metrics(seconds), details=details)


def link_ceiling(bytes_per_second: float) -> Ceiling:
    return Ceiling(name=LINK, bytes_per_second=bytes_per_second)


def make_plan(cases: Iterable[Case], *, launches: int = 1, skipped: Sequence[Skipped] = ()) -> Plan:
    given: dict[str, Any] = {
        "preset": "node",
        "nproc": 4,
        "backend": "gloo",
        "device": "cpu",
        "launches": launches,
    }
    given |= {"budget_seconds": 90.0, "timeout_seconds": 60.0}
    return Plan(cases=tuple(cases), skipped=tuple(skipped), **given)


def make_info(plan: Plan, environment: dict[str, Any] | None = None) -> RunInfo:
    return RunInfo(
        id="run-1",
        started=STARTED,
        host="node-a",
        parbench="0.1.0",
        plan=plan,
        environment=environment,
    )


def make_run(
    plan: Plan, records: Iterable[Record], environment: dict[str, Any] | None = None
) -> Run:
    read = tuple(msgspec.json.decode(encode(record), type=Record) for record in records)
    return Run(path=Path("runs/run-1"), info=make_info(plan, environment), records=read)


def write_run(out: Path, run: Run) -> Path:
    """Write a run's folder; what run.json says does not depend on when and where the test runs."""
    path, _ = create_run(out, run.info.plan, "0.1.0")
    write_info(path, run.info)
    with open_writer(path) as writer:
        for record in run.records:
            writer.write(record)
    return path


ENVIRONMENT = {
    "host": {
        "name": "node-a",
        "cpu_model": "Example CPU",
        "memory_bytes": 8 << 30,
        "governor": None,
    },
    "versions": {"python": "3.11.7", "numpy": "2.4.6"},
    "variables": {"OMP_NUM_THREADS": "1"},
    "process": {"cores": 2, "affinity": [0, 1]},
    "torch": {"version": "2.13.0", "cuda": None, "threads": 1},
}


def sample_run(*, launches: int = 3) -> Run:
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    operations = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "sendrecv",
    ]
    curve = [
        (
            collective_case(name, size, mode=mode),
            (20e-6 + 5e-6 * i + size * (1 + i / 5) / 3e9) / (3 if mode[0] == "p" else 1),
        )
        for mode in ("blocking", "pipelined")
        for i, name in enumerate(operations)
        for size in sizes
    ]
    steps = [
        (step_case("ddp"), 0.012),
        (step_case("fsdp"), 0.017),
        (step_case("pipeline", schedule="1f1b"), 0.02),
    ]
    steps.append((step_case("pipeline", schedule="gpipe"), 0.024))
    broken, wrong, lost = (
        collective_case("all_reduce", 3 << 20),
        step_case("expert"),
        collective_case("broadcast", 5 << 20),
    )
    failed = collective_case("all_to_all", 7 << 20)
    records = []
    for launch in range(launches):
        wobble = 1 + 0.04 * launch
        records += [
            ok_record(
                case,
                launch,
                seconds * wobble,
                details={"send_bytes": 10, "convention": "nccl-tests", "launch": launch},
            )
            for case, seconds in curve
        ]
        notes = ["functional only: 4 processes on 2 cores"]
        records += [
            ok_record(case, launch, seconds * wobble, notes=notes, grade="noisy")
            for case, seconds in steps
        ]
        records.append(
            hang_record(broken)
            if launch == 0
            else failed_record(broken, launch, "skipped", "not tried again: hang in launch 1")
        )
    records.append(
        failed_record(
            wrong, 0, "wrong", "3 of 96 gradients differ", check=Check(passed=False, wrong=3)
        )
    )
    records += [
        failed_record(wrong, launch, "skipped", "not tried again: wrong in launch 1")
        for launch in range(1, launches)
    ]
    records += [failed_record(failed, launch, "failed", HOSTILE_TEXT) for launch in range(launches)]
    records.append(
        ok_record(
            lost,
            0,
            2e-3,
            environment={"changed": {"host.cpu_model": ["Example CPU", "Another CPU"]}},
        )
    )
    skipped = Skipped(
        case=collective_case("all_gather", 1001),
        reason="size 1001 B is not a multiple of 4 ranks x 4 B",
    )
    records.append(failed_record(skipped.case, 0, "skipped", skipped.reason))
    cases = [case for case, _ in (*curve, *steps)] + [broken, wrong, failed, lost]
    plan = make_plan(cases, launches=launches, skipped=[skipped])
    return make_run(plan, records, ENVIRONMENT)


def context_case(method: str = "ring", sequence: int = 64, **params: Any) -> Case:
    given = {"shape": "tiny", "sequence": sequence, "microbatch": 4, "method": method, **params}
    return make_case(
        "workload.cp", "parbench.workloads.context_parallel.context_step:prepare", given
    )


def context_details(
    method: str = "ring", sequence: int = 64, ranks: int = 2, **more: Any
) -> dict[str, Any]:
    """Return what a record says of attention over ranks; usp on half of them by heads."""
    axes = (
        {"ulysses": {"ranks": 2}, "ring": {"ranks": ranks // 2}}
        if method == "usp"
        else {"cp": {"ranks": ranks}}
    )
    return {
        "method": method,
        "mask": "causal",
        "sequence": sequence,
        "tokens_per_rank": sequence // ranks,
        "axes": {**axes, "dp": {"ranks": ranks}},
        "attention_bytes": {"forward": {}, "backward": {}},
        "crossover_ranks": 2.0,
        **more,
    }


def context_metrics(
    seconds: float, axes: Iterable[str] = ("cp",), num_bytes: float = 1 << 20
) -> dict[str, MetricValue]:
    """Return what a context-parallel step knows, the same on each axis of attention; backward sends twice as much."""
    axes = list(axes)
    found = step_metrics(seconds) | {
        "compute": counted_metric((0.9 - 0.3 * len(axes)) * seconds, "s")
    }
    for axis in axes:
        found |= {
            f"exposed_comm.{axis}": counted_metric(0.3 * seconds, "s"),
            f"bytes_sent.{axis}": counted_metric(3 * num_bytes, "B"),
        }
        for direction, times, ratio in (("forward", 1, 1.0), ("backward", 2, 1.25)):
            found[f"bytes_sent.{axis}.{direction}"] = counted_metric(times * num_bytes, "B")
            found[f"bytes_ratio.{axis}.{direction}"] = counted_metric(ratio, "")
    found |= {
        "exposed_comm.dp": counted_metric(0.1 * seconds, "s"),
        "memory.activations": counted_metric(5 << 20, "B"),
    }
    return found | {"load_balance": rate_metric(0.65, "")}


def context_record(
    method: str = "ring",
    seconds: float = 0.02,
    sequence: int = 64,
    *,
    num_bytes: float = 1 << 20,
    **more: Any,
) -> Record:
    details = context_details(method, sequence, **more)
    axes = [axis for axis in details["axes"] if axis != "dp"]
    metrics = context_metrics(seconds, axes, num_bytes)
    return ok_record(
        context_case(method, sequence), seconds=seconds, metrics=metrics, details=details
    )


EXPERT_LOADS = {
    "balanced": [128] * 8,
    "hot_rank": [192] * 4 + [64] * 4,
    "zipf": [94, 62, 55, 123, 190, 46, 76, 378],
}


def expert_case(
    scope: str = "ep_layer", routing: str = "balanced", capacity: float = 0.0, **params: Any
) -> Case:
    given: dict[str, Any] = {
        "shape": "tiny",
        "ep": 0,
        "experts": 8,
        "top_k": 2,
        "variant": "all_to_all",
    }
    given |= {"capacity": capacity, "routing": routing, **params}
    return make_case(f"workload.{scope}", f"workloads.{scope}:prepare", given)


def expert_metrics(routing: str, capacity: float, seconds: float) -> dict[str, MetricValue]:
    """Return what an expert-parallel step knows; balanced routes know of no slow-down."""
    found = step_metrics(seconds) | {
        "exposed_comm.ep": counted_metric(0.4 * seconds, "s"),
        "bytes_ratio.ep": counted_metric(1.0, ""),
    }
    ratios = {"imbalance.rank": 1.35, "imbalance.expert": 2.95}
    found |= {name: counted_metric(value, "") for name, value in ratios.items()}
    found |= {
        name: counted_metric(0.125 if capacity else 0.0, "")
        for name in ("drop_rate", "drop_rate_expected")
    }
    for way in ("dispatch", "combine"):
        found |= {
            f"{way}_bandwidth.{kind}": rate_metric(rate)
            for kind, rate in (("logical", 2e9), ("wire", 1e9))
        }
    if routing == "balanced":
        return found | {"imbalance_time": counted_metric(0.0, "s")}
    slower = MetricValue(value=1.25, low=1.2, high=1.3, better="lower", method=METHOD)
    return found | {
        "imbalance_time": counted_metric(0.2 * seconds, "s"),
        "imbalance_slowdown": slower,
    }


def expert_record(
    scope: str = "ep_layer",
    routing: str = "balanced",
    capacity: float = 0.0,
    seconds: float = 0.02,
    **more: Any,
) -> Record:
    load = EXPERT_LOADS[routing]
    ranks = [sum(load[:4]), sum(load[4:])]
    details = {"expert_load": [load], "rank_load": [ranks], "axes": {"ep": {"ranks": 2}}, **more}
    return ok_record(
        expert_case(scope, routing, capacity),
        seconds=seconds,
        metrics=expert_metrics(routing, capacity, seconds),
        details=details,
        notes=["another note", f"{scope}: what it may claim"],
    )
