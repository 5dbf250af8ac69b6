"""Synthetic cases, records and runs for the tests of reports/."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.plan.cases import Case, make_case
from parbench.bench.plan.plan import Plan, SkippedCase
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import (
    Check,
    Noise,
    RankState,
    Record,
    Samples,
    SkipReason,
    Status,
    WorldInfo,
    encode_record,
)
from parbench.bench.results.runs import Run, RunInfo, create_run, open_writer, write_run_info
from parbench.bench.results.stats import Grade

Metrics = dict[str, MetricValue]
Action = tuple[str, int, int]
"""An action of a pipeline schedule with its start and stop in microseconds."""

WORLD = WorldInfo(size=4, nodes=1, backend="gloo", device="cpu")
STARTED = "2026-01-02T03:04:05.678Z"
METHOD = "median of 120 iterations of one repetition, order-statistics interval"
HOSTILE_TEXT = "<script>alert('x')</script> [bold]$x$ & \x1b[31mred"
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


def collective_case(
    operation: str = "all_reduce", size_bytes: int = 1024, **params: Any
) -> Case:
    kind = "p2p" if operation == "sendrecv" else "collective"
    target = f"parbench.bench.operations.collectives:{operation}"
    shape: dict[str, Any] = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking"}
    return make_case(f"{kind}.{operation}", target, {**shape, **params})


def step_case(name: str = "ddp", **params: Any) -> Case:
    return make_case(f"step.{name}", f"workloads.{name}:prepare", {"layers": 4, **params})


def seconds_metric(value: float | None) -> MetricValue:
    """Return a time whose interval reaches a tenth of the value up and down."""
    if value is None:
        return MetricValue(value=None, unit="s", better="lower", method="unknown")
    low, high = value * 0.9, value * 1.1
    return MetricValue(
        value=value,
        unit="s",
        better="lower",
        low=low,
        high=high,
        method=METHOD,
    )


def rate_metric(value: float | None, unit: str = "B/s") -> MetricValue:
    return MetricValue(value=value, unit=unit, better="higher", method=METHOD)


def counted_metric(value: float | None, unit: str) -> MetricValue:
    return MetricValue(value=value, unit=unit, better="lower", method="counted")


def counted_metrics(unit: str, values: Mapping[str, float | None]) -> Metrics:
    return {name: counted_metric(value, unit) for name, value in values.items()}


def collective_metrics(case: Case, seconds: float) -> Metrics:
    rate = float(case.params["size_bytes"]) / seconds
    return {
        "time": seconds_metric(seconds),
        "algbw": rate_metric(rate),
        "busbw": rate_metric(rate * 1.5),
        "time_p99": seconds_metric(seconds * 2),
    }


def step_metrics(seconds: float) -> Metrics:
    return {
        "step_time": seconds_metric(seconds),
        "tokens_per_second": rate_metric(4096 / seconds, "tokens/s"),
        "bytes_sent.dp": MetricValue(
            value=3 << 20,
            unit="B",
            better="lower",
            method="closed form",
        ),
    }


def training_metrics(seconds: float = 0.010, axes: Sequence[str] = ("dp",)) -> Metrics:
    """Return the metrics of a training step, whose parts add up to its time."""
    shares = {
        "compute": 0.6,
        "exposed_copy": 0.04,
        "idle": 0.06,
        "ect": 0.33,
        "straggler_wait": 0.04,
    }
    memory = {
        "parameters": 1 << 20,
        "gradients": 1 << 20,
        "optimizer": 2 << 20,
        "activations": 3 << 20,
    }
    metrics = step_metrics(seconds)
    for axis in axes:
        shares[f"exposed_comm.{axis}"] = 0.3 / len(axes)
        shares[f"comm_transfer.{axis}"] = 0.2 / len(axes)
        metrics[f"bytes_sent.{axis}"] = counted_metric(3 << 20, "B")
        metrics[f"bytes_expected.{axis}"] = counted_metric(3 << 20, "B")
        metrics[f"bytes_ratio.{axis}"] = counted_metric(1.0, "")
    metrics |= counted_metrics("s", {name: share * seconds for name, share in shares.items()})
    for component, num_bytes in memory.items():
        for source in ("memory", "memory_formula", "memory_counted"):
            metrics[f"{source}.{component}"] = counted_metric(num_bytes, "B")
    metrics["mfu"] = rate_metric(0.345, "")
    metrics["overlap"] = rate_metric(0.33, "")
    return metrics


def comm_call(
    op: str = "all_reduce", num_bytes: int = 1 << 20, axis: str = "dp", **fields: Any
) -> dict[str, Any]:
    return {"axis": axis, "op": op, "bytes": num_bytes, "ranks": 4, "count": 1, **fields}


def curve_records(
    operation: str = "all_reduce", latency: float = 20e-6, **params: Any
) -> list[Record]:
    """Return the records of an operation from 1K to 16M, whose fit is that latency and 3 GB/s."""
    records = []
    for size in [1024 * 4**i for i in range(8)]:
        case = collective_case(operation, size, **params)
        records.append(ok_record(case, seconds=latency + size / 3e9))
    return records


def ok_record(
    case: Case,
    repetition: int = 0,
    seconds: float = 1e-3,
    *,
    metrics: Mapping[str, MetricValue] | None = None,
    grade: Grade = "stable",
    n: int = 120,
    **fields: Any,
) -> Record:
    if metrics is None:
        is_sized = "size_bytes" in case.params
        metrics = collective_metrics(case, seconds) if is_sized else step_metrics(seconds)
    usual: dict[str, Any] = {
        "world": WORLD,
        "status": "ok",
        "stop": "precision",
        "check": Check(passed=True, wrong=0),
        "samples": Samples(values=[seconds] * n),
        "metrics": dict(metrics),
        "noise": Noise(grade=grade, spread=0.02),
        "started": STARTED,
        "seconds": 0.5,
    }
    return Record(case=case, repetition=repetition, **{**usual, **fields})


def failed_record(
    case: Case,
    repetition: int = 0,
    status: Status = "failed",
    reason: str = "it broke",
    **fields: Any,
) -> Record:
    usual: dict[str, Any] = {"world": WORLD, "started": STARTED, "seconds": 0.1}
    return Record(
        case=case, repetition=repetition, status=status, reason=reason, **{**usual, **fields}
    )


def out_of_budget_record(case: Case, repetition: int = 0) -> Record:
    return failed_record(
        case, repetition, "skipped", "out of time", skip_reason=SkipReason.OUT_OF_BUDGET
    )


def hang_record(case: Case) -> Record:
    waiting = RankState(
        rank=0,
        host="node-a",
        pid=41,
        state="waiting in all_reduce",
        stack="File a.py, line 7, in step",
    )
    absent = RankState(
        rank=1,
        host="node-b",
        pid=42,
        state="did not arrive",
        stack="File b.py, line 9, in <listcomp>",
    )
    reason = "rank 1 did not arrive within 60 s"
    return failed_record(case, 0, "hang", reason, ranks=[waiting, absent])


def pipeline_case(schedule: str = "1f1b", microbatches: int = 4, **params: Any) -> Case:
    target = "parbench.workloads.pipeline_parallel.pipeline_step:prepare"
    shape: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "layers": 4}
    return make_case("workload.pp", target, {**shape, **params})


def pipeline_actions(schedule: str, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return a rank's forward passes of 1 ms, then its backward passes of 2 ms.

    The waits between passes grow, so that charts can join some of them. The backward passes of
    zero-bubble schedules are split into I and W.
    """
    waits = [5 * i * i for i in range(microbatches + 1)]
    forward_start = 1000 * rank
    backward_start = 1000 * (ranks + microbatches) + waits[-1] + 2000 * (ranks - 1 - rank)
    actions = []
    for i in range(microbatches):
        start = forward_start + 1000 * i + waits[i]
        actions.append((f"{rank}F{i}", start, start + 1000))
    for i in range(microbatches):
        start = backward_start + 2000 * i + waits[i]
        if schedule.startswith("zb"):
            actions.append((f"{rank}I{i}", start, start + 1000))
            actions.append((f"{rank}W{i}", start + 1000, start + 2000))
        else:
            actions.append((f"{rank}B{i}", start, start + 2000))
    return actions


