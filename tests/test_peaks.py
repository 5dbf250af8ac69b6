"""A device's peak is found by its whole name or not at all; a share above one is an error."""

import subprocess
import sys

import pytest

from workloads.peaks import PEAKS, datasheet_peak, mfu_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_names_that_torch_gives_have_their_datasheets_bfloat16_peak(name: str, tflops: float) -> None:
    assert datasheet_peak(name, "bfloat16") == pytest.approx(tflops * 1e12)


def test_a_v100_has_float16_by_its_board_and_no_bfloat16() -> None:
    assert datasheet_peak("Tesla V100-SXM2-16GB", "float16") == 125e12
    assert datasheet_peak("Tesla V100-PCIE-32GB", "float16") == 112e12
    assert datasheet_peak("Tesla V100S-PCIE-32GB", "float16") == 130e12
    assert datasheet_peak("Tesla V100-SXM2-16GB", "bfloat16") is None


def test_float32_is_not_tensor_float_32() -> None:
    assert datasheet_peak("NVIDIA A100-SXM4-40GB", "float32") == 19.5e12
    assert datasheet_peak("NVIDIA A100-SXM4-40GB", "tf32") == 156e12


@pytest.mark.parametrize(
    "name",
    [
        "Intel(R) Xeon(R) Platinum 8480C",
        "",
        "NVIDIA A10G",  # no A10
        "NVIDIA H100",  # of which board?
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of one
        "NVIDIA A1000",
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert datasheet_peak(name, "bfloat16") is None


def test_an_unknown_element_type_has_no_peak() -> None:
    assert datasheet_peak("NVIDIA H200", "float8_e4m3fn") is None


@pytest.mark.parametrize(("words", "peaks"), PEAKS, ids=lambda part: " ".join(part))
def test_every_entry_can_be_reached_and_is_ordered_as_hardware_is(
    words: tuple[str, ...], peaks: dict[str, float]
) -> None:
    assert datasheet_peak(" ".join(words), "float16") == peaks["float16"], "an earlier entry hides it"
    assert peaks["float16"] >= peaks.get("tf32", 0) >= 0
    assert peaks["float16"] > peaks["float32"]
    assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
    assert all(1e12 < peak < 1e16 for peak in peaks.values())


def test_tf32_is_half_of_bfloat16_where_there_is_both() -> None:
    for words, peaks in PEAKS:
        if "tf32" in peaks:
            assert peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02), words


def test_a_share_is_the_rate_over_the_peak() -> None:
    assert mfu_of(156e12, 312e12) == 0.5
    assert mfu_of(312e12, 312e12) == 1.0


def test_an_unknown_peak_gives_no_share() -> None:
    assert mfu_of(1e12, None) is None


def test_more_than_the_peak_is_an_error_that_names_the_peak_and_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"4e\+12 FLOP/s / measured peak\(3\.2e\+12 FLOP/s\) = 1\.2500 > 1"):
        mfu_of(4e12, 3.2e12, peak_name="measured peak")


def test_a_peak_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"datasheet peak\(0 FLOP/s\) <= 0"):
        mfu_of(1.0, 0.0)


@pytest.mark.parametrize("module", ["costs", "intervals", "peaks"])
def test_closed_forms_need_no_torch(module: str) -> None:
    code = f"import sys, workloads.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
