"""Every case goes the same way, whatever goes wrong on it has a status and words, and a wrong result has no time."""

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
from ranks import Ranks
from refusals import refusal

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

MEASURE = Measure(warmup=3, min_iterations=6, max_iterations=8)
LATE_SECONDS = 0.02
COMPUTE = MetricValue(value=4e-4, unit="s", better="lower", method="the slowest rank's")
Fault = Literal["none", "refuse", "refuse each", "before", "after", "describe", "raise", "describe raises", "explain"]
NAMED = "number: wrong; rank 1: fault 1; rank 1: fault 2; and 2 more"
"""What ranks that explain themselves name as wrong, each thing once and no more than three."""
calls: list[str] = []
"""What this rank's last benchmark was asked, in order."""


class Faulty:
    """All-reduces one number; has a fault on the ranks it is told, and keeps a log of what it is asked."""

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
            raise RuntimeError("no words")
        return Description(
            headline="step_time",
            hops=2,
            work=(Work(name="tokens_per_second", amount=128.0, unit="tokens/s"),),
            details={"told by": self.world.rank if self.fault == "describe" else "all", "warmup": "theirs"},
            notes=("emulated",),
        )

    def close(self) -> None:
        calls.append("close")


class Explaining(Faulty):
    """Says where its time goes, and takes three steps for it; keeps how long each beginning and its steps took.

    It names what is wrong, too.
    """

    def differences(self) -> list[str]:
        if self.fault == "none":
            return []
        return ["number: wrong", *(f"rank 1: fault {n + 1}" for n in range(4 * self.world.rank))]

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        calls.append("explain")
        begins, waits = list[float](), list[float]()
        for _ in range(3):
            began = time.perf_counter()
            begin()
            begun = time.perf_counter()
            assert self.number.item() == 1.0
            calls.append("begun")
            self.step()
            begins.append(begun - began)
            waits.append(time.perf_counter() - begun)
        if self.fault == "explain":
            raise RuntimeError("lost for words")
        return Explanation(
            metrics={"compute": COMPUTE},
            details={"rank": self.world.rank, "budget": budget_seconds, "begins": begins, "waits": waits},
            notes=("explained in three steps",),
        )


