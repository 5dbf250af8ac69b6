"""Running one case on the ranks: outcomes, blocks, wrong results, refusals, explanations."""

import io
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parbench.bench.launch.messages import Outcome
from parbench.bench.plan.cases import Case, load_target, make_case
from parbench.bench.plan.catalogue import OPERATIONS
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import FaultSpec, Measure, parse_fault
from parbench.bench.rank import runner, timing
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun, inject_fault
from parbench.bench.rank.timing import Stopwatch
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Check
from parbench.bench.text import UserError
from parbench.bench.world.benchmark import Description, Explanation, Work
from parbench.bench.world.world import World
from tests.bench.rank.test_device_timer import FakeDevice, FakeTimer
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark
from tests.support.filling import filling
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

MODULE = "tests.bench.rank.test_runner"
MEASURE = Measure(warmup=3, min_iterations=6, max_iterations=8)
LATE_SECONDS = 0.02
COMPUTE = MetricValue(
    value=4e-4,
    unit="s",
    better="lower",
    method="the slowest rank's",
)
Fault = Literal[
    "none",
    "refuse",
    "wrong before",
    "wrong after",
    "check raises",
    "explain raises",
]
calls: list[str] = []
"""The calls of this rank to its last benchmark."""


class FaultyBenchmark:
    """All-reduces one number, with an optional fault, and logs its calls."""

    def __init__(self, world: World, fault: Fault) -> None:
        self.world = world
        self.fault = fault
        self.number = torch.zeros(1)
        self.num_checks = 0

    def step(self) -> None:
        calls.append("step")
        dist.all_reduce(self.number, group=self.world.group)

    def reset(self) -> None:
        calls.append("reset")
        self.number.fill_(1.0)

    def check(self) -> int:
        calls.append("check")
        self.num_checks += 1
        if self.fault == "check raises":
            raise RuntimeError("the roof is on fire")
        wrong_check = {"wrong before": 1, "wrong after": 2}.get(self.fault)
        if self.num_checks == wrong_check:
            return 3 + self.world.rank
        return int(self.number.item() != self.world.size)

    def describe(self) -> Description:
        return Description(
            headline="step_time",
            hops=2,
            work=(Work(name="tokens_per_second", amount=128.0, unit="tokens/s"),),
            details={"author": "all", "warmup": "overwritten"},
            notes=("emulated",),
        )

    def close(self) -> None:
        calls.append("close")


class ExplainingBenchmark(FaultyBenchmark):
    """Also names its differences and explains its time in three steps."""

    def differences(self) -> list[str]:
        if self.fault == "none":
            return []
        return ["number: wrong", *(f"rank 1: fault {n}" for n in range(4 * self.world.rank))]

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        calls.append("explain")
        begin_seconds: list[float] = []
        step_seconds: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            begin()
            step_start = time.perf_counter()
            self.step()
            begin_seconds.append(step_start - start)
            step_seconds.append(time.perf_counter() - step_start)
        if self.fault == "explain raises":
            raise RuntimeError("no explanation")
        details = {"budget": budget_seconds, "begins": begin_seconds, "steps": step_seconds}
        return Explanation(metrics={"compute": COMPUTE}, details=details, notes=("explained",))


