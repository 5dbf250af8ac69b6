"""Every mode takes its sample as it says; what is disturbed on purpose is slower or wrong, and nothing else."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from parbench.bench.operations.operation import Operation
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.catalogue import OPERATIONS
from parbench.bench.plan.params import Value
from parbench.bench.plan.plan import Measure, parse_fault
from parbench.bench.rank import runner, timing
from parbench.bench.rank.runner import CaseRun, Disturbed, load_target
from parbench.bench.rank.timing import sampler
from parbench.bench.text import UserError
from parbench.bench.world.benchmark import Description
from parbench.bench.world.torch_compat import coalescing
from parbench.bench.world.world import Subgroups, World
from tests.support.fake_time import HeldTime
from tests.support.fakes import NotingBenchmark
from tests.support.filling import filling
from tests.support.ranks import Ranks

NO_WORLD = cast(World, None)


class Takes(NotingBenchmark):
    """Takes so long to launch a step and so long until its device has done it; two works to wait for, 10 s each."""

    def __init__(self, clock: HeldTime, launch: float = 0.0, device: float = 0.0) -> None:
        super().__init__()
        self.clock, self.launch, self.device = clock, launch, device

    def step(self) -> None:
        super().step()
        self.clock.sleep(self.launch)

    def issue(self) -> Sequence[dist.Work]:
        self.calls.append("issue")
        self.clock.sleep(5.0)
        return [cast(dist.Work, self), cast(dist.Work, self)]

    def wait(self) -> None:
        self.calls.append("wait")
        self.clock.sleep(10.0)

    def sync(self) -> None:
        self.calls.append("sync")
        self.clock.sleep(self.device)

    def check(self) -> int:
        return 3

    def describe(self) -> Description:
        return Description(headline="asleep")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldTime:
    fake = HeldTime(100_000_000_000)
    for module in (timing, runner):
        monkeypatch.setattr(module, "time", fake)
    return fake


def sample_of_three(world: World, mode: str) -> tuple[list[float], list[float]]:
    """Reduce three tensors in a sample; return what each was right after its call and what it was at the end."""
    tensors, noted = [torch.ones(4) for _ in range(3)], list[float]()

    class OneAfterAnother(NotingBenchmark):
        def step(self) -> None:
            tensor = tensors[len(noted)]
            dist.all_reduce(tensor, group=world.group)
            noted.append(float(tensor[0]))

    assert sampler(mode, OneAfterAnother(), world, 3)() is None
    return noted, [float(tensor.sum()) / 4 for tensor in tensors]


def issue_all_reduce(world: World) -> tuple[bool, int]:
    """Return whether the issue time is between arrival and end, and how much is wrong then."""
    prepare = load_target("parbench.bench.operations.collectives:all_reduce")
    operation = cast(Operation, prepare(world, size_bytes=1 << 16, dtype="float32"))
    sample = sampler("async", operation, world, 1)
    operation.reset()
    arrived = time.perf_counter_ns()
    issued = sample()
    ended = time.perf_counter_ns()
    return issued is not None and arrived < issued < ended, operation.check()


def test_an_asynchronous_sample_tells_when_it_was_issued_and_waits_for_all(
    clock: HeldTime, two_ranks: Ranks
) -> None:
    benchmark = Takes(clock)
    assert sampler("async", benchmark, NO_WORLD, 1)() == 105_000_000_000
    assert benchmark.calls == ["issue", "wait", "wait"]
    with pytest.raises(UserError, match="mode async"):
        sampler("async", NotingBenchmark(), NO_WORLD, 1)
    assert two_ranks.call("tests.bench.rank.test_timing_modes:issue_all_reduce") == [
        (True, 0),
        (True, 0),
    ]


def test_pipelined_collectives_run_one_by_one_and_coalesced_ones_together_at_the_end(
    two_ranks: Ranks,
) -> None:
    for mode, noted in (("pipelined", 2.0), ("coalesced", 1.0)):
        assert (
            two_ranks.call("tests.bench.rank.test_timing_modes:sample_of_three", mode=mode)
            == [([noted] * 3, [2.0] * 3)] * 2
        ), mode


def launched_together(world: World) -> dict[str, tuple[bool, bool]]:
    """Return of each operation whether torch gathered its call without a device, and whether the operation says so."""
    found = {}
    for spec in OPERATIONS:
        if spec.name.startswith("collective.") and spec.busbw is not None:
            prepare = load_target(spec.definition.target)
            operation = cast(Operation, prepare(world, size_bytes=1 << 12, dtype="float32"))
            with coalescing(world.group, None):
                operation.step()
                gathered = distributed_c10d._world.pg_coalesce_state[world.group]
                found[spec.short_name] = (bool(gathered), operation.gathered)
                gathered.clear()  # two kinds cannot be in one launch
    return found


def test_torch_is_given_a_device_for_just_those_calls_that_it_does_not_gather_itself(
    two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given one for the others, torch 2.11 never waits for an all_gather, which it runs on a stream of NCCL's."""
    for found in two_ranks.call("tests.bench.rank.test_timing_modes:launched_together"):
        told = {name: says for name, (gathers, says) in found.items() if gathers == says}
        assert told == {
            name: name in ("all_reduce", "all_gather", "reduce_scatter") for name in told
        }
        assert found.keys() - told.keys() == {"all_reduce_two_step"}, (
            "whose two kinds of calls cannot be in one launch"
        )
    given = list[object]()

    def noted(group: object, device: object) -> AbstractContextManager[object]:
        given.append(device)
        return nullcontext()

    monkeypatch.setattr(timing, "coalescing", noted)
    for backend, gathered in product(("nccl", "gloo"), (True, False)):
        world = cast(World, SimpleNamespace(backend=backend, group=None, device="cuda:3"))
        operation = replace(filling(), gathered=gathered)
        for benchmark in (
            operation,
            Disturbed(operation, parse_fault("slow:1:1%", 2), lambda: None),
        ):
            sampler("coalesced", benchmark, world, 2)()
    assert given == [None, None, "cuda:3", "cuda:3", None, None, None, None]


