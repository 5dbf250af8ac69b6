"""Synthetic runs for the tests of reports/: made through the real plan, record and run folder."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.cases import Case, make_case
from bench.ceiling import LINK, Ceiling
from bench.plan import Plan, Skipped
from bench.records import Check, Metric, Noise, RankState, Record, Samples, Status, Stop, WorldInfo, encode
from bench.runs import Run, RunInfo, create_run, open_writer, write_info
from bench.stats import Grade

WORLD = WorldInfo(size=4, nodes=1, backend="gloo", device="cpu")
STARTED = "2026-01-02T03:04:05.678Z"
METHOD = "median of 120 iterations of one launch, order-statistics interval"
HOSTILE = "<script>alert('x')</script> [bold]$x$ & \x1b[31mred"


def collective(operation: str = "all_reduce", size_bytes: int = 1024, **params: Any) -> Case:
    given = {"size_bytes": size_bytes, "dtype": "float32", "mode": "blocking", **params}
    kind = "p2p" if operation == "sendrecv" else "collective"
    return make_case(f"{kind}.{operation}", f"bench.collectives:{operation}", given)


def step(name: str = "ddp", **params: Any) -> Case:
    return make_case(f"step.{name}", f"workloads.{name}:prepare", {"layers": 4, **params})


def seconds_metric(value: float | None, reach: float = 0.1) -> Metric:
    if value is None:
        return Metric(value=None, unit="s", better="lower", method="unknown")
    return Metric(
        value=value, unit="s", better="lower", low=value * (1 - reach), high=value * (1 + reach), method=METHOD
    )


def rate_metric(value: float | None, unit: str = "B/s") -> Metric:
    return Metric(value=value, unit=unit, better="higher", method=METHOD)


def collective_metrics(case: Case, seconds: float) -> dict[str, Metric]:
    rate = float(case.params["size_bytes"]) / seconds
    return {
        "time": seconds_metric(seconds),
        "algbw": rate_metric(rate),
        "busbw": rate_metric(rate * 1.5),
        "time_p99": seconds_metric(seconds * 2),
    }


def step_metrics(seconds: float) -> dict[str, Metric]:
    return {
        "step_time": seconds_metric(seconds),
        "tokens_per_second": rate_metric(4096 / seconds, "tokens/s"),
        "bytes_sent.dp": Metric(value=3 << 20, unit="B", better="lower", method="closed form"),
    }


def plain(value: float | None, unit: str) -> Metric:
    return Metric(value=value, unit=unit, better="lower", method="counted")


def training_metrics(seconds: float = 0.010, axes: Sequence[str] = ("dp",)) -> dict[str, Metric]:
    """Return all that a training step on these axes can know; its parts add up to 98 % of ``seconds``."""
    shares = {"compute": 0.6, "exposed_copy": 0.02, "idle": 0.06, "residual": 0.02, "ect": 0.33, "comm_wait": 0.25}
    shares |= {"comm_skew": 0.04, "contention": 0.05}
    shares |= {f"exposed_comm.{axis}": 0.3 / len(axes) for axis in axes}
    shares |= {f"comm_transfer.{axis}": 0.2 / len(axes) for axis in axes}
    memory = {"parameters": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20, "activations": 3 << 20}
    found = step_metrics(seconds) | {name: plain(share * seconds, "s") for name, share in shares.items()}
    for axis in axes:
        found |= {f"bytes_{name}.{axis}": plain(3 << 20, "B") for name in ("sent", "expected")}
        found[f"bytes_ratio.{axis}"] = plain(1.0, "")
    for source in ("memory", "memory_formula", "memory_counted"):
        found |= {f"{source}.{name}": plain(num_bytes, "B") for name, num_bytes in memory.items()}
    found["mfu"] = rate_metric(0.345, "")
    found["tracing_overhead"] = plain(0.03, "")
    return found


def comm_call(op: str = "all_reduce", num_bytes: int = 1 << 20, axis: str = "dp", **more: Any) -> dict[str, Any]:
    return {"axis": axis, "op": op, "bytes": num_bytes, "ranks": 4, "count": 1, **more}


def curve_records(operation: str = "all_reduce", latency: float = 20e-6, **params: Any) -> list[Record]:
    """Return an operation's records whose fit is that latency and 3 GB/s, from 1K to 16M."""
    sizes = [1024 * 4**i for i in range(8)]
    return [ok(collective(operation, size, **params), seconds=latency + size / 3e9) for size in sizes]


