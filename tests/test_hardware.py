"""Machines as numbers: presets that agree with the datasheets' ratios, files that say what is wrong with them."""

from pathlib import Path

import msgspec
import pytest

from bench.errors import UserError
from workloads.peaks import datasheet_peak
from workloads.planner.hardware import PRESETS, Efficiency, hardware_of, read_hardware

WHOLE = """
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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_dense_peak_of_the_other_table(name: str) -> None:
    device = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}.get(name, f"NVIDIA {name.upper()}")
    assert PRESETS[name].flops_per_second == datasheet_peak(device, "bfloat16")


@pytest.mark.parametrize("name", PRESETS)
def test_links_inside_are_faster_than_across_and_memory_faster_than_both(name: str) -> None:
    preset = PRESETS[name]
    assert preset.across_bytes_per_second < preset.inside_bytes_per_second < preset.memory_bytes_per_second


def test_newer_generations_are_faster_in_everything_that_changed() -> None:
    a100, h100, h200, b200 = (PRESETS[name] for name in ("a100", "h100", "h200", "b200"))
    assert a100.flops_per_second < h100.flops_per_second == h200.flops_per_second < b200.flops_per_second
    assert h100.memory_bytes < h200.memory_bytes < b200.memory_bytes
    assert a100.inside_bytes_per_second < h100.inside_bytes_per_second < b200.inside_bytes_per_second


def test_what_a_step_may_fill_leaves_room() -> None:
    assert PRESETS["h100"].usable_bytes == pytest.approx(80e9 * 0.92)


def test_every_preset_says_where_its_numbers_are_from() -> None:
    assert len({preset.source for preset in PRESETS.values()}) == len(PRESETS)
    assert all("NVIDIA" in preset.source for preset in PRESETS.values())


def test_every_preset_says_what_of_it_nobody_checked() -> None:
    assert all("not checked" in preset.source for preset in PRESETS.values())
    assert "cards of 400 Gbit/s not checked" not in PRESETS["h200"].source


@pytest.mark.parametrize(
    ("name", "memory", "nvlink_both_ways", "peak", "card"),
    [
        ("a100", 80e9, 600e9, 312e12, 200e9),
        ("h100", 80e9, 900e9, 989.4e12, 400e9),
        ("h200", 141e9, 900e9, 989.4e12, 400e9),
        ("b200", 1440e9 / 8, 14.4e12 / 8, 2250e12, 400e9),
    ],
)
def test_figures_are_the_vendors(name: str, memory: float, nvlink_both_ways: float, peak: float, card: float) -> None:
    """Memory in bytes, NVLink both ways in bytes a second, the dense peak, a card in bits a second."""
    found = PRESETS[name]
    assert (found.memory_bytes, 2 * found.inside_bytes_per_second) == (memory, nvlink_both_ways)
    assert (found.flops_per_second, 8 * found.across_bytes_per_second) == (peak, card)


def test_a_name_is_found_in_any_case() -> None:
    assert hardware_of("H100") is PRESETS["h100"]


def test_an_unknown_name_is_refused_with_what_was_meant() -> None:
    with pytest.raises(UserError, match=r"hardware 'h10' is not a100, h100, h200 or b200, .*did you mean 'h100'"):
        hardware_of("h10")


def test_a_file_declares_a_machine_of_its_own(file: Path) -> None:
    file.write_text(WHOLE)
    found = hardware_of(str(file))
    assert (found.name, found.source) == ("mine", str(file))
    assert (found.gpus_per_node, found.rails, found.memory_bytes) == (4, 1, 96e9)
    assert found.efficiency == Efficiency(gemm=0.4, overlap={"fsdp": 0.5})
    assert found.launch_seconds == PRESETS["h100"].launch_seconds


def test_a_file_may_give_itself_a_name(file: Path) -> None:
    file.write_text('name = "ours"\n' + WHOLE)
    assert read_hardware(file).name == "ours"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WHOLE.replace("gpus_per_node = 4", "gpus_per_node = 0"), r">= 1.*gpus_per_node"),
        (WHOLE.replace("gemm = 0.4", "gemm = 1.4"), r"<= 1.*efficiency.gemm.*fields are gemm"),
        (WHOLE.replace("fsdp = 0.5", "fsdp = -1"), r">= 0"),
        (WHOLE.replace("rails", "rail"), r"unknown field `rail`.*rails"),
        (WHOLE.replace("memory_bytes = 96e9", ""), r"missing required field `memory_bytes`"),
        ("flops_per_second = ", "is no TOML"),
        (WHOLE.replace("fsdp = 0.5", "tp = 0.9"), r": overlap of 'tp' is not of dp, edp, fsdp or cp$"),
        (WHOLE.replace("fsdp = 0.5", "fsd = 0.5"), r"overlap of 'fsd' is not of dp, .*did you mean 'fsdp'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_is_allowed(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        read_hardware(file)
    assert str(caught.value).startswith(f"hardware file {file}")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"absent\.toml cannot be read: No such file"):
        hardware_of("absent.toml")


def test_a_machine_survives_being_written_down() -> None:
    preset = PRESETS["b200"]
    assert msgspec.convert(msgspec.to_builtins(preset), type(preset)) == preset
