"""Operations on two stub GPUs: results, calls of NCCL, and what happens in the timed region."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.catalogue import MODES, OPERATIONS
from tests.fake_cuda.stub import RanksOnStub, Stub
from tests.fake_cuda.traces import ALLOCATING, Call, Region, Trace, timed_regions
from tests.support.nvidia import format_uuid

pytestmark = pytest.mark.cuda_stub
SPEC = WorldSpec(nproc=2, backend="nccl", device="cuda")
SIZE = {"size_bytes": 4096}
NAMES = [spec.name for spec in OPERATIONS if spec.name.startswith(("collective.", "p2p."))]

SEND_AND_RECEIVE = ["ncclRecv", "ncclSend"]
CALLS_PER_STEP = {
    "collective.all_reduce": ["ncclAllReduce"],
    "collective.all_gather": ["ncclAllGather"],
    "collective.reduce_scatter": ["ncclReduceScatter"],
    "collective.all_to_all": ["ncclAlltoAll"],
    "collective.all_to_all_v": SEND_AND_RECEIVE * 2,
    "collective.broadcast": ["ncclBroadcast"],
    "collective.reduce": ["ncclReduce"],
    "collective.gather": ["ncclRecv"],
    "collective.scatter": ["ncclSend"],
    "collective.barrier": ["ncclAllReduce"],
    "p2p.sendrecv": SEND_AND_RECEIVE,
    "p2p.pingpong": SEND_AND_RECEIVE,
    "p2p.unidirectional": ["ncclSend"],
    "p2p.bidirectional": SEND_AND_RECEIVE,
    "p2p.matrix": ["ncclSend"],
    "p2p.pairwise": SEND_AND_RECEIVE,
}
"""Calls of NCCL in a step of rank 0."""

CALLS_PER_STEP_OF_RANK_1 = CALLS_PER_STEP | {
    "collective.gather": ["ncclSend"],
    "collective.scatter": ["ncclRecv"],
    "p2p.unidirectional": ["ncclRecv"],
    "p2p.matrix": ["ncclRecv"],
}

WAITING = {"collective.barrier": ["cudaStreamSynchronize"]}
"""Operations that wait for the device in a step, because that is what they are."""

GROUPED = ("p2p.sendrecv", "p2p.bidirectional", "p2p.pairwise", "collective.all_to_all_v")
"""Operations whose sends and receives are one group, which is one node of a graph."""

NODES_BESIDE_NCCL = {"collective.gather": 1, "collective.scatter": 1}
"""Copies of a step on rank 0 that torch adds."""


@dataclass(frozen=True)
class Measured:
    """A case that was measured, and the calls of each rank meanwhile."""

    status: str
    reason: str
    details: dict[str, Any]
    calls: list[list[Call]]

    @property
    def regions(self) -> list[list[Region]]:
        """The timed regions of each rank."""
        return [list(timed_regions(calls)) for calls in self.calls]

    @property
    def steps(self) -> int:
        return int(self.details["steps_per_sample"])


def list_cases() -> Iterator[tuple[str, str]]:
    """Yield each operation in each mode that it has."""
    for spec in OPERATIONS:
        for mode in MODES:
            if spec.name in NAMES:
                params = spec.complete({"mode": mode})
                if spec.refuse(params, SPEC) is None:
                    yield spec.name, mode


CASES = list(list_cases())


@pytest.fixture(scope="module")
def measured(two_ranks_on_stub: RanksOnStub) -> dict[tuple[str, str], Measured]:
    """All operations in all modes, each measured once."""
    ranks, answers = two_ranks_on_stub, {}
    for name, mode in CASES:
        params = {"mode": mode, **(SIZE if name != "collective.barrier" else {})}
        answers[name, mode] = ranks.call(
            "tests.fake_cuda.cases:measure_case",
            name=name,
            params=params,
            label=f"{name}:{mode}",
        )[0]
    traces = ranks.traces()
    return {
        (name, mode): Measured(
            status=answers[name, mode][0],
            reason=answers[name, mode][1],
            details=answers[name, mode][2],
            calls=[cut(trace, name, mode) for trace in traces],
        )
        for name, mode in CASES
    }


def cut(trace: Trace, name: str, mode: str) -> list[Call]:
    return trace.between(f"{name}:{mode}:start", f"{name}:{mode}:end")


def test_run_measures_all_reduce(stub: Stub) -> None:
    arguments = "--device cuda --nproc 2 --preset smoke all_reduce --repetitions 1"
    session = stub.parbench("run", *arguments.split(), "--budget", "10s")
    assert session.returncode == 0, session.output
    assert {record.status for record in session.records} == {"ok"}
    assert [trace.rank for trace in session.traces] == [0, 1]
    [file] = stub.folder.glob("runs/*Z-*/run.json")
    facts = json.loads(file.read_text())["environment"]
    assert facts["gpu"]["driver"] == "580.95.05"
    uuids = [session.records[0].environment[f"rank {rank}"]["gpu"]["uuid"] for rank in (0, 1)]
    assert uuids == [format_uuid(0), format_uuid(1)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_operation_is_correct(
    measured: dict[tuple[str, str], Measured], name: str, mode: str
) -> None:
    case = measured[name, mode]
    assert (case.status, case.reason) == ("ok", "")


@pytest.mark.parametrize(("name", "mode"), [case for case in CASES if case[1] != "graph"])
def test_step_makes_its_calls_of_nccl(
    measured: dict[tuple[str, str], Measured], name: str, mode: str
) -> None:
    case = measured[name, mode]
    tables = (CALLS_PER_STEP, CALLS_PER_STEP_OF_RANK_1)
    for regions, table in zip(case.regions, tables, strict=True):
        calls = [call.name for call in regions[-1].communication]
        assert sorted(calls) == sorted(table[name] * case.steps)


@pytest.mark.parametrize(("name", "mode"), [case for case in CASES if case[1] != "graph"])
def test_step_communicates_on_its_stream(
    measured: dict[tuple[str, str], Measured], name: str, mode: str
) -> None:
    case = measured[name, mode]
    for regions in case.regions:
        region = regions[-1]
        streams = {call.fields["stream"] for call in region.communication}
        if mode == "async" or name.startswith("p2p."):
            # The group's own stream: the events of the timed region wait for it.
            assert region.stream not in streams
            assert region.calls[-1].name == "cudaStreamWaitEvent"
            assert region.calls[-1].fields["stream"] == region.stream
        else:
            assert streams == {region.stream}


@pytest.mark.parametrize("name", [name for name, mode in CASES if mode == "graph"])
def test_graph_is_replayed_once_per_sample(
    measured: dict[tuple[str, str], Measured], name: str
) -> None:
    case = measured[name, "graph"]
    calls_per_step = 1 if name in GROUPED else len(CALLS_PER_STEP[name])
    [rank_0, _] = case.regions
    assert [call.name for call in rank_0[-1].calls] == ["cudaGraphLaunch"]
    nodes = case.steps * (calls_per_step + NODES_BESIDE_NCCL.get(name, 0))
    assert rank_0[-1].calls[0].number("nodes") == nodes


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_timed_region_neither_waits_nor_allocates(
    measured: dict[tuple[str, str], Measured], name: str, mode: str
) -> None:
    case = measured[name, mode]
    for regions in case.regions:
        calls = regions[-1].calls
        waiting = [call.name for call in calls if call.waits_for_device]
        assert waiting == WAITING.get(name, []) * case.steps
        assert [call.name for call in calls if call.name in ALLOCATING] == []


def test_cases_of_the_same_groups_share_a_communicator(two_ranks_on_stub: RanksOnStub) -> None:
    """It is split from the world's once."""
    group_params = {**SIZE, "group": "dp=2 tp=1:tp", "concurrent": True}
    outcomes = two_ranks_on_stub.call(
        "tests.fake_cuda.cases:measure_cases",
        name="collective.all_reduce",
        params_of_cases=[group_params, group_params],
        label="group",
    )
    assert outcomes == [[("ok", "")] * 2] * 2
    for trace in two_ranks_on_stub.traces():
        splits = []
        for number in range(2):
            calls = trace.between(f"group:{number}:start", f"group:{number}:end")
            splits.append([call.name for call in calls].count("ncclCommSplit"))
        assert splits == [1, 0]