def ok(
    case: Case,
    launch: int = 0,
    seconds: float = 1e-3,
    *,
    metrics: Mapping[str, Metric] | None = None,
    stop: Stop = "precision",
    grade: Grade = "quiet",
    steady: str = "flat",
    n: int = 120,
    **more: Any,
) -> Record:
    usual = collective_metrics(case, seconds) if "size_bytes" in case.params else step_metrics(seconds)
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


def bad(case: Case, launch: int = 0, status: Status = "failed", reason: str = "it broke", **more: Any) -> Record:
    fields: dict[str, Any] = {"case": case, "world": WORLD, "launch": launch, "status": status, "reason": reason}
    return Record(**{**fields, "started": STARTED, "seconds": 0.1, **more})


def hang(case: Case, launch: int = 0) -> Record:
    ranks = [
        RankState(rank=0, host="node-a", pid=41, state="waiting in all_reduce", stack="File a.py, line 7, in step"),
        RankState(rank=1, host="node-b", pid=42, state="did not arrive", stack="File b.py, line 9, in <listcomp>"),
    ]
    return bad(case, launch, "hang", "rank 1 did not arrive within 60 s", ranks=ranks)


def link(bytes_per_second: float) -> Ceiling:
    return Ceiling(name=LINK, bytes_per_second=bytes_per_second)


def make_plan(cases: Iterable[Case], *, launches: int = 1, skipped: Sequence[Skipped] = ()) -> Plan:
    return Plan(
        preset="node",
        cases=tuple(cases),
        skipped=tuple(skipped),
        nproc=4,
        backend="gloo",
        device="cpu",
        launches=launches,
        budget_seconds=90.0,
        timeout_seconds=60.0,
    )


def make_info(plan: Plan, environment: dict[str, Any] | None = None) -> RunInfo:
    return RunInfo(id="run-1", started=STARTED, host="node-a", parbench="0.1.0", plan=plan, environment=environment)


def make_run(plan: Plan, records: Iterable[Record], environment: dict[str, Any] | None = None) -> Run:
    """Return a run as it would be read back, without a folder."""
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
    "host": {"name": "node-a", "cpu_model": "Example CPU", "memory_bytes": 8 << 30, "governor": None},
    "versions": {"python": "3.11.7", "numpy": "2.4.6"},
    "variables": {"OMP_NUM_THREADS": "1"},
    "process": {"cores": 2, "affinity": [0, 1]},
    "torch": {"version": "2.13.0", "cuda": None, "threads": 1},
}


def sample_run(*, launches: int = 3) -> Run:
    """Return a run that has something of everything."""
    sizes = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
    operations = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"]
    curve = [
        (
            collective(name, size, mode=mode),
            (20e-6 + 5e-6 * i + size * (1 + i / 5) / 3e9) / (3 if mode[0] == "p" else 1),
        )
        for mode in ("blocking", "pipelined")
        for i, name in enumerate(operations)
        for size in sizes
    ]
    steps = [(step("ddp"), 0.012), (step("fsdp"), 0.017), (step("pipeline", schedule="1f1b"), 0.02)]
    steps.append((step("pipeline", schedule="gpipe"), 0.024))
    broken, wrong, lost = collective("all_reduce", 3 << 20), step("expert"), collective("broadcast", 5 << 20)
    failed = collective("all_to_all", 7 << 20)
    records = []
    for launch in range(launches):
        wobble = 1 + 0.04 * launch
        records += [
            ok(case, launch, seconds * wobble, details={"send_bytes": 10, "convention": "nccl-tests", "launch": launch})
            for case, seconds in curve
        ]
        notes = ["functional only: 4 processes on 2 cores"]
        records += [ok(case, launch, seconds * wobble, notes=notes, grade="noisy") for case, seconds in steps]
        records.append(
            hang(broken) if launch == 0 else bad(broken, launch, "skipped", "not tried again: hang in launch 1")
        )
    records.append(bad(wrong, 0, "wrong", "3 of 96 gradients differ", check=Check(passed=False, wrong=3)))
    records += [bad(wrong, launch, "skipped", "not tried again: wrong in launch 1") for launch in range(1, launches)]
    records += [bad(failed, launch, "failed", HOSTILE) for launch in range(launches)]
    records.append(ok(lost, 0, 2e-3, environment={"changed": {"host.cpu_model": ["Example CPU", "Another CPU"]}}))
    skipped = Skipped(case=collective("all_gather", 1001), reason="size 1001 B is not a multiple of 4 ranks x 4 B")
    records.append(bad(skipped.case, 0, "skipped", skipped.reason))
    cases = [case for case, _ in (*curve, *steps)] + [broken, wrong, failed, lost]
    plan = make_plan(cases, launches=launches, skipped=[skipped])
    return make_run(plan, records, ENVIRONMENT)