def prepare(
    world: World,
    *,
    fault: Fault = "none",
    faulty_ranks: str = "0,1",
    explaining_ranks: str = "",
) -> FaultyBenchmark:
    """Return a benchmark with a fault on these ranks."""
    calls[:] = ["prepare"]
    own_fault: Fault = fault if str(world.rank) in faulty_ranks.split(",") else "none"
    if own_fault == "refuse":
        raise UserError("no flux capacitor")
    if str(world.rank) in explaining_ranks.split(","):
        return ExplainingBenchmark(world, own_fault)
    return FaultyBenchmark(world, own_fault)


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The outcomes of all blocks on one rank or its error, and the calls to its benchmark."""

    outcomes: list[Outcome]
    error: str
    calls: list[str]
    phase: str
    steps: int

    @property
    def outcome(self) -> Outcome:
        return self.outcomes[-1]


def run_case_on_rank(
    world: World,
    params: dict[str, Value],
    case_target: str,
    injection: FaultSpec | None,
    blocks: int,
) -> RankRun:
    calls.clear()
    case = make_case("workload.faulty", case_target, params)
    progress = Progress()
    measure = replace(MEASURE, max_iterations=14) if blocks > 1 else MEASURE
    run = CaseRun(case, world, measure, progress, injection)
    outcomes: list[Outcome] = []
    error = ""
    try:
        for remaining in reversed(range(blocks)):
            outcomes.append(run.run_block(60.0, remaining, is_only=blocks == 1))
            if not outcomes[-1].more:
                break
    except RuntimeError as exception:
        error = str(exception)
    return RankRun(
        outcomes=outcomes,
        error=error,
        calls=list(calls),
        phase=progress.phase,
        steps=progress.steps,
    )


def run_case(
    ranks: Ranks,
    injection: FaultSpec | None = None,
    target: str = f"{MODULE}:prepare",
    blocks: int = 1,
    **params: Value,
) -> list[RankRun]:
    return ranks.call(
        f"{MODULE}:run_case_on_rank",
        params=params,
        case_target=target,
        injection=injection,
        blocks=blocks,
    )


def unpack(outcome: Outcome) -> dict[str, Any]:
    with np.load(io.BytesIO(outcome.raw)) as file:
        return dict(file)


def test_outcome_has_check_description_and_samples(two_ranks: Ranks) -> None:
    first, second = run_case(two_ranks)
    outcome = first.outcome
    assert outcome.status == "ok"
    assert outcome.check == Check(passed=True, wrong=0)
    assert outcome.stop in ("precision", "max-iters")
    assert outcome.notes == ["emulated"]
    assert {"step_time", "tokens_per_second"} <= outcome.metrics.keys()
    assert outcome.details == {"author": "all", "warmup": 3, "steps_per_sample": 1}
    assert 6 <= len(outcome.samples.values) <= 8
    assert sum(outcome.samples.values) < outcome.wall_seconds < 60
    assert second.outcome.status == "ok"
    assert second.outcome.samples.values == []
    timed_calls = ["reset", "step"] * (MEASURE.warmup + len(outcome.samples.values))
    for rank in (first, second):
        assert rank.calls == [
            "prepare", "reset", "step", "check", *timed_calls, "check", "close"
        ]  # fmt: skip
        assert rank.phase == "check"
        assert rank.steps == rank.calls.count("reset")


def test_blocks_extend_one_case(two_ranks: Ranks) -> None:
    runs = run_case(two_ranks, blocks=3, explaining_ranks="0,1")
    outcomes = runs[0].outcomes
    counts = [len(outcome.samples.values) for outcome in outcomes]
    last = outcomes[-1]
    assert [outcome.more for outcome in outcomes] == [True, True, False]
    assert 3 == counts[0] < counts[1] < counts[2] <= 14
    assert last.samples.values[:3] == outcomes[0].samples.values
    assert last.samples.samples_per_block == [3, counts[1] - 3, counts[2] - counts[1]]
    assert unpack(last)["duration_ns"].shape == (2, counts[2])
    for run in runs:
        assert run.calls.count("close") == 1


@pytest.mark.parametrize(
    ("when", "mode"),
    [
        ("before", "blocking"),
        ("after", "blocking"),
        ("after", "pipelined"),
    ],
)
def test_wrong_result_has_no_time(two_ranks: Ranks, when: str, mode: str) -> None:
    runs = run_case(
        two_ranks,
        fault=f"wrong {when}",
        faulty_ranks="1",
        mode=mode,
        explaining_ranks="0,1",
    )
    for run in runs:
        assert run.outcome.status == "wrong"
        assert f"{when} the timed iterations: 4 wrong values on rank 1" in run.outcome.reason
        assert run.outcome.reason.endswith("wrong; rank 1: fault 0; rank 1: fault 1")
        assert run.outcome.check == Check(passed=False, wrong=4)
        assert run.outcome.wrong_by_rank == {1: 4}
        assert run.outcome.samples.values == []
        assert run.outcome.raw == b""
        assert "explain" not in run.calls
        assert run.calls[-1] == "close"


def test_case_that_all_ranks_refuse_is_skipped(two_ranks: Ranks) -> None:
    for run in run_case(two_ranks, fault="refuse"):
        assert run.outcome.status == "skipped"
        assert "no flux capacitor" in run.outcome.reason
        assert run.outcome.check == Check()
        assert run.calls == ["prepare"]


def test_case_that_one_rank_refuses_fails(two_ranks: Ranks) -> None:
    runs = run_case(two_ranks, fault="refuse", faulty_ranks="1")
    for run in runs:
        assert run.outcome.status == "failed"
        assert "rank 1: no flux capacitor" in run.outcome.reason
        assert "step" not in run.calls
    assert runs[0].calls == ["prepare", "close"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("check raises", "the roof is on fire"),
        ("explain raises", "no explanation"),
    ],
)
def test_benchmark_that_raises_ends_the_case(two_ranks: Ranks, fault: str, error: str) -> None:
    for run in run_case(two_ranks, fault=fault, explaining_ranks="0,1"):
        assert run.error == error
        assert run.outcomes == []


def test_explanation_follows_the_checks(two_ranks: Ranks) -> None:
    runs = run_case(two_ranks, explaining_ranks="0,1")
    for run in runs:
        last_calls = ["check", "explain", *["reset", "step"] * 3, "close"]
        assert run.calls[-len(last_calls) :] == last_calls
        assert run.calls.count("check") == 2
        assert run.phase == "explain"
        assert run.outcome.metrics["compute"] == COMPUTE
    outcome = runs[0].outcome
    assert outcome.notes == ["emulated", "explained"]
    assert outcome.details["author"] == "all"
    assert 0 < outcome.details["budget"] < 60


@pytest.mark.parametrize(
    ("explaining_ranks", "injection"),
    [
        ("0", ""),
        ("0,1", "slow:1:0.5%"),
    ],
)
def test_explanation_needs_all_ranks_undisturbed(
    two_ranks: Ranks, explaining_ranks: str, injection: str
) -> None:
    fault = parse_fault(injection, 2) if injection else None
    for run in run_case(two_ranks, fault, explaining_ranks=explaining_ranks):
        assert run.outcome.status == "ok"
        assert "compute" not in run.outcome.metrics
        assert "explain" not in run.calls


def test_injected_late_rank_delays_every_step(two_ranks: Ranks) -> None:
    runs = run_case(two_ranks, parse_fault("late:1:20ms", 2), explaining_ranks="0,1")
    waiting, late = (run.outcome for run in runs)
    assert min(late.details["begins"]) >= LATE_SECONDS
    assert min(waiting.details["steps"]) >= LATE_SECONDS / 2
    assert waiting.arrival is not None
    assert waiting.arrival.late_rank == 1


GATHER = "parbench.bench.operations.collectives:gather"
ALL_REDUCE = "parbench.bench.operations.collectives:all_reduce"
DATA: dict[str, Any] = {"size_bytes": 64, "dtype": "float32"}
OTHER_GROUP: dict[str, Any] = {"group": "dp=2 tp=1:tp", "group_index": 1}


@pytest.mark.parametrize(
    ("injection", "target", "params"),
    [
        ("corrupt:0", GATHER, {**DATA, "root": 1}),  # rank 0 has no result
        ("corrupt:0", ALL_REDUCE, {**DATA, "size_bytes": 0}),
        ("corrupt:0", ALL_REDUCE, {**DATA, **OTHER_GROUP}),  # rank 0 is not measured
        ("late:0:1ms", f"{MODULE}:prepare", OTHER_GROUP),
        ("slow:0:10%", f"{MODULE}:prepare", {"mode": "async"}),  # its step can only be late
    ],
)
def test_fault_without_effect_is_skipped(
    two_ranks: Ranks, injection: str, target: str, params: dict[str, Any]
) -> None:
    for run in run_case(two_ranks, parse_fault(injection, 2), target, **params):
        assert run.outcome.status == "skipped"
        assert injection in run.outcome.reason


class CountingBenchmark(NotingBenchmark):
    """Counts its steps since the last reset, which must be one at a check."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self) -> None:
        self.number = 0

    def step(self) -> None:
        self.number += 1

    def check(self) -> int:
        return int(self.number != 1)


