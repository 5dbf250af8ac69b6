"""GPUs as the driver's tool tells them: every word of it a value, or unknown; and how they are joined."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from parbench.bench.machine import gpu as module
from parbench.bench.machine.gpu import Gpu, gpu_links, gpus_of, in_detail, nvidia_smi, visible_gpus
from tests.support.nvidia import A100, H100, L40S, UNKNOWN_WORDS, gpus, install, topology
from tests.support.trees import write_tool


def seen(environ: dict[str, str]) -> tuple[Gpu, ...]:
    return in_detail(environ, gpus_of(environ))


# --- facts ---


def test_everything_that_a_driver_tells_of_a_gpu_is_kept(tmp_path: Path) -> None:
    listed = gpus({**H100, "memory.used": "4", "remapped_rows.uncorrectable": "1"}, 1)
    running = [
        (0, 17, "/usr/bin/python3.12"),
        (0, os.getpid(), "me"),
        (0, 18, "[Not Found]"),
        (0, 19, "odd, name"),
    ]
    [found] = seen(
        install(
            tmp_path, listed, processes=running, links=lambda index: ["26.562 GB/s", "<inactive>"]
        )
    )
    assert found == Gpu(
        name="NVIDIA H100 80GB HBM3",
        index=0,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        driver="580.95.05",
        compute_capability="9.0",
        memory_bytes=81559 << 20,
        persistence=True,
        mig=False,
        ecc=True,
        power_limit_watts=700.0,
        power_default_watts=700.0,
        sm_clock_max=1980,
        memory_clock_max=2619,
        sm_clock_applications=1980,
        memory_clock_applications=2619,
        pcie_generation_max=5,
        pcie_width_max=16,
        nvlinks=(26.562, 0.0),
        sm_clock=345,
        memory_clock=2619,
        slowed_by=("idle",),
        utilization_percent=0,
        temperature_celsius=28,
        memory_used_bytes=4 << 20,
        pcie_generation=5,
        pcie_width=16,
        errors_corrected=0,
        errors_uncorrected=0,
        rows_remapped=1,
        remap_pending=False,
        remap_failed=False,
        processes=("python3.12 (pid 17)", "? (pid 18)", "odd, name (pid 19)"),
    )
    assert msgspec.json.decode(msgspec.json.encode(found), type=Gpu) == found, (
        "a node tells it to another"
    )


def test_a_run_keeps_what_is_fixed_apart_from_what_varies_each_fact_once(tmp_path: Path) -> None:
    [found] = seen(install(tmp_path, gpus(H100, 1)))
    fixed, varying = found.facts(varying=False), found.facts(varying=True)
    assert {"driver", "power_limit_watts", "mig", "nvlinks", "sm_clock_max"} <= fixed.keys()
    assert {
        "sm_clock",
        "temperature_celsius",
        "processes",
        "slowed_by",
        "pcie_generation",
    } <= varying.keys()
    assert [*fixed, *varying] == [
        one.name for one in fields(Gpu) if one.name not in ("name", "index")
    ]


def test_what_is_not_told_is_unknown_in_whatever_words_and_never_zero(tmp_path: Path) -> None:
    known = {"name", "uuid", "nvlinks", "processes"}
    for word in UNKNOWN_WORDS:
        kept = {name: value if name == "name" else word for name, value in H100.items()}
        [found] = seen(install(tmp_path, [{**gpus(H100, 1)[0], **kept, "index": word}]))
        assert {
            one.name for one in fields(Gpu) if getattr(found, one.name) is not None
        } == known - {"nvlinks"}, word
    [odd] = seen(
        install(
            tmp_path, gpus({**H100, "clocks.current.sm": "fast", "mig.mode.current": "Maybe"}, 1)
        )
    )
    assert (odd.sm_clock, odd.mig) == (None, None)


def test_an_older_driver_is_asked_by_its_own_words_and_not_for_what_it_does_not_know(
    tmp_path: Path,
) -> None:
    """Pending and failed remaps were numbers in some drivers; without links there is a sentence, or nothing."""
    of_one = {"clocks_throttle_reasons.active": "0x000000000000006A", "remapped_rows.pending": "1"}
    one, two = seen(
        install(tmp_path, gpus(A100, 2, gpu1=of_one), links=lambda index: ["25 GB/s"] * 12 * index)
    )
    assert (one.driver, one.compute_capability, one.memory_bytes) == (
        "470.256.02",
        None,
        40960 << 20,
    )
    assert (one.slowed_by, one.remap_pending, one.nvlinks) == ((), False, ())
    reasons = ("applications clocks setting", "hardware slowdown", "software thermal slowdown")
    assert two.slowed_by == (*reasons, "hardware thermal slowdown")
    assert (two.remap_pending, two.nvlinks) == (True, (25.0,) * 12)
    [pcie] = seen(install(tmp_path, gpus(L40S, 1)))
    assert (pcie.nvlinks, pcie.mig, pcie.sm_clock_applications, pcie.pcie_generation) == (
        None,
        None,
        None,
        1,
    )


def test_one_gpu_is_asked_for_by_its_uuid(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 3))
    assert [
        gpu.index for gpu in gpus_of(environ, "-i", "GPU-00000002-0000-0000-0000-000000000000")
    ] == [2]
    assert gpus_of(environ, "-i", "GPU-of-another-host") == ()


def test_a_tool_that_is_absent_fails_or_does_not_answer_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    assert (visible_gpus(environ), gpu_links(environ), nvidia_smi(environ, "-L")) == ((), {}, None)
    line = "echo NVIDIA A100, 40960"
    for body in ("echo No devices were found", "echo 'Field \"pid\" is not a valid field'\nexit 2"):
        write_tool(tmp_path, "nvidia-smi", body)
        assert visible_gpus(environ) == (), body
    tool = Path(install(tmp_path, gpus(H100, 1))["PATH"]) / "nvidia-smi"
    write_tool(
        tmp_path,
        tool.name,
        f"{tool.read_text().removeprefix('#!/bin/sh').strip().removeprefix('exec ')}\nexit 9",
    )
    assert visible_gpus(environ) == (), "it failed, whatever it said before"
    [blind] = in_detail(environ, [Gpu(name="H100")])
    assert (blind.processes, blind.nvlinks, blind.remap_failed) == (None, None, None)
    write_tool(tmp_path, "nvidia-smi", "").write_bytes(b"\x7fELF, but no program")
    assert visible_gpus(environ) == ()
    monkeypatch.setattr(module, "_QUERY_SECONDS", 0.2)
    write_tool(tmp_path, "nvidia-smi", f"{line}\nexec /bin/sleep 20")
    assert visible_gpus(environ) == ()


# --- which are visible ---


def test_the_visible_devices_restrict_and_order_gpus(tmp_path: Path) -> None:
    environ = install(tmp_path, gpus(H100, 3))
    wanted: dict[str, list[int]] = {
        "": [],
        "-1": [],
        "none": [],
        "GPU-f": [],
        "1": [1],
        "1,0": [1, 0],
        " 0 , 1 ": [0, 1],
    }
    wanted |= {"0,-1,1": [0], "0,7,1": [0], "GPU-00000002,GPU-00000000-0000": [2, 0]}
    for visible, indices in wanted.items():
        found = visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": visible})
        assert [gpu.index for gpu in found] == indices, visible
    assert [gpu.index for gpu in visible_gpus(environ)] == [0, 1, 2]
    assert visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "MIG-cc"}) == (
        Gpu(name="MIG-cc", mig=True),
    )
    assert visible_gpus({"PATH": "", "CUDA_VISIBLE_DEVICES": "MIG-cc"}) == ()


# --- how they are joined ---

NICS = [f"NIC{number}" for number in range(8)]
MELLANOX = [f"mlx5_{number}" for number in range(4)]


def on_one_socket(one: int, other: int) -> bool:
    return one // 4 == other // 4


def in_a_box(one: int, other: int) -> str:
    if not on_one_socket(one, other):
        return "SYS"
    return ("PIX", "PXB", "PHB", "NODE")[one ^ other] if one ^ other < 3 else "NODE"


HOSTS: list[tuple[str, str, Callable[[int, int], str]]] = [
    (
        "DGX H100",
        topology(lambda a, b: "NV18", ("0-55,112-167", "56-111,168-223"), nics=NICS),
        lambda a, b: "NVLink",
    ),
    (
        "a box of two sockets with PCIe alone",
        topology(in_a_box, ("0-31,64-95", "32-63,96-127")),
        lambda a, b: "PCIe" if on_one_socket(a, b) else "other NUMA node",
    ),
    (
        "two boards of four A100, an older driver",
        topology(
            lambda a, b: "NV12" if on_one_socket(a, b) else "SYS",
            ("0-47", "48-95"),
            nics=MELLANOX,
            has_numa_id=False,
        ),
        lambda a, b: "NVLink" if on_one_socket(a, b) else "other NUMA node",
    ),
]


def test_links_of_eight_gpus_are_read_from_the_matrix_of_each_kind_of_host(tmp_path: Path) -> None:
    for host, matrix, expected in HOSTS:
        links = gpu_links(install(tmp_path, gpus(H100, 8), topology=matrix))
        uuids = [gpu["uuid"] for gpu in gpus(H100, 8)]
        pairs = {
            (a, b): links.get(frozenset((uuids[a], uuids[b]))) for b in range(8) for a in range(b)
        }
        assert pairs == {(a, b): expected(a, b) for a, b in pairs}, host
        assert len(links) == len(pairs), host
