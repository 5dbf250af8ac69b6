"""Hardware presets have the figures of the vendor, and a file can declare other hardware."""

import re
from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.workloads.planner.hardware import PRESETS, Efficiency, load_hardware
from tests.support.paths import ROOT

HARDWARE_FILE = """
flops_per_second = 1e15
memory_bytes = 96e9
memory_bytes_per_second = 4e12
gpus_per_node = 4
inside_bytes_per_second = 2e11
across_bytes_per_second = 25e9
rails = 1

[efficiency]
gemm = 0.4
overlap = { fsdp = 0.5 }
"""


def test_hardware_file_overrides_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(HARDWARE_FILE)
    hardware = load_hardware(str(path))
    assert hardware.name == "cluster"
    assert hardware.gpus_per_node == 4
    assert hardware.memory_bytes == 96e9
    assert hardware.efficiency == Efficiency(gemm=0.4, overlap={"fsdp": 0.5})
    assert hardware.launch_seconds == PRESETS["h100"].launch_seconds


def test_h100_states_the_largest_error_of_fsdp() -> None:
    page = (ROOT / "docs" / "concepts" / "planner-validation.md").read_text()
    errors = re.findall(r"(?:h100|grand-teton) \| fsdp=.*?([+-][\d.]+)% \|", page)
    assert f"up to {max(map(float, errors)):.0f} %" in PRESETS["h100"].source


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "'h10' is not known: choose a100.*h100"),
        ("absent.toml", r"absent\.toml cannot be read"),
    ],
)
def test_unknown_hardware_is_rejected(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_hardware(name)


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        ("gpus_per_node = 4", "gpus_per_node = 0", ">= 1.*gpus_per_node"),
        ("rails", "rail", "`rail`"),
        ("memory_bytes = 96e9", "", "missing.*`memory_bytes`"),
        ("fsdp = 0.5", "fsd = 0.5", "'fsd'.*fsdp"),
        (HARDWARE_FILE, "flops_per_second = ", "TOML"),
    ],
)
def test_hardware_file_error_names_file_and_key(
    tmp_path: Path, part: str, replacement: str, message: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(HARDWARE_FILE.replace(part, replacement))
    with pytest.raises(UserError, match=f"cluster.toml.*{message}"):
        load_hardware(str(path))
