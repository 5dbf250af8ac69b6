"""Link speeds as people write them, and what share of them was reached."""

import pytest

from bench.ceiling import COPY, LINK, Ceiling, efficiency, parse_link
from bench.errors import UserError

LINK_25 = Ceiling(name=LINK, bytes_per_second=25e9)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("400Gbit", 50e9),
        ("400gbit", 50e9),
        ("400 Gbit/s", 50e9),
        ("200Gbps", 25e9),
        ("200gbps", 25e9),
        ("100Gb/s", 12.5e9),
        ("100mbit", 12.5e6),
        ("1.6Tbit", 200e9),
        ("50GB/s", 50e9),
        ("50GBps", 50e9),
        ("900MB/s", 900e6),
        ("12.5kB/s", 12.5e3),
        (" 8bit ", 1.0),
        ("8b/s", 1.0),
    ],
)
def test_a_link_is_a_number_of_bits_or_bytes(text: str, bytes_per_second: float) -> None:
    assert parse_link(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    "text",
    [
        *("", "400", "400G", "Gbit", "0Gbit", "0.0GB/s", "-1Gbit", "50GB", "50GiB/s", "4e2Gbit", "infGbit", "1_0Gbit"),
        *("٣Gbit", "400Gbit/s/s", "400BPS", "400Xbit", "9" * 400 + "Gbit"),
    ],
)
def test_what_is_no_link_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match=r"not understood: write a number above 0 .* such as 400Gbit.*50GB/s") as caught:
        parse_link(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["50gb/s", "50mb/s"])
def test_what_could_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' could mean bits or bytes.*write a number"):
        parse_link(text)


def test_efficiency_is_a_share_of_the_link() -> None:
    found = efficiency(20e9, LINK_25)
    assert found.fraction == pytest.approx(0.8)
    assert (found.against, found.note) == ("link", "")


def test_efficiency_at_the_link_needs_no_note() -> None:
    assert efficiency(25e9, LINK_25).note == ""


def test_efficiency_above_the_link_is_noted_not_clipped() -> None:
    found = efficiency(30e9, LINK_25)
    assert found.fraction == pytest.approx(1.2)
    assert "reduction in the network" in found.note


@pytest.mark.parametrize(("rate", "ceiling", "against"), [(None, LINK_25, "link"), (20e9, None, None)])
def test_unknown_stays_unknown(rate: float | None, ceiling: Ceiling | None, against: str | None) -> None:
    found = efficiency(rate, ceiling)
    assert (found.fraction, found.against, found.note) == (None, against, "")


def test_efficiency_above_a_copy_speaks_of_memory() -> None:
    found = efficiency(30e9, Ceiling(name=COPY, bytes_per_second=20e9))
    assert found.fraction == pytest.approx(1.5)
    assert found.against == "copy"
    assert found.note.startswith("above the copy in memory")


def test_nothing_carried_is_known() -> None:
    assert efficiency(0.0, LINK_25).fraction == 0
