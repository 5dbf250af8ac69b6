"""Every case goes the same way, whatever goes wrong on it has a status and words, and a wrong result has no time."""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks

from bench.cases import make_case
from bench.errors import UserError
from bench.injection import Injection
from bench.messages import Outcome, Work
from bench.params import Value
from bench.plan import Measure
from bench.progress import Progress
from bench.records import Check, Metric
from bench.runner import load_target, run_case
from bench.subject import Description, Explanation
from bench.world import World

MEASURE = Measure(warmup=3, min_iterations=6, max_iterations=8)
Fault = Literal["none", "refuse", "before", "after", "describe", "raise", "describe raises", "explain"]
calls: list[str] = []
"""What this rank's last subject was asked, in order."""


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
            work=(Work(name="tokens_per_second", amount=128.0, unit="tokens/s"),),
            details={"told by": self.world.rank if self.fault == "describe" else "all", "warmup": "theirs"},
            notes=("emulated",),
        )

    def close(self) -> None:
        calls.append("close")


def prepare(world: World, *, fault: Fault = "none", ranks: str = "0,1", mark: int = 0) -> Faulty:
    """Return a subject with a fault on some ranks; ``mode`` is no parameter of it, so it must not be passed."""
    calls.clear()
    calls.append(f"prepare {mark}")
    mine: Fault = fault if str(world.rank) in ranks.split(",") else "none"
    if mine == "refuse":
        raise UserError("this device has no flux capacitor")
    return Faulty(world, mine)


def refuse_each_in_its_words(world: World) -> Faulty:
    raise UserError(f"rank {world.rank} does not like it")


def run(
    world: World, params: dict[str, Value], prepared_by: str = "test_runner:prepare"
) -> tuple[Outcome, list[str], tuple[str, int]]:
    """Run a case; return the outcome, what the subject was asked, and the phase and steps of the progress."""
    progress = Progress()
    case = make_case("custom.faulty", prepared_by, params)
    outcome = run_case(case, world, MEASURE, 60.0, progress)
    return outcome, list(calls), (progress.phase, progress.steps)


def asked_until_it_raised(world: World, params: dict[str, Value]) -> tuple[str, list[str]]:
    try:
        run(world, params)
    except RuntimeError as error:
        return str(error), list(calls)
    return "", list(calls)


def runs(two_ranks: Ranks, **params: Value) -> list[Outcome]:
    return [outcome for outcome, _, _ in two_ranks.call("test_runner:run", params=params)]


def asked(two_ranks: Ranks, **params: Value) -> list[list[str]]:
    return [log for _, log, _ in two_ranks.call("test_runner:run", params=params)]


# ---- what goes well


def test_a_right_result_has_its_time_its_check_and_what_the_subject_says_of_itself(two_ranks: Ranks) -> None:
    outcome, other = runs(two_ranks)
    assert (outcome.status, outcome.reason, outcome.check) == ("ok", "", Check(passed=True, wrong=0))
    assert outcome.stop in ("precision", "max-iters")
    assert (outcome.headline, outcome.notes) == ("step_time", ["emulated"])
    assert outcome.work == [Work(name="tokens_per_second", amount=128.0, unit="tokens/s")]
    assert 6 <= len(outcome.seconds) == len(outcome.skew_seconds) <= 8
    assert sum(outcome.seconds) < outcome.wall_seconds < 60
    assert (other.status, other.seconds, other.raw) == ("ok", [], b"")


def test_details_say_how_it_was_timed_and_on_which_clock(two_ranks: Ranks) -> None:
    outcome, _ = runs(two_ranks)
    assert outcome.details == {
        "told by": "all",
        "warmup": 3,  # the runner's own word is the last
        "steps_per_sample": 1,
    }
    assert outcome.arrival is not None
    assert (outcome.arrival.method, outcome.arrival.uncertainty) == ("one host, one monotonic clock", 0.0)


def test_raw_samples_are_every_ranks_and_make_the_seconds(two_ranks: Ranks) -> None:
    outcome, _ = runs(two_ranks)
    raw = unpack(outcome)
    assert set(raw) == {
        *("ranks", "arrival_ns", "exit_ns", "duration_ns", "issue_ns", "steps_per_sample", "clock_offsets_ns"),
    }
    shape = (2, len(outcome.seconds))
    assert raw["arrival_ns"].shape == raw["exit_ns"].shape == raw["duration_ns"].shape == shape
    assert (raw["duration_ns"].max(axis=0) / 1e9).tolist() == pytest.approx(outcome.seconds, rel=1e-12)
    assert (np.ptp(raw["arrival_ns"], axis=0) / 1e9).tolist() == pytest.approx(outcome.skew_seconds, rel=1e-12)
    assert raw["arrival_ns"].min() == 0
    assert (raw["exit_ns"] - raw["arrival_ns"] == raw["duration_ns"]).all()
    assert raw["clock_offsets_ns"].tolist() == [0, 0]


