"""What a row says of its attention: bytes each way, balance and its ceiling, hops under blocks of known length."""

import time
from typing import Any

import pytest
import torch
from ranks import Ranks
from training_steps import Params

from parbench.workloads.context_parallel.attention_kernel import Recorder, Size, Wait
from parbench.workloads.context_parallel.context_case import ContextPlan, balance_limit
from parbench.workloads.context_parallel.context_step import AttentionProbe, Seen, hops_of

METHODS = ("ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp")
LONG: Params = {"layers": 1, "hidden": 16, "heads": 4, "kv_heads": 4, "sequence": 256, "vocabulary": 32}
TIMED: Params = {**LONG, "hidden": 256, "microbatch": 8, "compute": "timed:1ms", "attention": "timed:200ms"}
ALONE: dict[Size, list[float]] = {("keys", (4,), torch.float32): [0.5], ("gradients", (4,), torch.float32): [0.25]}
MOVED = torch.zeros(3, 5, dtype=torch.bfloat16)


def waited(step: int, issued: float, began: float, ended: float, what: str = "keys") -> Wait:
    size = (what, (4,), torch.float32)
    return Wait(direction="forward", step=step, size=size, peers=(0, 1), issued=issued, began=began, ended=ended)


def seen(*rounds: list[Wait], pairs: dict[tuple[str, int], int] | None = None) -> Seen:
    return Seen(sent={}, pairs=pairs or {}, rounds=list(rounds), alone=ALONE)


def test_what_is_recorded_adds_up_in_order_and_each_recording_begins_anew() -> None:
    found = Recorder(torch.device("cpu"))
    for _ in range(2):
        with found.recording():
            for direction, step, pairs in (("forward", 0, 3), ("forward", 0, 4), ("forward", 1, 5), ("backward", 0, 6)):
                found.computed(direction, step, pairs)  # type: ignore[arg-type]
            for step in range(3):
                with found.waiting("forward", step, "keys", MOVED, [0]):
                    pass
        assert found.pairs == {("forward", 0): 7, ("forward", 1): 5, ("backward", 0): 6}
        assert [wait.step for wait in found.waits()] == [0, 1, 2]


def test_nothing_is_noted_outside_nor_after_a_step_that_fails() -> None:
    found = Recorder(torch.device("cpu"))

    def fail() -> None:
        with found.recording():
            raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        fail()
    assert found.issued() is None
    found.computed("forward", 0, 3)
    with found.waiting("forward", 0, "keys", MOVED, [0]):
        pass
    assert (dict(found.pairs), found.waits()) == ({}, [])


def test_a_wait_is_as_long_as_its_body_by_any_clock_and_known_to_be_issued_before() -> None:
    found = Recorder(torch.device("cpu"))
    with found.recording():
        issued = found.issued()
        time.sleep(0.02)
        with found.waiting("backward", 2, "gradients", MOVED, [0, 3], issued):
            time.sleep(0.03)
        with found.waiting("backward", 3, "gradients", MOVED, [0, 3]):
            pass
    wait, other = found.waits()
    assert (wait.direction, wait.step, wait.peers) == ("backward", 2, (0, 3))
    assert (wait.size, wait.num_bytes) == (("gradients", (3, 5), torch.bfloat16), 30)
    assert wait.issued == issued
    assert wait.began - wait.issued >= 0.02
    assert wait.seconds == wait.ended - wait.began >= 0.03
    assert other.issued == other.began <= other.ended <= time.perf_counter()
    behind, _ = found.waits(ahead_seconds=4.0)
    assert (behind.issued, behind.began, behind.ended) == (wait.issued - 4, wait.began - 4, wait.ended - 4)


def test_a_hop_is_exposed_from_when_it_is_waited_for_and_all_peers_have_issued_it() -> None:
    """In the first hop rank 1 is 5 s late to issue; the second is issued early by both and waited for 1 s and 3 s."""
    rounds = (
        [[waited(0, 0.0, 1.0, 7.0), waited(1, 7.0, 8.0, 9.0)]] * 2,
        [[waited(0, 5.0, 6.0, 7.0), waited(1, 7.0, 8.0, 11.0)]] * 2,
    )
    told = [seen(*of, pairs={("forward", 0): pairs}) for of, pairs in zip(rounds, (3, 5), strict=True)]
    hops = hops_of(told)
    assert [(hop.exposed_seconds, hop.wait_seconds) for hop in hops] == [(2.0, 6.0), (3.0, 3.0)]
    assert [(hop.num_bytes, hop.count, hop.comm_seconds) for hop in hops] == [(16, 1, 0.5)] * 2
    assert [hop.pairs_by_rank for hop in hops] == [(3, 5), (0, 0)]
    nothing: Any = None
    plan = ContextPlan(method="ring", mask="causal", sequence=4, ranks=2, ulysses=1)
    given = dict.fromkeys(("world", "layout", "recorder", "forward"), nothing)
    probe = AttentionProbe(plan=plan, expected={}, **given)
    metrics = {name: metric.value for name, metric in probe.summarise(told).metrics.items()}
    assert metrics == {
        "load_balance": 0.8,
        "balance_ceiling": plan.balance_ceiling(),
        "attention_comm": 1.0,
        "attention_exposed": 4.0,
        "attention_wait": 7.0,
    }
    # what comes before a peer has noted its issue is not exposed
    assert hops_of([seen([waited(0, 0.0, 1.0, 2.0)]), seen([waited(0, 2.5, 3.0, 3.0)])])[0].exposed_seconds == 0


