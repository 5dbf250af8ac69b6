"""What is said of a pipeline's time adds up, and what slows it is called by its name."""

import importlib
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks
from test_pp import small

from bench.subject import Explanation
from bench.world import World
from workloads.footprint import UNCOUNTED
from workloads.pipeline.pp_explain import cores_shared

pytestmark = pytest.mark.measures

SECONDS = 0.05
CAUSES = ("schedule", "imbalance", "p2p", "rest")


class Late:
    """A message that comes ``seconds`` later than it does; whoever waits for it, waits so much longer."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self._work, self._seconds, self._came = work, seconds, 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        self._work.wait()
        self._came = time.perf_counter() + self._seconds

    def wait(self) -> None:
        self._thread.join()
        time.sleep(max(0.0, self._came - time.perf_counter()))


def explained(
    world: World, params: dict[str, Any], link: tuple[int, int] = (-1, -1), late_seconds: float = 0.0
) -> Explanation:
    """Return the explanation of a step; what comes over ``link`` comes late."""
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    plain = schedules._batch_p2p

    def batch(ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        from_there = [op.op is dist.irecv and (op.peer, world.rank) == link for op in ops]
        works = plain(ops, desc)
        return [Late(work, late_seconds) for work in works] if any(from_there) else works

    step = small(world, params)
    schedules._batch_p2p = batch
    try:
        step.step()

        def begin() -> None:
            step.reset()
            world.barrier()

        return step.explain(begin, 2.0)
    finally:
        schedules._batch_p2p = plain
        step.close()


def values(found: Explanation) -> dict[str, float]:
    return {name: metric.value for name, metric in found.metrics.items() if metric.value is not None}


def timed(**params: Any) -> dict[str, Any]:
    return {"schedule": "1f1b", "microbatches": 4, "compute": f"timed:{SECONDS}s", **params}


@pytest.fixture(scope="module")
def plain(two_ranks: Ranks) -> Explanation:
    """1F1B on two ranks with nothing in its way."""
    found: Explanation = two_ranks.call("test_pp_explain:explained", params=timed())[0]
    return found


def test_compute_and_idle_are_the_makespan_and_causes_are_the_idle(plain: Explanation) -> None:
    seen = values(plain)
    assert seen["compute"] + seen["idle"] == pytest.approx(seen["makespan"], rel=1e-9)
    assert sum(seen[f"idle_{cause}"] for cause in CAUSES) == pytest.approx(seen["idle"], abs=1e-12)
    assert seen["bubble_fraction"] == pytest.approx(seen["idle"] / seen["makespan"], rel=1e-9)
    assert seen["bubble_overhead"] == pytest.approx(seen["idle"] / seen["compute"], rel=1e-9)
    assert seen["compute"] == pytest.approx(4 * 3 * SECONDS, rel=0.2)


def test_the_bubble_is_measured_simulated_and_by_formula(plain: Explanation) -> None:
    seen = values(plain)
    for name in ("bubble_fraction", "bubble_fraction_span", "bubble_overhead"):
        assert f"{name}_simulated" in seen
    assert seen["bubble_fraction_formula"] == pytest.approx(1 / 5)
    assert seen["bubble_overhead_formula"] == pytest.approx(1 / 4)
    assert seen["bubble_fraction_simulated"] == pytest.approx(1 / 5)
    assert 0.15 < seen["bubble_fraction"] < 0.4


def test_what_is_sent_and_held_is_told_of_every_rank(plain: Explanation) -> None:
    seen, told = values(plain), plain.details["pipeline"]
    assert seen["bytes_ratio.pp"] == 1.0
    for boundary, link in zip(told["boundaries"], ((0, 1), (1, 0)), strict=True):
        assert (boundary["from"], boundary["to"]) == link
        assert boundary["sent_bytes"] == boundary["expected_bytes"] == seen["bytes_sent.pp"]
    assert told["in_flight_by_rank"] == [2.0, 1.0]
    assert seen["in_flight"] == 2.0
    for source in ("memory", "memory_counted", "memory_formula"):
        assert seen[f"{source}.activations"] > 0
    assert [len(told["memory_by_rank"][name]) for name in ("parameters", "activations")] == [2, 2]


def test_the_timeline_has_every_action_in_its_order_and_its_gaps_have_causes(plain: Explanation) -> None:
    told = plain.details["pipeline"]
    orders = [["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]]
    orders += [[f"1{kind}{m}" for m in range(4) for kind in "FB"]]
    for name in ("measured", "predicted"):
        assert [[action for action, _, _ in row] for row in told[name]] == orders
        assert all(a[2] <= b[1] for row in told[name] for a, b in pairwise(row))
    end = max(stop for row in told["measured"] for _, _, stop in row)
    for rank, row in enumerate(told["measured"]):
        filled = sum(stop - start for _, start, stop in row) + sum(b - a for r, a, b, _ in told["idle"] if r == rank)
        assert filled == pytest.approx(end, abs=100)
    assert {cause for *_, cause in told["idle"]} <= set(CAUSES)
    assert told["clock"]


def test_other_schedules_are_compared_and_the_halves_are_owned_up_to(plain: Explanation) -> None:
    lines = {line["schedule"]: line for line in plain.details["pipeline"]["comparison"]}
    assert len(lines) == 10
    assert lines["zb_h1"]["step_seconds"] < lines["1f1b"]["step_seconds"] < lines["naive"]["step_seconds"]
    assert any("half of the backward pass" in note for note in plain.notes)


@pytest.mark.parametrize("compute", ["timed:5ms", "real"])
def test_selective_checkpointing_owns_up_to_what_is_not_counted(
    two_ranks: Ranks, plain: Explanation, compute: str
) -> None:
    """Whether a bubble is claimed or not; no other schedule is compared by bytes that are not known."""
    params = timed(checkpointing="selective", compute=compute)
    found = two_ranks.call("test_pp_explain:explained", params=params)[0]
    assert UNCOUNTED in found.notes
    assert UNCOUNTED not in plain.notes
    assert "memory_counted.activations" not in found.metrics
    assert {"memory_counted.parameters", "memory.activations"} <= set(found.metrics)
    lines = found.details["pipeline"].get("comparison", [])
    assert bool(lines) == (compute != "real" or not found.notes[0].startswith("functional only"))
    assert {line["activation_bytes"] for line in lines if "why_not" not in line} <= {None}
    assert all(line["activation_bytes"] for line in plain.details["pipeline"]["comparison"] if "why_not" not in line)


def raised_by(two_ranks: Ranks, **changed: Any) -> dict[str, float]:
    """Return how much longer ranks are idle for each cause, with what is changed and without, measured in turns."""
    before, after = (values(two_ranks.call("test_pp_explain:explained", **given)[0]) for given in (PLAIN, changed))
    return {cause: after[f"idle_{cause}"] - before[f"idle_{cause}"] for cause in CAUSES}


def is_alone(raised: dict[str, float], cause: str, least_seconds: float) -> bool:
    """Say whether one cause is raised, by so much at least, and no other by half as much."""
    most = raised[cause]
    return most > least_seconds and all(abs(raised[one]) < 0.5 * most for one in CAUSES if one != cause)


PLAIN: dict[str, Any] = {"params": timed()}
ATTEMPTS = 4
"""A core that something else wants for a moment moves actions about: one quiet attempt of several is enough."""


def test_a_late_link_is_p2p_and_nothing_else(two_ranks: Ranks) -> None:
    """Activations come 20 ms later from rank 0 to rank 1."""
    late = {"params": timed(), "link": (0, 1), "late_seconds": 0.02}
    assert any(is_alone(raised_by(two_ranks, **late), "p2p", 0.008) for _ in range(ATTEMPTS))


def test_a_stage_twice_as_slow_is_imbalance_and_nothing_else(two_ranks: Ranks) -> None:
    """Of six layers, four and two take as long in all as three and three; by simulation 5/3 of an action are lost."""
    uneven = {"params": timed(layers=6, split="4+2")}
    assert any(is_alone(raised_by(two_ranks, **uneven), "imbalance", 0.5 * 5 / 3 * SECONDS) for _ in range(ATTEMPTS))


def test_ranks_that_share_cores_claim_no_bubble_of_real_compute(four_ranks: Ranks) -> None:
    params = {"schedule": "1f1b", "microbatches": 4}
    shared = four_ranks.call("test_pp_explain:shares_cores")
    found = four_ranks.call("test_pp_explain:explained", params=params)[0]
    claimed = [name for name in found.metrics if name.startswith(("bubble", "idle"))]
    assert bool(claimed) != shared[0]
    assert any(note.startswith("functional only") for note in found.notes) == shared[0]
    assert ("measured" in found.details["pipeline"]) != shared[0]
    assert values(found)["bytes_ratio.pp"] == 1.0


def shares_cores(world: World) -> bool:
    return cores_shared(world)


def test_more_ranks_than_cores_share_them(four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert four_ranks.call("test_pp_explain:shared_on", cores=3) == [True] * 4
    assert four_ranks.call("test_pp_explain:shared_on", cores=4) == [False] * 4


def shared_on(world: World, cores: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        return cores_shared(world)