class Moves(NotingBenchmark):
    """Counts its steps in a number that a reset sets to zero; repeated, a step leaves it right or not."""

    def __init__(self, repeatable: bool) -> None:
        super().__init__()
        self.repeatable, self.number = repeatable, 0

    def reset(self) -> None:
        self.number = 0

    def step(self) -> None:
        super().step()
        self.number = 1 if self.repeatable else self.number + 1

    def check(self) -> int:
        return int(self.number != 1)


def moves(world: World, *, repeatable: bool) -> Moves:
    return Moves(repeatable)


def replayed(world: World, repeatable: bool, empty: str) -> tuple[str, str]:
    """Measure in mode graph where graphs of one step hold nothing, or of many, or of one after its first replay."""
    real, replays = timing.sampler, list[int]()

    def captured(mode: str, benchmark: Moves, world: World, steps: int) -> timing.Sample:
        if mode != "graph":
            return real(mode, benchmark, world, steps)
        benchmark.step()  # the warm-up before a capture

        def replay() -> None:
            replays.append(steps)
            if empty != ("one" if steps == 1 else "many") and (empty, replays.count(1), steps) != (
                "later",
                2,
                1,
            ):
                for _ in range(steps):
                    benchmark.step()

        return replay

    with mock.patch.object(timing, "sampler", captured):
        params: dict[str, Value] = {"mode": "graph", "repeatable": repeatable}
        case = make_case("custom.moves", "tests.bench.rank.test_timing_modes:moves", params)
        run = CaseRun(
            case, Subgroups(world), Measure(warmup=1, max_iterations=8), timing.Progress(), None
        )
        outcome = run.visit(60.0)
    return outcome.status, outcome.reason


def test_a_graph_is_captured_so_that_other_threads_may_go_on() -> None:
    benchmark = NotingBenchmark()
    with mock.patch.object(torch, "cuda") as cuda:
        replay = sampler("graph", benchmark, NO_WORLD, 3)
    cuda.graph.assert_called_once_with(
        cuda.CUDAGraph.return_value, capture_error_mode="thread_local"
    )
    assert benchmark.calls == ["step"] * 4, "a warm-up, then what is captured"
    assert replay is cuda.CUDAGraph.return_value.replay


def test_replays_are_checked_so_that_an_empty_capture_is_wrong_and_so_is_the_last_replay(
    two_ranks: Ranks,
) -> None:
    table = (
        ("nothing", (True, False), ""),
        ("one", (True, False), "in a replay before the timed region"),
        ("later", (True, False), "after the timed region"),
        ("many", (True,), "in the last replay of the timed region"),
        ("many", (False,), ""),  # whose result no reference knows
    )
    for empty, kinds, when in table:
        told = (
            ("wrong", f"results differ from the reference {when}: 1 on rank 0, 1 on rank 1")
            if when
            else ("ok", "")
        )
        for repeatable in kinds:
            found, _ = two_ranks.call(
                "tests.bench.rank.test_timing_modes:replayed", repeatable=repeatable, empty=empty
            )
            assert found == told, (empty, repeatable)


def test_a_slow_step_takes_longer_by_its_share_of_the_devices_time_not_of_its_launch(
    clock: HeldTime,
) -> None:
    benchmark = Takes(clock, launch=1.0, device=9.0)
    Disturbed(benchmark, parse_fault("slow:1:300%", 2), benchmark.sync).step()
    assert benchmark.calls == ["step", "sync"]
    assert clock.perf_counter() == 140.0
    right = filling()
    Disturbed(right, parse_fault("slow:1:10%", 2), benchmark.sync).step()
    assert right.check() == 0


def test_a_late_step_takes_no_longer_and_waits_for_no_device_and_all_else_is_the_benchmarks(
    clock: HeldTime,
) -> None:
    benchmark = Takes(clock, launch=1.0, device=9.0)
    disturbed = Disturbed(benchmark, parse_fault("late:1:3s", 2), benchmark.sync)
    disturbed.reset()
    disturbed.step()
    assert clock.perf_counter() == 101.0
    disturbed.close()
    assert benchmark.calls == ["reset", "step", "close"]
    assert (disturbed.check(), disturbed.describe().headline) == (3, "asleep")


def test_a_corrupt_step_has_exactly_one_wrong_element_and_what_cannot_be_disturbed_is_refused(
    clock: HeldTime,
) -> None:
    operation, benchmark = filling(), Takes(clock)
    disturbed = Disturbed(operation, parse_fault("corrupt:1", 2), benchmark.sync)
    for _ in range(2):
        disturbed.reset()
        assert disturbed.check() == 4
        disturbed.step()
        assert disturbed.check() == 1
    operation.step()
    assert disturbed.check() == 0
    with pytest.raises(UserError, match=r"corrupt:1: this benchmark has no corrupt\(\)"):
        Disturbed(benchmark, parse_fault("corrupt:1", 2), benchmark.sync).step()
    for text in ("corrupt:1", "slow:1:10%"):
        with pytest.raises(UserError, match="mode async knows only late"):
            Disturbed(benchmark, parse_fault(text, 2), benchmark.sync).issue()
