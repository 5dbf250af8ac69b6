"""A check compares the GPUs of its host with those of earlier runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.check.earlier_gpus import find_missing_gpus
from parbench.bench.machine.gpu import Gpu
from parbench.bench.results.records import encode_record
from parbench.bench.results.runs import RunInfo, write_run_info
from tests.bench.check.test_health import build_record, plan_cases
from tests.support.fakes import make_plan as make_fake_plan


def write_run(
    out: Path,
    day: int,
    uuids: Sequence[str],
    *,
    host: str = "n1",
    visible: str | None = None,
) -> None:
    """Write a run whose ranks used one GPU each."""
    path = out / f"2026010{day}T000000Z-{host}"
    path.mkdir(parents=True)
    [case, *_] = plan_cases("cuda", 2)
    environment: dict[str, Any] = {"host": {"name": f"{host}.cluster"}, "gpu": {}}
    if visible is not None:
        environment["variables"] = {"CUDA_VISIBLE_DEVICES": visible}
    ranks = {f"rank {rank}": {"gpu": {"uuid": uuid}} for rank, uuid in enumerate(uuids)}
    if len(uuids) == 1:
        environment["gpu"]["uuid"] = uuids[0]
        ranks = {}
    started = f"2026-01-0{day}T00:00:00.000Z"
    plan = make_fake_plan((case,), nproc=len(uuids), repetitions=1, device="cuda")
    info = RunInfo(
        id=path.name,
        started=started,
        host=host,
        parbench="1",
        plan=plan,
        environment=environment,
    )
    write_run_info(path, info)
    record = replace(build_record(case), environment=ranks)
    (path / "records.jsonl").write_bytes(encode_record(record))


def describe_missing(
    out: Path, uuids: str, num_silent: int = 0, visible: str | None = None
) -> str:
    """Return the name and reason of the missing device, empty if no GPU is missing."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = [Gpu(uuid=uuid) for uuid in uuids]
    devices = find_missing_gpus(out, "n1", environ, gpus, num_silent)
    return "\n".join(f"{device.name}: {device.reasons[0].text}" for device in devices)


@pytest.mark.parametrize(
    ("now", "num_silent", "text"),
    [
        ("abc", 0, ""),
        ("abd", 0, ""),  # a replaced GPU
        ("ab", 0, "missing GPU: 1 of c, which run 20260102T000000Z-n1 used"),
        ("ab", 1, ""),
        ("a", 1, "missing GPU: 1 of b and c, which run 20260102T000000Z-n1 used"),
    ],
)
def test_gpu_of_an_earlier_run_is_missing(
    now: str, num_silent: int, text: str, tmp_path: Path
) -> None:
    write_run(tmp_path, 1, "xyz")  # before its GPUs were replaced
    write_run(tmp_path, 2, "abc")
    write_run(tmp_path, 3, "a")  # a run with fewer ranks
    assert describe_missing(tmp_path, now, num_silent) == text


def test_single_gpu_of_an_earlier_run_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, 1, "a")
    assert describe_missing(tmp_path, "").startswith("missing GPU: 1 of a, ")


def test_other_runs_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, 1, "abc", host="n2")
    write_run(tmp_path, 2, "abc", visible="0,1,2")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    assert describe_missing(tmp_path, "ab") == ""
    assert "1 of c, " in describe_missing(tmp_path, "ab", visible="0,1,2")