def prepare(world: World, *, fault: Fault = "none", ranks: str = "0,1", explains: str = "") -> Faulty:
    """Return a benchmark with a fault on some ranks; ``mode`` is no parameter of it, so it must not be passed."""
    calls[:] = ["prepare"]
    mine: Fault = fault if str(world.rank) in ranks.split(",") else "none"
    if fault == "refuse each":
        raise UserError(f"rank {world.rank} does not like it")
    if mine == "refuse":
        raise UserError("this device has no flux capacitor")
    return (Explaining if str(world.rank) in explains.split(",") else Faulty)(world, mine)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a case went on a rank: what it raised if it did, and what its benchmark was asked."""

    outcome: Outcome
    error: str
    log: list[str]
    phase: str
    steps: int


def run(world: World, params: dict[str, Value], prepared_by: str, injection: FaultSpec | None) -> Ran:
    progress, outcome, error = Progress(), Outcome(status="failed"), ""
    progress.steps = 1000  # of the case before
    case = make_case("workload.faulty", prepared_by, params)
    try:
        outcome = CaseRun(case, Subgroups(world), MEASURE, progress, injection).visit(60.0)
    except RuntimeError as raised:
        error = str(raised)
    return Ran(outcome=outcome, error=error, log=list(calls), phase=progress.phase, steps=progress.steps)


def visit(world: World, params: dict[str, Value], budgets: list[float], end: bool) -> list[tuple[Outcome, list[str]]]:
    """Visit a case so often; return each outcome with what the benchmark was asked until then, last of its end."""
    case, measure = make_case("workload.faulty", "test_runner:prepare", params), replace(MEASURE, max_iterations=14)
    made = CaseRun(case, Subgroups(world), measure, Progress(), None)
    seen = []
    for left, seconds in zip(reversed(range(len(budgets))), budgets, strict=True):
        outcome = made.visit(seconds, left + end, alone=False)
        seen.append((outcome, list(calls)))
        if not outcome.more:
            break
    return [*seen, (made.end(), list(calls))] if end else seen


def ran(gang: Ranks, by: str = "prepare", injection: FaultSpec | None = None, /, **params: Value) -> list[Ran]:
    return gang.call("test_runner:run", params=params, prepared_by=f"test_runner:{by}", injection=injection)


def unpack(outcome: Outcome) -> dict[str, Any]:
    with np.load(io.BytesIO(outcome.raw)) as file:
        return dict(file)


def test_a_right_result_has_its_time_its_check_and_what_the_benchmark_says_of_itself(two_ranks: Ranks) -> None:
    first, second = ran(two_ranks)
    outcome = first.outcome
    assert (outcome.status, outcome.reason, outcome.check) == ("ok", "", Check(passed=True, wrong=0))
    assert outcome.stop in ("precision", "max-iters")
    assert (outcome.headline, outcome.notes, outcome.explained) == ("step_time", ["emulated"], {})
    assert outcome.work == [Work(name="tokens_per_second", amount=128.0, unit="tokens/s")]
    assert outcome.details == {"told by": "all", "warmup": 3, "steps_per_sample": 1}  # the runner's own word is last
    assert 6 <= len(outcome.seconds) == len(outcome.skew_seconds) == len(outcome.transfer_seconds) <= 8
    assert sum(outcome.seconds) < outcome.wall_seconds < 60
    assert (second.outcome.status, second.outcome.seconds, second.outcome.raw) == ("ok", [], b"")
    for rank in (first, second):  # checked before and after, the last of the last timed step; closed once
        taken = ["reset", "step"] * (MEASURE.warmup + len(outcome.seconds))
        assert rank.log == ["prepare", "reset", "step", "check", *taken, "check", "close"]
        assert (rank.phase, rank.steps) == ("check", rank.log.count("reset"))
    raw = unpack(outcome)
    named = ("ranks", "arrival_ns", "exit_ns", "duration_ns", "issue_ns", "steps_per_sample", "clock_offsets_ns")
    assert set(raw) == set(named)
    assert raw["arrival_ns"].shape == raw["exit_ns"].shape == raw["duration_ns"].shape == (2, len(outcome.seconds))
    assert (raw["duration_ns"].max(axis=0) / 2e9).tolist() == pytest.approx(outcome.seconds, rel=1e-12), "of two hops"
    transfers_ns = raw["exit_ns"].max(axis=0) - raw["arrival_ns"].max(axis=0)
    assert (transfers_ns / 2e9).tolist() == pytest.approx(outcome.transfer_seconds, rel=1e-12)
    assert (np.ptp(raw["arrival_ns"], axis=0) / 1e9).tolist() == pytest.approx(outcome.skew_seconds, rel=1e-12)
    assert raw["arrival_ns"].min() == 0
    last_in, last_out = (raw[name].argmax(axis=0).tolist() for name in ("arrival_ns", "exit_ns"))
    assert outcome.arrival == blame(last_in, last_out, outcome.skew_seconds, "one host, one monotonic clock", 0.0)
    assert (raw["exit_ns"] - raw["arrival_ns"] == raw["duration_ns"]).all()
    assert (raw["ranks"].tolist(), raw["clock_offsets_ns"].tolist()) == ([0, 1], [0, 0])


def test_a_case_in_several_visits_is_prepared_once_checked_after_each_and_closed_after_the_last(
    two_ranks: Ranks,
) -> None:
    first, second = two_ranks.call("test_runner:visit", params={"explains": "0,1"}, budgets=[60.0] * 3, end=False)
    outcomes = [outcome for outcome, _ in first]
    assert [outcome.more for outcome in outcomes] == [True, True, False]
    counts = [len(outcome.seconds) for outcome in outcomes]
    assert 3 == counts[0] < counts[1] < counts[2] <= 14
    last = outcomes[-1]
    assert (outcomes[0].seconds, last.seconds[:3]) == (outcomes[0].seconds, outcomes[0].seconds), "of all visits"
    assert last.visits == [3, counts[1] - 3, counts[2] - counts[1]]
    assert [bool(outcome.raw) for outcome in outcomes] == [False, False, True]
    assert unpack(last)["duration_ns"].shape == (2, counts[2])
    assert last.explained == {}, "what is visited again does not explain itself"
    one = ["reset", "step"]
    later = [[*one * (1 + count), "check"] for count in last.visits[1:]]
    before = ["prepare", *one, "check", *one * (MEASURE.warmup + 3), "check"]
    for rank in (first, second):
        assert rank[-1][1] == [*before, *later[0], *later[1], "close"]
    assert [outcome.more for outcome, _ in second] == [True, True, False]


def test_a_case_without_time_for_more_visits_ends_with_what_was_seen_and_a_wrong_one_at_once(two_ranks: Ranks) -> None:
    first, _ = two_ranks.call("test_runner:visit", params={}, budgets=[60.0, 60.0], end=True)
    (*_, (seen, _)), (ended, log) = first[:2], first[2]
    assert (ended.seconds, ended.visits, ended.more, bool(ended.raw)) == (seen.seconds, seen.visits, False, True)
    assert ended.stop in ("budget", "max-iters")
    assert log[-1] == "close"
    for rank in two_ranks.call(
        "test_runner:visit", params={"fault": "after", "ranks": "1"}, budgets=[60.0, 60.0], end=False
    ):
        [(wrong, log)] = rank
        assert (wrong.status, wrong.more, log[-1]) == ("wrong", False, "close")


def test_a_pipelined_case_tells_the_steps_of_a_sample_and_is_checked_on_a_fresh_one(two_ranks: Ranks) -> None:
    """Steps on top of steps have summed in place; that is no fault of the result."""
    seen = ran(two_ranks, mode="pipelined")
    outcome = seen[0].outcome
    raw = unpack(outcome)
    steps = int(raw["steps_per_sample"])
    assert 4 <= steps == outcome.details["steps_per_sample"]
    assert (raw["duration_ns"].max(axis=0) / steps / 2e9).tolist() == pytest.approx(outcome.seconds, abs=1e-9)
    assert outcome.transfer_seconds == []
    for rank in seen:
        assert rank.log[-5:] == ["step", "reset", "step", "check", "close"]


def test_a_wrong_result_has_no_time_and_names_its_rank_and_is_not_explained(two_ranks: Ranks) -> None:
    for mode, when in (("blocking", "before"), ("blocking", "after"), ("pipelined", "before"), ("pipelined", "after")):
        for rank in ran(two_ranks, fault=when, ranks="1", mode=mode, explains="0,1"):
            told = rank.outcome
            assert told.status == "wrong", (mode, when)
            assert told.reason == f"results differ from the reference {when} the timed region: 4 on rank 1; {NAMED}"
            assert told.check == Check(passed=False, wrong=4)
            assert (told.seconds, told.stop, told.raw, told.explained) == ([], None, b"", {})
            assert "explain" not in rank.log
            first = ["prepare", "reset", "step", "check"]  # nothing is timed after a wrong first check
            assert (rank.log == [*first, "close"]) == (when == "before"), (mode, when)
    for explains, named in (("", ""), ("0", "; number: wrong"), ("0,1", f"; {NAMED}")):
        both = ran(two_ranks, fault="after", explains=explains)[0].outcome
        assert both.check.wrong == 7
        assert both.reason.endswith(f": 3 on rank 0, 4 on rank 1{named}"), explains


REFUSED, DISAGREE = "this device has no flux capacitor", "ranks disagree about whether this can run"
OTHER_STEPS: dict[str, Value] = {"fault": "describe", "ranks": "1", "explains": "0,1"}
ABSENT = "target 'test_runner:preparr' cannot be loaded: test_runner has no function 'preparr'"
EACH = f"{DISAGREE}: rank 0: rank 0 does not like it; rank 1: rank 1 does not like it"
ONE = f"{DISAGREE}: rank 0: ready; rank 1: {REFUSED}"
UNLIKE = "ranks disagree about what a step does: 1 unlike rank 0"
NOT_RUN: list[tuple[str, dict[str, Value], str, str, list[list[str]]]] = [
    ("prepare", {"fault": "refuse"}, "skipped", REFUSED, [["prepare"], ["prepare"]]),
    ("prepare", {"fault": "refuse", "ranks": "1"}, "failed", ONE, [["prepare", "close"], ["prepare"]]),
    ("prepare", {"fault": "refuse each"}, "failed", EACH, []),
    ("prepare", OTHER_STEPS, "failed", UNLIKE, [["prepare", "close"]] * 2),
    ("preparr", {}, "skipped", ABSENT, []),
]


def test_what_cannot_run_is_skipped_or_failed_in_words_and_closed_where_it_was_prepared(two_ranks: Ranks) -> None:
    for prepared_by, params, status, reason, logs in NOT_RUN:
        seen = ran(two_ranks, prepared_by, **params)
        for rank in seen:
            assert (rank.outcome.status, rank.outcome.reason) == (status, reason)
            assert (rank.outcome.check, rank.outcome.seconds, rank.outcome.explained) == (Check(), [], {})
        if logs:
            assert [rank.log for rank in seen] == logs, reason


def test_a_benchmark_is_closed_when_it_raises(two_ranks: Ranks) -> None:
    for fault, error, last in (
        ("raise", "the roof is on fire", "check"),
        ("describe raises", "no words", "prepare"),
        ("explain", "lost for words", "step"),
    ):
        for rank in ran(two_ranks, fault=fault, explains="0,1"):
            assert (rank.error, rank.log[-2:]) == (error, [last, "close"])


def test_a_benchmark_explains_itself_last_on_every_rank_after_all_checks(two_ranks: Ranks) -> None:
    for mode in ("blocking", "pipelined"):
        seen = ran(two_ranks, mode=mode, explains="0,1")
        for number, rank in enumerate(seen):
            at = rank.log.index("explain")
            assert rank.log[at - 1 :] == ["check", "explain", *["reset", "begun", "step"] * 3, "close"], mode
            assert rank.log.count("check") == 2
            assert (rank.phase, rank.steps) == ("explain", rank.log.count("reset"))
            assert (rank.outcome.status, rank.outcome.details["rank"]) == ("ok", number)
        outcome = seen[0].outcome  # joins what the benchmark says of itself
        assert (outcome.explained, outcome.headline) == ({"compute": COMPUTE}, "step_time")
        assert outcome.notes == ["emulated", "explained in three steps"]
        assert (outcome.details["told by"], outcome.details["warmup"]) == ("all", 3)
        assert (outcome.check, len(outcome.seconds) >= 6) == (Check(passed=True, wrong=0), True)
        [share] = {rank.outcome.details["budget"] for rank in seen}  # rank 0's of the budget
        assert 0 < share < 60


def test_no_rank_explains_what_another_cannot(two_ranks: Ranks) -> None:
    slow = FaultSpec(kind="slow", rank=1, amount=0.005, text="slow:1:0.5%")  # a disturbed rank cannot
    for injection, explains, told in ((None, "0", ""), (slow, "0,1", slow.text)):
        for rank in ran(two_ranks, "prepare", injection, explains=explains):
            assert (rank.outcome.status, rank.outcome.explained, rank.outcome.injected) == ("ok", {}, told)
            assert rank.outcome.notes in (["emulated"], [])
            assert "explain" not in rank.log
            assert rank.phase == "check"


def test_a_late_rank_is_late_at_every_beginning_and_the_others_wait_for_it_in_the_step(two_ranks: Ranks) -> None:
    injection = FaultSpec(kind="late", rank=1, amount=LATE_SECONDS, text="late:1:20ms")
    waiting, late = (rank.outcome for rank in ran(two_ranks, "prepare", injection, explains="0,1"))
    assert waiting.explained == {"compute": COMPUTE}
    assert min(late.details["begins"]) >= LATE_SECONDS
    assert min(waiting.details["waits"]) >= LATE_SECONDS / 2
    assert min(waiting.skew_seconds) >= LATE_SECONDS / 2
    assert late.injected == waiting.injected == "late:1:20ms"


def test_a_target_names_a_function_of_any_importable_module_or_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_step.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_target("parbench.bench.operations.collectives:all_reduce").__name__ == "all_reduce"
    for target, told in {
        "no_such_module:prepare": "No module named 'no_such_module'",
        "needy_step:prepare": "No module named 'no_such_dependency'",
        "parbench.bench.operations.collectives:CONVENTION": "parbench.bench.operations.collectives has no "
        "function 'CONVENTION'",
        "parbench.bench.rank.runner": "parbench.bench.rank.runner has no function ''",
    }.items():
        with pytest.raises(UserError) as refusal:
            load_target(target)
        assert str(refusal.value) == f"target '{target}' cannot be loaded: {told}"
    assert "needy_step" not in sys.modules


def test_what_a_target_returns_that_is_no_benchmark_is_told_with_what_it_lacks() -> None:
    for target, told in {
        "builtins:type": "returned the class SimpleNamespace: return a benchmark made of it",
        "builtins:id": "returned int, which is no benchmark: it has no step, reset, check, describe or close",
    }.items():
        world = SimpleNamespace(backend="gloo")
        with pytest.raises(TypeError) as refusal:
            _benchmark(make_case("custom.odd", target, {}), cast(World, world), None)
        assert str(refusal.value) == f"target {target!r} {told}"


def test_float8_is_refused_on_nccl_below_compute_capability_9_in_one_sentence() -> None:
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for capability in ((8, 0), (8, 9)):
            said = (
                f"nccl carries {dtype} from compute capability 9.0 on; this GPU's is {'.'.join(map(str, capability))}"
            )
            assert refusal(refuse_float8, dtype, capability) == said
        for capability in ((9, 0), (10, 0), (12, 0)):
            refuse_float8(dtype, capability)
    refuse_float8("bfloat16", (8, 0))


def test_what_needs_more_than_is_free_on_any_device_is_refused_by_all_ranks_in_the_same_words() -> None:
    asked: dict[str, Value] = {"size_bytes": 1 << 30, "dtype": "int8", "mode": "blocking"}
    case = make_case("collective.all_reduce", "parbench.bench.operations.collectives:all_reduce", asked)
    place = SimpleNamespace(device=torch.device("cpu"))
    runner._refuse_too_large(case, cast(World, place))  # a CPU has swap, and its plan has looked at it
    place.device = torch.device("cuda", 0)
    with mock.patch.object(torch, "cuda") as cuda:
        for here, there, cached, refused in ((8, 8, 0, False), (8, 5, 0, True), (5, 8, 0, True), (5, 8, 2, False)):
            cuda.mem_get_info.return_value = (here << 30, 80 << 30)
            cuda.memory_reserved.return_value, cuda.memory_allocated.return_value = (cached << 30) + 7, 7
            place.gather = lambda mine, there=there: [mine, there << 30]
            if refused:
                told = refusal(runner._refuse_too_large, case, place)
                assert told == "size 1G needs about 6.4 GB a rank; 5.4 GB of the device are free"
            else:  # what torch keeps for itself is free to be used again
                runner._refuse_too_large(case, cast(World, place))


def test_arrivals_on_a_device_are_as_uncertain_as_its_host_sees_them_and_the_last_arrivers_time_is_kept() -> None:
    arrivals = np.array([[0, 100_000, 0], [15_000, 0, 30_000]])
    durations = np.array([[9_000, 2_000, 9_000], [4_000, 8_000, 4_000]])
    stamps = np.stack([arrivals, arrivals + durations, durations, 0 * durations])
    clock = Clock(offsets_ns=(0, 0), uncertainty_ns=5_000, method="ping-pong")
    world = cast(World, SimpleNamespace(clock=clock, hosts=("a", "b")))
    found = []
    for hidden in (None, 0.5):
        timed = Timed(stamps=stamps, stop="visits", steps_per_sample=1, warmup=1, hidden=hidden)
        found.append(runner._seen(Outcome(status="ok"), timed, Description(), world, [0, 1]))
    host, device = found
    assert host.arrival is not None
    assert device.arrival is not None
    assert (host.arrival.method, host.arrival.uncertainty, host.arrival.share) == ("ping-pong", 5e-6, 0.6667)
    assert (device.arrival.uncertainty, device.arrival.share) == (25e-6, 0.3333), "15 us apart may be none"
    assert device.arrival.method == "ping-pong; a device's events by its host"
    assert (host.last_arriver_seconds, device.last_arriver_seconds) == ([], [4e-6, 2e-6, 4e-6])
    assert device.details.items() - host.details.items() == {("launch_hidden", 0.5)}
    assert metrics_of(device)["last_arriver"].value == 4e-6
    assert "last_arriver" not in metrics_of(host)


def test_a_time_on_a_device_says_what_it_cannot_claim() -> None:
    def notes(mode: str, num_ranks: int, hidden: float | None) -> list[str]:
        case = make_case("collective.all_reduce", "parbench.bench.operations.collectives:all_reduce", {"mode": mode})
        return runner._notes(case, cast(World, SimpleNamespace(backend="nccl")), num_ranks, hidden)

    assert notes("blocking", 1, None) == [], "on a CPU it is as it was"
    assert ["compares with nccl-tests" in note for note in notes("blocking", 2, 1.0)] == [True]
    assert notes("pipelined", 2, 1.0) == notes("async", 2, 0.0) == []
    [launch] = notes("pipelined", 2, 0.75)
    assert launch.startswith("25% of iterations hold time of the host's launch")
    assert notes("graph", 1, 1.0) == ["one rank: nothing moves, and NCCL launches nothing in place"]
