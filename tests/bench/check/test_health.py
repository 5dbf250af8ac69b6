"""Verdicts of a check, from runs as they are written: rates, wrong results, what did not run, slow links."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from parbench.bench.check.cases import ALONE, QUANTITIES, name_of, options_of
from parbench.bench.check.health import Device, Health, compared, measured, problems_of
from parbench.bench.check.rule import LEAST_LAUNCHES
from parbench.bench.check.show import render
from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import Case, load_catalogue
from parbench.bench.plan.options import make_plan
from parbench.bench.results.records import Record, Status, WorldInfo
from parbench.bench.results.runs import Run, RunInfo
from parbench.bench.results.samples import samples_name
from parbench.cli import DEFINITIONS
from tests.support.fakes import make_plan as make_fake_plan

CATALOGUE = load_catalogue(DEFINITIONS)
N = 4


def cases_of(device: str, nproc: int) -> tuple[Case, ...]:
    options = options_of(device, nproc, budget="40s", timeout="20s", inject=None)
    spec = WorldSpec(nproc=nproc, backend="nccl" if device == "cuda" else "gloo", device=device)
    return make_plan(options, CATALOGUE, spec).cases


def a_run(
    folder: Path,
    speeds: Mapping[int, float],
    *,
    device: str = "cuda",
    pairs: Mapping[str, float] | None = None,
    bad: Mapping[str, tuple[Status, str]] | None = None,
    only: int = LEAST_LAUNCHES,
) -> Run:
    """Return a run in which ranks and pairs are so many times as slow as others, and some quantities went badly."""
    records = []
    for case in cases_of(device, N):
        group = int(case.whole.get("group_index", 0))
        alone = case.whole.get("group", "world") != "world"
        ranks = [group] if alone else list(range(N))
        details: dict[str, Any] = {"size_bytes": 1 << 20}
        if "m" in case.whole:
            details = {"m": 1000}
        if case.name == "p2p.pairwise":
            details["pairs"] = ["0-3 1-2", "0-2 1-3", "0-1 2-3"][int(str(case.whole["round"]))]
        for launch in range(only):
            record = Record(
                case=case,
                world=WorldInfo(size=N, nodes=1, backend="nccl", device=device),
                launch=launch,
                status="ok",
                details=details,
                started="2026-01-01T00:00:00Z",
                seconds=1.0,
            )
            if told := (bad or {}).get(name_of(record)):
                records.append(msgspec.structs.replace(record, status=told[0], reason=told[1]))
                continue
            slow = {rank: speeds.get(rank, 1.0) for rank in ranks}
            for pair in str(details.get("pairs", "")).split():
                one, other = map(int, pair.split("-"))
                slow[one] = slow[other] = max(slow[one], slow[other], (pairs or {}).get(pair, 1.0))
            if name_of(record) == "all ranks":
                slow = dict.fromkeys(slow, max(slow.values()))
            nanoseconds = np.array([[1e6 * slow[rank] * (1 + launch / 10)] * 9 for rank in ranks])
            arrays: dict[str, Any] = {
                name: nanoseconds.astype(np.int64)
                for name in ("arrival_ns", "exit_ns", "duration_ns", "issue_ns")
            }
            content = io.BytesIO()
            arrays |= {"ranks": np.array(ranks), "steps_per_sample": np.array(1)}
            np.savez(content, **arrays)
            file = folder / samples_name(record)
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_bytes(content.getvalue())
            records.append(record)
    asked = make_fake_plan(cases_of(device, N), nproc=N, launches=LEAST_LAUNCHES, device=device)
    info = RunInfo(id="1", started="", host="n1", parbench="1", plan=asked, environment={})
    return Run(path=folder, info=info, records=tuple(records))


def devices(kind: str = "NVIDIA H100", host: str = "n1") -> tuple[Device, ...]:
    return tuple(
        Device(host=host, name=f"GPU {i}", uuid=f"{host}-{i}", kind=kind, rank=i) for i in range(N)
    )


def checked(run: Run) -> Health:
    told, links, together = measured(devices(), run)
    return Health(
        host="n1",
        started="2026-01-01T00:00:00Z",
        seconds=42.0,
        device="cuda",
        devices=compared(told, 0.05),
        links=links,
        together=together,
        problems=problems_of(run),
    )


def verdicts(health: Health) -> list[str]:
    return [device.verdict for device in health.devices]


def test_every_quantity_is_planned_alone_and_together_on_a_gpu_and_what_cores_have_on_them() -> (
    None
):
    for device, nproc, names in (
        ("cuda", 8, {one.name for one in QUANTITIES}),
        ("cpu", 2, {"bfloat16", "pairs"}),
    ):
        cases = cases_of(device, nproc)
        record = Record(case=cases[0], world=WorldInfo(size=1, nodes=1, backend="", device=""), launch=0, status="ok",
                        started="", seconds=0.0)  # fmt: skip
        found = [name_of(msgspec.structs.replace(record, case=case)) for case in cases]
        assert names <= set(found)
        for one in QUANTITIES:
            if (one.on_gpu if device == "cuda" else one.on_cpu) is not None:
                rounds = 7 if (one.name, nproc) == ("pairs", 8) else 1
                assert found.count(one.name) == rounds, one.name
                assert found.count(f"{one.name} alone") == (nproc if one.alone else 0), one.name
    assert {case.whole.get("group") for case in cases_of("cuda", 1)} == {"world"}, (
        "one alone is alone already"
    )
    assert ALONE["concurrent"] == "false"


def test_a_host_whose_devices_are_alike_is_well(tmp_path: Path) -> None:
    health = checked(a_run(tmp_path, {}))
    assert (health.code, verdicts(health), health.problems, health.links) == (0, ["ok"] * N, (), ())
    assert health.together == pytest.approx(1.1 * (1 << 20) * 1e3 / 1.21, rel=0.01)
    [head, titles, first, *_] = render(health).splitlines()
    assert head == "n1: ok · 4 x NVIDIA H100 · 42 s"
    assert titles.split()[:2] == ["verdict", "device"]
    assert first.split()[:3] == ["ok", "GPU", "0"]


def test_a_slow_device_is_named_with_its_share_and_what_to_do(tmp_path: Path) -> None:
    health = checked(a_run(tmp_path, {2: 1.25}))
    assert (health.code, verdicts(health), health.bad) == (1, ["ok", "ok", "bad", "ok"], ["GPU 2"])
    [one, host, links] = health.devices[2].reasons
    assert one.text.startswith("20 % under its peers in bfloat16 (")
    assert "20 % in copy (" in one.text
    assert "alone" not in one.text, "which it is in company, too"
    assert one.text.endswith("MADs), in 3 of 3 launches")
    assert host.text.startswith("20 % under its peers in to device (")
    assert links.text.startswith("20 % under its peers in pairs (")
    lines = render(health).splitlines()
    assert any(line.startswith("bad  GPU 2: 20 % under its peers in bfloat16") for line in lines)
    assert health.links == (), "all its pairs are slow, and it is named itself"


def test_a_slow_link_is_named_and_not_its_ends(tmp_path: Path) -> None:
    health = checked(a_run(tmp_path, {}, pairs={"1-3": 1.4}))
    assert [link.text.partition(",")[0] for link in health.links] == [
        "GPU 1 - GPU 3: 29 % under its peers"
    ]
    assert (health.code, verdicts(health)) == (1, ["ok"] * N)


def test_wrong_results_are_the_ranks_that_alone_had_them(tmp_path: Path) -> None:
    told: dict[str, tuple[Status, str]] = {
        "float32": (
            "wrong",
            "results differ from the reference before the timed region: 3 on rank 1",
        ),
        "all ranks": (
            "wrong",
            "results differ from the reference: 1 on rank 0, 1 on rank 1, 1 on rank 2, 1 on rank 3",
        ),
        "copy": ("skipped", "not tried again: wrong in launch 1 (1 on rank 1)"),
    }
    health = checked(a_run(tmp_path, {}, bad=told))
    assert (health.code, verdicts(health), health.problems) == (1, ["ok", "bad", "ok", "ok"], ())
    assert health.devices[1].reasons[0].text == "wrong results in compute.gemm (3 times)"
    shared = {"all ranks": told["all ranks"]}
    health = checked(a_run(tmp_path, {}, bad=shared))
    assert (health.code, verdicts(health)) == (4, ["ok"] * N), (
        "nobody alone: what ranks do together cannot tell who"
    )
    assert health.problems[0].startswith("collective.all_reduce: results differ")


def test_what_did_not_run_is_said(tmp_path: Path) -> None:
    hang: dict[str, tuple[Status, str]] = {
        "pairs": ("hang", "no end within 20 s: rank 3 did not arrive")
    }
    health = checked(a_run(tmp_path, {}, bad=hang))
    assert (health.code, health.verdict) == (4, "did not run")
    assert health.problems == ("p2p.pairwise: no end within 20 s: rank 3 did not arrive",)
    late: dict[str, tuple[Status, str]] = {"copy": ("skipped", LEFT_OUT)}
    health = checked(a_run(tmp_path, {}, bad=late))
    assert health.problems == (
        f"memory.copy: {LEFT_OUT} -> stop other work here, or allow more time (--budget 2m)",
    )
    health = checked(a_run(tmp_path, {2: 1.25}, only=2))
    assert health.code == 4
    assert health.problems[0].startswith("not reached: ")
    assert verdicts(health) == ["ok"] * N, "two launches name nobody"
    assert Health(host="n1", started="", seconds=0.0, device="cuda").code == 4


def test_devices_of_several_hosts_are_compared_once_and_only_with_their_kind(
    tmp_path: Path,
) -> None:
    fast, _, _ = measured(devices(), a_run(tmp_path / "a", {}))
    slow, _, _ = measured(devices(host="n2"), a_run(tmp_path / "b", dict.fromkeys(range(N), 1.2)))
    alone = compared(slow, 0.05)
    assert [one.verdict for one in alone] == ["ok"] * N, (
        "a whole host that is slow has no peers in itself"
    )
    other, _, _ = measured(devices(host="n3"), a_run(tmp_path / "c", {}))
    both = compared(compared([*fast, *alone, *other], 0.05), 0.05)
    assert [one.verdict for one in both] == ["ok"] * N + ["bad"] * N + ["ok"] * N
    assert all(len(one.reasons) <= 3 for one in both), "said once"
    apart = [msgspec.structs.replace(one, kind="NVIDIA A100") for one in slow]
    assert {one.verdict for one in compared([*fast, *apart], 0.05)} == {"ok"}