def pipeline_details(
    schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, **fields: Any
) -> dict[str, Any]:
    timeline = [pipeline_actions(schedule, rank, ranks, microbatches) for rank in range(ranks)]
    return {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": microbatches,
        "virtual_stages": 1,
        "layers_by_stage": [2] * ranks,
        "stages_by_rank": [[rank] for rank in range(ranks)],
        "clock": "one host, one monotonic clock",
        "measured": timeline,
        "predicted": timeline,
        **fields,
    }


def pipeline_metrics(seconds: float = 0.020) -> Metrics:
    """Return the metrics of a pipeline step, which is idle for a quarter of its time."""
    shares = {
        "compute": 0.75,
        "idle": 0.25,
        "idle_schedule": 0.15,
        "idle_imbalance": 0.05,
        "idle_rest": 0.05,
    }
    metrics = step_metrics(seconds)
    metrics |= counted_metrics("s", {name: share * seconds for name, share in shares.items()})
    metrics["bubble_fraction"] = counted_metric(0.263, "")
    metrics["bubble_fraction_simulated"] = counted_metric(0.237, "")
    metrics["bubble_fraction_formula"] = counted_metric(0.21, "")
    metrics["in_flight"] = counted_metric(2.0, "microbatches")
    metrics["memory.activations"] = counted_metric(5 << 20, "B")
    return metrics