def prepare_counting(world: World) -> CountingBenchmark:
    return CountingBenchmark()


def run_graph_on_rank(world: World, is_empty: bool) -> Outcome:
    """Measure in mode graph, where the graphs of a step may contain nothing."""
    original_sampler = timing.make_sampler

    def make_sampler(mode: str, benchmark: CountingBenchmark, steps: int) -> timing.Sampler:
        if mode != "graph":
            return original_sampler(mode, benchmark, steps)
        return original_sampler("pipelined", benchmark, 0 if is_empty else steps)

    case = make_case("workload.counting", f"{MODULE}:prepare_counting", {"mode": "graph"})
    measure = Measure(warmup=1, max_iterations=8)
    with (
        mock.patch.object(timing, "make_sampler", make_sampler),
        mock.patch.object(runner, "make_sampler", make_sampler),
    ):
        return CaseRun(case, world, measure, Progress(), None).run_block(60.0)


def test_empty_graph_is_a_wrong_result(two_ranks: Ranks) -> None:
    target = f"{MODULE}:run_graph_on_rank"
    assert two_ranks.call(target, is_empty=False)[0].status == "ok"
    outcome = two_ranks.call(target, is_empty=True)[0]
    assert outcome.status == "wrong"
    assert "of a replay before the timed iterations" in outcome.reason


