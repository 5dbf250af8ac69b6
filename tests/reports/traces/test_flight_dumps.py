"""Dumps of torch's flight recorder: the rank that is missing in a collective."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.text import UserError
from parbench.reports.render.terminal import render_text
from parbench.reports.traces.explain import explain_traces


def make_dump(*operations: str, is_done: bool = True) -> dict[str, Any]:
    """Return a dump in the layout of torch 2.11. Only the last operation may be pending."""
    entries = []
    for number, operation in enumerate(operations, start=1):
        state = "completed" if is_done or number < len(operations) else "started"
        entries.append(
            {
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "profiling_name": f"nccl:{operation}",
                "time_created_ns": 1_700_000_000_000_000_000 + number,
                "state": state,
                "retired": state == "completed",
                "is_p2p": False,
            }
        )
    config = {"0": {"ranks": "[0, 1, 2]"}}
    return {"entries": entries, "pg_config": config}


PENDING = make_dump("all_reduce", "all_reduce", is_done=False)
ABSENT = make_dump("all_reduce")


def explain(folder: Path, dumps: dict[int, dict[str, Any]], *, is_pickled: bool = True) -> str:
    for rank, dump in dumps.items():
        content = pickle.dumps(dump) if is_pickled else json.dumps(dump).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
    return render_text(explain_traces([folder], None))


@pytest.mark.parametrize("is_pickled", [True, False])
def test_missing_rank_is_named(tmp_path: Path, is_pickled: bool) -> None:
    text = explain(tmp_path, {0: PENDING, 1: ABSENT, 2: PENDING}, is_pickled=is_pickled)
    verdict = "HANG  All_reduce, number 2 of default_pg (0) does not finish: rank 1 is missing."
    assert verdict in text


@pytest.mark.parametrize(
    ("dumps", "message"),
    [
        ({0: PENDING, 2: PENDING}, "rank 1 has no dump"),
        ({0: PENDING, 1: PENDING, 2: PENDING}, "all ranks have enqueued it"),
        ({0: ABSENT, 1: ABSENT}, "No collective is pending"),
        (
            {0: PENDING, 1: make_dump("all_reduce", "all_gather", is_done=False), 2: PENDING},
            "all_reduce by 0,2, all_gather by 1, number 2 of default_pg (0) does not finish: "
            "ranks call different operations",
        ),
    ],
)
def test_cause_is_named(tmp_path: Path, dumps: dict[int, dict[str, Any]], message: str) -> None:
    assert message.lower() in " ".join(explain(tmp_path, dumps).split()).lower()


def test_two_dumps_of_a_rank_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a_rank_1", tmp_path / "b_rank_1"]
    for path in paths:
        path.write_text(json.dumps(PENDING))
    with pytest.raises(UserError, match=r"b_rank_1: pass one dump per rank"):
        explain_traces(paths, None)


@pytest.mark.parametrize(
    ("dump", "problem"),
    [
        ({"entries": [print]}, r"contains builtins\.print"),  # Code of a pickle is not run.
        ({"entries": [{"seq_id": 1}]}, r"is not a dump of torch 2\.4 or later"),
    ],
)
def test_bad_dump_is_refused(tmp_path: Path, dump: dict[str, Any], problem: str) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump))
    with pytest.raises(UserError, match=problem):
        explain_traces([path], None)