def test_a_pipelined_case_tells_the_steps_of_a_sample_and_its_raw_samples_are_undivided(two_ranks: Ranks) -> None:
    outcome, _ = runs(two_ranks, mode="pipelined")
    raw = unpack(outcome)
    steps = int(raw["steps_per_sample"])
    assert 4 <= steps == outcome.details["steps_per_sample"]
    assert (raw["duration_ns"].max(axis=0) / steps / 1e9).tolist() == pytest.approx(outcome.seconds, abs=1e-9)


def unpack(outcome: Outcome) -> dict[str, Any]:
    with np.load(io.BytesIO(outcome.raw)) as file:
        return dict(file)


def test_a_case_is_checked_before_and_after_and_closed_once(two_ranks: Ranks) -> None:
    answers = two_ranks.call("test_runner:run", params={"mark": 7})
    iterations = len(answers[0][0].seconds)
    for _, log, _ in answers:
        assert log[:4] == ["prepare 7", "reset", "step", "check"]
        # the last check is of the last timed step, not of a new one
        assert log[4:] == ["reset", "step"] * (MEASURE.warmup + iterations) + ["check", "close"]


def test_a_pipelined_case_is_checked_on_a_fresh_step(two_ranks: Ranks) -> None:
    """Steps on top of steps have summed in place; that is no fault of the result."""
    for log in asked(two_ranks, mode="pipelined"):
        assert log[-5:] == ["step", "reset", "step", "check", "close"]


def test_a_watcher_ends_up_at_the_check_with_every_step_counted(two_ranks: Ranks) -> None:
    answers = two_ranks.call("test_runner:run", params={})
    for _, log, (phase, steps) in answers:
        assert phase == "check"
        assert steps == log.count("reset")


# ---- what goes wrong


