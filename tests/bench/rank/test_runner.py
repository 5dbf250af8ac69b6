"""Running one case: outcomes, visits, wrong results, refusals and explanations."""

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parbench.bench.launch.control_channel import Outcome, Work
from parbench.bench.launch.driver import metrics_of
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import FaultSpec, Measure
from parbench.bench.rank import runner
from parbench.bench.rank.runner import CaseRun, _benchmark, load_target, refuse_float8
from parbench.bench.rank.timing import Progress, Timed
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Check, blame
from parbench.bench.text import UserError
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import Clock, Subgroups, World
from tests.support.ranks import Ranks
from tests.support.refusals import usage_error

MEASURE = Measure(warmup=3, min_iterations=6, max_iterations=8)
LATE_SECONDS = 0.02
COMPUTE = MetricValue(value=4e-4, unit="s", better="lower", method="the slowest rank's")
ALL_REDUCE = "parbench.bench.operations.collectives:all_reduce"
Fault = Literal[
    "none",
    "refuse",
    "refuse each",
    "before",
    "after",
    "describe",
    "raise",
    "describe raises",
    "explain",
]
calls: list[str] = []
"""The calls to this rank's last benchmark."""


class FaultyBenchmark:
    """All-reduces one number, with an optional fault, and logs its calls."""

    def __init__(self, world: World, fault: Fault) -> None:
        self.world, self.fault = world, fault
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
        if self.fault == "raise":
            raise RuntimeError("the roof is on fire")
        if self.fault == {1: "before", 2: "after"}.get(self.num_checks):
            return 3 + self.world.rank
        return int(self.number.item() != self.world.size)

    def describe(self) -> Description:
        if self.fault == "describe raises":
            raise RuntimeError("no description")
        author = self.world.rank if self.fault == "describe" else "all"
        return Description(
            headline="step_time",
            hops=2,
            work=(Work(name="tokens_per_second", amount=128.0, unit="tokens/s"),),
            details={"author": author, "warmup": "overwritten"},
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

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        calls.append("explain")
        begin_seconds, step_seconds = list[float](), list[float]()
        for _ in range(3):
            start = time.perf_counter()
            begin()
            started = time.perf_counter()
            assert self.number.item() == 1.0
            self.step()
            begin_seconds.append(started - start)
            step_seconds.append(time.perf_counter() - started)
        if self.fault == "explain":
            raise RuntimeError("no explanation")
        return Explanation(
            metrics={"compute": COMPUTE},
            details={
                "rank": self.world.rank,
                "budget": budget_seconds,
                "begins": begin_seconds,
                "steps": step_seconds,
            },
            notes=("explained",),
        )


def prepare(
    world: World, *, fault: Fault = "none", ranks: str = "0,1", explains: str = ""
) -> FaultyBenchmark:
    """Return a benchmark with a fault on these ranks; ``mode`` is not passed to it."""
    calls[:] = ["prepare"]
    own_fault: Fault = fault if str(world.rank) in ranks.split(",") else "none"
    if fault == "refuse each":
        raise UserError(f"rank {world.rank} refuses")
    if own_fault == "refuse":
        raise UserError("no flux capacitor")
    kind = ExplainingBenchmark if str(world.rank) in explains.split(",") else FaultyBenchmark
    return kind(world, own_fault)


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One rank's outcome or error, the calls to its benchmark and its progress."""

    outcome: Outcome
    error: str
    calls: list[str]
    phase: str
    steps: int


def run_on_rank(
    world: World, params: dict[str, Value], function: str, injection: FaultSpec | None
) -> RankRun:
    progress = Progress()
    progress.steps = 1000  # of the previous case
    outcome, error = Outcome(status="failed"), ""
    case = make_case("workload.faulty", f"{__name__}:{function}", params)
    try:
        outcome = CaseRun(case, Subgroups(world), MEASURE, progress, injection).visit(60.0)
    except RuntimeError as raised:
        error = str(raised)
    return RankRun(
        outcome=outcome,
        error=error,
        calls=list(calls),
        phase=progress.phase,
        steps=progress.steps,
    )


def visit_on_rank(
    world: World, params: dict[str, Value], visits: int, end: bool
) -> list[tuple[Outcome, list[str]]]:
    """Visit a case; return each outcome with all calls so far, last those of its early end."""
    case = make_case("workload.faulty", "tests.bench.rank.test_runner:prepare", params)
    measure = replace(MEASURE, max_iterations=14)
    run = CaseRun(case, Subgroups(world), measure, Progress(), None)
    outcomes = []
    for remaining in reversed(range(visits)):
        outcome = run.visit(60.0, remaining + end, alone=False)
        outcomes.append((outcome, list(calls)))
        if not outcome.more:
            break
    if end:
        outcomes.append((run.end(), list(calls)))
    return outcomes


def run_case(
    gang: Ranks, injection: FaultSpec | None = None, function: str = "prepare", /, **params: Value
) -> list[RankRun]:
    return gang.call(
        "tests.bench.rank.test_runner:run_on_rank",
        params=params,
        function=function,
        injection=injection,
    )


def unpack(outcome: Outcome) -> dict[str, Any]:
    with np.load(io.BytesIO(outcome.raw)) as file:
        return dict(file)


def test_outcome_holds_check_description_and_samples(two_ranks: Ranks) -> None:
    first, second = run_case(two_ranks)
    outcome = first.outcome
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert outcome.check == Check(passed=True, wrong=0)
    assert outcome.stop in ("precision", "max-iters")
    assert (outcome.headline, outcome.notes, outcome.explained) == ("step_time", ["emulated"], {})
    assert outcome.work == [Work(name="tokens_per_second", amount=128.0, unit="tokens/s")]
    assert outcome.details == {"author": "all", "warmup": 3, "steps_per_sample": 1}
    assert 6 <= len(outcome.seconds) <= 8
    assert sum(outcome.seconds) < outcome.wall_seconds < 60
    assert (second.outcome.status, second.outcome.seconds) == ("ok", [])
    assert second.outcome.raw == b""
    for rank in (first, second):
        timed = ["reset", "step"] * (MEASURE.warmup + len(outcome.seconds))
        checked = ["reset", "step", "check"]
        assert rank.calls == ["prepare", *checked, *timed, "check", "close"]
        assert (rank.phase, rank.steps) == ("check", rank.calls.count("reset"))


def test_raw_samples_agree_with_the_outcome(two_ranks: Ranks) -> None:
    outcome = run_case(two_ranks)[0].outcome
    raw = unpack(outcome)
    arrival, exits, duration = (raw[f"{name}_ns"] for name in ("arrival", "exit", "duration"))
    assert arrival.shape == exits.shape == duration.shape == (2, len(outcome.seconds))
    assert (exits - arrival == duration).all()
    assert arrival.min() == 0

    def approx(seconds: list[float]) -> Any:
        return pytest.approx(seconds, rel=1e-12)

    transfer_ns = exits.max(axis=0) - arrival.max(axis=0)
    assert (duration.max(axis=0) / 2e9).tolist() == approx(outcome.seconds), "two hops"
    assert (transfer_ns / 2e9).tolist() == approx(outcome.transfer_seconds)
    assert (np.ptp(arrival, axis=0) / 1e9).tolist() == approx(outcome.skew_seconds)
    last_in, last_out = arrival.argmax(axis=0).tolist(), exits.argmax(axis=0).tolist()
    method = "one host, one monotonic clock"
    assert outcome.arrival == blame(last_in, last_out, outcome.skew_seconds, method, 0.0)
    assert raw["ranks"].tolist() == [0, 1]
    assert raw["clock_offsets_ns"].tolist() == [0, 0]


def test_visits_extend_one_case(two_ranks: Ranks) -> None:
    by_rank = two_ranks.call(
        "tests.bench.rank.test_runner:visit_on_rank",
        params={"explains": "0,1"},
        visits=3,
        end=False,
    )
    outcomes = [outcome for outcome, _ in by_rank[0]]
    counts = [len(outcome.seconds) for outcome in outcomes]
    last = outcomes[-1]
    assert 3 == counts[0] < counts[1] < counts[2] <= 14
    assert last.seconds[:3] == outcomes[0].seconds
    assert last.visits == [3, counts[1] - 3, counts[2] - counts[1]]
    assert [bool(outcome.raw) for outcome in outcomes] == [False, False, True]
    assert unpack(last)["duration_ns"].shape == (2, counts[2])
    assert last.explained == {}
    step = ["reset", "step"]
    expected = ["prepare", *step, "check", *step * MEASURE.warmup]
    for warmup, count in zip((0, 1, 1), last.visits, strict=True):
        expected += [*step * (warmup + count), "check"]
    for rank in by_rank:
        assert [outcome.more for outcome, _ in rank] == [True, True, False]
        assert rank[-1][1] == [*expected, "close"]


def test_early_end_keeps_the_samples(two_ranks: Ranks) -> None:
    first, _ = two_ranks.call(
        "tests.bench.rank.test_runner:visit_on_rank", params={}, visits=2, end=True
    )
    (last_visit, _), (ended, log) = first[-2:]
    assert (ended.seconds, ended.visits) == (last_visit.seconds, last_visit.visits)
    assert (ended.more, bool(ended.raw)) == (False, True)
    assert ended.stop in ("budget", "max-iters")
    assert log[-1] == "close"


def test_wrong_result_ends_the_visits(two_ranks: Ranks) -> None:
    params = {"fault": "after", "ranks": "1"}
    for rank in two_ranks.call(
        "tests.bench.rank.test_runner:visit_on_rank", params=params, visits=2, end=False
    ):
        [(outcome, log)] = rank
        assert (outcome.status, outcome.more, log[-1]) == ("wrong", False, "close")


def test_pipelined_case_is_checked_on_a_fresh_step(two_ranks: Ranks) -> None:
    ranks = run_case(two_ranks, mode="pipelined")
    outcome = ranks[0].outcome
    raw = unpack(outcome)
    steps = int(raw["steps_per_sample"])
    assert 4 <= steps == outcome.details["steps_per_sample"]
    seconds = raw["duration_ns"].max(axis=0) / steps / 2e9
    assert seconds.tolist() == pytest.approx(outcome.seconds, abs=1e-9)
    assert outcome.transfer_seconds == []
    for rank in ranks:
        assert rank.calls[-5:] == ["step", "reset", "step", "check", "close"]


@pytest.mark.parametrize("mode", ["blocking", "pipelined"])
@pytest.mark.parametrize("fault", ["before", "after"])
def test_wrong_result_has_no_time(two_ranks: Ranks, mode: str, fault: str) -> None:
    for rank in run_case(two_ranks, fault=fault, ranks="1", mode=mode, explains="0,1"):
        outcome = rank.outcome
        assert outcome.status == "wrong"
        assert f"{fault} the timed region: 4 on rank 1" in outcome.reason
        assert outcome.check == Check(passed=False, wrong=4)
        assert (outcome.seconds, outcome.stop, outcome.raw) == ([], None, b"")
        assert "explain" not in rank.calls
        is_untimed = rank.calls == ["prepare", "reset", "step", "check", "close"]
        assert is_untimed == (fault == "before")


def test_wrong_result_names_ranks_and_three_differences(two_ranks: Ranks) -> None:
    differences = "number: wrong; rank 1: fault 0; rank 1: fault 1; and 2 more"
    for explains, suffix in (("", ""), ("0", "; number: wrong"), ("0,1", f"; {differences}")):
        outcome = run_case(two_ranks, fault="after", explains=explains)[0].outcome
        assert outcome.check.wrong == 7
        assert outcome.reason.endswith(f": 3 on rank 0, 4 on rank 1{suffix}"), explains


@pytest.mark.parametrize(
    ("params", "status", "fact", "log"),
    [
        ({"fault": "refuse"}, "skipped", "no flux capacitor", ["prepare"]),
        ({"fault": "refuse each"}, "failed", "rank 0 refuses; rank 1: rank 1 refuses", None),
        (
            {"fault": "refuse", "ranks": "1"},
            "failed",
            "rank 0: ready; rank 1: no flux capacitor",
            ["prepare", "close"],
        ),
        (
            {"fault": "describe", "ranks": "1", "explains": "0,1"},
            "failed",
            "1 unlike rank 0",
            ["prepare", "close"],
        ),
    ],
)
def test_refused_case_is_not_measured(
    two_ranks: Ranks, params: dict[str, Any], status: str, fact: str, log: list[str] | None
) -> None:
    ranks = run_case(two_ranks, **params)
    for rank in ranks:
        assert rank.outcome.status == status
        assert fact in rank.outcome.reason
        assert (rank.outcome.check, rank.outcome.seconds) == (Check(), [])
    assert log is None or ranks[0].calls == log


def test_absent_function_is_skipped(two_ranks: Ranks) -> None:
    for rank in run_case(two_ranks, None, "absent"):
        assert rank.outcome.status == "skipped"
        assert "'tests.bench.rank.test_runner:absent'" in rank.outcome.reason


@pytest.mark.parametrize(
    ("fault", "error", "last_call"),
    [
        ("raise", "the roof is on fire", "check"),
        ("describe raises", "no description", "prepare"),
        ("explain", "no explanation", "step"),
    ],
)
def test_benchmark_that_raises_is_closed(
    two_ranks: Ranks, fault: str, error: str, last_call: str
) -> None:
    for rank in run_case(two_ranks, fault=fault, explains="0,1"):
        assert (rank.error, rank.calls[-2:]) == (error, [last_call, "close"])


@pytest.mark.parametrize("mode", ["blocking", "pipelined"])
def test_explanation_follows_the_checks(two_ranks: Ranks, mode: str) -> None:
    ranks = run_case(two_ranks, mode=mode, explains="0,1")
    for number, rank in enumerate(ranks):
        last_calls = ["check", "explain", *["reset", "step"] * 3, "close"]
        assert rank.calls[-len(last_calls) :] == last_calls
        assert rank.calls.count("check") == 2
        assert (rank.phase, rank.steps) == ("explain", rank.calls.count("reset"))
        assert rank.outcome.details["rank"] == number
    outcome = ranks[0].outcome
    assert (outcome.status, outcome.headline) == ("ok", "step_time")
    assert outcome.explained == {"compute": COMPUTE}
    assert outcome.notes == ["emulated", "explained"]
    assert outcome.details["author"] == "all"
    [budget] = {rank.outcome.details["budget"] for rank in ranks}
    assert 0 < budget < 60


def test_explanation_needs_all_ranks_undisturbed(two_ranks: Ranks) -> None:
    slow = FaultSpec(kind="slow", rank=1, amount=0.005, text="slow:1:0.5%")
    for injection, explains, injected in ((None, "0", ""), (slow, "0,1", slow.text)):
        for rank in run_case(two_ranks, injection, explains=explains):
            assert (rank.outcome.status, rank.outcome.explained) == ("ok", {})
            assert rank.outcome.injected == injected
            assert "explain" not in rank.calls


def test_injected_late_rank_delays_every_step(two_ranks: Ranks) -> None:
    injection = FaultSpec(kind="late", rank=1, amount=LATE_SECONDS, text="late:1:20ms")
    ranks = run_case(two_ranks, injection, explains="0,1")
    waiting, late = (rank.outcome for rank in ranks)
    assert waiting.explained == {"compute": COMPUTE}
    assert min(late.details["begins"]) >= LATE_SECONDS
    assert min(waiting.details["steps"]) >= LATE_SECONDS / 2
    assert min(waiting.skew_seconds) >= LATE_SECONDS / 2
    assert late.injected == waiting.injected == "late:1:20ms"


def test_load_target_imports_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_step.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_target(ALL_REDUCE).__name__ == "all_reduce"
    for target, name in (
        ("no_such_module:prepare", "'no_such_module'"),
        ("needy_step:prepare", "'no_such_dependency'"),
        ("parbench.bench.operations.collectives:CONVENTION", "'CONVENTION'"),
        ("parbench.bench.rank.runner", "''"),
    ):
        message = usage_error(load_target, target)
        assert message.startswith(f"target '{target}'")
        assert message.endswith(name)
    assert "needy_step" not in sys.modules


@pytest.mark.parametrize(
    ("target", "fact"),
    [
        ("builtins:type", "the class SimpleNamespace"),
        ("builtins:id", "int, which is no benchmark: it has no step, reset, check"),
    ],
)
def test_target_must_return_a_benchmark(target: str, fact: str) -> None:
    world = cast(World, SimpleNamespace(backend="gloo"))
    with pytest.raises(TypeError, match=fact):
        _benchmark(make_case("custom.odd", target, {}), world, None)


def test_float8_needs_compute_capability_9() -> None:
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        assert "8.9" in usage_error(refuse_float8, dtype, (8, 9))
        for capability in ((9, 0), (10, 0)):
            refuse_float8(dtype, capability)
    refuse_float8("bfloat16", (8, 0))


GIB = 1 << 30


def test_case_too_large_for_any_device_is_refused() -> None:
    params: dict[str, Value] = {"size_bytes": GIB, "dtype": "int8", "mode": "blocking"}
    case = make_case("collective.all_reduce", ALL_REDUCE, params)
    world = SimpleNamespace(device=torch.device("cpu"))
    runner._refuse_too_large(case, cast(World, world))  # the plan has checked the host's memory
    world.device = torch.device("cuda", 0)
    with mock.patch.object(torch, "cuda") as cuda:
        for own_gib, other_gib, cached_gib, is_refused in (
            (8, 8, 0, False),
            (8, 5, 0, True),
            (5, 8, 0, True),
            (5, 8, 2, False),  # torch reuses its cache
        ):
            cuda.mem_get_info.return_value = (own_gib * GIB, 80 * GIB)
            cuda.memory_reserved.return_value = cached_gib * GIB + 7
            cuda.memory_allocated.return_value = 7
            world.gather = lambda free, other=other_gib: [free, other * GIB]
            if is_refused:
                assert "5.4 GB" in usage_error(runner._refuse_too_large, case, world)
            else:
                runner._refuse_too_large(case, cast(World, world))


def test_device_arrivals_are_less_certain() -> None:
    arrivals = np.array([[0, 100_000, 0], [15_000, 0, 30_000]])
    durations = np.array([[9_000, 2_000, 9_000], [4_000, 8_000, 4_000]])
    stamps = np.stack([arrivals, arrivals + durations, durations, 0 * durations])
    clock = Clock(offsets_ns=(0, 0), uncertainty_ns=5_000, method="ping-pong")
    world = cast(World, SimpleNamespace(clock=clock, hosts=("a", "b")))

    def summarize(hidden: float | None) -> Outcome:
        timed = Timed(stamps=stamps, stop="visits", steps_per_sample=1, warmup=1, hidden=hidden)
        return runner._seen(Outcome(status="ok"), timed, Description(), world, [0, 1])

    host, device = summarize(None), summarize(0.5)
    assert host.arrival is not None
    assert device.arrival is not None
    assert (host.arrival.method, host.arrival.uncertainty) == ("ping-pong", 5e-6)
    assert device.arrival.uncertainty == 25e-6
    assert (host.arrival.share, device.arrival.share) == (0.6667, 0.3333)
    assert (host.last_arriver_seconds, device.last_arriver_seconds) == ([], [4e-6, 2e-6, 4e-6])
    assert device.details["launch_hidden"] == 0.5
    assert metrics_of(device)["last_arriver"].value == 4e-6
    assert "last_arriver" not in metrics_of(host)