def pipeline_record(
    schedule: str = "1f1b", repetition: int = 0, seconds: float = 0.020, **fields: Any
) -> Record:
    """Return a pipeline step with these details; `layers_per_stage` and `hidden` are parameters."""
    params = {
        name: fields.pop(name) for name in ("layers_per_stage", "hidden") if name in fields
    }
    case = pipeline_case(schedule, fields.get("microbatches", 4), **params)
    details = {"pipeline": pipeline_details(schedule, **fields)}
    return ok_record(
        case, repetition, seconds, metrics=pipeline_metrics(seconds), details=details
    )


def context_details(
    method: str, sequence: int, ranks: int = 2, **fields: Any
) -> dict[str, Any]:
    """Return the details of attention over ranks; usp shares heads between two of them."""
    axes = {"cp": {"ranks": ranks}}
    if method == "usp":
        axes = {"ulysses": {"ranks": 2}, "ring": {"ranks": ranks // 2}}
    return {
        "method": method,
        "sequence": sequence,
        "tokens_per_rank": sequence // ranks,
        "axes": {**axes, "dp": {"ranks": ranks}},
        **fields,
    }


def context_record(
    method: str = "ring",
    seconds: float = 0.02,
    sequence: int = 64,
    *,
    num_bytes: float = 1 << 20,
    **fields: Any,
) -> Record:
    """Return a context-parallel step that sends three times `num_bytes` on each axis.

    The axes of attention send equal bytes; each exposes 30 % of the step.
    """
    details = context_details(method, sequence, **fields)
    axes = [axis for axis in details["axes"] if axis != "dp"]
    metrics = step_metrics(seconds)
    metrics["compute"] = counted_metric((0.9 - 0.3 * len(axes)) * seconds, "s")
    metrics["exposed_comm.dp"] = counted_metric(0.1 * seconds, "s")
    for axis in axes:
        metrics[f"exposed_comm.{axis}"] = counted_metric(0.3 * seconds, "s")
        metrics[f"bytes_sent.{axis}"] = counted_metric(3 * num_bytes, "B")
    metrics["memory.activations"] = counted_metric(5 << 20, "B")
    params: dict[str, Any] = {
        "shape": "tiny",
        "sequence": sequence,
        "microbatch": 4,
        "cp_method": method,
    }
    target = "parbench.workloads.context_parallel.context_step:prepare"
    case = make_case("workload.cp", target, params)
    return ok_record(case, seconds=seconds, metrics=metrics, details=details)


EXPERT_LOADS = {
    "balanced": [128] * 8,
    "zipf": [94, 62, 55, 123, 190, 46, 76, 378],
}


def expert_metrics(routing: str, capacity: float, seconds: float) -> Metrics:
    """Return the metrics of an expert-parallel step; the load is uneven unless it is balanced."""
    metrics = step_metrics(seconds)
    metrics["exposed_comm.ep"] = counted_metric(0.4 * seconds, "s")
    metrics["bytes_ratio.ep"] = counted_metric(1.0, "")
    metrics["imbalance.rank"] = counted_metric(1.0 if routing == "balanced" else 1.35, "")
    metrics["drop_rate"] = counted_metric(0.125 if capacity else 0.0, "")
    return metrics


def expert_record(
    scope: str = "ep_layer",
    routing: str = "balanced",
    capacity: float = 0.0,
    seconds: float = 0.02,
    **fields: Any,
) -> Record:
    """Return a step of eight experts in one layer on two ranks."""
    load = EXPERT_LOADS[routing]
    rank_load = [sum(load[:4]), sum(load[4:])]
    details: dict[str, Any] = {"rank_load": [rank_load], "axes": {"ep": {"ranks": 2}}}
    params: dict[str, Any] = {
        "shape": "tiny",
        "ep": 0,
        "experts": 8,
        "top_k": 2,
        "variant": "all_to_all",
        "capacity": capacity,
        "routing": routing,
    }
    return ok_record(
        make_case(f"workload.{scope}", f"workloads.{scope}:prepare", params),
        seconds=seconds,
        metrics=expert_metrics(routing, capacity, seconds),
        details={**details, **fields},
        notes=["another note"],
    )


def make_plan(
    cases: Iterable[Case],
    *,
    repetitions: int = 1,
    skipped: Sequence[SkippedCase] = (),
    preset: str = "node",
) -> Plan:
    return Plan(
        cases=tuple(cases),
        skipped=tuple(skipped),
        preset=preset,
        nproc=4,
        backend="gloo",
        device="cpu",
        repetitions=repetitions,
        budget_seconds=90.0,
        timeout_seconds=60.0,
    )


def make_run(
    plan: Plan, records: Iterable[Record], environment: dict[str, Any] | None = None
) -> Run:
    """Return a run whose records went through their encoding, as those of a folder do."""
    decoded = tuple(
        msgspec.json.decode(encode_record(record), type=Record) for record in records
    )
    info = RunInfo(
        id="run-1",
        started=STARTED,
        host="node-a",
        parbench="0.1.0",
        plan=plan,
        environment=environment,
    )
    return Run(path=Path("runs/run-1"), info=info, records=decoded)


def write_run(out: Path, run: Run) -> Path:
    """Write a run's folder; its run.json does not depend on when and where the test runs."""
    path, _ = create_run(out, run.info.plan, "0.1.0")
    write_run_info(path, run.info)
    with open_writer(path) as writer:
        for record in run.records:
            writer.write(record)
    return path


OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "sendrecv",
)
STEP_SECONDS = (
    (step_case("ddp"), 0.012),
    (step_case("fsdp"), 0.017),
    (step_case("pipeline", schedule="1f1b"), 0.02),
    (step_case("pipeline", schedule="gpipe"), 0.024),
)


def sample_times() -> list[tuple[Case, float]]:
    """Return the cases of the sample run's collectives with their seconds."""
    times = []
    for mode, speed in (("blocking", 1), ("pipelined", 3)):
        for i, name in enumerate(OPERATIONS):
            for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
                seconds = 20e-6 + 5e-6 * i + size * (1 + i / 5) / 3e9
                times.append((collective_case(name, size, mode=mode), seconds / speed))
    return times


def sample_run(*, repetitions: int = 3) -> Run:
    """Return a run of six operations and four steps with one bad case of each status."""
    collectives = sample_times()
    hung = collective_case("all_reduce", 3 << 20)
    wrong = step_case("expert")
    failed = collective_case("all_to_all", 7 << 20)
    cut = collective_case("broadcast", 5 << 20)
    details = {"send_bytes": 10, "convention": "nccl-tests"}
    notes = ["oversubscribed: 4 ranks on 2 cores. Times include waiting for a core."]
    records = []
    for i in range(repetitions):
        factor = 1 + 0.04 * i
        for case, seconds in collectives:
            records.append(
                ok_record(case, i, seconds * factor, details={**details, "repetition": i})
            )
        for case, seconds in STEP_SECONDS:
            records.append(ok_record(case, i, seconds * factor, notes=notes, grade="noisy"))
        records.append(failed_record(failed, i, "failed", HOSTILE_TEXT))
    records.append(hang_record(hung))
    check = Check(passed=False, wrong=3)
    records.append(failed_record(wrong, 0, "wrong", "3 of 96 gradients differ", check=check))
    skip: dict[str, Any] = {"status": "skipped", "skip_reason": SkipReason.EARLIER_FAILURE}
    for i in range(1, repetitions):
        records.append(
            failed_record(hung, i, reason="not tried again: hang in repetition 1", **skip)
        )
        records.append(
            failed_record(wrong, i, reason="not tried again: wrong in repetition 1", **skip)
        )
    changed = {"host.cpu_model": ["Example CPU", "Another CPU"]}
    records.append(ok_record(cut, 0, 2e-3, environment={"changed": changed}))
    reason = "size 1001 B is not a multiple of 4 ranks x 4 B"
    skipped = SkippedCase(case=collective_case("all_gather", 1001), reason=reason)
    records.append(failed_record(skipped.case, 0, "skipped", reason))
    cases = [case for case, _ in (*collectives, *STEP_SECONDS)]
    plan = make_plan(
        [*cases, hung, wrong, failed, cut], repetitions=repetitions, skipped=[skipped]
    )
    return make_run(plan, records, ENVIRONMENT)
