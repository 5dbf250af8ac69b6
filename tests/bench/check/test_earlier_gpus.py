"""A check compares the GPUs of its host with those of earlier runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.check.earlier_gpus import find_missing_gpus
from parbench.bench.check.health import Device
from parbench.bench.machine.gpu import Gpu
from parbench.bench.results.records import encode_record
from parbench.bench.results.runs import RunInfo, write_run_info
from tests.bench.check.test_health import build_record, plan_cases
from tests.support.fakes import make_plan as make_fake_plan

SILENT = Device(host="n1", name="GPU 0000:19:00.0", kind="GPU", rank=-1, ran=False)


def write_run(
    out: Path, day: int, uuids: Sequence[str], *, host: str = "n1", visible: str | None = None
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
    out: Path, uuids: str, silent: Sequence[Device] = (), visible: str | None = None
) -> str:
    """Return a line with the name and reason of each missing device."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = [Gpu(uuid=uuid) for uuid in uuids]
    devices = find_missing_gpus(out, "n1", environ, gpus, silent)
    return "\n".join(f"{device.name}: {device.reasons[0].text}" for device in devices)


@pytest.mark.parametrize(
    ("now", "silent", "text"),
    [
        ("abc", (), ""),
        ("abd", (), ""),  # a replaced GPU
        ("ab", (), "missing GPU: c was here in 20260102T000000Z-n1 of 2026-01-02"),
        ("ab", (SILENT,), ""),
        (
            "a",
            (SILENT,),
            "missing GPU: 1 of b and c, which were here in 20260102T000000Z-n1 of 2026-01-02",
        ),
    ],
)
def test_gpu_of_an_earlier_run_is_missing(
    now: str, silent: Sequence[Device], text: str, tmp_path: Path
) -> None:
    write_run(tmp_path, 1, "xyz")  # before its GPUs were replaced
    write_run(tmp_path, 2, "abc")
    write_run(tmp_path, 3, "a")  # a run with fewer ranks
    assert describe_missing(tmp_path, now, silent) == text


def test_single_gpu_of_an_earlier_run_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, 1, "a")
    assert describe_missing(tmp_path, "").startswith("missing GPU: a was here")


def test_other_runs_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, 1, "abc", host="n2")
    write_run(tmp_path, 2, "abc", visible="0,1,2")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    assert describe_missing(tmp_path, "ab") == ""
    assert "c was here" in describe_missing(tmp_path, "ab", visible="0,1,2")