def test_hops_of_all_layers_are_summed_rounds_give_their_mean_and_what_moves_is_told_apart() -> None:
    rounds = [[waited(0, 0.0, 0.0, s), waited(0, 10.0, 10.0, 10.0 + s)] for s in (1.0, 9.0, 2.0)]
    [hop] = hops_of([seen(*rounds)] * 2)
    assert (hop.count, hop.comm_seconds, hop.exposed_seconds) == (2, 1.0, 8.0)
    hops = hops_of([seen([waited(0, 0.0, 0.0, 1.0), waited(0, 0.0, 1.0, 3.0, "gradients")])] * 2)
    found = [(hop.what, hop.exposed_seconds, hop.comm_seconds) for hop in hops]
    assert found == [("keys", 1.0, 0.5), ("gradients", 2.0, 0.25)]


def test_bytes_are_the_formulas_each_way_and_balance_is_at_its_ceiling(four_ranks: Ranks) -> None:
    for method in METHODS:
        metrics, details = four_ranks.call("cp_ranks:explained", params={"method": method, **LONG}, budget=0.0)[0]
        ratios = {name: value for name, value in metrics.items() if name.startswith("bytes_ratio.")}
        axes = ("ring", "ulysses") if method == "usp" else ("cp",)
        assert ratios == {f"bytes_ratio.{axis}.{way}": 1 for axis in axes for way in ("forward", "backward")}, method
        assert metrics["load_balance"] == metrics["balance_ceiling"], method
        assert metrics["load_balance"] == pytest.approx(balance_limit(method, 4), abs=0.02), method
        hops = details["attention_steps"]
        assert all(hop["comm_seconds"] > 0 and hop["count"] == 1 for hop in hops), method
        if method == "ring":
            plan = ContextPlan(method="ring", mask="causal", sequence=256, ranks=4, ulysses=1)
            pairs = {hop["step"]: hop["pairs_by_rank"] for hop in hops if hop["direction"] == "forward"}
            assert pairs == {step: [2 * 4 * plan.pairs(rank, step) for rank in range(4)] for step in range(3)}


@pytest.mark.full
@pytest.mark.measures
@pytest.mark.parametrize(("method", "mask"), [("ring", "full"), ("zigzag", "causal")])
def test_hops_hide_under_blocks_that_take_longer(four_ranks: Ranks, method: str, mask: str) -> None:
    """Blocks take 25 ms and more, hops a few: under a tenth of what communication takes alone stays exposed."""
    shares: list[float] = []
    while len(shares) < 3 and min(shares, default=1.0) >= 0.1:  # whoever else is on this machine may delay a rank
        params = {"method": method, "mask": mask, **TIMED}
        metrics, details = four_ranks.call("cp_ranks:explained", params=params)[0]
        assert len(details["attention_steps"]) == 3 * 3
        shares.append(metrics["attention_exposed"] / metrics["attention_comm"])
    assert min(shares) < 0.1, shares


@pytest.mark.full
@pytest.mark.measures
def test_what_nothing_hides_is_exposed(four_ranks: Ranks) -> None:
    params = {"method": "allgather_kv", "mask": "causal", **TIMED}
    metrics, _ = four_ranks.call("cp_ranks:explained", params=params)[0]
    assert metrics["attention_exposed"] > 0.3 * metrics["attention_comm"]


def test_the_formula_of_activations_is_of_a_ranks_part_and_spans_are_told_apart_by_axis(two_ranks: Ranks) -> None:
    for method in ("ring", "ulysses"):
        [(found, _), _] = two_ranks.call(
            "cp_ranks:explained", params={"method": method, **LONG}, whole=True, budget=0.0
        )
        formula, counted = (found[f"memory_{source}.activations"] for source in ("formula", "counted"))
        assert formula == pytest.approx(counted, rel=0.02), method
        assert found["bytes_ratio.cp"] == found["bytes_ratio.dp"] == 1, method
        assert "exposed_comm.other" not in found, method
        assert {"exposed_comm.cp", "exposed_comm.dp", "comm_transfer.cp"} <= found.keys(), method