@pytest.mark.parametrize("mode", ["blocking", "pipelined"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrong_result_has_no_time_and_names_its_rank(two_ranks: Ranks, when: str, mode: str) -> None:
    outcomes = runs(two_ranks, fault=when, ranks="1", mode=mode)
    for outcome in outcomes:
        assert outcome.status == "wrong"
        assert outcome.reason == f"results differ from the reference {when} the timed region: 4 on rank 1"
        assert outcome.check == Check(passed=False, wrong=4)
        assert (outcome.seconds, outcome.stop, outcome.raw) == ([], None, b"")


def test_what_is_wrong_is_summed_over_ranks_and_told_for_each(two_ranks: Ranks) -> None:
    outcome, _ = runs(two_ranks, fault="after")
    assert outcome.check.wrong == 7
    assert outcome.reason.endswith(": 3 on rank 0, 4 on rank 1")


def test_nothing_is_timed_after_a_wrong_first_check(two_ranks: Ranks) -> None:
    for log in asked(two_ranks, fault="before", ranks="0"):
        assert log == ["prepare 0", "reset", "step", "check", "close"]


def test_a_case_that_all_ranks_refuse_is_skipped_in_their_words(two_ranks: Ranks) -> None:
    for outcome in runs(two_ranks, fault="refuse"):
        assert (outcome.status, outcome.reason) == ("skipped", "this device has no flux capacitor")
        assert outcome.check == Check()


def test_a_case_that_one_rank_refuses_has_failed_and_is_closed_on_the_others(two_ranks: Ranks) -> None:
    answers = two_ranks.call("test_runner:run", params={"fault": "refuse", "ranks": "1"})
    for outcome, _, _ in answers:
        assert outcome.status == "failed"
        assert outcome.reason == (
            "ranks disagree about whether this can run: rank 0: ready; rank 1: this device has no flux capacitor"
        )
    assert [log for _, log, _ in answers] == [["prepare 0", "close"], ["prepare 0"]]


def test_ranks_that_refuse_for_different_reasons_have_failed(two_ranks: Ranks) -> None:
    answers = two_ranks.call("test_runner:run", params={}, prepared_by="test_runner:refuse_each_in_its_words")
    for outcome, _, _ in answers:
        assert outcome.status == "failed"
        assert outcome.reason.endswith(": rank 0: rank 0 does not like it; rank 1: rank 1 does not like it")


def test_ranks_that_would_do_different_steps_take_none(two_ranks: Ranks) -> None:
    answers = two_ranks.call("test_runner:run", params={"fault": "describe", "ranks": "1"})
    for outcome, log, _ in answers:
        assert outcome.status == "failed"
        assert outcome.reason == "ranks disagree about what a step does: 1 unlike rank 0"
        assert log == ["prepare 0", "close"]


def test_a_subject_is_closed_when_its_check_raises(two_ranks: Ranks) -> None:
    for error, log in two_ranks.call("test_runner:asked_until_it_raised", params={"fault": "raise"}):
        assert error == "the roof is on fire"
        assert log[-2:] == ["check", "close"]


def test_a_subject_is_closed_when_it_cannot_describe_itself(two_ranks: Ranks) -> None:
    for error, log in two_ranks.call("test_runner:asked_until_it_raised", params={"fault": "describe raises"}):
        assert error == "no words"
        assert log == ["prepare 0", "close"]


def test_a_target_that_is_not_there_is_skipped_with_the_reason(two_ranks: Ranks) -> None:
    outcome, _, _ = two_ranks.call("test_runner:run", params={}, prepared_by="test_runner:preparr")[0]
    assert outcome.status == "skipped"
    assert "has no function 'preparr'" in outcome.reason


def test_a_parameter_that_the_target_does_not_take_is_an_error_on_every_rank(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="unexpected keyword argument 'colour'"):
        runs(two_ranks, colour="red")


# ---- what explains itself

LATE_SECONDS = 0.02
COMPUTE = Metric(value=4e-4, unit="s", better="lower", method="the slowest rank's")


class Explaining(Faulty):
    """Says where its time goes, and takes three steps for it; keeps how long each beginning and its steps took."""

    def explain(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        calls.append("explain")
        self.begins: list[float] = []
        self.waits: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            begin()
            self.begins.append(time.perf_counter() - began)
            assert self.number.item() == 1.0
            calls.append("begun")
            began = time.perf_counter()
            self.step()
            self.waits.append(time.perf_counter() - began)
        if self.fault == "explain":
            raise RuntimeError("lost for words")
        return Explanation(
            metrics={"compute": COMPUTE},
            details={"rank": self.world.rank, "budget": budget_seconds, "begins": self.begins, "waits": self.waits},
            notes=("explained in three steps",),
        )


def prepare_explaining(world: World, *, fault: Fault = "none", ranks: str = "0,1", only: str = "0,1") -> Faulty:
    """Return a subject that explains itself on the ranks named by ``only``."""
    calls.clear()
    mine: Fault = fault if str(world.rank) in ranks.split(",") else "none"
    return (Explaining if str(world.rank) in only.split(",") else Faulty)(world, mine)


def explained(
    world: World, params: dict[str, Value], injection: Injection | None = None
) -> tuple[Outcome, list[str], tuple[str, int]]:
    """Run a case whose subject explains itself."""
    progress = Progress()
    case = make_case("custom.explaining", "test_runner:prepare_explaining", params)
    outcome = run_case(case, world, MEASURE, 60.0, progress, injection=injection)
    return outcome, list(calls), (progress.phase, progress.steps)


def explained_until_it_raised(world: World, params: dict[str, Value]) -> tuple[str, list[str]]:
    try:
        explained(world, params)
    except RuntimeError as error:
        return str(error), list(calls)
    return "", list(calls)


def explanations(two_ranks: Ranks, **params: Value) -> list[Any]:
    return two_ranks.call("test_runner:explained", params=params)


def injected(ranks: Ranks, kind: str, amount: float) -> list[Any]:
    injection = Injection(kind=kind, rank=1, amount=amount, text=f"rank 1 is {kind}")  # type: ignore[arg-type]
    return ranks.call("test_runner:explained", params={}, injection=injection)


@pytest.mark.parametrize("mode", ["blocking", "pipelined"])
def test_a_subject_explains_itself_last_on_every_rank_after_all_checks(two_ranks: Ranks, mode: str) -> None:
    for outcome, log, _ in explanations(two_ranks, mode=mode):
        assert outcome.status == "ok"
        assert log[log.index("explain") :] == ["explain", *["reset", "begun", "step"] * 3, "close"]
        assert log[log.index("explain") - 1] == "check"
        assert log.count("check") == 2


def test_each_beginning_resets_and_counts_a_step_and_the_watcher_knows_the_phase(two_ranks: Ranks) -> None:
    for _, log, (phase, steps) in explanations(two_ranks):
        assert phase == "explain"
        assert steps == log.count("reset")
        assert log.count("begun") == 3


def test_an_explanation_joins_what_the_subject_says_of_itself(two_ranks: Ranks) -> None:
    outcome, other = (outcome for outcome, _, _ in explanations(two_ranks))
    assert outcome.explained == {"compute": COMPUTE}
    assert outcome.notes == ["emulated", "explained in three steps"]
    assert (outcome.details["told by"], outcome.details["warmup"]) == ("all", 3)
    assert [found.details["rank"] for found in (outcome, other)] == [0, 1]
    assert len(outcome.seconds) >= 6
    assert (outcome.headline, outcome.check) == ("step_time", Check(passed=True, wrong=0))


def test_an_explanation_has_a_share_of_the_budget_that_is_the_same_on_every_rank(two_ranks: Ranks) -> None:
    shares = {outcome.details["budget"] for outcome, _, _ in explanations(two_ranks)}
    assert len(shares) == 1
    assert 0 < shares.pop() < 60


def test_a_subject_without_an_explanation_has_none(two_ranks: Ranks) -> None:
    for outcome in runs(two_ranks):
        assert outcome.explained == {}
        assert outcome.status == "ok"


def test_no_rank_explains_what_another_cannot(two_ranks: Ranks) -> None:
    for outcome, log, (phase, _) in explanations(two_ranks, only="0"):
        assert (outcome.status, outcome.explained) == ("ok", {})
        assert "explained in three steps" not in outcome.notes
        assert "explain" not in log
        assert phase == "check"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrong_result_is_not_explained(two_ranks: Ranks, when: str) -> None:
    for outcome, log, _ in explanations(two_ranks, fault=when, ranks="1"):
        assert (outcome.status, outcome.explained) == ("wrong", {})
        assert "explain" not in log
        assert log[-1] == "close"


def test_ranks_that_would_do_different_steps_explain_none(two_ranks: Ranks) -> None:
    for outcome, log, _ in explanations(two_ranks, fault="describe", ranks="1"):
        assert (outcome.status, outcome.explained) == ("failed", {})
        assert log == ["close"]


def test_a_subject_is_closed_when_its_explanation_raises(two_ranks: Ranks) -> None:
    for error, log in two_ranks.call("test_runner:explained_until_it_raised", params={"fault": "explain"}):
        assert error == "lost for words"
        assert log[-1] == "close"


def test_a_disturbed_rank_explains_nothing_and_neither_do_the_others(two_ranks: Ranks) -> None:
    for outcome, log, _ in injected(two_ranks, "slow", 0.005):
        assert (outcome.status, outcome.explained) == ("ok", {})
        assert outcome.injected == "rank 1 is slow"
        assert "explain" not in log


def test_a_late_rank_is_late_at_every_beginning_and_the_others_wait_for_it_in_the_step(two_ranks: Ranks) -> None:
    [(outcome, log, _), (late, _, _)] = injected(two_ranks, "late", LATE_SECONDS)
    assert outcome.explained == {"compute": COMPUTE}
    assert "explain" in log
    assert all(seconds >= LATE_SECONDS for seconds in late.details["begins"])
    assert all(seconds >= LATE_SECONDS / 2 for seconds in outcome.details["waits"])
    assert late.injected == outcome.injected == "rank 1 is late"


# ---- targets


def test_a_target_names_a_function_of_any_importable_module() -> None:
    assert load_target("bench.collectives:all_reduce").__name__ == "all_reduce"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_module:prepare", "No module named 'no_such_module'"),
        ("bench.no_such_module:prepare", "No module named 'bench.no_such_module'"),
        ("bench.runner:no_such_function", "bench.runner has no function 'no_such_function'"),
        ("bench.collectives:CONVENTION", "bench.collectives has no function 'CONVENTION'"),
        ("bench.runner", "bench.runner has no function ''"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_refused_with_its_name(target: str, told: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_target(target)
    assert str(refusal.value) == f"target '{target}' cannot be loaded: {told}"


def test_a_target_whose_own_import_is_missing_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_step.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="No module named 'no_such_dependency'"):
        load_target("needy_step:prepare")
    assert "needy_step" not in sys.modules