def make_all_reduce(**params: Value) -> Case:
    [definition] = [spec for spec in OPERATIONS if spec.short_name == "all_reduce"]
    return definition.build_case({"size_bytes": 1024, **params})


def log_device_until_load(world: World, mode: str) -> list[str]:
    """Return the actions of a device before a background load started."""
    device = FakeDevice(HeldTime())

    def make_stopwatch(**fields: Any) -> Stopwatch:
        return Stopwatch(**{**fields, "timer": FakeTimer(device)})

    def start_load(kind: str, world: World) -> NoReturn:
        device.log.append("load")
        raise ZeroDivisionError

    case = make_all_reduce(mode=mode, background="gemm")
    run = CaseRun(case, world, MEASURE, Progress(), None)
    with (
        mock.patch.object(runner, "Stopwatch", make_stopwatch),
        mock.patch.object(runner, "background_load", start_load),
        suppress(ZeroDivisionError),
    ):
        run.run_block(5.0)
    return device.log


@pytest.mark.parametrize("mode", ["blocking", "pipelined"])
def test_start_line_is_launched_before_background_load(two_ranks: Ranks, mode: str) -> None:
    """Its kernels are loaded at their first launch, which must not wait for the load."""
    for log in two_ranks.call(f"{MODULE}:log_device_until_load", mode=mode):
        assert log == ["spin", "meet", "load"]


class SlowDevice(NotingBenchmark):
    """A step takes 1 s to launch, and its device 9 s to run it."""

    def __init__(self, clock: HeldTime) -> None:
        super().__init__()
        self.clock = clock

    def step(self) -> None:
        super().step()
        self.clock.sleep(1.0)

    def sync(self) -> None:
        self.clock.sleep(9.0)


def test_slow_step_takes_its_share_of_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HeldTime(0)
    monkeypatch.setattr(runner, "time", clock)
    benchmark = SlowDevice(clock)
    inject_fault(benchmark, parse_fault("slow:1:300%", 2), benchmark.sync)
    benchmark.step()
    assert clock.perf_counter() == 40.0


def test_corrupt_step_has_one_wrong_element() -> None:
    disturbed = filling()
    inject_fault(disturbed, parse_fault("corrupt:1", 2), lambda: None)
    disturbed.reset()
    disturbed.step()
    assert disturbed.check() == 1


def test_corruption_that_a_benchmark_lacks_is_refused() -> None:
    benchmark = NotingBenchmark()
    corrupt = parse_fault("corrupt:1", 2)
    assert "corrupt:1" in usage_error(inject_fault, benchmark, corrupt, lambda: None)


def test_load_target_imports_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_step.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_target("json:loads").__name__ == "loads"
    target = "parbench.bench.operations.collectives:CONVENTION"
    assert "'CONVENTION'" in usage_error(load_target, target)
    # A case with an error in the import is not skipped.
    for module in ("no_such_module", "needy_step"):
        with pytest.raises(ModuleNotFoundError):
            load_target(f"{module}:prepare")
    (tmp_path / "odd_step.py").write_text("import os\nos.no_such_name\n")
    with pytest.raises(AttributeError):
        load_target("odd_step:prepare")
    assert "needy_step" not in sys.modules


def test_target_must_return_a_benchmark() -> None:
    case = make_case("custom.odd", "builtins:id", {})
    world = cast(World, SimpleNamespace(backend="gloo"))
    with pytest.raises(TypeError, match="which is not a benchmark"):
        runner.make_benchmark(case, world, None)


def test_float8_needs_compute_capability_9() -> None:
    assert "9.0" in usage_error(runner.refuse_float8, "float8_e4m3fn", (8, 9))
    runner.refuse_float8("float8_e4m3fn", (9, 0))
    runner.refuse_float8("bfloat16", (8, 0))
